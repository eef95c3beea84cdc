import math
import os

import pytest
import torch

from kernelhead.finetune.schedule import epoch_order, mix, same_bits, warmup_cosine


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


def test_deterministic_algorithms_are_asked_for_and_given_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    with same_bits(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.empty(3).resize_(2).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(ZeroDivisionError), same_bits(False):
        raise ZeroDivisionError
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before
