"""A new head on somebody else's network."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from kernelhead.heads import Head, create_head
from kernelhead.surgery._plan import Plan, find_plan, is_linear
from kernelhead.surgery._pooling import pooling_plan
from kernelhead.surgery._record import described, keep_with_transformers
from kernelhead.surgery._trace import tensors_of
from kernelhead.surgery._warm import WARM, start_from

__all__ = ["Changes", "changes", "kernelize"]

logger = logging.getLogger("kernelhead")


@dataclass(frozen=True)
class Changes:
    """A record of what `kernelize` did to a network, in names of layers and modules."""

    layers: tuple[str, ...]  # that are heads now
    head: str
    num_classes: int
    relus_removed: tuple[str, ...] = ()  # modules that lost the ReLU before the features
    relus_kept: tuple[str, ...] = ()  # modules where such a ReLU stays
    pooled: tuple[str, ...] = ()  # where the positions come from, for a head that pools
    notes: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)  # of `kernelize` that do the same to a network without head

    def __str__(self) -> str:
        parts = {
            "the ReLU before the features is removed: ": map(repr, self.relus_removed),
            "the ReLU before the features stays: ": map(repr, self.relus_kept),
            "positions come from ": self.pooled,
        }
        lines = [f"{', '.join(map(repr, self.layers))}: head {self.head!r} for {self.num_classes} classes"]
        lines += [words + listed for words, names in parts.items() if (listed := ", ".join(names))]
        return "; ".join([*lines, *self.notes])


def changes(model: nn.Module) -> Changes:
    """Return the record of what `kernelize` did to this network."""
    record = getattr(model, "_kernelhead_changes", None)
    if not isinstance(record, Changes):
        raise ValueError(f"{type(model).__name__} was not made by kernelize; call kernelize on it first")
    return record


def kernelize(
    model: nn.Module,
    num_classes: int | None = None,
    *,
    head: str = "landmarks",
    warm_start: bool = False,
    rectified: bool = False,
    class_token: bool | None = None,
    layer: str | Sequence[str] | None = None,
    inputs: Any = None,
    **head_options: Any,
) -> nn.Module:
    """Put a new head on a network of torchvision, timm, transformers or your own, and return the same network.

    The layers that make the logits, each an `nn.Linear` or a 1x1 convolution, are found by a run of a copy on tensors
    without data. Everything else keeps its weights, names, device, precision, mode and `requires_grad`. The logger
    "kernelhead" says what was done, and `kernelhead.surgery.changes(model)` returns it.

    Args:
        model: the network, not yet wrapped by DataParallel, DistributedDataParallel or torch.compile.
        num_classes: C; None keeps the number of the network.
        head: one of `kernelhead.HEADS`. A head that pools takes the feature map or the tokens from before the network's
            global pooling. If there are none, it takes the network's features, unless `pool` is among its options.
            Where the network takes an `attention_mask`, tokens count for which it is not 0: padding changes nothing.
        warm_start: start from the trained linear layer, for the heads linear, cosine and kernel: the network ranks the
            classes nearly as before. It does so exactly if the layer has no bias and no more classes than features. The
            confidence is that of a new head.
        rectified: keep the ReLU before the features, which is removed otherwise. A warm start keeps it too: the trained
            weights expect it.
        class_token: whether tokens of classification at the beginning are among the positions of a head that pools.
            None leaves them out where the network's own pooling does. It knows those of networks of timm, and the one
            that a network reads instead of pooling, such as [CLS] of BERT: the first that counts.
        layer: the name of the layer to replace, or several names, instead of a search.
        inputs: a batch of the network's inputs: a tensor, a tuple of arguments or a dictionary of named ones. Needed
            if none can be guessed.
        head_options: of the head, such as `landmarks=512`.

    Example:
        >>> model = kernelize(torchvision.models.resnet18(), num_classes=37)
        >>> model(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 37])
    """
    _check(model)
    if warm_start and head not in WARM:
        raise ValueError(f"warm_start needs a head with one weight per class, {', '.join(WARM)}; got head={head!r}")
    plan = find_plan(model, (layer,) if isinstance(layer, str) else tuple(layer or ()), inputs)
    before = plan.slots[0].num_classes
    classes = before if num_classes is None else num_classes
    if classes is None:
        raise ValueError(f"{type(model).__name__} has no classifier yet, so it needs num_classes")
    if warm_start and classes != before:
        raise ValueError(f"warm_start keeps the classes: the trained layer has {before or 'none'}, not {classes}")
    relus = {name: edit for name, edit in plan.removals.items() if edit is not None and not (rectified or warm_start)}
    plan.edits = list(relus.values())

    heads = _heads(model, plan, head, classes, head_options)
    given = {name: value for name, value in head_options.items() if name == "pool"}
    given |= {} if class_token is None else {"class_token": class_token}
    if any(each.pools for each in heads.values()):
        try:
            plan = pooling_plan(model, plan, heads, class_token)
        except LookupError as error:
            for name, value in given.items():
                wants = f"{name}={value!r} needs the map or the tokens that features are pooled from"
                raise ValueError(f"{wants}, but {error}; leave {name} out to use the features as they are") from error
            heads = _heads(model, plan, head, classes, {**head_options, "pool": None})
            plan.notes.insert(0, f"pool=None, on its features as they are: {error}")
    elif class_token is not None:
        raise ValueError(f"class_token={class_token} needs a head that pools; got head={head!r}")

    notes = list(plan.notes)
    if warm_start:
        for name, new in heads.items():
            old: Any = model.get_submodule(name)
            notes += start_from(new, old.weight.flatten(1), old.bias)
    kept = tuple(name for name in plan.removals if name not in relus)
    if kept and not rectified:
        stays = "that ReLU is a function call or shared: it stays"
        notes.append("the trained weights expect that ReLU" if warm_start else stays)
    plan.apply(model, heads)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "id2label") and config.num_labels != classes:
        config.num_labels = classes  # makes new names of labels too
    for count in ("num_classes", "num_labels"):
        if isinstance(getattr(model, count, None), int):
            setattr(model, count, classes)
    unique = tuple(dict.fromkeys(notes))
    arguments = {"rectified": rectified or warm_start, "class_token": class_token, "inputs": described(inputs)}
    arguments["layer"] = list(layer) if isinstance(layer, tuple | list) else layer
    record = Changes(tuple(heads), head, classes, tuple(relus), kept, plan.pooled, unique, arguments)
    model._kernelhead_changes = record  # type: ignore[assignment]
    if hasattr(config, "id2label") and hasattr(model, "save_pretrained"):
        keep_with_transformers(model)
    logger.info("%s: %s", type(model).__name__, record)
    return model


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"kernelize takes an nn.Module, got {type(model).__name__}")
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel | torch.jit.ScriptModule)
    if wrapped or hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(f"kernelize the network itself, before it is compiled or wrapped into {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, Head):
            there = f"{type(module).__name__} at {name!r}"
            raise ValueError(f"{type(model).__name__} has the head {there} already; kernelize it as it was before")
    if is_linear(model):
        raise ValueError(f"the network is one {type(model).__name__} layer; use kernelhead.create_head instead")


def _heads(model: nn.Module, plan: Plan, head: str, num_classes: int, options: dict[str, Any]) -> dict[str, Head]:
    """Make the heads by the names of their layers, on their device and in their precision, or that of the network."""
    heads = {}
    for slot in plan.slots:
        owners = chain(tensors_of(model), tensors_of(model.get_submodule(slot.name)))
        *_, last = torch.empty(0), *(each for each in owners if each.is_floating_point())
        heads[slot.name] = create_head(head, slot.in_features, num_classes, **options).to(last.device, last.dtype)
    return heads
