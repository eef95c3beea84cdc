"""nn.Conv2d that takes the kernels of `kernelhead.ops.conv3x3` where they apply."""

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from kernelhead.ops.precision import autocast_enabled

TRITON = find_spec("triton") is not None  # imported where it is used: `import kernelhead` does without


class Conv3x3(nn.Conv2d):
    """nn.Conv2d, which bfloat16 on CUDA computes with kernels made for few channels.

    They take 3x3 convolutions with padding 1, stride 1 or 2 and no bias, of the widths of a CIFAR ResNet. Everything
    else, and everything in another precision or on another device, is an ordinary convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C_in, H, W) -> (N, C_out, H', W')."""
        if TRITON and x.is_cuda and self._is_plain() and self._dtype(x) == torch.bfloat16:
            from kernelhead.ops import conv3x3

            if conv3x3.supported(x, self.weight, self.stride[0]):
                return conv3x3.conv3x3(x, self.weight, self.stride[0])
        return super().forward(x)

    def _is_plain(self) -> bool:
        return (
            self.kernel_size == (3, 3)
            and self.padding == (1, 1)
            and self.stride[0] == self.stride[1]
            and self.dilation == (1, 1)
            and self.groups == 1
            and self.bias is None
            and self.padding_mode == "zeros"
        )

    def _dtype(self, x: Tensor) -> torch.dtype:
        """In which an ordinary convolution would compute."""
        if autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        return torch.promote_types(x.dtype, self.weight.dtype)
