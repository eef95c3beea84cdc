"""What runs in training are shown: batches and, with a teacher, its scores, made once for all that see the same."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernelhead.data.resident import ResidentImages
from kernelhead.train.compiled import compile_whole
from kernelhead.train.distributed import World
from kernelhead.train.run import Run
from kernelhead.train.saved import load_classifier
from kernelhead.train.schedule import Schedule, epoch_noise, epoch_order

if TYPE_CHECKING:
    from kernelhead.data.images import Batch, Images


class Feed:
    """The batches of one seed from one set of images, and what one teacher says of them.

    A step takes all that changes from step to step, the place in the epoch and the random numbers, from tensors on the
    device, so that it can be captured as a CUDA graph. Images that are not on the device come through `fetch`, which is
    called before each step.

    Attributes:
        batch: images (B, 3, H, W), labels (B,) and, where there is a teacher, its scores (B, C), of the last step.
    """

    batch: tuple[Tensor, Tensor, Tensor | None]

    def __init__(
        self, run: Run, data: "Images", num_classes: int, schedule: Schedule, *, compiled: bool, world: World
    ) -> None:
        device = data.labels.device
        self.seed, self.data, self.schedule = run.seed, data, schedule
        self.teacher = None if run.teacher is None else _teacher(run.teacher, num_classes, device)
        self.steps = schedule.steps(len(data))
        self.part = world.part(schedule.batch_size)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.resident = isinstance(data, ResidentImages)
        if self.resident:
            sizes = self.steps, len(range(schedule.batch_size)[self.part])
            self.order = torch.empty(sizes, dtype=torch.long, device=device)
            self.noise = torch.empty(*sizes, data.draws, device=device)
        self.look = compile_whole(self._look) if compiled and world.size == 1 else self._look
        self.stream: Iterator[Batch] | None = None
        self.fetched: list[Tensor] = []
        self.prepared: tuple[int, Tensor, Tensor] | None = None

    def prepare_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Order and random numbers of an epoch, on the host: best called while the device is still busy."""
        if self.prepared is None or self.prepared[0] != epoch:
            order = epoch_order(len(self.data), self.seed, epoch)
            noise = epoch_noise(len(self.data), self.data.draws, self.seed, epoch)
            self.prepared = epoch, order, noise
        return self.prepared[1:]

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to the step `first_step` of an epoch."""
        self.step_index.fill_(epoch * self.steps + first_step)
        order, noise = self.prepare_epoch(epoch)
        size = self.schedule.batch_size
        if self.resident:
            for place, values in ((self.order, order), (self.noise, noise)):
                batches = values[: self.steps * size].view(self.steps, size, *values.shape[1:])
                place.copy_(batches[:, self.part], non_blocking=True)
            return
        places = [slice(step * size, (step + 1) * size) for step in range(first_step, self.steps)]
        self.stream = self.data.batches((order[at][self.part], noise[at][self.part]) for at in places)

    def fetch(self) -> None:
        """Bring the next batch to the place from which the step reads it."""
        if self.resident:
            return
        assert self.stream is not None
        batch = next(self.stream)
        if not self.fetched:
            self.fetched = [tensor.clone() for tensor in batch]
        for place, tensor in zip(self.fetched, batch, strict=True):
            place.copy_(tensor)

    def step(self) -> None:
        """Look at the next batch."""
        self.batch = self.look()
        self.step_index += 1

    def close(self) -> None:
        """End what decodes images ahead of the training."""
        if isinstance(self.stream, Generator):
            self.stream.close()

    def _look(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.resident:
            step = self.step_index.remainder(self.steps)
            index, noise = (epoch.index_select(0, step).squeeze(0) for epoch in (self.order, self.noise))
            images, labels = self.data.augmented(index, noise)
        else:
            images, labels = self.fetched
        device = labels.device.type
        if device == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        scores = None
        if self.teacher is not None:
            with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                scores = self.teacher(images)
        return images, labels, scores


def _teacher(path: str, num_classes: int, device: torch.device) -> nn.Module:
    saved = load_classifier(Path(path))
    if len(saved.classes) != num_classes:
        raise ValueError(f"the teacher {path} knows {len(saved.classes)} classes, the data have {num_classes}")
    model = saved.model.to(device).requires_grad_(False)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model
