"""Classification heads, one per file, behind one registry.

A head is made as `Head(in_features, num_classes, **options)`, or by its name with `create_head`. A new head is a file
with a subclass of `Head` and a line of `HEADS`; tests/heads/test_contract.py says what it promises.
"""

import inspect

from kernelhead.heads._base import CONFIG_VERSION, Head
from kernelhead.heads._points import PointHead
from kernelhead.heads.attentive import AttentiveHead
from kernelhead.heads.cosine import CosineHead
from kernelhead.heads.expansion import ExpansionHead
from kernelhead.heads.frozen import FrozenHead
from kernelhead.heads.kernel import KernelHead
from kernelhead.heads.landmarks import LandmarkHead
from kernelhead.heads.linear import LinearHead
from kernelhead.heads.prototypes import PrototypeHead
from kernelhead.heads.second_order import SecondOrderHead

HEADS: dict[str, type[Head]] = {
    "kernel": KernelHead,
    "prototypes": PrototypeHead,
    "landmarks": LandmarkHead,
    "linear": LinearHead,
    "cosine": CosineHead,
    "second_order": SecondOrderHead,
    "expansion": ExpansionHead,
    "attentive": AttentiveHead,
}
FACTORY = ("device", "dtype")


def create_head(
    name: str, in_features: int, num_classes: int, *, version: int = CONFIG_VERSION, **options: object
) -> Head:
    """Make the head called `name`, with options, and `device` and `dtype` as for layers of PyTorch.

    `create_head(**head.config)` makes the same head again.

    Example:
        >>> create_head("kernel", 64, 10, degree=9).config["degree"]
        9
    """
    if version != CONFIG_VERSION:
        raise ValueError(f"the configuration has version {version}; this kernelhead reads version {CONFIG_VERSION}")
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}; choose one of {', '.join(HEADS)}")
    known = option_defaults(name)
    unknown = [option for option in options if option not in (*known, *FACTORY)]
    if unknown:
        raise ValueError(f"head {name!r} has no option {unknown[0]!r}; it takes {', '.join(known) or 'no options'}")
    return HEADS[name](in_features, num_classes, **options)


def option_defaults(name: str) -> dict[str, object]:
    """Return the options of the head called `name` with their defaults."""
    parameters = list(inspect.signature(HEADS[name]).parameters.values())[2:]
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in FACTORY}


__all__ = [
    "HEADS",
    "AttentiveHead",
    "CosineHead",
    "ExpansionHead",
    "FrozenHead",
    "Head",
    "KernelHead",
    "LandmarkHead",
    "LinearHead",
    "PointHead",
    "PrototypeHead",
    "SecondOrderHead",
    "create_head",
    "option_defaults",
]
