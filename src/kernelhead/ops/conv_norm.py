"""3x3 convolution, BatchNorm of the batch, shortcut and ReLU as one operation on CUDA. Needs triton.

    z = relu(batch_norm(conv3x3(x)) + shortcut)

A small network's step is a few hundred kernels that take a few microseconds each, so that it is their number that
counts. Here a layer has two forward: the convolution, which also gives the statistics of its output
(`kernelhead.ops.batch_statistics`), and one pass over that output for all the rest; and five backward: the two
sums over pixels that BatchNorm's gradient needs, one pass for the gradients with respect to the convolution's output
and the shortcut, and the three of the convolution.

The sums backward are few (`PARTS`), so that every program of the pass that needs them adds them up by itself, which
costs less than to wait for a last program. There are no atomic sums: the same numbers give the same bits, whatever else
runs on the device.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op

from kernelhead.ops import conv3x3
from kernelhead.ops.conv3x3 import channels_last, empty

ELEMENTS = 4096  # of a tile (pixels, channels) that a program takes at once
PARTS = {16: 128, 32: 64, 64: 64}  # sums over pixels, by channels


def supported(x: Tensor, weight: Tensor, stride: int, shortcut: Tensor | None, shortcut_stride: int) -> bool:
    """Whether `conv_norm` takes these: what `conv3x3` takes, more than one pixel, and a shortcut that fits."""
    if not conv3x3.supported(x, weight, stride):
        return False
    samples, height, width = x.shape[0], *(_strided(side, stride) for side in x.shape[2:])
    if samples * height * width < 2:  # nothing varies: BatchNorm refuses it
        return False
    return shortcut is None or (
        shortcut.dtype == torch.bfloat16
        and shortcut.dim() == 4
        and shortcut.shape[0] == samples
        and shortcut.shape[1] <= weight.shape[0]
        and [_strided(side, shortcut_stride) for side in shortcut.shape[2:]] == [height, width]
    )


def conv_norm(
    x: Tensor,
    weight: Tensor,
    shortcut: Tensor | None = None,
    *,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    tickets: Tensor,
    momentum: float,
    eps: float,
    stride: int,
    shortcut_stride: int = 1,
    rectified: bool = True,
) -> Tensor:
    """BatchNorm in training of `conv3x3(x, weight, stride)`, plus a shortcut, rectified if that is wanted.

    x (N, C_in, H, W), weight (C_out, C_in, 3, 3) as for `conv3x3`. scale, bias, running_mean, running_var (C_out,) and
    batches () are those of BatchNorm, in float32 and int64; the last three are updated. shortcut (N, C, H', W'),
    bfloat16: every shortcut_stride-th place of it is added, to the middle C channels. tickets (1,): an int32 zero, and
    zero again afterwards, which no other call may use at the same time.
    -> (N, C_out, ceil(H / stride), ceil(W / stride)), bfloat16 and channels last.
    """
    with torch.no_grad():
        y, statistics = _convolve(x, weight, running_mean, running_var, batches, tickets, stride, momentum, eps)
    z: Tensor = _normalize(x, weight, scale, bias, shortcut, y, statistics, stride, shortcut_stride, rectified)
    return z


@triton.jit
def _normalize_kernel(
    y,
    statistics,
    scale,
    bias,
    shortcut,
    z,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    H_SHORTCUT: tl.constexpr,
    W_SHORTCUT: tl.constexpr,
    C_SHORTCUT: tl.constexpr,  # 0: there is none
    STRIDE: tl.constexpr,  # of the shortcut
    RECTIFIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    at = m[:, None] * C + c[None, :]
    within = (m < pixels)[:, None]
    factor = tl.load(scale + c) * tl.load(statistics + C + c)
    difference = tl.load(y + at, mask=within, other=0.0).to(tl.float32) - tl.load(statistics + c)[None, :]
    value = difference * factor[None, :] + tl.load(bias + c)[None, :]
    if C_SHORTCUT > 0:
        row = m // W % H * STRIDE
        place = (m // (H * W) * H_SHORTCUT + row) * W_SHORTCUT + m % W * STRIDE
        channel = c - (C - C_SHORTCUT) // 2
        kept = within & ((channel >= 0) & (channel < C_SHORTCUT))[None, :]
        value += tl.load(shortcut + place[:, None] * C_SHORTCUT + channel[None, :], mask=kept, other=0.0).to(tl.float32)
    if RECTIFIED:
        value = tl.where(value < 0, 0.0, value)  # what is not a number stays so
    tl.store(z + at, value.to(z.dtype.element_ty), mask=within)


@triton.jit
def _gradient(dz, z, at, within, RECTIFIED: tl.constexpr):
    """With respect to the sum that is rectified."""
    gradient = tl.load(dz + at, mask=within, other=0.0).to(tl.float32)
    if RECTIFIED:
        gradient = tl.where(tl.load(z + at, mask=within, other=0.0).to(tl.float32) <= 0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=["blocks"])
def _sums_kernel(
    dz,
    z,
    y,
    statistics,
    partial,  # (parts, 2, C): sums of the gradient, and of its products with the normalised values
    pixels,
    blocks,  # of pixels, for each part
    C: tl.constexpr,
    RECTIFIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    c = tl.arange(0, C)
    mean = tl.load(statistics + c)
    first = tl.zeros((BLOCK, C), tl.float32)
    second = tl.zeros((BLOCK, C), tl.float32)
    for block in range(blocks):
        m = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        at = m[:, None] * C + c[None, :]
        within = (m < pixels)[:, None]
        gradient = _gradient(dz, z, at, within, RECTIFIED)
        first += gradient
        second += gradient * (tl.load(y + at, mask=within, other=0.0).to(tl.float32) - mean[None, :])
    own = partial + part * (2 * C) + c
    tl.store(own, tl.sum(first, 0))
    tl.store(own + C, tl.sum(second, 0) * tl.load(statistics + C + c))


@triton.jit
def _backward_kernel(
    dz,
    z,
    y,
    statistics,
    scale,
    partial,
    dy,
    dscale,
    dbias,
    dshortcut,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    H_SHORTCUT: tl.constexpr,
    W_SHORTCUT: tl.constexpr,
    C_SHORTCUT: tl.constexpr,
    STRIDE: tl.constexpr,
    RECTIFIED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.arange(0, C)
    parts = partial + (tl.arange(0, PARTS) * (2 * C))[:, None] + c[None, :]
    along_bias = tl.sum(tl.load(parts), 0)
    along_scale = tl.sum(tl.load(parts + C), 0)
    if tl.program_id(0) == 0:
        tl.store(dbias + c, along_bias)
        tl.store(dscale + c, along_scale)

    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = m[:, None] * C + c[None, :]
    within = (m < pixels)[:, None]
    inverse = tl.load(statistics + C + c)
    gradient = _gradient(dz, z, at, within, RECTIFIED)
    difference = tl.load(y + at, mask=within, other=0.0).to(tl.float32) - tl.load(statistics + c)[None, :]
    common = (along_bias / pixels)[None, :] + difference * (inverse * along_scale / pixels)[None, :]
    value = (gradient - common) * (tl.load(scale + c) * inverse)[None, :]
    tl.store(dy + at, value.to(dy.dtype.element_ty), mask=within)

    if C_SHORTCUT > 0:
        channel = c - (C - C_SHORTCUT) // 2
        kept = within & ((channel >= 0) & (channel < C_SHORTCUT))[None, :]
        for down in tl.static_range(STRIDE):  # of these places, one was added to z
            for right in tl.static_range(STRIDE):
                row = m // W % H * STRIDE + down
                column = m % W * STRIDE + right
                place = (m // (H * W) * H_SHORTCUT + row) * W_SHORTCUT + column
                inside = kept & ((row < H_SHORTCUT) & (column < W_SHORTCUT))[:, None]
                passed = gradient if down + right == 0 else tl.zeros_like(gradient)
                to = dshortcut + place[:, None] * C_SHORTCUT + channel[None, :]
                tl.store(to, passed.to(dshortcut.dtype.element_ty), mask=inside)


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
    """The convolution, and the statistics (2, C_out) of it."""
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
def _normalize(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    y: Tensor,
    statistics: Tensor,
    stride: int,
    shortcut_stride: int,
    rectified: bool,
) -> Tensor:
    z = torch.empty_like(y)
    samples, channels, height, width = y.shape
    block = ELEMENTS // channels
    _normalize_kernel[(triton.cdiv(samples * height * width, block),)](
        y, statistics, scale, bias, None if shortcut is None else channels_last(shortcut), z, samples * height * width,
        height, width, channels, *_sides(shortcut), shortcut_stride, rectified, block, num_warps=8,
    )  # fmt: skip
    return z


@_normalize.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    y: Tensor,
    statistics: Tensor,
    stride: int,
    shortcut_stride: int,
    rectified: bool,
) -> Tensor:
    return torch.empty_like(y)


@custom_op("kernelhead::conv_norm_backward", mutates_args=())
def _denormalize(
    dz: Tensor,
    z: Tensor | None,  # where it was rectified
    y: Tensor,
    statistics: Tensor,
    scale: Tensor,
    shortcut: Tensor | None,
    shortcut_stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to y, scale, bias and shortcut; the last is empty where there is none."""
    dy, dscale, dbias, dshortcut = _gradients(dz, z, y, statistics, scale, shortcut, shortcut_stride)
    samples, channels, height, width = y.shape
    pixels, block, rectified = samples * height * width, ELEMENTS // channels, z is not None
    parts = min(PARTS[channels], triton.next_power_of_2(triton.cdiv(pixels, block)))
    partial = statistics.new_empty(parts, *statistics.shape)
    dz = channels_last(dz)
    _sums_kernel[(parts,)](
        dz, z, y, statistics, partial, pixels, triton.cdiv(pixels, parts * block), channels, rectified, block,
        num_warps=8,
    )  # fmt: skip
    _backward_kernel[(triton.cdiv(pixels, block),)](
        dz, z, y, statistics, scale, partial, dy, dscale, dbias, dshortcut, pixels,
        height, width, channels, *_sides(shortcut), shortcut_stride, rectified, parts, block, num_warps=8,
    )  # fmt: skip
    return dy, dscale, dbias, dshortcut


