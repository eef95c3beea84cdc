import numpy as np
import pytest
from scipy import stats

from kernelhead.paper.table import mean_and_deviation, paired_difference, sign_flip_p


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
