"""Where a network pools its feature map or its tokens, and how a head gets at the positions from before."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from kernelhead.heads import Head
from kernelhead.surgery._hooks import Fold, Mask
from kernelhead.surgery._plan import POOLINGS, RESHAPES, Plan, in_short
from kernelhead.surgery._trace import Heads, Node, Trace, trace, walk_back

# Operations that act at every position alone, behind which a hook may stand as well.
POINTWISE = frozenset("relu relu_ hardtanh hardtanh_ hardswish hardswish_ silu silu_ gelu tanh clone _to_copy".split())


def pooling_plan(model: nn.Module, plan: Plan, heads: Mapping[str, Head], class_token: bool | None) -> Plan:
    """Plan where the heads, by the name of their layer, get positions from; LookupError says why there is no way."""
    kind = getattr(model, "main_input_name", None)  # of transformers
    arguments = list(inspect.signature(model.forward).parameters)
    if kind == "input_values":
        raise LookupError("it reads sounds, and its attention_mask counts samples in time, not positions")
    if "attention_mask" in arguments and kind != "pixel_values":
        return _masked(model, plan, heads, class_token, arguments.index("attention_mask"))
    if kind == "input_ids":
        raise LookupError("it reads padded texts without attention_mask, and a mean over positions would count padding")
    if hasattr(model, "reset_classifier") and hasattr(model, "forward_features"):  # of timm
        with suppress(Exception):  # a network that cannot do without its pooling
            return _tried(model, _without_pooling(model, plan, class_token), heads)
    return _tried(model, _around_pooling(plan, class_token), heads)


def _masked(model: nn.Module, plan: Plan, heads: Mapping[str, Head], class_token: bool | None, position: int) -> Plan:
    """Plan for a network that reads padded texts, and try it."""
    if getattr(getattr(model, "config", None), "classifier_pooling", None) == "mean":  # of ModernBERT, made of sums
        edited = trace(model, [plan.trace.given], _pool_first_token)
        plan = replace(plan, trace=edited, edits=[*plan.edits, _pool_first_token])
    found = _tried(model, _around_pooling(plan, class_token, position), heads)
    found.notes = [*plan.notes, "attention_mask says which tokens count"]
    return found


def _pool_first_token(model: nn.Module, heads: Heads) -> None:
    model.config.classifier_pooling = "cls"  # type: ignore[union-attr]


def _left_out(class_token: bool | None, own: int, known: int) -> int:
    """Return how many of the `known` class tokens a head leaves out. `own`: as the network's own pooling."""
    if class_token is not None and not known:
        raise ValueError(f"class_token={class_token} needs a network with a class token; leave it out")
    return own if class_token is None else 0 if class_token else known


def _stop_pooling(model: nn.Module, heads: Heads) -> None:
    """Make a network of timm return its map or its tokens, by its own means."""
    model.reset_classifier(0, "")  # type: ignore[operator]


def _without_pooling(model: nn.Module, plan: Plan, class_token: bool | None) -> Plan:
    """Let a network of timm give up its pooling, so that the head receives the map or the tokens."""
    run = trace(model, [plan.trace.given], _stop_pooling)
    # Tokens at the beginning that the network leaves out when it averages; one that reads its class token has none.
    averages = getattr(model, "global_pool", None) in ("avg", "avgmax", "max")
    leaves_out = averages and not getattr(model, "pool_include_prefix", False)
    known, slots = getattr(model, "num_prefix_tokens", 0), []
    for slot in plan.slots:
        features = run.calls_of(slot.name)[0].input
        if features is None or not _has_positions(features.shape):
            raise LookupError("it pools even where it is told not to")
        axis = 1 if len(features.shape) > 3 and features.shape[1] == slot.in_features else -1
        known = known if axis == -1 else 0
        prefix = _left_out(class_token, known if leaves_out else 0, known)
        slots.append(replace(slot, axis=axis, pools=True, prefix=prefix))
    return replace(plan, slots=slots, edits=[*plan.edits, _stop_pooling], pooled=("its output without global pooling",))


def _around_pooling(plan: Plan, class_token: bool | None, position: int | None = None) -> Plan:
    """Let every position of any network go through the pooling by itself. `position` is that of attention_mask."""
    folds: dict[tuple[str, bool, int, int], Fold] = {}
    masks: dict[int, Mask] = {}
    slots = []
    for slot in plan.slots:
        features = plan.trace.calls_of(slot.name)[0].input
        if features is None:
            raise LookupError(f"{slot.name!r} is given more than a tensor")
        fold = None
        if not _has_positions(features.shape):
            site = _find_site(plan.trace, features)
            node, own = _pooling(features), site[-1]
            known = max(own, int(node.op == "select" and _argument(node, 2) == 0))
            skipped = _left_out(class_token, own, known)
            fold = folds.setdefault(site, Fold(*site, skipped if position is None else 0))
        else:
            skipped = _left_out(class_token, 0, 0)
        mask = None if position is None else masks.setdefault(skipped, Mask(position, skipped))
        slots.append(replace(slot, pools=True, fold=fold, rank=len(features.shape), mask=mask))
    pooled = tuple(map(str, folds.values())) or tuple(f"the input of {slot.name!r}" for slot in slots)
    edits = [*plan.edits, *(fold.install for fold in folds.values()), *(mask.install for mask in masks.values())]
    return replace(plan, slots=slots, edits=edits, pooled=pooled)


