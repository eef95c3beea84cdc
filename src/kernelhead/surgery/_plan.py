"""The changes to make on a network, found before any is made."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kernelhead.surgery._hooks import Slot, rectified
from kernelhead.surgery._trace import Call, Edit, Heads, Inputs, Node, Trace, guesses, trace, walk_back

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INPUTS = "give inputs=..., a batch that the network takes"

RESHAPES = frozenset("view _unsafe_view reshape _reshape_alias clone".split())
POOLINGS = frozenset(
    "mean amax avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_max_pool2d max_pool2d_with_indices select slice".split()
)
# Operations that leave a rectified feature rectified: they reshape, pick or pool.
PICKS = frozenset("permute transpose t squeeze unsqueeze expand alias detach _to_copy cat stack unbind split".split())
TRANSPARENT = RESHAPES | POOLINGS | PICKS | {"split_with_sizes"}
# Operations with weights of their own: behind them begins the rest of the network.
WEIGHTED = re.compile(r"mm$|^linear$|convolution|embedding|(batch|layer|group|rms)_norm|attention")


@dataclass
class Plan:
    """The layers to replace, and the other changes."""

    slots: list[Slot]
    trace: Trace
    removals: dict[str, Edit | None] = field(default_factory=dict)
    """Names of the modules with a ReLU before the features, and edits that take it away; None if nothing can."""
    edits: list[Edit] = field(default_factory=list)
    pooled: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def apply(self, model: nn.Module, heads: Heads) -> None:
        """Change a network, or a copy of it."""
        for edit in self.edits:
            edit(model, heads)
        for slot in self.slots:
            head = heads[slot.name]
            if slot.pools or slot.axis != -1:
                head.register_forward_pre_hook(slot.before)
                head.register_forward_hook(slot.after)
            replace_module(model, slot.name, head)


def find_plan(model: nn.Module, layers: Sequence[str], inputs: Any) -> Plan:
    """Find the layers that make the logits, unless they are named, and the ReLUs around them."""
    owner, modules = type(model).__name__, dict(model.named_modules())
    for name in layers:
        module = modules.get(name) if name else None
        if not (isinstance(module, nn.Identity) or is_linear(module)):
            found = "missing" if module is None else f"a {type(module).__name__}"
            wanted = "an nn.Linear, a 1x1 convolution or an nn.Identity"
            raise ValueError(f"layer {name!r} of {owner} is {found}; name {wanted} ({_candidates(model)})")
    args = inputs if isinstance(inputs, tuple | list) else (inputs,)
    given: Inputs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(args), {})
    try:
        run = trace(model, guesses(model) if inputs is None else [given])
    except Exception as error:  # whatever a network raises
        if inputs is None:
            raise ValueError(f"{owner} runs on no input that can be guessed ({in_short(error)}); {INPUTS}") from error
        raise ValueError(f"{owner} does not run on these inputs: {in_short(error)}") from error
    for name in layers:
        if not run.calls_of(name):
            raise ValueError(f"{owner} does not use the layer {name!r} when it runs")
    calls, after = ([run.calls_of(name)[0] for name in layers], []) if layers else _find_classifiers(run, model)
    features = {call.name: call.input for call in calls}
    plan = Plan([_slot(model, name, node) for name, node in features.items()], run)
    if len({slot.num_classes for slot in plan.slots}) > 1:
        sizes = ", ".join(f"{slot.name!r}: {slot.num_classes}" for slot in plan.slots)
        raise _not_found(model, f"the layers before its output differ in their number of classes ({sizes})")
    before = walk_back([node for node in features.values() if node is not None], lambda node: node.op in TRANSPARENT)
    plan.removals = dict(_find_removal(run, model, node) for node in [*after, *before] if _is_relu(node))
    return plan


def in_short(error: Exception) -> str:
    """Return the beginning of an error's message, in one line."""
    return " ".join(str(error).split())[:200]


