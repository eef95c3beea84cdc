"""The outcome of a run: its result, measured on test or held-out images, and its network."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernelhead import metrics, recalibrate
from kernelhead.finetune.checkpoint import load_checkpoint, save_checkpoint
from kernelhead.finetune.spec import TrainResult
from kernelhead_lab.data.images import Images
from kernelhead_lab.data.streamed import StreamedImages
from kernelhead_lab.engine.loop import Trained, predict
from kernelhead_lab.networks import Classifier, build, count_parameters
from kernelhead_lab.spec import LabSpec

SIZES = (288, 320)  # pixels, at which networks that were trained on 224 are tested too
ENOUGH, BATCH = 1024, 64  # training images that statistics are estimated from, and a batch of them


def measure(
    trained: Trained,
    training: Images,
    testing: Images,
    *,
    left_out: int,
    seconds: float,
    at_once: int,
    choosing: bool,
    extra: Mapping[str, Any],
) -> TrainResult:
    """Return the result of a run, tested on `testing`; without an accuracy where it diverged."""
    spec, model, diverged_at = trained.spec, trained.model, trained.diverged_at
    assert spec.epochs is not None
    per_epoch = len(trained.losses) // spec.epochs
    logits = predict(model, testing) if diverged_at is None else None
    if logits is not None and not torch.isfinite(logits).all():  # no loss has seen what the last update did
        diverged_at, logits = len(trained.losses) - 1, None
    found: dict[str, Any] = {}
    if logits is not None:
        found = metrics.summary(logits, testing.labels.cpu())
        alpha = getattr(model.head, "alpha", None)
        found["alpha"] = None if alpha is None else alpha.detach().float().tolist()
    if logits is not None and isinstance(training, StreamedImages) and spec.augment == "imagenet":
        assert isinstance(testing, StreamedImages)
        extra = {**extra, "crops": at_sizes(model, training, testing)}
    weights = {} if spec.weights is None else {"weights": file_of_weights(spec.weights)}
    return TrainResult(
        spec=portable(spec),
        images={"train": len(training), "test": len(testing), "left_out": left_out},
        parameters={"backbone": count_parameters(model.backbone), "head": count_parameters(model.head)},
        seconds=seconds,
        curve={
            "loss": _per_epoch(trained.losses, per_epoch),
            "accuracy": _per_epoch(100 * trained.accuracies, per_epoch),
        },
        diverged_at=diverged_at,
        at_once=at_once,
        choosing=choosing,
        extra={**extra, **weights},
        **found,
    )


def at_sizes(
    model: Classifier, training: StreamedImages, testing: StreamedImages, sizes: Sequence[int] = SIZES
) -> dict[str, dict[str, float | None]]:
    """Return what a network reaches on whole squares of other sizes than it was trained on.

    A head that standardises over the batch is measured a second time, with the statistics of training images of that
    size: a mean over more positions deviates less.
    """
    norms = [each for each in model.head.modules() if isinstance(each, nn.BatchNorm1d) and not each.affine]
    kept = copy.deepcopy([norm.state_dict() for norm in norms])
    # Images are in the order of their classes.
    spread = torch.arange(0, len(training), max(1, len(training) // ENOUGH))
    batches = [(index, None) for index in torch.split(spread, BATCH)]
    found = {}
    for size in sizes:
        shown, labels = testing.resized(size), testing.labels.cpu()
        found[str(size)] = metrics.summary(predict(model, shown), labels)
        if norms:
            device = training.labels.device.type
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                recalibrate(model, [images for images, _ in training.resized(size).batches(batches)])
            found[f"{size}, own statistics"] = metrics.summary(predict(model, shown), labels)
            for norm, state in zip(norms, kept, strict=True):
                norm.load_state_dict(state)
    return found


def save_network(path: Path, trained: Trained) -> None:
    """Keep a network beside its result; what an earlier one chose for active learning goes."""
    spec, model = portable(trained.spec), trained.model
    if model.backbone.stride_first:
        spec = replace(spec, backbone_options={**spec.backbone_options, "stride_first": True})
    for chosen in path.parent.glob(f"{path.stem}-*.safetensors"):
        chosen.unlink()
    state = {"spec": spec.recipe(), "num_classes": model.head.num_classes}
    save_checkpoint(path.with_suffix(".safetensors"), model.state_dict(), state)


def load_network(path: Path, device: torch.device | str = "cpu") -> Classifier:
    """Make the network again that `save_network` kept, in evaluation mode."""
    tensors, state = load_checkpoint(path)
    spec = replace(LabSpec.from_dict(state["spec"]), pretrained=False, weights=None)
    model = build(spec, state["num_classes"])
    model.load_state_dict(tensors)
    return model.to(device).eval()


def portable(spec: LabSpec) -> LabSpec:
    """Return a spec without paths of this machine."""
    return spec if spec.weights is None else replace(spec, weights=Path(spec.weights).name)


@cache
def file_of_weights(path: str) -> dict[str, str]:
    """Return how a result names the file of weights that its network began with: its name and its checksum."""
    return {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def _per_epoch(values: Tensor, per_epoch: int) -> list[float | None]:
    """Return means over epochs, in four digits; None for an epoch that was not reached."""
    means = values.cpu().double().view(-1, per_epoch).mean(1).numpy()
    return [float(f"{mean:.4g}") if np.isfinite(mean) else None for mean in means]
