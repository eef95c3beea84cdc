"""The statistics in the cells of tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

NOT_RUN = "not run"


def mean_and_deviation(values: Sequence[float]) -> str:
    """The mean and, of more than one value, the standard deviation."""
    if not values:
        return NOT_RUN
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def differences(ours: Mapping[int, float], *theirs: Mapping[int, float]) -> dict[int, float]:
    """Ours minus the mean of theirs by seed, of the seeds that all have."""
    seeds = sorted(set(ours).intersection(*theirs))
    return {seed: ours[seed] - float(np.mean([each[seed] for each in theirs])) for seed in seeds}


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], *, test: bool = True) -> str:
    """Mean of ours - theirs over the seeds that both have, with the p-value of a paired test."""
    found = np.array(list(differences(ours, theirs).values()))
    if not len(found):
        return ""
    text = f"{found.mean():+.2f}"
    return f"{text} (p {sign_flip_p(found):.3f})" if test and len(found) > 1 else text


class Pooled(NamedTuple):
    """The mean difference of several cells, and the test of all their differences together."""

    mean: float
    pairs: int
    p: float


def pooled(cells: Iterable[Mapping[int, float]], against: float = 0.0) -> Pooled | None:
    """Test the differences of several cells together; None without any.

    `cells`: the differences of each cell by seed. Each cell weighs alike, however many seeds it has. `against`: the
    difference that the test takes for none.
    """
    found = [np.array(list(cell.values())) for cell in cells if cell]
    if not found:
        return None
    weighted = np.concatenate([(cell - against) / len(cell) for cell in found]) / len(found)
    return Pooled(float(weighted.sum()) + against, len(weighted), sign_flip_p(weighted))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: the p-values of several tests, so that any false one among them is as rare as p says."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[place])
        adjusted[place] = min(1.0, largest)
    return adjusted


def p_text(p: float) -> str:
    """Return a p-value in three digits."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def sign_flip_p(differences: np.ndarray) -> float:
    """Two-sided p of a mean difference, were each difference as likely to have the other sign.

    Exact up to 14 pairs, by all sign patterns; beyond that by 100,000 random ones.
    """
    n = len(differences)
    as_far_as = abs(differences.sum()) - 1e-9 * np.abs(differences).sum()  # sums that would be equal differ by rounding
    if n <= 14:
        signs = np.array(list(product((-1.0, 1.0), repeat=n)))
        return float((np.abs(signs @ differences) >= as_far_as).mean())
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(100_000, n))
    as_far = np.abs(signs @ differences) >= as_far_as
    return float((as_far.sum() + 1) / (len(signs) + 1))
