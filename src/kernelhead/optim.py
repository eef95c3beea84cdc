"""Where weight decay goes, and a learning rate of the head's own."""

from itertools import product
from typing import Any

from torch import nn

from kernelhead.heads import Head


def parameter_groups(model: nn.Module, weight_decay: float, *, head_lr: float | None = None) -> list[dict[str, Any]]:
    """Optimiser groups with weight decay where the paper has it (its section 5.2 and Appendix B).

    Every trainable parameter is decayed, the kernel's raw coefficients with them, except coefficients that are bounded
    on their own (sigmoid, softmax). A parameter shared by several modules appears once.

    `head_lr` is the learning rate of the heads of `kernelhead.HEADS` in the model; the rest takes that of the
    optimiser. A new head on a trained network may have to learn faster than the network tolerates.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), kernelhead.KernelHead(64, 10))
        >>> optimizer = torch.optim.SGD(parameter_groups(model, 1e-4, head_lr=0.1), lr=0.01, momentum=0.9)
    """
    for name, value in (("weight_decay", weight_decay), ("head_lr", head_lr)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} needs to be at least 0; got {name}={value}")
    heads = [module for module in model.modules() if isinstance(module, Head)]
    if head_lr is not None and not heads:
        raise ValueError(f"head_lr needs a head of kernelhead; {type(model).__name__} has none, call kernelize first")
    of_head = {id(parameter) for head in heads if head_lr is not None for parameter in head.parameters()}
    undecayed = {id(parameter) for head in heads for parameter in head.undecayed}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for in_head, free in product((False, True), repeat=2):
        own = [p for p in trainable if (id(p) in of_head, id(p) in undecayed) == (in_head, free)]
        rate = {"lr": head_lr} if in_head else {}
        groups.append({"params": own, "weight_decay": 0.0 if free else weight_decay, **rate})
    return [group for group in groups if group["params"]]
