"""What a trace shows: the layers that make the logits, and the ReLU before them."""

from dataclasses import dataclass

from torch import nn

from kernelhead.surgery._trace import Call, Node, Trace

# Operations that leave a rectified feature rectified: they reshape, pick or pool.
TRANSPARENT = frozenset(
    "view _unsafe_view reshape permute transpose t squeeze unsqueeze expand clone alias detach _to_copy _reshape_alias "
    "select slice cat stack mean amax avg_pool2d adaptive_avg_pool1d _adaptive_avg_pool2d adaptive_max_pool2d "
    "max_pool2d_with_indices unbind split split_with_sizes".split()
)
# Operations with weights of their own: behind them begins the rest of the network.
WEIGHTED = frozenset(
    "mm addmm bmm baddbmm linear convolution embedding native_batch_norm _native_batch_norm_legit_no_training "
    "_native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm batch_norm native_layer_norm "
    "layer_norm native_group_norm group_norm _fused_rms_norm rms_norm".split()
)


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution that is a linear layer at every place."""
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and module.groups == 1
        and set(module.kernel_size) == set(module.stride) == {1}
    )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_convolution(module)


def is_relu(node: Node) -> bool:
    """ReLU, or ReLU6, which is hardtanh with its lower end at zero."""
    op = node.op.rstrip("_")
    return op == "relu" or (op == "hardtanh" and len(node.arguments) > 1 and node.arguments[1] == 0)


@dataclass(frozen=True)
class Found:
    """The calls of the layers that make the logits, and the ReLUs between them and the output."""

    calls: list[Call]
    relus: list[Node]


def find_classifiers(trace: Trace, known: tuple[str, ...] = ()) -> Found:
    """Go from the output back to the first linear layers, or to the placeholder where a classifier was taken away.

    `known` are names that the network itself gives to its classifiers, which tell one placeholder from another.
    """
    makers: dict[Node, Call] = {}
    for call in trace.calls:
        if call.output is not None and is_linear(call.module):
            makers[call.output] = call
    outputs = trace.outputs[:1]  # where there are several, the logits come first
    placeholders = [call for call in trace.calls if isinstance(call.module, nn.Identity)]
    named = [call for call in placeholders if call.name in known]
    last = [call for call in placeholders if call.output in outputs]
    if named or (last and outputs[0] not in makers):
        return Found(named or last[-1:], [])
    calls, relus = [], []
    waiting, seen = list(outputs), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in makers:
            calls.append(makers[node])
            continue
        if node.op in WEIGHTED or "attention" in node.op or not node.inputs:
            made_by = f"{node.op or 'its input'}{f' in {node.scope[-1]!r}' if any(node.scope) else ''}"
            raise LookupError(f"going back from its output, {made_by} comes before any nn.Linear or 1x1 convolution")
        if is_relu(node):
            relus.append(node)
        waiting.extend(node.sources)
    if not calls:
        raise LookupError("its output is no tensor that a module computed")
    order = {call: place for place, call in enumerate(trace.calls)}
    return Found(sorted(calls, key=lambda call: order[call]), relus)


def find_relus(features: Node) -> list[Node]:
    """The ReLUs whose result, pooled and reshaped, are the features."""
    relus, waiting, seen = [], [features], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_relu(node):
            relus.append(node)
        elif node.op in TRANSPARENT:
            waiting.extend(node.sources)
    return relus


def find_auxiliary(trace: Trace, model: nn.Module, classifiers: list[str], num_classes: int) -> list[str]:
    """Linear layers as wide as the classifier that no evaluation runs: the auxiliary classifiers of a training."""
    ran = {call.name for call in trace.calls}
    names = []
    for name, module in model.named_modules():
        width = getattr(module, "out_features", getattr(module, "out_channels", None))
        if is_linear(module) and name not in ran and name not in classifiers and width == num_classes:
            names.append(name)
    return names
