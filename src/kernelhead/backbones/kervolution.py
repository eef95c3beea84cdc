"""KER, the paper's fourth baseline: convolutions whose inner product is a Gaussian kernel (Wang et al., CVPR 2019)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.ops.modes import runs_kernels, transformed
from kernelhead.ops.precision import autocast_dtype, without_autocast


class GaussianKervolution2d(nn.Conv2d):
    """exp(-gamma |patch - w|^2 / n) for every patch of n numbers and every filter w.

    Takes the place of a convolution of the same sizes without bias. Three choices that the papers leave open:

    - The squared distance is divided by n, the size of a patch. Without it a 3x3 patch of 64 channels lies at distances
      of hundreds, where exp(-d) and its gradient are zero in float32: deep networks then do not train at all.
    - gamma is learned, one a layer, as exp of a registered parameter, so that it stays positive. It starts at 1.
    - The distance is |x|^2 - 2 <x, w> + |w|^2, cut at zero where rounding makes it negative, and computed in float32
      under autocast, since it is a difference of large numbers. On CUDA the patches of images, of at most 27 numbers,
      are subtracted as they are, in the kernels of `kernelhead.ops.kervolution`.

    Images (N, C, H, W) -> (N, filters, H', W'), values in (0, 1]. Under autocast they are rounded in the end, to what
    a convolution would give: all that follows, up to the shortcuts of a whole ResNet, takes its precision from there.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False)
        self.log_gamma = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        dtype, stride, padding = self._dtype(images), self.stride[0], int(self.padding[0])
        if _has_kernels(images):
            from kernelhead.ops import kervolution as ops

            if ops.supported(images, self.weight, stride, padding):
                return ops.kervolution(images, self.weight, self.log_gamma, stride=stride, padding=padding, dtype=dtype)
        with without_autocast(images.device.type):
            images = images.to(self.weight.dtype)
            n = self.weight[0].numel()
            cross = F.conv2d(images, self.weight, stride=stride, padding=padding)
            ones = torch.ones_like(self.weight[:1, :1])
            squares = images.square().sum(1, keepdim=True)
            lengths = F.conv2d(squares, ones, stride=stride, padding=padding)
            filters = self.weight.square().sum((1, 2, 3))[:, None, None]
            distance = (lengths - 2 * cross + filters).clamp_min(0)
            return torch.exp(-self.log_gamma.exp() * distance / n).to(dtype)

    def _dtype(self, images: Tensor) -> torch.dtype:
        """Of the result."""
        return autocast_dtype(self.weight.dtype, images.device.type)

    def extra_repr(self) -> str:
        gamma = math.exp(self.log_gamma.item()) if self.log_gamma.device.type != "meta" else math.nan
        return f"{super().extra_repr()}, gamma={gamma:g}"  # type: ignore[no-untyped-call]


def _has_kernels(images: Tensor) -> bool:
    """Whether there are any for these. There is none for the gradient of hidden features, or of an image."""
    return runs_kernels(images.device) and not (images.requires_grad and torch.is_grad_enabled()) and not transformed()
