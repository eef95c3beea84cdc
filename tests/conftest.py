"""Shared by all tests: fixed seeds, one thread, and hypothesis without deadlines or a database of its own."""

import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

from kernelhead.results import save_result

settings.register_profile("kernelhead", deadline=None, derandomize=True, database=None)
settings.load_profile("kernelhead")
# A virtual machine may name instructions for matrices (AMX) that it has not: a product in bfloat16 ends the process
# then. This is read by the first product, here and in what tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
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


@pytest.fixture(scope="session")
def write_runs():
    """Result files of a recipe as if it had been trained: `write_runs(store, recipe, protocol, {seed: accuracy}, ..)`.

    Its candidates come first: the smallest rate with the largest decay was the best. More is added to final results.
    """

    def save(path, recipe, seed, accuracy, **more):
        result = {
            "experiment": recipe.data,
            "method": recipe.key,
            "seed": seed,
            "config": {"backbone": recipe.backbone, "head": recipe.head},
            "images": {"train": 9, "test": 9, "left_out": 0},
            "curve": {"loss": [1.0], "accuracy": [1.0]},
            "parameters": {"backbone": 1, "head": 6500},
            "seconds": 1.0,
            "accuracy": accuracy,
        }
        if accuracy is not None:
            result |= {"nll": 2 - accuracy / 100, "ece": 12.3}
        save_result(path, {**result, **more})

    def write(store, recipe, protocol, by_seed, **more):
        for candidate in protocol.candidates():
            path = store.choice_path(recipe.chooser, protocol, candidate)
            if not path.exists():
                preferred = 1e4 * candidate.weight_decay - candidate.learning_rate
                save(path, recipe.chooser, 0, 50 + preferred, seconds=more.get("seconds", 1.0))
        for seed, accuracy in by_seed.items():
            save(store.result_path(recipe, protocol, seed), recipe, seed, accuracy, **more)

    return write
