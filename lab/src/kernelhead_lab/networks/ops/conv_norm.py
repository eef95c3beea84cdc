"""3x3 convolution, BatchNorm of the batch and ReLU as one operation on CUDA. Needs triton.

Row: lab/results/bench/conv_norm.json. A step of ResNet-20, eight at once, takes half as long as with cuDNN. No
compiled peer has been measured.

    z = relu(batch_norm(conv3x3(x)))

A small network's step is a few hundred kernels of a few microseconds each. Alone their number counts; beside other
networks it is what they read and write. A layer has two kernels forward:

- the convolution, which also gives the statistics of its output (`kernelhead_lab.networks.ops.batch_statistics`);
- one pass over that output for all the rest.

It has five backward: the two sums over pixels that BatchNorm's gradient needs, one pass for the gradient with respect
to the convolution's output, and the convolution's three.

The sums backward have few parts (`SUMS`), so that every program of the next pass adds them up by itself. That costs
less than waiting for a last program. There are no atomic sums: the same numbers give the same bits, whatever else runs
on the device. The ReLU's sign is computed again from the convolution's output, which is read anyway.

`kernelhead_lab.networks.ops.basic_block` puts two such layers and a shortcut together.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op

from kernelhead_lab.networks.ops import conv3x3
from kernelhead_lab.networks.ops.conv3x3 import channels_last
from kernelhead_lab.networks.ops.conv_norm_kernels import backward_kernel, normalize_kernel, sums_kernel


class Layer(NamedTuple):
    """A convolution and its BatchNorm. The running statistics and `batches` are updated by each forward pass."""

    weight: Tensor  # (C_out, C_in, 3, 3), as for `conv3x3`
    scale: Tensor  # (C_out,), float32, as are the next three
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    batches: Tensor  # (), int64
    tickets: Tensor  # (1,): an int32 zero, and zero again afterwards, which no other call may use at the same time
    momentum: float
    eps: float
    stride: int


class Pass(NamedTuple):
    """How a pass over pixels is launched: in tiles (pixels, channels) of so many elements."""

    elements: int
    blocks: int  # tiles for each program, at most: see `conv3x3.blocks_each`
    warps: int


class Sums(NamedTuple):
    """How sums over pixels are launched: as `Pass`, but in at most so many parts, each of as many tiles as it needs."""

    elements: int
    parts: int
    warps: int


# By channels, for batch 128 on an H200; `benchmarks/conv_search.py` finds them.
NORMALIZE = {16: Pass(4096, 1, 8), 32: Pass(4096, 1, 8), 64: Pass(4096, 1, 8)}
SUMS = {16: Sums(4096, 64, 8), 32: Sums(4096, 64, 8), 64: Sums(4096, 64, 4)}
BACKWARD = {16: Pass(4096, 4, 8), 32: Pass(4096, 2, 4), 64: Pass(2048, 2, 4)}


def supported(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether `conv_norm` takes these: what `conv3x3` takes, and more than one pixel."""
    if not conv3x3.supported(x, weight, stride):
        return False
    height, width = ((side - 1) // stride + 1 for side in x.shape[2:])
    return x.shape[0] * height * width > 1  # of one nothing varies: BatchNorm refuses it


def conv_norm(x: Tensor, layer: Layer, *, rectified: bool = True) -> Tensor:
    """BatchNorm in training of `conv3x3(x, layer.weight, layer.stride)`, rectified if that is wanted.

    x (N, C_in, H, W) as for `conv3x3` -> (N, C_out, ceil(H / stride), ceil(W / stride)), bfloat16 and channels last.
    """
    y, statistics = convolve(x, layer)
    z: Tensor = normalize(x, layer.weight, layer.scale, layer.bias, y, statistics, layer.stride, rectified)
    return z


def convolve(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """The convolution and its statistics (2, C_out), without gradients: they are those of what follows."""
    state = layer.running_mean, layer.running_var, layer.batches, layer.tickets
    with torch.no_grad():
        y, statistics = _convolve(x, layer.weight, *state, layer.stride, layer.momentum, layer.eps)
    return y, statistics


@custom_op("kernelhead::conv_norm_convolve", mutates_args=("running_mean", "running_var", "batches", "tickets"))
def _convolve(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    tickets: Tensor,
    stride: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    y, statistics = _convolved(x, weight, running_mean, running_var, batches, tickets, stride, momentum, eps)
    tiles = conv3x3.FORWARD[conv3x3.key(weight, stride)]
    partial = statistics.new_empty(conv3x3.programs(y, tiles), *statistics.shape)
    conv3x3.map_pixels(
        x, weight, y, stride, tiles, transposed=False, partial=partial, statistics=statistics,
        running_mean=running_mean, running_var=running_var, batches=batches, tickets=tickets,
        momentum=momentum, eps=eps,
    )  # fmt: skip
    return y, statistics


@_convolve.register_fake
def _convolved(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    tickets: Tensor,
    stride: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return conv3x3.output(x, weight, stride), running_mean.new_empty(2, weight.shape[0])


# x and weight are arguments for the sake of the gradient: y is a function of them.
@custom_op("kernelhead::conv_norm", mutates_args=())
def normalize(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    y: Tensor,
    statistics: Tensor,
    stride: int,
    rectified: bool,
) -> Tensor:
    return normalized(y, statistics, scale, bias, rectified=rectified)


@normalize.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    y: Tensor,
    statistics: Tensor,
    stride: int,
    rectified: bool,
) -> Tensor:
    return torch.empty_like(y)


def normalized(
    y: Tensor,
    statistics: Tensor,
    scale: Tensor,
    bias: Tensor,
    shortcut: Tensor | None = None,
    shortcut_stride: int = 1,
    *,
    rectified: bool,
) -> Tensor:
    """Return BatchNorm of y (N, C, H, W), with every shortcut_stride-th position of the shortcut added."""
    z = torch.empty_like(y)
    samples, channels, height, width = y.shape
    pixels, how = samples * height * width, NORMALIZE[channels]
    block, blocks = _split(pixels, channels, how)
    sides = (0, 0, 0) if shortcut is None else (shortcut.shape[2], shortcut.shape[3], shortcut.shape[1])
    with torch.cuda.device_of(y):
        normalize_kernel[(triton.cdiv(pixels, block * blocks),)](
            y, statistics, scale, bias, None if shortcut is None else channels_last(shortcut), z, pixels, blocks,
            height, width, channels, *sides, shortcut_stride, rectified, block, num_warps=how.warps,
        )  # fmt: skip
    return z


@custom_op("kernelhead::conv_norm_backward", mutates_args=())
def denormalize(
    dz: Tensor,
    z: Tensor | None,  # where a shortcut was added and the sum rectified
    y: Tensor,
    statistics: Tensor,
    scale: Tensor,
    bias: Tensor,
    rectified: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to y, scale and bias."""
    channels = y.shape[1]
    pixels, how = y.numel() // channels, SUMS[channels]
    block = how.elements // channels
    parts = min(how.parts, triton.next_power_of_2(triton.cdiv(pixels, block)))
    sums = statistics.new_empty(parts, *statistics.shape)
    given = channels_last(dz), z, y, statistics, scale, bias, sums
    with torch.cuda.device_of(y):
        sums_kernel[(parts,)](
            *given, pixels, triton.cdiv(pixels, parts * block), channels, rectified, block, num_warps=how.warps
        )
    return _denormalized(*given, rectified)


@denormalize.register_fake
def _(
    dz: Tensor,
    z: Tensor | None,
    y: Tensor,
    statistics: Tensor,
    scale: Tensor,
    bias: Tensor,
    rectified: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(scale), torch.empty_like(bias)


@custom_op("kernelhead::conv_norm_backward_between", mutates_args=())
def denormalize_between(
    dy: Tensor, weight: Tensor, y: Tensor, statistics: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for z = relu(BatchNorm of y) between two convolutions: dy and weight are the second's, of stride 1.

    dL/dz is summed where it is computed, and not read for that.
    """
    tiles, dz = conv3x3.DGRAD_SUMS[conv3x3.key(weight, 1)], torch.empty_like(y)
    sums = statistics.new_empty(conv3x3.programs(dz, tiles), *statistics.shape)
    normalisation = {"statistics": statistics, "scale": scale, "bias": bias}
    conv3x3.map_pixels(dy, weight, dz, 1, tiles, transposed=True, sums=sums, y=y, **normalisation)
    return _denormalized(dz, None, y, statistics, scale, bias, sums, True)


@denormalize_between.register_fake
def _(
    dy: Tensor, weight: Tensor, y: Tensor, statistics: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(scale), torch.empty_like(bias)


def _denormalized(
    dz: Tensor,
    z: Tensor | None,
    y: Tensor,
    statistics: Tensor,
    scale: Tensor,
    bias: Tensor,
    sums: Tensor,  # (parts, 2, C)
    rectified: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, dscale, dbias = torch.empty_like(y), torch.empty_like(scale), torch.empty_like(bias)
    channels, parts = y.shape[1], len(sums)
    pixels, how = y.numel() // channels, BACKWARD[channels]
    block, blocks = _split(pixels, channels, how)
    with torch.cuda.device_of(y):
        backward_kernel[(triton.cdiv(pixels, block * blocks),)](
            dz, z, y, statistics, scale, bias, sums, dy, dscale, dbias, pixels, blocks, parts,
            channels, rectified, triton.next_power_of_2(parts), block, num_warps=how.warps,
        )  # fmt: skip
    return dy, dscale, dbias


def _split(pixels: int, channels: int, how: Pass) -> tuple[int, int]:
    """Pixels of a tile, and tiles of a program."""
    block = how.elements // channels
    return block, conv3x3.blocks_each(pixels, block, how.blocks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.stride, ctx.rectified = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, scale, bias, y, statistics = ctx.saved_tensors
    dy, dscale, dbias = denormalize(dz, None, y, statistics, scale, bias, ctx.rectified)
    dx = conv3x3.input_gradient(x, weight, dy, ctx.stride) if ctx.needs_input_grad[0] else None
    dw = conv3x3.wgrad(x, dy, weight, ctx.stride) if ctx.needs_input_grad[1] else None
    return dx, dw, dscale, dbias, None, None, None, None


normalize.register_autograd(_backward, setup_context=_save)
