"""What the head of a trained classifier is given for images."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernelhead.data.packed import progress_of
from kernelhead.train.pictures import Steps, open_other, streamed_batch
from kernelhead.train.saved import SavedClassifier


def feature_batches(
    saved: SavedClassifier, data: str, device: torch.device, progress: Steps | None = None
) -> Iterator[Tensor]:
    """Features (n, D) of test images, or their maps (n, D, H, W) or tokens (n, L, D) where the head pools.

    The data are named as for `evaluate_classifier`. Their classes do not matter.
    """
    images, _ = open_other(saved, data, device, progress)
    model = saved.model.to(device).eval()
    wanted = torch.split(torch.arange(len(images)), streamed_batch(images.size))
    report = progress_of("computing features", progress)
    with torch.no_grad():
        for number, (batch, _) in enumerate(images.batches((index, None) for index in wanted), start=1):
            yield model.features(batch)
            if report is not None:
                report(number, len(wanted))
