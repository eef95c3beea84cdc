"""Differences between heads on the same test images."""

import numpy as np
import pytest
from scipy import stats

from kernelhead.finetune.beside import difference


def test_one_seed_is_mcnemars_test():
    ours, theirs = np.zeros((1, 100), dtype=bool), np.zeros((1, 100), dtype=bool)
    ours[0, :60], theirs[0, 10:62] = True, True  # 10 gained, 2 lost
    found = difference(ours, theirs)
    assert found.points == pytest.approx(8)
    tail = sum(stats.binom.pmf(k, 12, 0.5) for k in (0, 1, 2))
    assert found.p == pytest.approx(2 * tail)
    variance = (12 / 100 - 0.08**2 + 1 / 100) / 100
    assert found.over_images == pytest.approx(196 * np.sqrt(variance))
    assert found.over_seeds is None
    same = difference(ours, ours)
    assert (same.points, same.p) == (0, 1)
    assert same.over_images == pytest.approx(1.96)  # one image of 100


def test_several_seeds_are_the_paired_t_test_too():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random((4, 500)) < 0.8, rng.random((4, 500)) < 0.75
    found = difference(ours, theirs)
    peer = stats.ttest_rel(ours.mean(1), theirs.mean(1)).confidence_interval()
    assert found.points == pytest.approx(50 * (peer.low + peer.high))
    assert found.over_seeds == pytest.approx(50 * (peer.high - peer.low))
    assert found.p is None


def test_the_interval_over_images_holds_the_truth_as_often_as_it_says():
    rng, held = np.random.default_rng(1), 0
    for _ in range(400):
        hard = rng.random(300)
        found = difference(rng.random((1, 300)) < 0.5 + 0.5 * hard, rng.random((1, 300)) < 0.4 + 0.5 * hard)
        held += abs(found.points - 10) < found.over_images
    assert 0.92 < held / 400 < 0.99