@_denormalize.register_fake
def _gradients(
    dz: Tensor,
    z: Tensor | None,
    y: Tensor,
    statistics: Tensor,
    scale: Tensor,
    shortcut: Tensor | None,
    shortcut_stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dshortcut = (
        y.new_empty(0)
        if shortcut is None
        else empty(y, shortcut.shape[1], shortcut.shape[2], shortcut.shape[3], y.dtype)
    )
    return torch.empty_like(y), torch.empty_like(scale), torch.empty_like(scale), dshortcut


def _sides(shortcut: Tensor | None) -> tuple[int, int, int]:
    """Height, width and channels."""
    return (0, 0, 0) if shortcut is None else (shortcut.shape[2], shortcut.shape[3], shortcut.shape[1])


def _strided(side: int, stride: int) -> int:
    return (side - 1) // stride + 1


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, scale, _, shortcut, y, statistics, ctx.stride, ctx.shortcut_stride, rectified = inputs
    ctx.save_for_backward(x, weight, scale, shortcut, y, statistics, output if rectified else None)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, scale, shortcut, y, statistics, z = ctx.saved_tensors
    dy, dscale, dbias, dshortcut = _denormalize(dz, z, y, statistics, scale, shortcut, ctx.shortcut_stride)
    dx = conv3x3.input_gradient(x, weight, dy, ctx.stride) if ctx.needs_input_grad[0] else None
    dw = conv3x3.wgrad(x, dy, weight, ctx.stride) if ctx.needs_input_grad[1] else None
    return dx, dw, dscale, dbias, None if shortcut is None else dshortcut, None, None, None, None, None


_normalize.register_autograd(_backward, setup_context=_save)
