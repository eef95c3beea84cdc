import math

import pytest

from kernelhead.train.schedule import Schedule, warmup_cosine


def test_warm_up_is_linear_and_reaches_one():
    assert [warmup_cosine(step, 100, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_decay_follows_the_cosine():
    assert warmup_cosine(10, 110, 10) == 1
    assert warmup_cosine(60, 110, 10) == pytest.approx(0.5)
    assert warmup_cosine(35, 110, 10) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert 0 < warmup_cosine(109, 110, 10) < 1e-3


def test_no_warm_up():
    assert warmup_cosine(0, 10, 0) == 1


def test_a_schedule_says_every_step():
    schedule = Schedule(epochs=4, batch_size=10, warmup_epochs=1)
    assert schedule.steps(25) == 2
    expected = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6))]
    assert schedule.factors(25) == pytest.approx(expected)


def test_a_short_training_warms_up_for_half_of_it():
    assert Schedule(epochs=2, batch_size=1).factors(2) == pytest.approx([0.5, 1.0, 1.0, 0.5])