def _find_classifiers(run: Trace, model: nn.Module) -> tuple[list[Call], list[Node]]:
    """Return the calls of the layers that make the logits, or of their placeholders, and the tensors after them."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    known = config.get("classifier") or ()  # a name, or several, that a network of timm gives to its classifiers
    makers = {call.output: call for call in run.calls if call.output is not None and is_linear(call.module)}
    outputs = run.outputs[:1]  # where there are several, the logits come first
    placeholders = [call for call in run.calls if isinstance(call.module, nn.Identity)]
    named = [call for call in placeholders if call.name in ([known] if isinstance(known, str) else known)]
    last = [call for call in placeholders if call.output in outputs and call.output not in makers]
    if named or last:
        return named or last[-1:], []
    found = list(walk_back(outputs, lambda node: node not in makers))
    for node in found:
        if node not in makers and (WEIGHTED.search(node.op) or not node.inputs):
            made_by = str(node) if node.op else "its input"
            raise _not_found(model, f"going back from its output, {made_by} comes before any such layer")
    if not found:
        raise _not_found(model, "its output is no tensor that a module computed")
    return [call for output, call in makers.items() if output in found], found


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module is a linear layer, or a convolution that acts as one at every position."""
    if isinstance(module, CONVOLUTIONS):
        return module.groups == 1 and set(module.kernel_size) == set(module.stride) == {1}
    return isinstance(module, nn.Linear)


def _is_relu(node: Node) -> bool:
    """Whether an operation is a ReLU, or a ReLU6, which is a hardtanh whose lower end is zero."""
    return node.op.rstrip("_") == "relu" or (node.op.startswith("hardtanh") and node.arguments[1:2] == (0,))


def _find_removal(run: Trace, model: nn.Module, relu: Node) -> tuple[str, Edit | None]:
    """Return the name of the module that a ReLU belongs to, and an edit that takes the ReLU away, or None.

    A ReLU module becomes an identity. If it runs several times, as in many residual blocks, a hook rectifies the
    results of the modules that it served elsewhere. The DenseNet of torchvision loses its call of a function.
    """
    name = relu.scope[-1]
    module, shown = model.get_submodule(name), name or type(model).__name__
    if isinstance(module, nn.ReLU | nn.ReLU6):
        makers = [_maker(run, call.input) for call in run.calls_of(name) if call.output is not relu]
        if None in makers or (makers and isinstance(module, nn.ReLU6)):
            return shown, None

        def edit(model: nn.Module, heads: Heads) -> None:
            replace_module(model, name, nn.Identity())
            for maker in makers:
                model.get_submodule(str(maker)).register_forward_hook(rectified)

        return shown, edit
    if "torchvision" in sys.modules:
        from kernelhead.surgery._torchvision import UNRECTIFIED

        if new := UNRECTIFIED.get(type(module)):
            return shown, lambda model, heads: setattr(model.get_submodule(name), "__class__", new)
    return shown, None


def _maker(run: Trace, node: Node | None) -> str | None:
    """Return the name of the module that made a tensor used by the ReLU alone, if it runs once."""
    if node is None or sum(node in other.inputs for other in run.nodes) != 1:
        return None
    made = [call.name for call in run.calls if call.output is node]
    return made[-1] if made and len(run.calls_of(made[-1])) == 1 else None


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace a module by `new`, under every name that it has."""
    old = model.get_submodule(name)
    new.train(old.training)
    for each in [each for each, module in model.named_modules(remove_duplicate=False) if module is old]:
        model.set_submodule(each, new)


def _slot(model: nn.Module, name: str, features: Node | None) -> Slot:
    module = model.get_submodule(name)
    if isinstance(module, nn.Linear):
        return Slot(name, module.in_features, module.out_features, -1)
    if isinstance(module, CONVOLUTIONS):
        return Slot(name, module.in_channels, module.out_channels, 1)
    if features is None:
        raise ValueError(
            f"the number of features at {name!r} is unknown, as it is given more than a tensor; name another"
        )
    shape = features.shape
    # Vectors and tokens have their features last, and maps first, unless the network says otherwise.
    last = len(shape) in (2, 3) or shape[1] != getattr(model, "num_features", shape[1]) == shape[-1]
    return Slot(name, shape[-1 if last else 1], None, -1 if last else 1)


def _candidates(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if is_linear(module)]
    return f"its last linear layers are {', '.join(map(repr, names[-3:]))}" if names else "it has no linear layer"


def _not_found(model: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__}: looked for the nn.Linear or the 1x1 convolution that makes the logits, but {why}; "
        f"name it with layer='...' ({_candidates(model)}), or {INPUTS}"
    )
