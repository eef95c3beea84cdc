"""3x3 convolutions of few channels on CUDA: bfloat16, channels last, in three Triton kernels. Needs triton.

cuDNN's kernels are made for many channels; with 16 or 32 of them they take many times as long as reading the input
and writing the output. Here GROUP neighbouring target pixels of a row are computed together. In channels-last memory
the source pixels they need from one row are contiguous, and so are the targets themselves, so that

    target (GROUP * C_out) = sum over tap rows of  source (columns * C_source) @ banded weight

is a matrix product per tap row. The band is made while the weight is loaded; the forward pass and the gradient with
respect to the input, of stride 1 and 2, differ only in which tap a pair (source column, target column) belongs to.

The gradient with respect to the weight is summed over parts of the pixels, then over the parts: no atomics, so that
the same numbers give the same result, bit for bit, whatever else runs on the device.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op
from torch.nn.grad import conv2d_input

from kernelhead.ops.batch_statistics import batch_statistics


class Tiles(NamedTuple):
    """How `_map_kernel` is launched: `block` groups of `group` pixels a program, `columns` source columns a product."""

    group: int
    columns: int
    block: int
    warps: int
    stages: int


class Parts(NamedTuple):
    """How `_wgrad_kernel` is launched: `parts` sums over pixels, each `columns` tap columns and `channels` wide."""

    columns: int
    channels: int
    block: int
    parts: int
    warps: int
    stages: int


# By (input channels, output channels, stride): the fastest on an H200 at batch 128, found by benchmarks/conv3x3.py.
FORWARD = {
    (3, 16, 1): Tiles(2, 4, 128, 4, 1),
    (16, 16, 1): Tiles(2, 4, 128, 8, 1),
    (16, 32, 2): Tiles(1, 4, 128, 8, 1),
    (32, 32, 1): Tiles(2, 4, 128, 8, 1),
    (32, 64, 2): Tiles(1, 1, 64, 4, 4),
    (64, 64, 1): Tiles(1, 1, 64, 4, 3),
}
DGRAD = {
    (16, 16, 1): Tiles(2, 4, 128, 8, 1),
    (16, 32, 2): Tiles(2, 2, 128, 8, 1),
    (32, 32, 1): Tiles(2, 4, 128, 8, 1),
    (32, 64, 2): Tiles(2, 2, 64, 8, 1),
    (64, 64, 1): Tiles(1, 4, 64, 8, 1),
}
WGRAD = {
    (3, 16, 1): Parts(3, 16, 128, 256, 4, 3),
    (16, 16, 1): Parts(3, 16, 64, 128, 4, 4),
    (16, 32, 2): Parts(3, 32, 64, 128, 4, 3),
    (32, 32, 1): Parts(3, 32, 32, 128, 4, 3),
    (32, 64, 2): Parts(3, 64, 256, 128, 8, 1),
    (64, 64, 1): Parts(1, 64, 32, 16, 4, 4),
}


def supported(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether `conv3x3` takes these. x (N, C_in, H, W), weight (C_out, C_in, 3, 3)."""
    return (
        x.dim() == 4
        and weight.shape[1:] == (x.shape[1], 3, 3)
        and (weight.shape[1], weight.shape[0], stride) in FORWARD
        and x.dtype in (torch.bfloat16, torch.float32)
        and weight.dtype in (torch.bfloat16, torch.float32)
        and 0 < x.numel() < 2**28  # places are counted in 32 bits, those of the output too: at most 16/3 as many
    )


