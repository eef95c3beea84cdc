"""Samples with the weights they count by."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import compute_class_weight

FARTHEST = 400  # squares of 2^400 and of 2^-400 are numbers of float64, and so are sums and small parts of them

Array = NDArray[Any]


def weigh(
    features: Array, target: Array, weight: Array, class_weight: dict[Any, float] | str | None, classes: Array
) -> tuple[Array, Array, Array]:
    """Samples of positive weight, each once, with the weight of its class in its own. Their mean is one.

    features (N, D), target (N,): indices of `classes`, weight (N,).
    """
    weight = _class_weighted(target, weight, class_weight, classes)
    kept = weight > 0
    if not kept.any():
        raise ValueError("all samples have weight zero: at least one must count")
    features, target, weight = _merge_repeated(features[kept], target[kept], weight[kept])
    return features, target, weight / weight.mean()  # the ridge starts where it suits weights of about one


def scalings(features: Array, weight: Array) -> tuple[Array, list[Array]]:
    """The mean (D,) of features (N, D), and by what they may be divided: each by its own deviation, or all by one.

    Deviations are units of measurement, and say nothing; or they are signal, and the smallest are mostly noise. The
    mean of a constant is that very value.
    """
    shift = shifts(features)
    wide = np.ldexp(features.astype(np.float64, copy=False), -shift)
    mean: Array = np.average(wide, axis=0, weights=weight)
    deviation = np.sqrt(np.average((wide - mean) ** 2, axis=0, weights=weight))
    varies = deviation > 10 * np.finfo(features.dtype).eps * np.abs(mean)
    common = np.sqrt(np.mean(deviation[varies] ** 2)) if varies.any() else 1.0
    own = np.where(varies, deviation, common)
    scales = [own] if np.allclose(own, common, rtol=0.01) else [own, np.full_like(own, common)]
    lowest, highest = features.min(0), features.max(0)
    mean = np.where(lowest == highest, lowest, np.ldexp(mean, shift))
    return mean, [np.ldexp(scale, shift) for scale in scales]


def shifts(features: Array) -> Array:
    """Powers of two (D,), as exponents, over which the columns of features (N, D) and their squares are in range.

    Zeros for usual features. Others have one in common, but for columns that are 2^400 times larger or smaller than
    most: beside the larger ones nothing is seen of the smaller, unless each is scaled by its own deviation.
    """
    size = np.abs(features).max(0)
    exponent = np.frexp(size)[1]
    if np.abs(exponent).max() <= FARTHEST:
        return np.zeros_like(exponent)
    middle = int(np.median(exponent[size > 0]))
    shift: Array = exponent - np.clip(exponent - middle, -FARTHEST, FARTHEST)
    return np.where(size > 0, shift, middle)


def _class_weighted(target: Array, weight: Array, class_weight: dict[Any, float] | str | None, classes: Array) -> Array:
    if class_weight is None:
        return weight
    indices = np.unique(target)
    if class_weight == "balanced":  # by the weights of the samples, as if they were repeated
        totals = np.bincount(target, weight, minlength=len(classes))
        each = weight.sum() / (np.count_nonzero(totals) * np.where(totals > 0, totals, 1))
    else:
        each = np.ones(len(classes))
        each[indices] = compute_class_weight(class_weight, classes=classes[indices], y=classes[indices])
    weighted: Array = weight * each[target]
    return weighted


def _merge_repeated(features: Array, target: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Equal samples as one of their common weight. Leave-one-out would take one's copy for a prediction of it."""
    rows = np.column_stack([features, target.astype(features.dtype)])
    rows += 0.0  # turns -0.0 into 0.0: rows are compared as bytes, which takes a quarter of the time
    keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    return features[first], target[first], np.bincount(group.reshape(-1), weight)
