"""Shared by all tests: fixed seeds, one thread, and hypothesis without deadlines or a database of its own."""

import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("kernelhead", deadline=None, derandomize=True, database=None)
settings.load_profile("kernelhead")
torch.set_num_threads(1)  # the tensors are tiny: threads only wait for each other, and for other test processes


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals():
    """An interrupted command ignores further signals, as it is leaving; what a test starts would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
