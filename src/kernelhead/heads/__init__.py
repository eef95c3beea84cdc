"""Classification layers, one a file, behind one registry.

A head is an `nn.Module` made as `Head(in_features, num_classes, **options)`, on the `device` and of the `dtype` among
these, or by `create_head`, which knows presets too. Its attribute `pools` says what it takes:
feature vectors (..., D), or, where True, a feature map (N, D, H, W) or tokens (N, L, D).
"""

import inspect
from collections.abc import Callable

from torch import Tensor, nn

from kernelhead.heads import _loss
from kernelhead.heads.expansion import ExpansionHead
from kernelhead.heads.frozen import FrozenKernelClassifier
from kernelhead.heads.kernel import KernelClassifier, best_options
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
Options = dict[str, object]
PRESETS: dict[str, tuple[str, Callable[[Options], Options]]] = {"best": ("kernel", best_options)}
FACTORY = ("device", "dtype")


def create_head(name: str, in_features: int, num_classes: int, **options: object) -> nn.Module:
    """Make the head called `name`, of `HEADS` or `PRESETS`, with options, and `device` and `dtype` as for layers."""
    name, options = resolve(name, options)
    known = [option for option in list(inspect.signature(HEADS[name]).parameters)[2:] if option not in FACTORY]
    unknown = [option for option in options if option not in (*known, *FACTORY)]
    if unknown:
        raise ValueError(f"head {name!r} has no option {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    return HEADS[name](in_features, num_classes, **options)


def resolve(name: str, options: Options) -> tuple[str, Options]:
    """The head behind a name and all its options: those of a preset, and `options` over them."""
    if name not in HEADS and name not in PRESETS:
        raise ValueError(f"unknown head {name!r}; choose one of {', '.join([*HEADS, *PRESETS])}")
    head, preset = PRESETS.get(name, (name, dict))
    return head, preset(options)


def loss_and_hits(head: nn.Module, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of a head's logits with labels (N,), and which samples it classifies so (N,)."""
    if isinstance(head, KernelClassifier):
        return head.loss_and_hits(features, target)
    return _loss.loss_and_hits(head(features), target)


__all__ = [
    "HEADS",
    "PRESETS",
    "ExpansionHead",
    "FrozenKernelClassifier",
    "KernelClassifier",
    "LinearHead",
    "SecondOrderHead",
    "SoftmaxHead",
    "create_head",
    "loss_and_hits",
    "resolve",
]
