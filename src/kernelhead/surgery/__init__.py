"""A new head on somebody else's network."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead.heads import HEADS, PRESETS, create_head, resolve
from kernelhead.heads._places import check_sizes
from kernelhead.surgery import _libraries as libraries
from kernelhead.surgery._find import is_convolution, is_linear
from kernelhead.surgery._inputs import as_inputs
from kernelhead.surgery._plan import Plan, Slot, find_plan, pooling_plan
from kernelhead.surgery._relu import replace as replace_module
from kernelhead.surgery._trace import Inputs, tensors_of
from kernelhead.surgery._warm import check_warm_start, start_from

__all__ = ["Changes", "changes", "kernelize"]

logger = logging.getLogger("kernelhead")


@dataclass(frozen=True)
class Changes:
    """What `kernelize` did to a network."""

    layers: tuple[str, ...]
    """Names of the layers that are heads now."""
    head: str
    num_classes: int
    relus_removed: tuple[str, ...] = ()
    """Names of the modules that lost the ReLU before the features."""
    relus_kept: tuple[str, ...] = ()
    """Names of the modules where such a ReLU stays."""
    pooled: tuple[str, ...] = ()
    """Where the places come from, for a head that pools."""
    auxiliary: tuple[str, ...] = ()
    """Names of the auxiliary classifiers of a training, which are linear layers for the new classes now."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{', '.join(map(repr, self.layers))}: head {self.head!r} for {self.num_classes} classes"]
        if self.relus_removed:
            lines.append(f"the ReLU before the features is removed: {', '.join(map(repr, self.relus_removed))}")
        if self.relus_kept:
            lines.append(f"the ReLU before the features stays: {', '.join(map(repr, self.relus_kept))}")
        if self.pooled:
            lines.append(f"places come from {', '.join(self.pooled)}")
        if self.auxiliary:
            lines.append(f"auxiliary classifiers stay linear: {', '.join(map(repr, self.auxiliary))}")
        return "; ".join([*lines, *self.notes])


def changes(model: nn.Module) -> Changes:
    """What `kernelize` did to this network."""
    record = getattr(model, "_kernelhead_changes", None)
    if not isinstance(record, Changes):
        raise ValueError(f"{type(model).__name__} was not made by kernelize")
    return record


def kernelize(
    model: nn.Module,
    num_classes: int | None = None,
    *,
    head: str = "kernel",
    warm_start: bool = False,
    rectified: bool = False,
    layer: str | Sequence[str] | None = None,
    inputs: Any = None,
    **head_options: Any,
) -> nn.Module:
    """Put a new head on a network of torchvision, timm, transformers or your own, and return the same network.

    The layers that make the logits, each an `nn.Linear` or a 1x1 convolution, are found by a run of a copy on tensors
    without data. Everything else keeps its weights, names, device, precision, mode and `requires_grad`. What was done
    is logged by the logger "kernelhead" and can be read with `kernelhead.surgery.changes(model)`.

    Args:
        model: the network, not yet wrapped by DataParallel, DistributedDataParallel or torch.compile.
        num_classes: C; None keeps the number of the network.
        head: one of `kernelhead.HEADS`, or "best": `KernelClassifier.best` where the network pools a feature map or
            tokens, and the same on its features where it pools nothing.
        warm_start: start from the trained linear layer: the network classifies nearly as before. Exact in the ranking
            of the classes where the layer has no bias and no more classes than features; `inputs` keeps the bias,
            nearly, and the confidence.
        rectified: keep the ReLU before the features, which is removed otherwise, where the network has one there.
            A warm start keeps it: the trained weights expect it.
        layer: the name of the layer to replace, or several names, where they are not to be looked for.
        inputs: a batch of the network's inputs: a tensor, a tuple of arguments or a dictionary of named ones. Needed
            where none can be guessed, and by warm_start for what it says above.
        head_options: of the head, such as `prototypes=4`. `pool="rkhs"`, and the heads that pool by themselves, take
            the feature map or the tokens from before the network's global pooling.
    """
    kind, options = resolve(head, head_options)
    _check(model, num_classes)
    pools = _pools(kind, options)
    if warm_start:
        check_warm_start(kind, options)
    given = None if inputs is None else as_inputs(inputs)
    plan = find_plan(model, (layer,) if isinstance(layer, str) else None if layer is None else tuple(layer), given)
    before = plan.num_classes
    classes = before if num_classes is None else num_classes
    if classes is None:
        raise ValueError(f"{type(model).__name__} has no classifier yet, so it needs num_classes")
    if warm_start and classes != before:
        raise ValueError(f"warm_start keeps the classes: the trained layer has {before or 'none'}, not {classes}")
    keeps = rectified or warm_start
    removals = {name or type(model).__name__: edit for name, edit in plan.removals.items()}
    relus = [] if keeps else [(name, edit) for name, edit in removals.items() if edit is not None]
    kept = tuple(name for name, edit in removals.items() if keeps or edit is None)
    pooled: tuple[str, ...] = ()

    heads = _heads(model, plan, kind, classes, options)
    notes = []
    if pools:
        try:
            plan, pooled = pooling_plan(model, plan, given, [edit for _, edit in relus], heads)
        except ValueError as error:
            if head not in PRESETS or head_options.keys() & {"pool", "window"} or plan.trace is None:
                raise
            heads = _heads(model, plan, kind, classes, {**options, "pool": None})
            notes.append(f"on its features as they are ({str(error).split(';')[0]})")

    notes += plan.notes
    if warm_start:
        features = {} if given is None else _features(model, plan, given)
        for slot in plan.slots:
            old: Any = model.get_submodule(slot.name)
            notes += start_from(heads[slot.name], old.weight.flatten(1), old.bias, features.get(slot.name))
    if kept and not rectified:
        notes.append(
            "the trained weights expect that ReLU" if warm_start else "that ReLU is a function call or shared: it stays"
        )
    for edit in [*(edit for _, edit in relus), *plan.edits]:
        edit(model)
    for slot in plan.slots:
        slot.install(model, heads[slot.name])
    auxiliary = () if classes == before else _renew(model, plan.auxiliary, classes)
    libraries.set_num_classes(model, classes)
    record = Changes(
        tuple(slot.name for slot in plan.slots), head, classes,
        tuple(name for name, _ in relus), kept, pooled, auxiliary, tuple(dict.fromkeys(notes)),
    )  # fmt: skip
    model._kernelhead_changes = record  # type: ignore[assignment]
    logger.info("%s: %s", type(model).__name__, record)
    return model


