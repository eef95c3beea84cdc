from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from kernelhead_lab.tables.statistics import (
    differences,
    holm,
    mean_and_deviation,
    p_text,
    paired_difference,
    pooled,
    sign_flip_p,
)


def test_cells():
    assert mean_and_deviation([]) == "not run"
    assert mean_and_deviation([91.234]) == "91.23"
    assert mean_and_deviation([1.0, 2.0, 4.0]) == f"2.33 ± {np.std([1, 2, 4], ddof=1):.2f}"


def test_difference_is_over_shared_seeds_only():
    assert paired_difference({0: 5.0, 1: 7.0, 2: 100.0}, {0: 4.0, 1: 4.0, 9: 0.0}) == "+2.00 (p 0.500)"
    assert paired_difference({0: 5.0}, {0: 6.5}) == "-1.50"
    assert paired_difference({0: 5.0}, {1: 6.5}) == ""
    assert paired_difference({0: 5.0, 1: 5.0}, {0: 4.0, 1: 4.0}, test=False) == "+1.00"


def test_sign_flip_test_is_exact():
    differences = np.array([1.0, 2.0, 3.0, -0.5])
    # Of 16 sign patterns, the sums 5.5 and 6.5 and their opposites are as far from zero as 5.5.
    assert sign_flip_p(differences) == pytest.approx(4 / 16)
    assert sign_flip_p(np.full(10, 0.3)) == pytest.approx(2 / 2**10)
    assert sign_flip_p(np.zeros(3)) == 1
    rounded = np.array([58.02, 58.03, 58.77]) - np.array([58.48, 58.02, 58.31])  # -0.46, 0.01, 0.46 but for 1e-14
    assert sign_flip_p(rounded) == 1


@pytest.mark.parametrize("n", [12, 40])
def test_sign_flip_test_agrees_with_scipy(n):
    differences = np.random.default_rng(n).normal(0.4, 1, n)
    theirs = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=50_000 if n > 14 else np.inf, rng=0
    ).pvalue
    assert sign_flip_p(differences) == pytest.approx(theirs, abs=0.01 if n > 14 else 1e-12)


@pytest.mark.parametrize("against", [0.0, 0.5])
def test_cells_are_tested_together_and_weigh_alike(against):
    rng = np.random.default_rng(3)
    cells = [dict(enumerate(rng.normal(0.4, 1, n))) for n in (3, 1, 3, 2)]

    def mean_of_means(flat, axis):
        parts = np.split(flat, np.cumsum([len(cell) for cell in cells])[:-1], axis=-1)
        return sum(part.mean(axis=-1) for part in parts) / len(parts)

    flat = np.concatenate([list(cell.values()) for cell in cells]) - against
    theirs = stats.permutation_test(
        (flat,), mean_of_means, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    test = pooled([*cells, {}], against)
    assert test.mean == pytest.approx(np.mean([np.mean(list(cell.values())) for cell in cells]))
    assert test.pairs == 9
    assert test.p == pytest.approx(theirs.pvalue)
    assert pooled([{}, {}]) is None


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected where every set of hypotheses that holds it is, by the smallest p of the set."""
    for p_values in ([0.01, 0.04, 0.03, 0.005], [0.2, 0.2, 0.001], [0.5], [0.02, 0.9, 0.02, 0.6, 0.03]):
        sets = [each for size in range(1, 6) for each in combinations(range(len(p_values)), size)]
        closed = [
            max(min(1, len(each) * min(p_values[i] for i in each)) for each in sets if place in each)
            for place in range(len(p_values))
        ]
        assert holm(p_values) == pytest.approx(closed)
    assert holm([]) == []


def test_differences_are_by_seed_and_to_a_mean():
    assert differences({0: 5.0, 1: 7.0, 2: 1.0}, {1: 4.0, 0: 4.0}, {0: 2.0, 1: 6.0, 3: 0.0}) == {0: 2.0, 1: 2.0}
    assert differences({0: 5.0}, {1: 1.0}) == {}
    assert [p_text(p) for p in (0.00001, 0.001, 0.0416, 1.0)] == ["< 0.001", "0.001", "0.042", "1.000"]
