"""Small images that live on the device: cropped, flipped and normalised there, a batch at a time.

A data set of 32x32 images fits on any GPU as bytes. Nothing is copied from the host while training, and the random
numbers come from the device too, so that a whole training step can be captured as one CUDA graph.
"""

import torch
from torch import Tensor

from kernelhead.data.cifar import Images, Labels

PAD = 4


class ResidentImages:
    """Images and labels on a device.

    Args:
        images: uint8 (n, H, W, 3).
        labels: integers (n,).
        mean, std: of each channel, in units of a byte; those of the training images, also for test images.
    """

    def __init__(self, images: Images, labels: Labels, *, mean: Tensor, std: Tensor, device: torch.device) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        self.labels = torch.from_numpy(labels.astype("int64")).to(device)
        self.size = images.shape[1]
        self.mean, self.std = mean.float().to(device), std.float().to(device)
        # The border has the mean colour: zero after normalisation, as in He et al. (2016).
        padded = self.mean.round().to(torch.uint8).view(1, 3, 1, 1).repeat(len(images), 1, *[self.size + 2 * PAD] * 2)
        padded[:, :, PAD:-PAD, PAD:-PAD] = torch.from_numpy(images).to(device).permute(0, 3, 1, 2)
        self.padded = padded

    def __len__(self) -> int:
        return len(self.labels)

    def plain(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W), normalised, and labels (B,) at `index` (B,)."""
        images = self.padded[index, :, PAD:-PAD, PAD:-PAD]
        return self._normalize(images), self.labels[index]

    def augmented(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Likewise, each image shifted by up to 4 pixels both ways and flipped half of the time (Appendix B)."""
        device, count = self.padded.device, len(index)
        shift = torch.randint(2 * PAD + 1, (2, count, 1), device=device, generator=generator)
        flip = torch.randint(2, (count, 1), device=device, generator=generator).bool()
        span = torch.arange(self.size, device=device)
        rows = shift[0] + span
        columns = shift[1] + torch.where(flip, self.size - 1 - span, span)
        channels = torch.arange(3, device=device).view(1, 3, 1, 1)
        images = self.padded[
            index.view(-1, 1, 1, 1), channels, rows.view(count, 1, -1, 1), columns.view(count, 1, 1, -1)
        ]
        return self._normalize(images), self.labels[index]

    def _normalize(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean.view(1, 3, 1, 1)) / self.std.view(1, 3, 1, 1)


def channel_statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over uint8 images (n, H, W, 3), in units of a byte."""
    counts = torch.stack(
        [torch.bincount(torch.from_numpy(images[..., c].reshape(-1)), minlength=256) for c in range(3)]
    )
    values = torch.arange(256, dtype=torch.float64)
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = weights @ values
    return mean, (weights @ values.square() - mean.square()).sqrt()
