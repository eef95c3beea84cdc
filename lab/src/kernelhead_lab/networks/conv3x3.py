"""nn.Conv2d with the kernels of `kernelhead_lab.networks.ops`, alone and with what follows it in a CIFAR ResNet."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.fused.modes import runs_kernels
from kernelhead.fused.precision import autocast_enabled
from kernelhead_lab.networks.base import rectify

if TYPE_CHECKING:
    from kernelhead_lab.networks.ops.conv_norm import Layer


class Conv3x3(nn.Conv2d):
    """nn.Conv2d, which bfloat16 on CUDA computes with kernels made for few channels.

    They take 3x3 convolutions with padding 1, stride 1 or 2 and no bias, of the widths of a CIFAR ResNet. Everything
    else, and everything in another precision or on another device, is an ordinary convolution.
    """

    tickets: Tensor

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # `conv_norm` counts here and leaves zero. Each convolution has its own, as several networks train at once.
        self.register_buffer("tickets", torch.zeros(1, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take the kernels where there are any."""
        if self.has_kernels(x):
            from kernelhead_lab.networks.ops import conv3x3

            if conv3x3.supported(x, self.weight, self.stride[0]):
                return conv3x3.conv3x3(x, self.weight, self.stride[0])
        return super().forward(x)

    def has_kernels(self, x: Tensor) -> bool:
        """Whether there are any for this kind of convolution, device and precision."""
        return runs_kernels(x.device) and self._is_plain() and self._dtype(x) == torch.bfloat16

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


def conv_norm(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, *, rectified: bool = True) -> Tensor:
    """norm(conv(x)), rectified if that is wanted; in training on CUDA, where it can, in few kernels.

    x (N, C_in, H, W) -> (N, C_out, H', W').
    """
    if _has_kernels(conv, norm, x):
        from kernelhead_lab.networks.ops import conv_norm as ops

        if ops.supported(x, conv.weight, conv.stride[0]):
            return ops.conv_norm(x, _layer(conv, norm), rectified=rectified)
    return rectify(norm(conv(x)), rectified)


def basic_block(
    conv1: nn.Conv2d,
    norm1: nn.BatchNorm2d,
    conv2: nn.Conv2d,
    norm2: nn.BatchNorm2d,
    x: Tensor,
    *,
    rectified: bool = True,
) -> Tensor:
    """norm2(conv2(relu(norm1(conv1(x))))) + shortcut, rectified if that is wanted; in few kernels as `conv_norm`.

    x (N, C_in, H, W) -> (N, C_out, H', W'). The shortcut has no parameters: it is the positions of
    x that conv1's stride takes, between zeros for the channels that x lacks.
    """
    stride = conv1.stride[0]
    if _has_kernels(conv1, norm1, x) and _has_kernels(conv2, norm2, x) and conv2.stride == (1, 1):
        from kernelhead_lab.networks.ops import basic_block as ops

        if ops.supported(x, conv1.weight, conv2.weight, stride):
            return ops.basic_block(x, _layer(conv1, norm1), _layer(conv2, norm2), rectified=rectified)
    features = conv_norm(conv2, norm2, conv_norm(conv1, norm1, x), rectified=False)
    new_channels = features.shape[1] - x.shape[1]
    if stride > 1 or new_channels:
        x = F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, new_channels // 2, new_channels - new_channels // 2))
    return rectify(features + x, rectified)


def _has_kernels(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> bool:
    return isinstance(conv, Conv3x3) and _is_usual(norm) and conv.has_kernels(x)


def _layer(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> "Layer":
    from kernelhead_lab.networks.ops.conv_norm import Layer

    own: dict[str, Any] = {
        "weight": conv.weight,
        "scale": norm.weight,
        "bias": norm.bias,
        "running_mean": norm.running_mean,
        "running_var": norm.running_var,
        "batches": norm.num_batches_tracked,
        "tickets": conv.tickets,
        "momentum": norm.momentum,
        "eps": norm.eps,
        "stride": conv.stride[0],
    }
    return Layer(**own)


def _is_usual(norm: nn.BatchNorm2d) -> bool:
    """Whether it normalises with the statistics of the batch, in float32, and keeps a moving average of them."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
    )
