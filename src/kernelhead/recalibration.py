"""Statistics and temperature of trained heads, estimated anew, as for test images larger than those of training."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from kernelhead.heads import Head
from kernelhead.metrics import best_temperature


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> float:
    """Estimate the statistics and the temperature of heads anew. Returns the T by which the logits were divided.

    Heads that standardise (landmarks, expansion, attentive) use running means and variances of training. On inputs of
    another size, which have another number of positions, these are wrong. They become those of `batches`. If batches
    have labels, which should be of held-out samples, the logits are divided by the T of the best likelihood. T becomes
    part of the weights, so it is saved, frozen and exported with them.

    Args:
        model: a network with heads, or a head. All but its heads stays as it is.
        batches: a list or a DataLoader of inputs (N, ...), of pairs (inputs, labels (N,)), or of named arguments with
            "labels" among them. With labels it is gone through twice.

    Example:
        >>> recalibrate(kernelhead.LandmarkHead(64, 10), [torch.randn(100, 64, 14, 14)])
        1.0
    """
    heads = [module for module in model.modules() if isinstance(module, Head)]
    if not heads:
        raise ValueError(f"recalibrate needs a head of kernelhead; {type(model).__name__} has none")
    norms = [part for head in heads for part in head.modules() if isinstance(part, _BatchNorm) and not part.affine]
    sums: dict[_BatchNorm, Tensor] = {}  # (3, D): of ones, values and squares

    def note(norm: Any, given: tuple[Tensor, ...]) -> None:
        values = given[0].double()
        sums[norm] = sums.get(norm, 0) + torch.stack([values**power for power in range(3)]).sum(1)

    training, labelled = {module: module.training for module in model.modules()}, not norms
    model.eval()
    try:
        with ExitStack() as hooks:
            for norm in norms:
                hooks.enter_context(norm.register_forward_pre_hook(note))
            for _, labels in _run(model, batches) if norms else ():
                labelled |= labels is not None
        for norm, (count, total, squares) in sums.items():
            if count[0] < 2:
                raise ValueError(f"recalibrate needs two samples or more; got {count[0]:.0f}")
            norm.get_buffer("running_mean").copy_(total / count)
            norm.get_buffer("running_var").copy_((squares - total.square() / count) / (count - 1))
        if not labelled:
            return 1.0
        pairs = [pair for pair in _run(model, batches) if pair[1] is not None]
    finally:
        for module, mode in training.items():
            module.training = mode
    if not pairs:
        kinds = ", ".join(type(head).__name__ for head in heads)
        raise ValueError(f"recalibrate needs labels: {kinds} has no statistics, only a temperature")
    logits, target = (torch.cat(each) for each in zip(*pairs, strict=True))
    temperature = best_temperature(logits, target, torch.ones_like(target), 1.0)
    for head in heads:
        head.rescale(1 / temperature)
    return temperature


def _run(model: nn.Module, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Any]]:
    """Yield logits and labels, or None, of every batch."""
    device, batch = next(model.parameters()).device, None
    for batch in batches:
        given = tree_map_only(Tensor, lambda x: x.to(device), dict(batch) if isinstance(batch, Mapping) else batch)
        if isinstance(given, dict):
            labels = given.pop("labels", None)
            output = model(**given)
        else:
            inputs, labels, *_ = (*given, None) if isinstance(given, tuple | list) else (given, None)
            output = model(inputs)
        output = getattr(output, "logits", output)
        yield output if isinstance(output, Tensor) else output[0], labels
    if batch is None:
        raise ValueError("recalibrate got no batches; give a list or a DataLoader, which can be gone through again")
