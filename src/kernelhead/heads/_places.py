"""Feature maps and token sequences as one thing, places; and what else a head is given."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor


def as_vectors(features: Tensor, in_features: int, head: str) -> Tensor:
    """Check features (..., D) and flatten them to (N, D)."""
    _check_floating(features, head)
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise ValueError(f"{head} expects features of shape (..., {in_features}), got {tuple(features.shape)}")
    return features if features.dim() == 2 else features.reshape(-1, in_features)


def as_places(features: Tensor, in_features: int, head: str, window: int = 1) -> Tensor:
    """Check a map (N, D, H, W) or tokens (N, L, D) and view it as (N, L, D).

    With a window of w places a side, of a map only: all its windows (N, L, w w D), row by row of the map. In one of
    them its places are side by side, row by row, too.
    """
    _check_floating(features, head)
    shape = tuple(features.shape)
    if window > 1:
        if features.dim() != 4 or shape[1] != in_features:
            raise ValueError(f"{head} with windows expects a map (N, {in_features}, H, W), got {shape}")
        rows, columns = shape[2] - window + 1, shape[3] - window + 1
        if min(rows, columns) < 1:
            raise ValueError(
                f"{head} has {window} x {window} windows of places, and the map is {shape[2]} x {shape[3]}"
            )
        corners = [(row, column) for row in range(window) for column in range(window)]
        features = torch.cat([features[:, :, i : i + rows, j : j + columns] for i, j in corners], 1)
        return features.flatten(2).transpose(1, 2)
    if features.dim() == 4 and shape[1] == in_features:
        features = features.flatten(2).transpose(1, 2)
    elif features.dim() != 3 or shape[2] != in_features:
        raise ValueError(f"{head} expects a map (N, {in_features}, H, W) or tokens (N, L, {in_features}), got {shape}")
    if features.shape[1] == 0:
        raise ValueError(f"{head} averages over places and got none: {shape}")
    return features


def as_points(features: Tensor, in_features: int, head: str, *, pools: bool, window: int) -> Tensor:
    """What a kernel compares with its weights: the places or windows of each sample (N, L, D), or vectors (N, D)."""
    if pools:
        return as_places(features, in_features, head, window)
    return as_vectors(features, in_features, head)


def as_labels(target: Tensor, shape: Sequence[int], head: str) -> Tensor:
    """Check labels of this shape and flatten them to int64 (N,)."""
    if torch.is_floating_point(target):
        raise ValueError(
            f"{head} has a loss for labels, not for probabilities of classes (got {target.dtype}): take "
            "F.cross_entropy(head(features), target)"
        )
    if target.shape != tuple(shape) or target.dtype == torch.bool:
        found = f"{tuple(target.shape)} of {target.dtype}"
        raise ValueError(f"{head} expects integer labels of shape {tuple(shape)}, got {found}")
    return target.reshape(-1).long()


def _check_floating(features: Tensor, head: str) -> None:
    if not torch.is_floating_point(features):
        raise TypeError(f"{head} expects floating-point features, got {features.dtype}")


def check_sizes(head: str, **sizes: object) -> None:
    """Refuse sizes that are not positive integers."""
    for name, size in sizes.items():
        if not isinstance(size, SupportsIndex) or isinstance(size, bool) or operator.index(size) < 1:
            raise ValueError(f"{head} needs {name} to be a positive integer, got {size!r}")
