"""3x3 convolutions of few channels on CUDA: bfloat16, channels last, in three Triton kernels. Needs triton.

Row: lab/results/bench/conv3x3.json. With 16 channels cuDNN takes at least three times as long, with
64 channels as long or longer. No compiled peer has been measured.

cuDNN's kernels are made for many channels. Here GROUP neighbouring target pixels of a row are computed together. In
channels-last memory the source pixels that they need from one row are contiguous, and so are the targets, so that

    target (GROUP * C_out) = sum over tap rows of  source (columns * C_source) @ banded weight

is a matrix product per tap row. The band is made while the weight is loaded. The forward pass and the gradient with
respect to the input differ only in which tap a pair (source column, target column) belongs to.

A program takes strips: groups one below the other. It loads each row of the source once and adds its products to the up
to three rows of the target that it meets. Which rows these are is known when the kernel is compiled, and so is which of
them can be outside the image.

The gradient with respect to the weight is a product, too: a row of x in a strip times a row of dy, once per tap row. It
is summed over parts of the strips, then over the parts. There are no atomic sums: the same numbers give the
same bits, whatever else runs on the device.

Several networks at once compete for shared memory and for processors. So a pixel is loaded as seldom as
possible, few programs take many pixels each, and what is the same for all pixels is done once per program.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op
from torch.nn.grad import conv2d_input

from kernelhead_lab.networks.ops.conv3x3_kernels import map_kernel, sum_kernel, wgrad_kernel


class Tiles(NamedTuple):
    """How `map_kernel` is launched: `block` strips at once, `rows` high and `group` pixels wide."""

    group: int
    columns: int  # of the source, for a product
    rows: int  # for a gradient a multiple of the stride
    ahead: int  # products whose pixels are loaded before those of one are multiplied
    block: int
    blocks: int  # for each program, at most: see `blocks_each`
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most: fewer let more programs run at once


class Parts(NamedTuple):
    """How `wgrad_kernel` is launched: `parts` sums over strips, `rows` rows of x and `group` pixels of dy each."""

    group: int
    columns: int  # of x, for a program
    rows: int  # a multiple of the stride
    block: int  # strips at once
    parts: int
    warps: int
    stages: int


PROGRAMS = 64  # the work of a kernel is not divided among fewer for the sake of larger programs

# By (input channels, output channels, stride), for batch 128 on an H200; `benchmarks/conv_search.py` finds them.
FORWARD = {
    (3, 16, 1): Tiles(2, 4, 2, 2, 64, 4, 4, 1),
    (16, 16, 1): Tiles(2, 4, 4, 0, 64, 2, 4, 1, 128),
    (16, 32, 2): Tiles(1, 4, 2, 2, 64, 2, 4, 1, 128),
    (32, 32, 1): Tiles(2, 4, 2, 2, 64, 2, 4, 1),
    (32, 64, 2): Tiles(1, 1, 1, 2, 64, 2, 4, 1, 168),
    (64, 64, 1): Tiles(1, 1, 4, 0, 64, 1, 4, 1),
}
DGRAD = {
    (16, 16, 1): Tiles(2, 4, 4, 0, 64, 2, 4, 1),
    (16, 32, 2): Tiles(2, 2, 4, 1, 128, 1, 8, 1),
    (32, 32, 1): Tiles(2, 4, 4, 0, 64, 1, 4, 1),
    (32, 64, 2): Tiles(2, 2, 4, 0, 64, 1, 4, 1),
    (64, 64, 1): Tiles(1, 1, 4, 2, 128, 1, 8, 1),
}
DGRAD_SUMS = {  # of `conv_norm.denormalize_between`
    (16, 16, 1): Tiles(2, 4, 2, 2, 64, 8, 4, 1),
    (32, 32, 1): Tiles(2, 4, 2, 2, 64, 2, 4, 1),
    (64, 64, 1): Tiles(1, 1, 2, 0, 64, 1, 4, 1),
}
WGRAD = {
    (3, 16, 1): Parts(2, 4, 2, 128, 128, 4, 2),
    (16, 16, 1): Parts(2, 4, 2, 64, 64, 4, 2),
    (16, 32, 2): Parts(1, 3, 2, 128, 64, 4, 2),
    (32, 32, 1): Parts(1, 3, 2, 64, 64, 4, 2),
    (32, 64, 2): Parts(1, 3, 4, 64, 16, 8, 1),
    (64, 64, 1): Parts(1, 1, 2, 64, 16, 4, 2),
}


def supported(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether `conv3x3` takes these. x (N, C_in, H, W), weight (C_out, C_in, 3, 3)."""
    return (
        x.dim() == 4
        and weight.shape[1:] == (x.shape[1], 3, 3)
        and (weight.shape[1], weight.shape[0], stride) in FORWARD
        and x.dtype in (torch.bfloat16, torch.float32)
        and weight.dtype in (torch.bfloat16, torch.float32)
        and 0 < x.numel() < 2**28  # elements are counted in 32 bits, the output's too: at most 16/3 as many
    )


