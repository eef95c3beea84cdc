"""The batches that runs see and the scores of a teacher, made once for all runs that see the same."""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernelhead.finetune.schedule import epoch_order
from kernelhead_lab.data.resident import ResidentImages
from kernelhead_lab.engine.compiled import compile_whole
from kernelhead_lab.engine.schedule import epoch_noise, steps_per_epoch

if TYPE_CHECKING:
    from kernelhead_lab.data.images import Batch, Images


class Feed:
    """The batches of one seed from one set of images, and what one teacher says of them.

    A step reads its number and its random numbers from tensors on the device, so that it can be captured as a CUDA
    graph. Images that are not on the device come through `fetch`, which is called before each step.

    Attributes:
        batch: the last step's images (B, 3, H, W), labels (B,), and the teacher's scores (B, C) or None.
    """

    batch: tuple[Tensor, Tensor, Tensor | None]

    def __init__(
        self, data: "Images", *, seed: int, batch_size: int, teacher: nn.Module | None = None, compiled: bool = False
    ) -> None:
        device = data.labels.device
        self.seed, self.data, self.batch_size, self.teacher = seed, data, batch_size, teacher
        if teacher is not None:
            teacher.to(device).eval().requires_grad_(False)
            if device.type == "cuda":
                teacher.to(memory_format=torch.channels_last)
        self.steps = steps_per_epoch(len(data), batch_size)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.resident = isinstance(data, ResidentImages)
        if self.resident:
            self.order = torch.empty(self.steps, batch_size, dtype=torch.long, device=device)
            self.noise = torch.empty(self.steps, batch_size, data.draws, device=device)
        self.look = compile_whole(self._look) if compiled else self._look
        self.stream: Iterator[Batch] | None = None
        self.fetched: list[Tensor] = []
        self.prepared: tuple[int, Tensor, Tensor] | None = None

    def prepare_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Make the order and the random numbers of an epoch on the host, best while the device is still busy."""
        if self.prepared is None or self.prepared[0] != epoch:
            order = epoch_order(len(self.data), self.seed, epoch)
            noise = epoch_noise(len(self.data), self.data.draws, self.seed, epoch)
            self.prepared = epoch, order, noise
        return self.prepared[1:]

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to the step `first_step` of an epoch."""
        self.step_index.fill_(epoch * self.steps + first_step)
        order, noise = self.prepare_epoch(epoch)
        size = self.batch_size
        if self.resident:
            for tensor, values in ((self.order, order), (self.noise, noise)):
                batches = values[: self.steps * size].view(self.steps, size, *values.shape[1:])
                tensor.copy_(batches, non_blocking=True)
            return
        batches_left = [slice(step * size, (step + 1) * size) for step in range(first_step, self.steps)]
        self.stream = self.data.batches((order[at], noise[at]) for at in batches_left)

    def fetch(self) -> None:
        """Copy the next batch to where the step reads it."""
        if self.resident:
            return
        assert self.stream is not None
        batch = next(self.stream)
        if not self.fetched:
            self.fetched = [tensor.clone() for tensor in batch]
        for kept, tensor in zip(self.fetched, batch, strict=True):
            kept.copy_(tensor)

    def step(self) -> None:
        """Look at the next batch."""
        self.batch = self.look()
        self.step_index += 1

    def close(self) -> None:
        """End the threads that decode images ahead."""
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