def _tried(model: nn.Module, plan: Plan, heads: Mapping[str, Head]) -> Plan:
    """Change a copy, run it, look at its logits, and return the plan."""
    before = plan.trace
    try:
        outputs = trace(model, [before.given], plan.apply, heads).outputs
    except Exception as error:  # whatever a network raises
        raise LookupError(f"it does not run with a head that takes its positions ({in_short(error)})") from error
    expected = (before.outputs[0].shape[0], heads[plan.slots[0].name].num_classes)
    if outputs[0].shape != expected:
        raise LookupError(f"its logits would be {list(outputs[0].shape)}, not {list(expected)}")
    if [output.shape[:1] for output in outputs] != [output.shape[:1] for output in before.outputs]:
        raise LookupError("it returns more than logits from behind the pooling, and would do so per position")
    return plan


def _has_positions(shape: tuple[int, ...]) -> bool:
    """Whether a sample is more than a vector: two axes or more that are longer than 1."""
    return sum(size > 1 for size in shape[1:]) > 1


def _find_site(run: Trace, features: Node) -> tuple[str, bool, int, int]:
    """Go back from the features (N, D) to the map that they were pooled from. Returns the arguments of its `Fold`."""
    pooled = _pooling(features)
    source = pooled.sources[0]
    others = set(range(1, len(source.shape))) - _pooled_axes(pooled)
    if len(others) != 1:
        raise LookupError(f"{pooled} pools {list(source.shape)} in a way that leaves no feature vectors")
    channel, prefix = others.pop(), 0
    while True:
        once = [call for call in run.calls if call.name and len(run.calls_of(call.name)) == 1]
        for call in once:  # the innermost comes last, so the outermost that does the pooling itself is found
            if call.input is source and call.name in pooled.scope:
                return call.name, True, channel, prefix
        for call in reversed(once):
            if call.output is source:
                return call.name, False, channel, prefix
        if len(source.sources) != 1:
            break
        step, source = source, source.sources[0]
        if step.op == "slice" and _argument(step, 1) not in (0, channel) and not prefix:
            prefix = _argument(step, 2)
        elif step.op in ("permute", "transpose", "unsqueeze"):
            axes = torch.empty(tuple(range(2, len(source.shape) + 2)), device="meta")  # an axis' size is its number + 2
            channel = getattr(axes, step.op)(*step.arguments[1:]).shape[channel] - 2
        elif step.op in RESHAPES and step.shape != source.shape:
            same = [axis for axis in range(1, len(source.shape)) if source.shape[axis] == step.shape[channel]]
            if len(same) != 1 or prefix:
                break
            channel = same[0]
        elif step.op not in POINTWISE | RESHAPES:
            break
    raise LookupError(f"no module stands directly before {pooled}, where its features are pooled")


def _pooling(features: Node) -> Node:
    """Return the operation that makes vectors of a map: the first one, going back, whose input has positions."""
    found: dict[Node, Node] = {}  # by what it pools
    for node in walk_back([features], lambda node: not any(_has_positions(each.shape) for each in node.sources)):
        maps = [each for each in node.sources if _has_positions(each.shape)]
        if not node.inputs:
            raise LookupError("its features were never a map or tokens")
        if maps and node.op in RESHAPES:
            sides = "x".join(str(size) for size in maps[0].shape[1:])
            raise LookupError(f"it flattens its map {sides} into one vector and pools nothing")
        if maps and (node.op not in POOLINGS or len(node.sources) != 1):
            raise LookupError(f"its features are made of positions by {node}, which is no pooling")
        if maps:
            found[maps[0]] = node
    if len(found) > 1:
        raise LookupError("its features are pooled in several ways: " + ", ".join(sorted(map(str, found.values()))))
    return next(iter(found.values()))


def _argument(node: Node, position: int) -> int:
    value, *_ = *node.arguments[position:], 0
    return value if isinstance(value, int) else 0


def _pooled_axes(node: Node) -> set[int]:
    rank = len(node.sources[0].shape)
    if node.op in ("select", "slice"):
        return {_argument(node, 1) % rank}
    if node.op in ("mean", "amax"):
        axes = node.arguments[1] if len(node.arguments) > 1 else range(1, rank)
        return {axis % rank for axis in ([axes] if isinstance(axes, int) else axes)}
    return set(range(2, rank))
