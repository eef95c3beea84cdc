"""A folder of images becomes a trained classifier."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelhead.finetune.spec import TrainResult, TrainSpec

__all__ = ["TrainResult", "TrainSpec", "train"]


def train(
    spec: TrainSpec,
    *,
    report: Callable[[dict[str, Any]], object] | None = None,
    checkpoint: str | Path | None = None,
) -> TrainResult:
    """Train what a spec says, from its images to its result, as `kernelhead train` does.

    Args:
        spec: settings; those that are None are filled in.
        report: is given the figures of each epoch: epoch, loss, accuracy, val_loss, val_accuracy (both None without
            validation images), learning_rate and images_per_second. What it raises ends the run.
        checkpoint: folder of the run. A run that began there goes on from its last checkpoint, and epochs that are
            done are not reported again. None is a folder that is removed in the end.

    Example:
        >>> result = train(TrainSpec("photos", val=0.2), report=print, checkpoint="run")  # doctest: +SKIP
    """
    from kernelhead.finetune import data, distributed, settings, trainer  # torch takes seconds to import

    if checkpoint is None:
        with tempfile.TemporaryDirectory() as folder:
            return train(spec, report=report, checkpoint=folder)
    spec = settings.resolved(spec)
    device = distributed.choose_device(spec.device)
    world, opened = distributed.join_world(device), data.open_data(spec, device)
    spec = settings.resolved(spec, images=len(opened.train), processes=world.size)

    def watch(now: "trainer.Moment") -> None:
        if now.epoch_done and report is not None:
            names = ("epoch", "loss", "val_loss", "val_accuracy", "learning_rate", "images_per_second")
            report({**{name: getattr(now, name) for name in names}, "accuracy": 100 * now.accuracy})

    return trainer.train(spec, opened, Path(checkpoint), world=world, watch=watch)
