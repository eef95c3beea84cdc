"""Where weight decay goes, and a learning rate of the head's own."""

from itertools import product
from typing import Any

from torch import nn

from kernelhead.coefficients import activation
from kernelhead.heads import HEADS, KernelClassifier


def parameter_groups(model: nn.Module, weight_decay: float, *, head_lr: float | None = None) -> list[dict[str, Any]]:
    """Optimiser groups with weight decay where the paper has it (its section 5.2 and Appendix B).

    Every trainable parameter is decayed, the kernel's raw coefficients with them, except coefficients that are bounded
    on their own (sigmoid, softmax). A parameter shared by several modules appears once.

    `head_lr` is the learning rate of the heads of `kernelhead.HEADS` in the model; what is not in a head takes that of
    the optimiser. A new head on a trained network may have to learn faster than the network bears.

    `torch.optim.SGD(parameter_groups(model, 1e-4, head_lr=0.1), lr=0.01, momentum=0.9)`
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
    if head_lr is not None and not head_lr >= 0:
        raise ValueError(f"head_lr must not be negative, got {head_lr}")
    heads = [module for module in model.modules() if isinstance(module, tuple(HEADS.values()))]
    if head_lr is not None and not heads:
        raise ValueError(f"{type(model).__name__} has no head of kernelhead for head_lr to be the rate of")
    of_head = {id(parameter) for head in heads if head_lr is not None for parameter in head.parameters()}
    bounded = {
        id(head.raw_alpha)
        for head in heads
        if isinstance(head, KernelClassifier) and activation(head.coefficients).bounded
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for in_head, free in product((False, True), repeat=2):
        own = [p for p in trainable if (id(p) in of_head, id(p) in bounded) == (in_head, free)]
        rate = {"lr": head_lr} if in_head else {}
        groups.append({"params": own, "weight_decay": 0.0 if free else weight_decay, **rate})
    return [group for group in groups if group["params"]]
