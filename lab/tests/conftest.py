"""Shared by the tests of the laboratory: their marker, and result files as if cells had been trained."""

import os
from pathlib import Path

import pytest

from kernelhead.finetune.results import save_result
from kernelhead.finetune.spec import TrainResult


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def write_runs():
    """Result files of a cell as if it had been trained: `write_runs(store, cell, protocol, {seed: accuracy}, ..)`.

    Its candidates come first: the smallest rate with the largest decay was the best. More is given to final results.
    """

    def save(path, spec, accuracy, **more):
        likelihood = {} if accuracy is None else {"nll": 2 - accuracy / 100, "ece": 12.3}
        told = {
            "images": {"train": 9, "test": 9, "left_out": 0},
            "curve": {"loss": [1.0], "accuracy": [1.0]},
            "parameters": {"backbone": 1, "head": 6500},
            "seconds": 1.0,
            "accuracy": accuracy,
            **likelihood,
            **more,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # thousands of files
            save_result(path, TrainResult(spec=spec, **told))

    def write(store, cell, protocol, by_seed, **more):
        chooser, epochs = cell.chooser, protocol.epochs_to_choose(store.epochs)
        for candidate in protocol.candidates():
            path = store.choice_path(chooser, protocol, candidate)
            if not path.exists():
                preferred = 1e4 * candidate.weight_decay - candidate.learning_rate
                spec = protocol.applied(chooser.spec, candidate, epochs, 0)
                save(path, spec, 50 + preferred, choosing=True, seconds=more.get("seconds", 1.0))
        for seed, accuracy in by_seed.items():
            spec = protocol.applied(cell.spec, store.choice(cell, protocol), store.epochs, seed)
            save(store.result_path(cell, protocol, seed), spec, accuracy, **more)

    return write