def _heads(model: nn.Module, plan: Plan, head: str, num_classes: int, options: dict[str, Any]) -> dict[str, nn.Module]:
    """A head for each of the layers that make the logits, by its name."""
    return {
        slot.name: create_head(head, slot.in_features, num_classes, **options).to(*_home(model, slot.name))
        for slot in plan.slots
    }


def _check(model: nn.Module, num_classes: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"kernelize takes an nn.Module, got {type(model).__name__}")
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if wrapped or hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(f"kernelize the network itself, before it is compiled or wrapped into {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("kernelize the network before it is compiled to TorchScript")
    if num_classes is not None:
        check_sizes("kernelize", num_classes=num_classes)
    for name, module in model.named_modules():
        if isinstance(module, tuple(HEADS.values())):
            raise ValueError(
                f"{type(model).__name__} has the head {type(module).__name__} at {name!r} already; "
                "kernelize the network as it was before"
            )
    if is_linear(model):
        raise ValueError(f"the network is one {type(model).__name__} layer; use kernelhead.create_head in its place")


def _pools(head: str, options: dict[str, Any]) -> bool:
    pools = getattr(HEADS[head], "pools", False)
    if isinstance(pools, bool):
        return pools and bool(options.get("places", True))
    return options.get("pool") is not None


def _home(model: nn.Module, name: str) -> tuple[torch.device, torch.dtype]:
    """Device and precision of the old layer; of the network's last weights where the layer has none."""
    floating = [t for owner in (model, model.get_submodule(name)) for t in tensors_of(owner) if t.is_floating_point()]
    return (floating[-1].device, floating[-1].dtype) if floating else (torch.device("cpu"), torch.float32)


def _features(model: nn.Module, plan: Plan, inputs: Inputs) -> dict[str, Tensor]:
    """What the classifiers receive for a batch of inputs, (n, D) each, in evaluation mode."""
    seen: dict[str, Tensor] = {}
    hooks, modes = [], {module: module.training for module in model.modules()}
    for slot in plan.slots:

        def keep(module: nn.Module, args: tuple[Tensor, ...], slot: Slot = slot) -> None:
            last = args[0].movedim(1, -1) if slot.convolution else args[0]
            seen[slot.name] = last.reshape(-1, slot.in_features).float()

        hooks.append(model.get_submodule(slot.name).register_forward_pre_hook(keep))
    args, kwargs = inputs
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return seen


def _renew(model: nn.Module, names: list[str], num_classes: int) -> tuple[str, ...]:
    """Give auxiliary classifiers, which only a training uses, the new number of classes."""
    for name in names:
        old: Any = model.get_submodule(name)
        options = {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
        new: nn.Module
        if is_convolution(old):
            new = type(old)(old.in_channels, num_classes, 1, **options)
        else:
            new = nn.Linear(old.in_features, num_classes, **options)
        replace_module(model, name, new)
    return tuple(names)
