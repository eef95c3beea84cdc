import numpy as np
import pytest

from kernelhead_lab.data.images import hold_out


@pytest.mark.parametrize("holdout", [0.01, 0.2, 0.5, 0.99])
def test_every_class_is_in_both_parts(holdout):
    labels = np.repeat(np.arange(4), [10, 2, 1, 5])
    parts = hold_out(labels, holdout, 0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(18))
    kept, held = (np.bincount(labels[part.numpy()], minlength=4) for part in parts)
    assert (held[[0, 1, 3]] >= 1).all()
    assert (kept >= 1).all()
    assert held[2] == 0  # a single image is for training
    assert abs(held[0] - 10 * holdout) <= 1


def test_the_seed_decides():
    labels = np.repeat(np.arange(3), 50)
    one, again, other = (hold_out(labels, 0.2, seed)[1].tolist() for seed in (3, 3, 4))
    assert one == again
    assert one != other
    counted = np.zeros(150)
    for seed in range(300):
        counted[hold_out(labels, 0.2, seed)[1]] += 1
    assert (counted.reshape(3, 50).sum(1) == 300 * 10).all()
    assert counted.min() > 30  # of 60 expected: every image is held out at times
    assert counted.max() < 90


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.1, float("nan")])
def test_shares_that_make_no_sense(holdout):
    with pytest.raises(ValueError, match=f"holdout needs to be between 0 and 1; got {holdout}"):
        hold_out(np.zeros(4, dtype=int), holdout, 0)
