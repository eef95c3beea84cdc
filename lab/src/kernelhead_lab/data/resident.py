"""Small images that live on the device: cropped, flipped and normalised there, batch by batch.

A data set of 32x32 images fits on any GPU as bytes. Nothing is copied from the host during a run, so that a whole step
can be captured as one CUDA graph.
"""

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kernelhead.finetune.cifar import Images, Labels
from kernelhead_lab.data.images import Batch

PAD = 4


class ResidentImages:
    """Images and labels on a device.

    Args:
        images: uint8 (n, H, W, 3), H = W.
        labels: integers (n,).
        mean, std: of each channel, in units of a byte; those of the training images, also for test images.
    """

    draws = 3

    def __init__(self, images: Images, labels: Labels, *, mean: Tensor, std: Tensor, device: torch.device) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images need as many labels; got {len(labels)}")
        self.labels = torch.from_numpy(labels.astype("int64")).to(device)
        self.size = images.shape[1]
        self.mean, self.std = mean.float().to(device), std.float().to(device)
        self.span = torch.arange(self.size, device=device)
        # The border has the mean colour: zero after normalisation, as in He et al. (2016).
        padded = self.mean.round().to(torch.uint8).repeat(len(images), *[self.size + 2 * PAD] * 2, 1)
        padded[:, PAD:-PAD, PAD:-PAD] = torch.from_numpy(images).to(device)
        self.padded = padded
        self.chosen: Tensor | None = None

    def restricted(self, index: Tensor) -> "ResidentImages":
        """Return those at `index` (m,) alone. The bytes are shared."""
        part = copy.copy(self)
        index = index.to(self.labels.device)
        part.labels = self.labels[index]
        part.chosen = index if self.chosen is None else self.chosen[index]
        return part

    def _stored(self, index: Tensor) -> Tensor:
        return index if self.chosen is None else self.chosen[index]

    def __len__(self) -> int:
        return len(self.labels)

    def plain(self, index: Tensor) -> Batch:
        """Return images (B, 3, H, W), normalised, and labels (B,) at `index` (B,)."""
        index = index.to(self.labels.device)
        return self._normalize(self.padded[self._stored(index), PAD:-PAD, PAD:-PAD]), self.labels[index]

    def augmented(self, index: Tensor, noise: Tensor) -> Batch:
        """Return the same, each image shifted by up to 4 pixels and flipped half of the time (Appendix B)."""
        shift = (noise[:, :2] * (2 * PAD + 1)).long()
        rows = shift[:, :1] + self.span
        columns = shift[:, 1:] + torch.where(noise[:, 2:] < 0.5, self.size - 1 - self.span, self.span)
        images = self.padded[self._stored(index).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
        return self._normalize(images), self.labels[index]

    def batches(self, wanted: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[Batch]:
        for index, noise in wanted:
            yield self.plain(index) if noise is None else self.augmented(index, noise)

    def _normalize(self, images: Tensor) -> Tensor:
        """Bytes (B, H, W, 3) -> (B, 3, H, W), its channels last in memory."""
        return ((images.float() - self.mean) / self.std).permute(0, 3, 1, 2)


def channel_statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel over uint8 images (n, H, W, 3), in units of a byte."""
    counts = torch.stack(
        [torch.bincount(torch.from_numpy(images[..., c].reshape(-1)), minlength=256) for c in range(3)]
    )
    values = torch.arange(256, dtype=torch.float64)
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = weights @ values
    return mean, (weights @ values.square() - mean.square()).sqrt()