def conv3x3(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """3x3 convolution with padding 1 and without bias, in bfloat16 with float32 sums.

    x (N, C_in, H, W), weight (C_out, C_in, 3, 3) -> (N, C_out, ceil(H / stride), ceil(W / stride)), bfloat16 and
    channels last. Either input may be float32: it is rounded as it is read, and its gradient is float32. x that is not
    channels last is copied. Shapes beyond `supported` have no kernel. Gradients cannot be differentiated again.
    """
    out: Tensor = _forward(x, weight, stride)
    return out


@triton.jit
def _map_kernel(
    source,
    weight,
    target,
    groups,  # of target pixels, in all images
    stride_source,  # of the weight, along source channels
    stride_target,
    stride_row,
    stride_column,
    H_SOURCE: tl.constexpr,
    W_SOURCE: tl.constexpr,
    C_SOURCE: tl.constexpr,
    H_TARGET: tl.constexpr,
    W_TARGET: tl.constexpr,
    C_TARGET: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the gradient: source is dL/dy, target dL/dx
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    REACH: tl.constexpr,  # source columns that a group needs
    STEPS: tl.constexpr,  # of COLUMNS columns each, to cover them
    K: tl.constexpr,  # COLUMNS * C_SOURCE, at least, as a power of 2
    BLOCK: tl.constexpr,
    partial=None,  # (programs, 2, C_TARGET); this and the rest where `batch_statistics` is wanted
    statistics=None,
    running_mean=None,
    running_var=None,
    batches=None,
    tickets=None,
    momentum=0.0,
    eps=0.0,
):
    across: tl.constexpr = (W_TARGET + GROUP - 1) // GROUP
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = m % across
    row = m // across % H_TARGET
    image = m // (across * H_TARGET)
    first = place * (GROUP // STRIDE) + (STRIDE - 2) if TRANSPOSED else place * (GROUP * STRIDE) - 1
    k = tl.arange(0, K)
    n = tl.arange(0, GROUP * C_TARGET)
    to = n // C_TARGET

    total = tl.zeros((BLOCK, GROUP * C_TARGET), tl.float32)
    for step in range(3 * STEPS):
        tap_row = step // STEPS
        column = step % STEPS * COLUMNS + k // C_SOURCE
        if TRANSPOSED:
            tap_column = to[None, :] + (3 - STRIDE) - column[:, None] * STRIDE
            scaled = row + 1 - tap_row
            source_row = scaled // STRIDE
            inside = (m < groups) & (scaled % STRIDE == 0)
        else:
            tap_column = column[:, None] - to[None, :] * STRIDE
            source_row = row * STRIDE + tap_row - 1
            inside = m < groups
        inside = inside & (source_row >= 0) & (source_row < H_SOURCE)
        at = first[:, None] + column[None, :]
        reached = (k < COLUMNS * C_SOURCE) & (column < REACH)
        start = ((image * H_SOURCE + source_row) * W_SOURCE + first + step % STEPS * COLUMNS) * C_SOURCE
        pixels = tl.load(
            source + start[:, None] + k[None, :],
            mask=inside[:, None] & reached[None, :] & (at >= 0) & (at < W_SOURCE),
            other=0.0,
        )
        taps = tl.load(
            weight
            + (k % C_SOURCE * stride_source)[:, None]
            + (n % C_TARGET * stride_target)[None, :]
            + tap_row * stride_row
            + tap_column * stride_column,
            mask=reached[:, None] & (tap_column >= 0) & (tap_column < 3),
            other=0.0,
        )
        total = tl.dot(pixels.to(tl.bfloat16), taps.to(tl.bfloat16), total)

    begin = ((image * H_TARGET + row) * W_TARGET + place * GROUP) * C_TARGET
    within = (m < groups)[:, None] & (place[:, None] * GROUP + to[None, :] < W_TARGET)
    tl.store(target + begin[:, None] + n[None, :], total.to(target.dtype.element_ty), mask=within)
    if partial is not None:
        pixels = groups // across * W_TARGET
        batch_statistics(
            total, within, partial, statistics, running_mean, running_var, batches, tickets, pixels, momentum, eps,
            GROUP, C_TARGET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
def _wgrad_kernel(
    x,
    dy,
    partial,  # (parts, C_OUT, 3, 3, C_IN)
    pixels,
    blocks,  # of pixels, for each part
    H_IN: tl.constexpr,
    W_IN: tl.constexpr,
    C_IN: tl.constexpr,
    H_OUT: tl.constexpr,
    W_OUT: tl.constexpr,
    C_OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,  # COLUMNS * C_IN, at least, as a power of 2
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    tap_row = tl.program_id(1) // (3 // COLUMNS)
    tap_column = tl.program_id(1) % (3 // COLUMNS) * COLUMNS
    k = tl.arange(0, K)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((K, CHANNELS), tl.float32)
    for block in range(blocks):
        m = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        source_row = m // W_OUT % H_OUT * STRIDE + tap_row - 1
        first = m % W_OUT * STRIDE + tap_column - 1
        inside = (m < pixels) & (source_row >= 0) & (source_row < H_IN)
        at = first[:, None] + (k // C_IN)[None, :]
        start = ((m // (W_OUT * H_OUT) * H_IN + source_row) * W_IN + first) * C_IN
        seen = tl.load(
            x + start[:, None] + k[None, :],
            mask=inside[:, None] & (k < COLUMNS * C_IN)[None, :] & (at >= 0) & (at < W_IN),
            other=0.0,
        )
        gradient = tl.load(dy + (m * C_OUT)[:, None] + channel[None, :], mask=(m < pixels)[:, None], other=0.0)
        total = tl.dot(tl.trans(seen.to(tl.bfloat16)), gradient, total)
    begin = ((part * C_OUT + channel) * 9 + tap_row * 3 + tap_column) * C_IN
    tl.store(partial + begin[None, :] + k[:, None], total, mask=(k < COLUMNS * C_IN)[:, None])


@triton.jit
def _sum_kernel(
    partial,
    grad,
    stride_out,
    stride_in,
    stride_row,
    stride_column,
    C_IN: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    parts = tl.load(partial + (tl.arange(0, PARTS) * SIZE)[:, None] + i[None, :], mask=(i < SIZE)[None, :], other=0.0)
    tap = i // C_IN % 9
    place = i // (9 * C_IN) * stride_out + i % C_IN * stride_in + tap // 3 * stride_row + tap % 3 * stride_column
    tl.store(grad + place, tl.sum(parts, 0).to(grad.dtype.element_ty), mask=i < SIZE)


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
def dgrad(dy: Tensor, weight: Tensor, stride: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    dx = empty(dy, weight.shape[1], height, width, dtype)
    return map_pixels(dy, weight, dx, stride, DGRAD[key(weight, stride)], transposed=True)


@dgrad.register_fake
def _(dy: Tensor, weight: Tensor, stride: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    return empty(dy, weight.shape[1], height, width, dtype)


def key(weight: Tensor, stride: int) -> tuple[int, int, int]:
    return weight.shape[1], weight.shape[0], stride


def empty(like: Tensor, channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    shape = like.shape[0], channels, height, width
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def map_pixels(
    source: Tensor, weight: Tensor, target: Tensor, stride: int, tiles: Tiles, *, transposed: bool, **statistics: Any
) -> Tensor:
    """Fill the target. source, target (N, C, H, W); `statistics` are further arguments of the kernel."""
    _, channels, height, width = target.shape
    reach = tiles.group // 2 + 1 if transposed and stride == 2 else stride * (tiles.group - 1) + 3
    along_target, along_source, along_row, along_column = weight.stride()
    if transposed:
        along_source, along_target = along_target, along_source
    _map_kernel[(programs(target, tiles),)](
        channels_last(source), weight, target, _groups(target, tiles),
        along_source, along_target, along_row, along_column,
        source.shape[2], source.shape[3], source.shape[1], height, width, channels, stride, transposed,
        tiles.group, tiles.columns, reach, triton.cdiv(reach, tiles.columns), _width(tiles.columns * source.shape[1]),
        tiles.block, **statistics, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return target


def programs(target: Tensor, tiles: Tiles) -> int:
    """How many fill the target."""
    count: int = triton.cdiv(_groups(target, tiles), tiles.block)
    return count


def _groups(target: Tensor, tiles: Tiles) -> int:
    samples, _, height, width = target.shape
    count: int = samples * height * triton.cdiv(width, tiles.group)
    return count


@custom_op("kernelhead::conv3x3_wgrad", mutates_args=())
def wgrad(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    out_channels, channels, _, _ = weight.shape
    how = WGRAD[key(weight, stride)]
    pixels = dy.numel() // out_channels
    parts = min(how.parts, triton.next_power_of_2(triton.cdiv(pixels, how.block)))
    partial = torch.empty((parts, weight.numel()), dtype=torch.float32, device=x.device)
    _wgrad_kernel[(parts, 9 // how.columns, out_channels // how.channels)](
        channels_last(x), channels_last(dy), partial, pixels, triton.cdiv(pixels, parts * how.block),
        x.shape[2], x.shape[3], channels, dy.shape[2], dy.shape[3], out_channels, stride,
        how.columns, how.channels, _width(how.columns * channels), how.block,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    grad = torch.empty_like(weight)
    block = max(4096 // parts, 16)
    _sum_kernel[(triton.cdiv(weight.numel(), block),)](
        partial, grad, *grad.stride(), channels, weight.numel(), parts, block, num_warps=4
    )
    return grad


@wgrad.register_fake
def _(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(weight)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _width(needed: int) -> int:
    """Of a matrix product: a power of 2, and at least 16."""
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
    if x.shape[1] == 3:  # images: their gradient is not worth a kernel
        dx = conv2d_input(x.shape, weight.to(dy.dtype), dy, stride, 1).to(x.dtype)
    else:
        dx = dgrad(dy, weight, stride, x.shape[2], x.shape[3], x.dtype)
    return dx


_forward.register_autograd(_backward, setup_context=_save)