def conv3x3(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """3x3 convolution with padding 1 and without bias, in bfloat16 with float32 sums.

    x (N, C_in, H, W), weight (C_out, C_in, 3, 3) -> (N, C_out, ceil(H / stride), ceil(W / stride)), bfloat16 and
    channels last. Either input may be float32: it is rounded as it is read, and its gradient is float32. x that is not
    channels last is copied. Shapes beyond `supported` have no kernel. Gradients cannot be differentiated again.
    """
    out: Tensor = _forward(x, weight, stride)
    return out


# Operators that torch.compile does not look into: what it makes of Triton kernels in a `triton_op` (seen in torch 2.11)
# first fills the empty outputs, a twentieth of a training step.
@custom_op("kernelhead::conv3x3", mutates_args=())
def _forward(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return map_pixels(x, weight, output(x, weight, stride), stride, FORWARD[key(weight, stride)], transposed=False)


@_forward.register_fake
def output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    height, width = ((side - 1) // stride + 1 for side in x.shape[2:])
    return empty(x, weight.shape[0], height, width, torch.bfloat16)


@custom_op("kernelhead::conv3x3_dgrad", mutates_args=())
def dgrad(
    dy: Tensor,
    weight: Tensor,
    stride: int,
    height: int,
    width: int,
    dtype: torch.dtype,
    passed: Tensor | None = None,
    rectified: Tensor | None = None,
) -> Tensor:
    """Return the gradient with respect to x (N, C_in, height, width), plus what a shortcut from x passed on.

    passed and rectified are like dy, channels last. passed is the gradient of a sum to which every stride-th position
    of x was added, in its middle channels. It counts where rectified, if given, is positive.
    """
    dx = empty(dy, weight.shape[1], height, width, dtype)
    tiles = DGRAD[key(weight, stride)]
    return map_pixels(dy, weight, dx, stride, tiles, transposed=True, passed=passed, rectified=rectified)


@dgrad.register_fake
def _(
    dy: Tensor,
    weight: Tensor,
    stride: int,
    height: int,
    width: int,
    dtype: torch.dtype,
    passed: Tensor | None = None,
    rectified: Tensor | None = None,
) -> Tensor:
    return empty(dy, weight.shape[1], height, width, dtype)


def key(weight: Tensor, stride: int) -> tuple[int, int, int]:
    return weight.shape[1], weight.shape[0], stride


def empty(like: Tensor, channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    shape = like.shape[0], channels, height, width
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def map_pixels(
    source: Tensor, weight: Tensor, target: Tensor, stride: int, tiles: Tiles, *, transposed: bool, **more: Any
) -> Tensor:
    """Fill the target. source, target (N, C, H, W); `more` are further arguments of the kernel."""
    _, channels, height, width = target.shape
    reach = tiles.group // 2 + 1 if transposed and stride == 2 else stride * (tiles.group - 1) + 3
    along_target, along_source, along_row, along_column = weight.stride()
    if transposed:
        along_source, along_target = along_target, along_source
    with torch.cuda.device_of(target):  # where triton launches
        map_kernel[(programs(target, tiles),)](
            channels_last(source), weight, target, _lanes(target, tiles.group), _blocks(target, tiles),
            along_source, along_target, along_row, along_column,
            source.shape[2], source.shape[3], source.shape[1], height, width, channels, stride, transposed,
            tiles.group, tiles.columns, reach, triton.cdiv(reach, tiles.columns), tiles.rows, tiles.ahead,
            _width(tiles.columns * source.shape[1]), tiles.block, **more,
            num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
        )  # fmt: skip
    return target


def programs(target: Tensor, tiles: Tiles) -> int:
    """How many fill the target."""
    count: int = triton.cdiv(_target_strips(target, tiles), _blocks(target, tiles))
    return count


def _blocks(target: Tensor, tiles: Tiles) -> int:
    return blocks_each(_target_strips(target, tiles), 1, tiles.blocks)


def blocks_each(items: int, block: int, most: int) -> int:
    """How many blocks a program takes: at most so many, and fewer in a small batch."""
    count: int = triton.cdiv(items, block * PROGRAMS)
    return min(count, most)


def _target_strips(target: Tensor, tiles: Tiles) -> int:
    return _strips(target, tiles.group, tiles.block, triton.cdiv(target.shape[2], tiles.rows))


def _strips(pixels: Tensor, group: int, block: int, down: int) -> int:
    """Blocks of them, where an image has `down` strips one below the other."""
    count: int = triton.cdiv(_lanes(pixels, group), block) * down
    return count


def _lanes(pixels: Tensor, group: int) -> int:
    """Groups of pixels that a row has, in all images."""
    count: int = pixels.shape[0] * triton.cdiv(pixels.shape[3], group)
    return count


@custom_op("kernelhead::conv3x3_wgrad", mutates_args=())
def wgrad(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    out_channels, channels, _, _ = weight.shape
    how = WGRAD[key(weight, stride)]
    strips = _strips(dy, how.group, how.block, triton.cdiv(x.shape[2], how.rows))
    parts = min(how.parts, triton.next_power_of_2(strips))
    partial = torch.empty((parts * how.group, weight.numel()), dtype=torch.float32, device=x.device)
    reach = stride * (how.group - 1) + 3
    grad = torch.empty_like(weight)
    block = max(4096 // len(partial), 16)
    with torch.cuda.device_of(x):
        wgrad_kernel[(parts, triton.cdiv(reach, how.columns))](
            channels_last(x), channels_last(dy), partial, _lanes(dy, how.group), triton.cdiv(strips, parts),
            x.shape[2], x.shape[3], channels, dy.shape[2], dy.shape[3], out_channels, stride,
            how.group, how.columns, how.rows, _width(how.columns * channels), how.block,
            num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip
        sum_kernel[(triton.cdiv(weight.numel(), block),)](
            partial, grad, *grad.stride(), channels, weight.numel(), len(partial), block, num_warps=4
        )
    return grad


@wgrad.register_fake
def _(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(weight)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _width(needed: int) -> int:
    """Return the width of a matrix product: a power of 2, and at least 16."""
    width: int = max(16, triton.next_power_of_2(needed))
    return width


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx = input_gradient(x, weight, dy, ctx.stride) if ctx.needs_input_grad[0] else None
    dw = wgrad(x, dy, weight, ctx.stride) if ctx.needs_input_grad[1] else None
    return dx, dw, None


def input_gradient(x: Tensor, weight: Tensor, dy: Tensor, stride: int) -> Tensor:
    """With respect to x, for dy with respect to its convolution."""
    dx: Tensor
    if x.shape[1] == 3:  # images: their gradient is not worth a kernel; some processors round sums of bfloat16
        dx = conv2d_input(x.shape, weight.float(), dy.float(), stride, 1).to(x.dtype)
    else:
        dx = dgrad(dy, weight, stride, x.shape[2], x.shape[3], x.dtype)
    return dx


_forward.register_autograd(_backward, setup_context=_save)
