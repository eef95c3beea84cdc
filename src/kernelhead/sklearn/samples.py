"""Samples: their weights, how their features are scaled, and where they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils import compute_class_weight
from torch import Tensor
from torch.nn import functional as F

Array = NDArray[Any]
BLOCK_ROWS = 20_000


@dataclass(frozen=True)
class Samples:
    """Points (N, D), target (N,) and weight (N,)."""

    points: Tensor
    target: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return self.points.shape[0]

    def at(self, index: Tensor) -> "Samples":
        return Samples(self.points[index], self.target[index], self.weight[index])


class Points:
    """Unit vectors (N, D + 1) of samples, made of their scaled features and a constant, a part at a time.

    Sparse features (a CSR matrix) make sparse matrices, dense ones tensors.
    """

    def __init__(self, features: Any, rows: Array, scaling: "Scaling", constant: float, device: torch.device) -> None:
        self.features, self.rows, self.scaling, self.constant, self.device = features, rows, scaling, constant, device
        self.sparse, self.width, self.dtype = sparse.issparse(features), features.shape[1] + 1, torch.float64

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, index: Array) -> "Points":
        part = Points(self.features, self.rows[index], self.scaling, self.constant, self.device)
        part.dtype = self.dtype
        return part

    def parts(self, size: int) -> Iterator[slice]:
        return (slice(start, min(start + size, len(self))) for start in range(0, len(self), size))

    def at(self, index: slice | Array) -> Any:
        """Return the unit vectors at a slice or indices."""
        chosen = self.features[self.rows[index]]
        if self.sparse:
            scaled = sparse.csr_matrix(chosen.multiply(1 / self.scaling.scale), dtype=np.float64)
            points = sparse.hstack([scaled, np.full((scaled.shape[0], 1), self.constant)], format="csr")
            lengths = np.sqrt(np.asarray(points.multiply(points).sum(1)))
            unit = sparse.csr_matrix(points.multiply(1 / np.maximum(lengths, np.finfo(float).tiny)))
            return unit.astype(np.float64 if self.dtype is torch.float64 else np.float32)
        scaled = torch.from_numpy(self.scaling(chosen)).to(self.device, self.dtype)
        return F.normalize(F.pad(scaled, (0, 1), value=self.constant))


@dataclass(frozen=True)
class Scaling:
    """Features (N, D) -> (clip(features, lowest, highest) - mean) / scale."""

    lowest: Array
    highest: Array
    mean: Array
    scale: Array

    def __call__(self, features: Any) -> Array:
        if sparse.issparse(features):
            return np.asarray((features.multiply(1 / self.scale)).toarray())
        clipped = np.clip(features.astype(np.float64), self.lowest, self.highest)
        return np.asarray((clipped - self.mean) / self.scale)


def weigh(
    features: Any, target: Array, weight: Array, class_weight: dict[Any, float] | str | None, classes: Array
) -> tuple[Array, Array, Array]:
    """Return the rows of samples of positive weight, each once, their target and weight, with a mean weight of one.

    features (N, D), target (N,) of indices of `classes`, weight (N,). Weights include those of the classes.
    """
    if class_weight == "balanced":  # by the weights of the samples, as if they were repeated
        totals = np.bincount(target, weight, minlength=len(classes))
        each = weight.sum() / (np.count_nonzero(totals) * np.where(totals > 0, totals, 1))
    else:
        each = compute_class_weight(class_weight, classes=classes, y=classes)
    weight = weight * each[target]
    kept = np.flatnonzero(weight > 0)
    if not len(kept):
        raise ValueError("all samples have weight zero; give at least one a positive weight")
    # A sample held out would be predicted from its own copy.
    keys = _hashes(features, target)[kept]
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    rows, weight = kept[first], np.bincount(group.reshape(-1), weight[kept])
    order: Any = np.argsort(rows)
    if len(rows) <= BLOCK_ROWS:  # then the order in which they were given does nothing
        order = slice(None) if sparse.issparse(features) else np.lexsort((target[rows], *features[rows, :8].T))
    rows, weight = rows[order], weight[order]
    # The ridge starts where weights of about one suit it.
    return rows, target[rows], weight / weight.mean()


def _hashes(features: Any, target: Array) -> Array:
    """Return a sum of 64 bits for each row and label, by random factors of its words; equal rows have equal sums."""
    itemsize = features.dtype.itemsize
    words = max(1, itemsize // 4)
    factors = np.random.default_rng(0).integers(1, 2**63, (features.shape[1] + 1, words), dtype=np.uint64)
    kind = np.uint16 if itemsize == 2 else np.uint32
    keys = (target.astype(np.uint64) + 1) * factors[-1, 0]
    for start in range(0, features.shape[0], BLOCK_ROWS):
        block = features[start : start + BLOCK_ROWS]
        values = np.ascontiguousarray(
            (block.data if sparse.issparse(block) else block) + block.dtype.type(0)
        )  # no -0.0
        bits = values.view(kind).astype(np.uint64)
        if sparse.issparse(block):
            sums = (bits.reshape(-1, words) * factors[block.indices]).sum(1, dtype=np.uint64)
            running = np.concatenate([np.zeros(1, np.uint64), sums.cumsum(dtype=np.uint64)])
            keys[start : start + BLOCK_ROWS] += running[block.indptr[1:]] - running[block.indptr[:-1]]
        else:
            keys[start : start + BLOCK_ROWS] += bits.reshape(len(values), -1) @ factors[:-1].reshape(-1)
    return np.asarray(keys)


def shuffled_ranks(labels: Array, seed: Any) -> Array:
    """Return a random rank (N,) of each sample among those of its class, from 0."""
    shuffled = pd.Series(labels).sample(frac=1, random_state=seed)
    return np.asarray(shuffled.groupby(shuffled).cumcount().sort_index())


def in_range(features: Array) -> tuple[Array, Array]:
    """Divide features (N, D) by powers of two 2^e, so that squares neither overflow nor vanish; also return e (D,)."""
    exponent = np.frexp(np.abs(features).max(0))[1]
    return np.ldexp(features, -exponent), exponent


def scalings(features: Any, weight: Array) -> list[Scaling]:
    """Return candidates for the scaling of features (N, D).

    One is by their own deviations, right for units of measurement. The other is common: small deviations may be noise.
    Features are clipped to the range from their 1st to their 99th percentile, widened by its length on either side.
    Sparse ones are neither clipped nor centred.
    """
    if sparse.issparse(features):
        zero, square = np.zeros(features.shape[1]), features.multiply(features).mean()
        return [Scaling(zero - np.inf, zero + np.inf, zero, np.full_like(zero, np.sqrt(square * len(zero)) or 1.0))]
    wide, exponent = in_range(features.astype(np.float64))
    first, last = np.quantile(wide, [0.01, 0.99], axis=0)
    reach = np.where(last > first, last - first, np.inf)
    wide = np.clip(wide, first - reach, last + reach)
    mean: Array = np.average(wide, axis=0, weights=weight)
    deviation = np.sqrt(np.average((wide - mean) ** 2, axis=0, weights=weight))
    varies = deviation > 10 * np.finfo(features.dtype).eps * np.abs(mean)
    largest = exponent[varies].max(initial=exponent.min())
    squares = np.ldexp(deviation, exponent - largest)[varies] ** 2
    common = np.ldexp(np.sqrt(squares.mean()) if varies.any() else 1.0, largest)
    own = np.where(varies, np.ldexp(deviation, exponent), common)
    lowest, highest = features.min(0), features.max(0)
    mean = np.where(lowest == highest, lowest, np.ldexp(mean, exponent))
    limits = np.ldexp(first - reach, exponent), np.ldexp(last + reach, exponent)
    scales = [own] if np.allclose(own / common, 1, rtol=0.01) else [own, np.full_like(own, common)]
    return [Scaling(*limits, mean, scale) for scale in scales]


def as_device(name: str) -> torch.device:
    """Return the device of this name. "auto" is a CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, dtype=torch.float64, device=name).cpu()
    except (RuntimeError, AssertionError, TypeError):
        raise ValueError(f"device {name!r} is not available here, or has no float64; choose auto or cpu") from None
    return torch.device(name)


def as_readable(given: Any) -> Any:
    """Return a tensor as NumPy can read it: on the CPU, without gradient, and not in bfloat16."""
    if not isinstance(given, torch.Tensor):
        return given
    given = given.detach().cpu()
    return given.float() if given.dtype is torch.bfloat16 else given
