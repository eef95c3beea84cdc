"""The block of a CIFAR ResNet, two fused layers and a shortcut, as one operation on CUDA. Needs triton.

Row: the network of lab/results/bench/conv_norm.json, which consists of these blocks.

    z = relu(batch_norm(conv3x3(relu(batch_norm(conv3x3(x, stride))))) + shortcut(x))

The kernels are those of `kernelhead_lab.networks.ops.conv_norm`. In one operation x is a single input. So the gradients
of the first convolution and of the shortcut are added where the first is computed, and the shortcut's is never written.
The sums over the gradient between the two layers, which the first BatchNorm needs, are taken where it is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from kernelhead_lab.networks.ops import conv3x3, conv_norm
from kernelhead_lab.networks.ops.conv_norm import (
    Layer,
    convolve,
    denormalize,
    denormalize_between,
    normalize,
    normalized,
)


def supported(x: Tensor, first: Tensor, second: Tensor, stride: int) -> bool:
    """Whether `basic_block` takes these: x (N, C_in, H, W), and the weights of layers that `conv_norm` takes."""
    channels = first.shape[0]
    return (
        x.dtype == torch.bfloat16
        and 16 <= x.shape[1] <= channels
        and conv_norm.supported(x, first, stride)
        and second.shape == (channels, channels, 3, 3)
        and (channels, channels, 1) in conv3x3.FORWARD
        and second.dtype in (torch.bfloat16, torch.float32)
    )


def basic_block(x: Tensor, first: Layer, second: Layer, *, rectified: bool = True) -> Tensor:
    """The block in training; without its last ReLU if not `rectified`.

    x (N, C_in, H, W), bfloat16 -> (N, C_out, ceil(H / stride), ceil(W / stride)), bfloat16 and channels last, with the
    first layer's stride; the second has 1. The shortcut is every stride-th position of x in the middle channels.
    """
    y, statistics = convolve(x, first)
    with torch.no_grad():
        between = normalize(x, first.weight, first.scale, first.bias, y, statistics, first.stride, True)
    y2, statistics2 = convolve(between, second)
    parameters = first.weight, first.scale, first.bias, second.weight, second.scale, second.bias
    z: Tensor = _conclude(x, *parameters, y, statistics, between, y2, statistics2, first.stride, rectified)
    return z


# All but what the second BatchNorm and the shortcut need is an argument for the sake of the gradient.
@custom_op("kernelhead::basic_block", mutates_args=())
def _conclude(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    weight2: Tensor,
    scale2: Tensor,
    bias2: Tensor,
    y: Tensor,
    statistics: Tensor,
    between: Tensor,
    y2: Tensor,
    statistics2: Tensor,
    stride: int,
    rectified: bool,
) -> Tensor:
    return normalized(y2, statistics2, scale2, bias2, x, stride, rectified=rectified)


@_conclude.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    weight2: Tensor,
    scale2: Tensor,
    bias2: Tensor,
    y: Tensor,
    statistics: Tensor,
    between: Tensor,
    y2: Tensor,
    statistics2: Tensor,
    stride: int,
    rectified: bool,
) -> Tensor:
    return torch.empty_like(y2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.stride, ctx.rectified = inputs
    ctx.save_for_backward(*tensors, output if ctx.rectified else None)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, scale, bias, weight2, scale2, bias2, y, statistics, between, y2, statistics2, z = ctx.saved_tensors
    dz = conv3x3.channels_last(dz)
    dy2, dscale2, dbias2 = denormalize(dz, z, y2, statistics2, scale2, bias2, ctx.rectified)
    dweight2 = conv3x3.wgrad(between, dy2, weight2, 1) if ctx.needs_input_grad[4] else None
    dy, dscale, dbias = denormalize_between(dy2, weight2, y, statistics, scale, bias)
    dweight = conv3x3.wgrad(x, dy, weight, ctx.stride) if ctx.needs_input_grad[1] else None
    dx = None
    if ctx.needs_input_grad[0]:
        dx = conv3x3.dgrad(dy, weight, ctx.stride, x.shape[2], x.shape[3], x.dtype, dz, z)
    return dx, dweight, dscale, dbias, dweight2, dscale2, dbias2, *[None] * 7


_conclude.register_autograd(_backward, setup_context=_save)
