"""A table as plain data, and the statistics that go into its cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

NOT_RUN = "not run"


@dataclass(frozen=True)
class Table:
    """Cells are text: what is shown is decided where the numbers are known."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def mean_and_deviation(values: Sequence[float]) -> str:
    """The mean and, of more than one value, the standard deviation."""
    if not values:
        return NOT_RUN
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], *, test: bool = True) -> str:
    """Mean of ours - theirs over the seeds that both have, with the p-value of a paired test."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return ""
    differences = np.array([ours[seed] - theirs[seed] for seed in seeds])
    text = f"{differences.mean():+.2f}"
    return f"{text} (p {sign_flip_p(differences):.3f})" if test and len(seeds) > 1 else text


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
