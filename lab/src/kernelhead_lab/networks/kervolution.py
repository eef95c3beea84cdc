"""KER, the paper's fourth baseline: convolutions whose inner product is a Gaussian kernel (Wang et al., CVPR 2019)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.fused.precision import autocast_dtype, without_autocast


class GaussianKervolution2d(nn.Conv2d):
    """exp(-gamma |patch - w|^2 / n) for every patch of n numbers and every filter w.

    Replaces a convolution of the same sizes without bias. Three choices that the papers leave open:

    - The squared distance is divided by n, the size of a patch. A 3x3 patch of 64 channels lies at distances of
      hundreds, where exp(-d) and its gradient are zero in float32: deep networks would not train at all.
    - gamma is learned, one per layer, as exp of a registered parameter, so that it stays positive. It starts at 1.
    - The distance is |x|^2 - 2 <x, w> + |w|^2, cut at zero where rounding makes it negative. It is a difference of
      large numbers, so it is computed in float32 under autocast.

    Images (N, C, H, W) -> (N, filters, H', W'), values in (0, 1]. Under autocast the result is rounded to half
    precision, as a convolution's would be: all that follows takes its precision from there.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False)
        self.log_gamma = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        dtype = autocast_dtype(self.weight.dtype, images.device.type)
        stride, padding = self.stride[0], int(self.padding[0])
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

    def extra_repr(self) -> str:
        gamma = math.exp(self.log_gamma.item()) if self.log_gamma.device.type != "meta" else math.nan
        return f"{super().extra_repr()}, gamma={gamma:g}"  # type: ignore[no-untyped-call]
