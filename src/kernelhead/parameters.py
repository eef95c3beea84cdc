"""Where weight decay goes."""

from typing import Any

from torch import nn

from kernelhead.coefficients import activation
from kernelhead.heads import KernelClassifier


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups with weight decay where the paper has it (its section 5.2 and Appendix B).

    Every trainable parameter is decayed, the kernel's raw coefficients with them, except coefficients that are bounded
    on their own (sigmoid, softmax). A parameter shared by several modules appears once.

    `torch.optim.SGD(parameter_groups(model, 1e-4), lr=0.1, momentum=0.9)`
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
    bounded = {
        id(module.raw_alpha)
        for module in model.modules()
        if isinstance(module, KernelClassifier) and activation(module.coefficients).bounded
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if id(p) not in bounded], "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) in bounded], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
