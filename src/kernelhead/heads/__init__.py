"""Classification layers, one a file, behind one registry.

A head is an `nn.Module` made as `Head(in_features, num_classes, **options)`. Its attribute `pools` says what it takes:
feature vectors (..., D), or, where True, a feature map (N, D, H, W) or tokens (N, L, D).
"""

import inspect

from torch import nn

from kernelhead.heads.expansion import ExpansionHead
from kernelhead.heads.kernel import KernelClassifier
from kernelhead.heads.linear import LinearHead
from kernelhead.heads.second_order import SecondOrderHead
from kernelhead.heads.softmax import SoftmaxHead

HEADS: dict[str, type[nn.Module]] = {
    "softmax": SoftmaxHead,
    "linear": LinearHead,
    "second_order": SecondOrderHead,
    "expansion": ExpansionHead,
    "kernel": KernelClassifier,
}


def create_head(name: str, in_features: int, num_classes: int, **options: object) -> nn.Module:
    """Make the head called `name`, one of `HEADS`."""
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}; choose one of {', '.join(HEADS)}")
    known = list(inspect.signature(HEADS[name]).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"head {name!r} has no option {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    return HEADS[name](in_features, num_classes, **options)


__all__ = [
    "HEADS",
    "ExpansionHead",
    "KernelClassifier",
    "LinearHead",
    "SecondOrderHead",
    "SoftmaxHead",
    "create_head",
]
