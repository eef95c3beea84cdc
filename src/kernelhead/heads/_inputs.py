"""Checks of a head's inputs: sizes, feature vectors, spatial positions or tokens, labels."""

import math
import operator
from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from kernelhead.fused.modes import at_hand


def check_sizes(owner: str, **sizes: object) -> None:
    """Refuse sizes that are not positive integers."""
    for name, size in sizes.items():
        if not isinstance(size, SupportsIndex) or isinstance(size, bool) or operator.index(size) < 1:
            raise ValueError(f"{owner} needs {name} to be a positive integer; got {size!r}")


def check_choice(owner: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{owner} knows no {name}={value!r}; choose one of {', '.join(map(repr, choices))}")


def positive_number(owner: str, name: str, value: float) -> float:
    """Return the value as a float; it has to be positive and finite."""
    if not isinstance(value, SupportsFloat) or not 0 < float(value) < math.inf:
        raise ValueError(f"{owner} needs {name} to be positive and finite; got {value!r}")
    return float(value)


def scale_of(owner: str, scale: float | None, count: int) -> float:
    """Return what `count` standardised values are multiplied by: unless given, so that they weigh as 128 do."""
    return math.sqrt(128 / count) if scale is None else positive_number(owner, "scale", scale)


def as_vectors(features: Tensor, in_features: int, owner: str) -> Tensor:
    """Check feature vectors (..., D) and flatten them to (N, D)."""
    _check_floating(features, owner)
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise ValueError(f"{owner} expects features of shape (..., {in_features}); got {tuple(features.shape)}")
    return features if features.dim() == 2 else features.reshape(-1, in_features)


def as_positions(features: Tensor, in_features: int, owner: str) -> Tensor:
    """Check a map `(N, D, H, W)` or tokens `(N, L, D)`, and view it as `(N, L, D)`."""
    _check_floating(features, owner)
    shape = tuple(features.shape)
    if features.dim() == 4 and shape[1] == in_features:
        features = features.flatten(2).transpose(1, 2)
    elif features.dim() != 3 or shape[2] != in_features:
        raise ValueError(
            f"{owner} expects a map (N, {in_features}, H, W), tokens (N, L, {in_features}) or vectors "
            f"(N, {in_features}), with pool=None vectors (..., {in_features}); got {shape}"
        )
    if features.shape[1] == 0:
        raise ValueError(f"{owner} expects one position or more; got {shape}")
    return features


def as_mask(mask: Tensor, features: Tensor, pools: bool, owner: str) -> Tensor:
    """Check a mask `(N, L)` of tokens or `(N, H, W)` of a map, and make it `(N, L)`, true where a position counts."""
    if not pools or features.dim() < 3:
        raise ValueError(
            f"{owner} takes a mask with tokens or maps that it pools; got features of shape {tuple(features.shape)}"
            + ("" if pools else " and pool=None")
        )
    shape = tuple(features.select(1 if features.dim() == 4 else 2, 0).shape)
    if mask.shape != shape:
        raise ValueError(f"{owner} expects a mask of shape {shape}; got {tuple(mask.shape)}")
    real = mask.flatten(1) > 0
    if at_hand(real):
        empty = (~real.any(1)).nonzero()
        if len(empty):
            raise ValueError(f"{owner} needs a real position in each sample; got none in sample {empty[0].item()}")
    return real


def as_labels(target: Tensor, shape: Sequence[int], owner: str) -> Tensor:
    """Check labels of this shape and flatten them to int64 (N,)."""
    if target.shape != tuple(shape) or target.is_floating_point() or target.dtype == torch.bool:
        found = f"{tuple(target.shape)} of {target.dtype}"
        other = "F.cross_entropy takes probabilities, and F.binary_cross_entropy_with_logits several labels per sample"
        raise ValueError(f"{owner}.loss takes integer labels of shape {tuple(shape)}; got {found}: {other}")
    return target.reshape(-1).long()


def _check_floating(features: Tensor, owner: str) -> None:
    if not torch.is_floating_point(features):
        raise TypeError(f"{owner} expects floating-point features; got {features.dtype}")
