"""What is kept of a training: its result, measured on the images it is tested on, and its network."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelhead import metrics
from kernelhead.backbones import count_parameters
from kernelhead.data.images import Images
from kernelhead.data.open import Opened
from kernelhead.paper.store import Job
from kernelhead.results import sha256_of
from kernelhead.train.config import TrainConfig
from kernelhead.train.loop import Run, Trained, predict
from kernelhead.train.saved import SavedClassifier, save_classifier


def measure(
    job: Job,
    trained: Trained,
    opened: Opened,
    training: Images,
    testing: Images,
    seconds: float,
    at_once: int,
) -> dict[str, Any]:
    """The result of a training, tested on `testing`; without an accuracy where it diverged."""
    per_epoch = len(trained.losses) // job.epochs
    result: dict[str, Any] = {
        "experiment": job.recipe.data,
        "method": job.recipe.key,
        "seed": job.seed,
        "config": {
            **_portable(trained.run, job),
            "epochs": job.epochs,
            "batch_size": job.protocol.batch_size,
            "warmup_epochs": job.protocol.warmup_epochs,
            "choosing": job.choosing,
        },
        "images": {"train": len(training), "test": len(testing), "left_out": len(opened.left_out)},
        "parameters": {part: count_parameters(getattr(trained.model, part)) for part in ("backbone", "head")},
        "curve": {
            "loss": _per_epoch(trained.losses, per_epoch),
            "accuracy": _per_epoch(100 * trained.accuracies, per_epoch),
        },
        "seconds": seconds,
        "at_once": at_once,
        "diverged_at": trained.diverged_at,
        "accuracy": None,
    }
    logits = predict(trained.model, testing) if trained.diverged_at is None else None
    if logits is not None and not torch.isfinite(logits).all():  # the last step's loss is that of before its update
        result["diverged_at"], logits = len(trained.losses), None
    if logits is not None:
        result |= metrics.summary(logits, testing.labels.cpu())
        alpha = getattr(trained.model.head, "alpha", None)
        if alpha is not None:
            result["alpha"] = alpha.detach().float().tolist()
    return result


def save_network(job: Job, trained: Trained, opened: Opened) -> None:
    """Keep a network beside its result; what an earlier one chose for active learning goes."""
    config = asdict(_config(job, trained.run, opened))
    saved = SavedClassifier(trained.model, trained.run, opened.classes, opened.input, config)
    for chosen in job.path.parent.glob(f"{job.path.stem}-*.safetensors"):
        chosen.unlink()
    save_classifier(job.path.with_suffix(".safetensors"), saved)


def _config(job: Job, run: Run, opened: Opened) -> TrainConfig:
    """The job as `kernelhead train` would be told it, so that `kernelhead evaluate` knows the classifier's data."""
    return TrainConfig(
        job.recipe.data,
        run.backbone,
        run.head,
        run.head_options,
        **run.backbone_options,
        teacher=run.teacher,
        temperature=run.temperature,
        mixup=run.mixup,
        head_rate=run.head_rate,
        epochs=job.epochs,
        batch_size=job.protocol.batch_size,
        learning_rate=run.learning_rate,
        weight_decay=run.weight_decay,
        warmup_epochs=job.protocol.warmup_epochs,
        seed=run.seed,
        size=opened.input.size,
    ).completed()


def _portable(run: Run, job: Job) -> dict[str, Any]:
    """What a run is told, without the places of this machine: a teacher is named from the folder of all runs on."""
    told, runs = asdict(run), job.path.parents[3]
    if run.teacher is not None and Path(run.teacher).is_relative_to(runs):
        told["teacher"] = Path(run.teacher).relative_to(runs).as_posix()
    if "weights" in run.backbone_options:
        told["backbone_options"]["weights"] = file_of_weights(run.backbone_options["weights"])
    return told


@cache
def file_of_weights(path: str) -> dict[str, str]:
    """How a result names the file of weights that its network began with: `file`, its name, and its `sha256`."""
    return {"file": Path(path).name, "sha256": sha256_of(Path(path))}


def _per_epoch(values: Tensor, per_epoch: int) -> list[float | None]:
    """Means over epochs, in four digits; None where there is none."""
    means = values.cpu().double().view(-1, per_epoch).mean(1).numpy()
    return [float(f"{mean:.4g}") if np.isfinite(mean) else None for mean in means]
