import math

import pytest

from kernelhead.finetune.schedule import epoch_order, mix, warmup_cosine


def test_warm_up_is_linear_and_reaches_one():
    assert [warmup_cosine(step, 100, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_decay_follows_the_cosine():
    assert warmup_cosine(10, 110, 10) == 1
    assert warmup_cosine(60, 110, 10) == pytest.approx(0.5)
    assert warmup_cosine(35, 110, 10) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert 0 < warmup_cosine(109, 110, 10) < 1e-3


def test_no_warm_up():
    assert warmup_cosine(0, 10, 0) == 1


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    first, second, other = (epoch_order(50, *which).tolist() for which in ((1, 0), (1, 1), (2, 0)))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert first == epoch_order(50, 1, 0).tolist()
    assert len({tuple(order) for order in (first, second, other)}) == 3


def test_mixed_seeds_differ_and_fit_generators():
    seeds = [mix(*values) for values in ((1, 2, 3), (1, 3, 2), (12, 3), (1, 23), (1, "a"))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
