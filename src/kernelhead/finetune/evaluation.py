"""What a classifier says about images: features, logits, figures and probabilities."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead.finetune.data import Data, Images, Progress, batches, read_images, shortened, warn_of
from kernelhead.finetune.images import Listing, check_data, data_root, list_images
from kernelhead.finetune.report import PREDICTIONS_FILE, write_predictions, write_report
from kernelhead.finetune.saved import SavedClassifier, head_of
from kernelhead.metrics import summary


def precision(amp: str, device: torch.device) -> torch.dtype | None:
    """Return the type of automatic mixed precision. "auto" is bfloat16 on a GPU that has it; None means float32."""
    if amp == "auto":
        amp = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "none"
    return None if amp == "none" else {"bfloat16": torch.bfloat16, "float16": torch.float16}[amp]


def main_logits(output: Any) -> Tensor:
    """Return the logits of a network that may give those of auxiliary classifiers after them."""
    logits: Tensor = output if isinstance(output, Tensor) else output[0]
    return logits


def features_and_logits(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the head receives, (n, D), (n, D, H, W) or (n, L, D), and logits (n, C)."""
    seen: list[Tensor] = []
    hook = head_of(model).register_forward_pre_hook(lambda head, given: seen.append(given[0]))
    with hook, torch.no_grad():
        logits = main_logits(model(images))
    return seen[0], logits


def classified(
    model: nn.Module, data: Data, images: Images, *, amp: str = "none", progress: Progress | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features and logits as of `features_and_logits` per batch of images, in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.to(data.device).eval()
    wanted, dtype = images.in_order(), precision(amp, data.device)
    for done, (batch, _) in enumerate(batches(images, wanted, data), 1):
        with torch.autocast(data.device.type, dtype=dtype, enabled=dtype is not None):
            found = features_and_logits(model, batch)
        if progress is not None:
            progress("classifying images", done, len(wanted))
        yield found
    for module, mode in modes.items():
        module.training = mode


def logits_of(
    model: nn.Module, data: Data, images: Images, *, amp: str = "none", progress: Progress | None = None
) -> Tensor:
    """Return the logits (n, C) of images in evaluation mode, float32, on the CPU."""
    found = classified(model, data, images, amp=amp, progress=progress)
    return torch.cat([logits.float().cpu() for _, logits in found])


def feature_batches(
    saved: SavedClassifier, data: str | None, device: torch.device, progress: Progress | None = None
) -> Iterator[Tensor]:
    """Yield features of test images, or maps or tokens where the head pools; `data` as of `evaluate_classifier`."""
    opened = open_test(saved, data, device, progress)
    for features, _ in classified(saved.model, opened, opened.test):
        yield features


def evaluate_classifier(
    saved: SavedClassifier,
    data: str | None,
    device: torch.device,
    progress: Progress | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Return the figures of a classifier on the test images of its own data, or of other data.

    A folder without a test part counts as a whole. Classes are recognised by their names. "seen_in_training" names the
    images that are among those of the training, whatever their names were there. Predictions and a report go to the
    folder `out`.
    """
    opened = open_test(saved, data, device, progress)
    logits = finite(logits_of(saved.model, opened, opened.test, amp=saved.spec.amp, progress=progress))
    if out is not None:
        write_predictions(out / PREDICTIONS_FILE, saved, opened.test, logits)
        write_report(out, saved, opened.test, logits)
    trained_on = saved.trained_on()
    seen = [name for name, _, mark in opened.test.named if mark in trained_on]
    return {"images": len(opened.test), "seen_in_training": seen, **summary(logits, opened.test.labels)}


def open_test(saved: SavedClassifier, data: str | None, device: torch.device, progress: Progress | None = None) -> Data:
    """Open the test images of other data, or of a classifier's own: the same files as at its end, whatever came since.

    The labels are those of the classifier.
    """
    own = saved.spec
    check_data(data or own.data)
    if data is None and "test" in saved.files:
        root = data_root(own.data)
        listing = Listing(test=[(root / name, label) for name, label, _ in saved.files["test"]], root=root)
    else:
        found = list_images(data or own.data, val=own.val, test=None if data else own.test)
        unknown = [name for name in found.classes if name not in saved.classes]
        if unknown:
            known = shortened(saved.classes)
            raise ValueError(f"the classifier has no class {unknown[0]!r}; its classes are {known}")
        label_of = [saved.classes.index(name) for name in found.classes]
        listing = Listing(test=[(source, label_of[label]) for source, label in found.test], root=found.root)
    opened = read_images(replace(listing, classes=saved.classes), own, saved.input, device, progress=progress)
    warn_of(opened.left_out)
    return opened


def finite(logits: Tensor) -> Tensor:
    """Return the logits (n, C) of a trained classifier, and refuse those that are not finite."""
    broken = int((~logits.isfinite()).any(1).sum())
    if broken:
        raise ValueError(f"logits of {broken} of {len(logits)} images are not finite: the run diverged; train it again")
    return logits
