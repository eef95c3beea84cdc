"""Where a network pools its feature map or its tokens, and where a hook can get at them."""

from dataclasses import dataclass

from kernelhead.surgery._trace import Node, Trace

POOLINGS = frozenset(
    "mean amax avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_max_pool2d max_pool2d_with_indices select slice".split()
)
RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "clone"})
# Operations that act at every place alone, behind which a hook may stand as well.
POINTWISE = frozenset("relu relu_ hardtanh hardtanh_ hardswish hardswish_ silu silu_ gelu tanh clone _to_copy".split())


@dataclass(frozen=True)
class Place:
    """Where to fold: at a module's first argument or at its result."""

    module: str
    before: bool
    channel: int
    prefix: int

    def __str__(self) -> str:
        return f"{'before' if self.before else 'after'} {self.module!r}"


def has_places(shape: tuple[int, ...]) -> bool:
    """Whether a sample is more than a vector: two axes or more that are longer than 1."""
    return sum(size > 1 for size in shape[1:]) > 1


def find_place(trace: Trace, features: Node) -> Place:
    """Go back from the features of a classifier, a vector for each sample, to the map they were pooled from."""
    pooled = _pooling(features)
    axes = _pooled_axes(pooled)
    source = pooled.sources[0]
    prefix = 0
    others = [axis for axis in range(1, len(source.shape)) if axis not in axes]
    if len(others) != 1:
        raise LookupError(f"{_describe(pooled)} pools {list(source.shape)} in a way that leaves no feature vectors")
    channel = others[0]
    while True:
        for call in trace.calls:  # the innermost comes last, so the outermost that does the pooling itself is found
            inside = call.name in pooled.scope
            if call.input is source and inside and call.name and len(trace.calls_of(call.name)) == 1:
                return Place(call.name, True, channel, prefix)
        for call in reversed(trace.calls):
            if call.output is source and call.name and len(trace.calls_of(call.name)) == 1:
                return Place(call.name, False, channel, prefix)
        step = source
        if len(step.sources) != 1:
            break
        source = step.sources[0]
        if step.op == "slice" and _argument(step, 1, 0) in axes and not prefix:
            prefix = _argument(step, 2, 0)
        elif step.op == "unsqueeze":
            new = _argument(step, 1, 0) % len(step.shape)
            channel, axes = channel - (channel > new), tuple(axis - (axis > new) for axis in axes if axis != new)
        elif step.op in ("permute", "transpose"):
            channel, axes = _before_permutation(step, channel, axes)
        elif step.op in RESHAPES and step.shape != source.shape:
            same = [axis for axis in range(1, len(source.shape)) if source.shape[axis] == step.shape[channel]]
            if len(same) != 1 or prefix:
                break
            channel = same[0]
            axes = tuple(axis for axis in range(1, len(source.shape)) if axis != channel)
        elif (step.op not in POINTWISE and step.shape != source.shape) or step.op not in POINTWISE | RESHAPES:
            break
    raise LookupError(f"no module stands directly before {_describe(pooled)}, where its features are pooled")


def _pooling(features: Node) -> Node:
    """The operation that makes vectors of a map: the first one, going back, whose input has places."""
    found: set[Node] = set()
    waiting, seen = [features], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        with_places = [each for each in node.sources if has_places(each.shape)]
        if not node.inputs:
            raise LookupError("its features were never a map or tokens")
        if with_places and (node.op not in POOLINGS or len(node.sources) != 1):
            if node.op in RESHAPES:
                places = "x".join(str(size) for size in with_places[0].shape[1:])
                raise LookupError(f"it flattens its map {places} into one vector and pools nothing")
            raise LookupError(f"its features are made of places by {_describe(node)}, which is no pooling of places")
        if with_places:
            found.add(node)
        else:
            waiting.extend(node.sources)
    sources = {node.sources[0] for node in found}
    if len(sources) > 1:
        raise LookupError("its features are pooled in several ways: " + ", ".join(sorted(map(_describe, found))))
    return next(iter(found))


def _describe(node: Node) -> str:
    return f"{node.op!r}" + (f" in {node.scope[-1]!r}" if any(node.scope) else "")


def _argument(node: Node, position: int, default: int) -> int:
    value = node.arguments[position] if len(node.arguments) > position else default
    return value if isinstance(value, int) else default


def _pooled_axes(node: Node) -> tuple[int, ...]:
    shape = node.sources[0].shape
    if node.op in ("select", "slice"):
        return (_argument(node, 1, 0) % len(shape),)
    if node.op in ("mean", "amax"):
        axes = node.arguments[1] if len(node.arguments) > 1 else range(1, len(shape))
        return tuple(sorted(axis % len(shape) for axis in ([axes] if isinstance(axes, int) else axes)))
    return tuple(range(2, len(shape)))


def _before_permutation(step: Node, channel: int, axes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    order = list(range(len(step.shape)))
    if step.op == "permute":
        order = [axis % len(order) for axis in step.arguments[1]]
    else:
        first, second = (axis % len(order) for axis in step.arguments[1:3])
        order[first], order[second] = order[second], order[first]
    return order[channel], tuple(order[axis] for axis in axes)
