"""Variants of heads that only tables need, behind one registry with the library's.

`create_lab_head(name, D, C, **options)` makes the heads of `kernelhead.heads.HEADS` and these, each a subclass of a
library head with more options:

    landmarks_variant      landmarks    + window, standardize, eps, dropout
    pooled_kernel          kernel       + pool
    pooled_prototypes      prototypes   + pool
    expansion_variant      expansion    + normalized, standardized, dropout
    second_order_variant   second_order + dropout
"""

import inspect
from typing import Any

from kernelhead.heads import FACTORY, HEADS, Head, create_head, option_defaults
from kernelhead_lab.heads.expansion import ExpansionVariant
from kernelhead_lab.heads.landmarks import LandmarkVariant
from kernelhead_lab.heads.pooled import PooledKernelHead, PooledPrototypeHead
from kernelhead_lab.heads.second_order import SecondOrderVariant

VARIANTS: dict[str, type[Head]] = {
    variant.name: variant
    for variant in (LandmarkVariant, PooledKernelHead, PooledPrototypeHead, ExpansionVariant, SecondOrderVariant)
}


def create_lab_head(name: str, in_features: int, num_classes: int, **options: Any) -> Head:
    """Make the library's head or the variant called `name`.

    Example:
        >>> create_lab_head("pooled_kernel", 64, 10).config["pool"]
        'auto'
    """
    if name in HEADS:
        return create_head(name, in_features, num_classes, **options)
    known = lab_option_defaults(name)
    unknown = [option for option in options if option not in (*known, *FACTORY)]
    if unknown:
        raise ValueError(f"head {name!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    return VARIANTS[name](in_features, num_classes, **options)


def lab_option_defaults(name: str) -> dict[str, object]:
    """Return the options of the head called `name` with their defaults."""
    if name in HEADS:
        return option_defaults(name)
    if name not in VARIANTS:
        raise ValueError(f"unknown head {name!r}; choose one of {', '.join([*HEADS, *VARIANTS])}")
    library: Any = VARIANTS[name].__base__
    variant = inspect.signature(VARIANTS[name]).parameters.values()
    own = {each.name: each.default for each in variant if each.kind is each.KEYWORD_ONLY}
    return {**option_defaults(library.name), **own}


__all__ = [
    "VARIANTS",
    "ExpansionVariant",
    "LandmarkVariant",
    "PooledKernelHead",
    "PooledPrototypeHead",
    "SecondOrderVariant",
    "create_lab_head",
    "lab_option_defaults",
]
