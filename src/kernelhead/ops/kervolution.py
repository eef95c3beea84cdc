"""Gaussian kervolution of images on CUDA, in three Triton kernels. Needs triton.

    k = exp(-gamma d / n),  d = sum over the n taps of (x - w)^2

An image's patch is a few dozen numbers, so that the sum is taken as it stands: in float32, one tap after the other, on
what would otherwise wait for memory. Nothing cancels, as in |x|^2 - 2 <x, w> + |w|^2. Backward, with h = gamma g k / n,

    dL/dw = 2 sum over pixels of h (x - w),  dL/dlog gamma = -sum of h d

where k and d are computed again, from the same numbers, rather than kept: k might be rounded, or 0 where d is finite.
The sums are taken over parts of the pixels, then over the parts: no atomics, so that the same numbers give the same
bits, whatever else runs on the device.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op

from kernelhead.ops.conv3x3 import channels_last, empty

MOST_TAPS = 27  # a tile of sums each, in registers: 3 channels of 3x3, or one of 5x5
DTYPES = torch.float32, torch.bfloat16, torch.float16


class Tiles(NamedTuple):
    """How a kernel is launched: `pixels` times `filters` values at once, and how many programs are wanted.

    Fewer pixels than threads: triton then loads them where they are needed, and passes none on through shared memory.
    """

    pixels: int
    filters: int
    warps: int
    programs: int


# As many programs as 132 multiprocessors hold at once, with no register spilled: 4 and 2 filters a thread. Reasoned;
# `benchmarks/baselines.py --tiles` measures others.
FORWARD = Tiles(32, 16, 4, 396)
BACKWARD = Tiles(16, 16, 4, 264)
ELEMENTS = 4096  # of the parts that a program adds up at once


def supported(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether `kervolution` takes these. x (N, C, H, W), weight (filters, C, K, K)."""
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or weight.shape[2] != weight.shape[3]:
        return False
    (filters, channels, taps, _), (height, width) = weight.shape, _sides(x, weight, stride, padding)
    padded = channels * (x.shape[2] + 2 * padding) * (x.shape[3] + 2 * padding)
    return (
        channels * taps * taps <= MOST_TAPS
        and weight.dtype == torch.float32
        and x.dtype in DTYPES
        and min(x.shape[0], height, width) > 0
        and x.shape[0] * max(padded, filters * height * width) < 2**30  # places are counted in 32 bits
    )


def kervolution(
    x: Tensor, weight: Tensor, log_gamma: Tensor, *, stride: int = 1, padding: int = 0, dtype: torch.dtype
) -> Tensor:
    """exp(-gamma |patch - w|^2 / n), computed in float32 and given in `dtype`, one of DTYPES.

    x (N, C, H, W), weight (filters, C, K, K) with n = C K K numbers a filter, log_gamma () -> (N, filters, H', W'),
    channels last. x that is not channels last is copied, and has no gradient. What is beyond `supported` has no kernel.
    Gradients cannot be differentiated again.
    """
    out: Tensor = _forward(x, weight, log_gamma, stride, padding, dtype)
    return out


@triton.jit
def _corner(pixel, H_OUT: tl.constexpr, W_OUT: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    """Image, row and column of the first tap of output pixels (B,)."""
    image = pixel // (H_OUT * W_OUT)
    return image, pixel // W_OUT % H_OUT * STRIDE - PADDING, pixel % W_OUT * STRIDE - PADDING


@triton.jit
def _taps(
    x,
    within,
    image,
    row,
    column,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The patches, C * SIDE * SIDE taps (B,) each, ordered as channels-last memory has them."""
    start = x + ((image * H + row) * W + column) * C
    taps = ()
    for down in tl.static_range(SIDE):
        reached = within & (row + down >= 0) & (row + down < H)
        for right in tl.static_range(SIDE):
            inside = reached & (column + right >= 0) & (column + right < W)
            for channel in tl.static_range(C):
                tap = tl.load(start + ((down * W + right) * C + channel), mask=inside, other=0.0)
                taps += (tap.to(tl.float32),)
    return taps


@triton.jit
def _filters(weight, o, exists, stride_out, stride_in, stride_row, stride_column, C: tl.constexpr, SIDE: tl.constexpr):
    """Likewise of the weight, of filters o (F,)."""
    taps = ()
    for down in tl.static_range(SIDE):
        for right in tl.static_range(SIDE):
            for channel in tl.static_range(C):
                at = o * stride_out + (down * stride_row + right * stride_column + channel * stride_in)
                taps += (tl.load(weight + at, mask=exists, other=0.0),)
    return taps


@triton.jit
def _distance(patch, filters, N: tl.constexpr):
    """Squared, (B, F)."""
    difference = patch[0][:, None] - filters[0][None, :]
    total = difference * difference
    for tap in tl.static_range(1, N):
        difference = patch[tap][:, None] - filters[tap][None, :]
        total = tl.fma(difference, difference, total)
    return total


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    x,
    weight,
    log_gamma,
    out,
    pixels,
    filters,
    blocks,  # of pixels, for each program
    stride_out,
    stride_in,
    stride_row,
    stride_column,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    H_OUT: tl.constexpr,
    W_OUT: tl.constexpr,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    PIXELS: tl.constexpr,
    FILTERS: tl.constexpr,
):
    N: tl.constexpr = C * SIDE * SIDE
    o = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    own = _filters(weight, o, o < filters, stride_out, stride_in, stride_row, stride_column, C, SIDE)
    factor = -tl.exp(tl.load(log_gamma)) / N
    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * PIXELS + tl.arange(0, PIXELS)
        image, row, column = _corner(m, H_OUT, W_OUT, STRIDE, PADDING)
        patch = _taps(x, m < pixels, image, row, column, H, W, C, SIDE)
        value = tl.exp(_distance(patch, own, N) * factor)
        within = (m < pixels)[:, None] & (o < filters)[None, :]
        tl.store(out + m[:, None] * filters + o[None, :], value.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    gradient,
    x,
    weight,
    log_gamma,
    partial,  # (N + 1, parts, filters): for each tap, and for log gamma
    pixels,
    filters,
    blocks,  # of pixels, for each part
    stride_out,
    stride_in,
    stride_row,
    stride_column,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    H_OUT: tl.constexpr,
    W_OUT: tl.constexpr,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    PIXELS: tl.constexpr,
    FILTERS: tl.constexpr,
):
    N: tl.constexpr = C * SIDE * SIDE
    o = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    own = _filters(weight, o, o < filters, stride_out, stride_in, stride_row, stride_column, C, SIDE)
    factor = tl.exp(tl.load(log_gamma)) / N
    sums = (tl.zeros((PIXELS, FILTERS), tl.float32),) * (N + 1)
    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * PIXELS + tl.arange(0, PIXELS)
        image, row, column = _corner(m, H_OUT, W_OUT, STRIDE, PADDING)
        patch = _taps(x, m < pixels, image, row, column, H, W, C, SIDE)
        within = (m < pixels)[:, None] & (o < filters)[None, :]
        g = tl.load(gradient + m[:, None] * filters + o[None, :], mask=within, other=0.0).to(tl.float32)
        distance = _distance(patch, own, N)
        value = tl.exp(distance * -factor)
        h = g * value * factor
        more = ()
        for tap in tl.static_range(N):
            more += (tl.fma(h, patch[tap][:, None] - own[tap][None, :], sums[tap]),)
        # An infinite distance, of which k = 0 is left, adds nothing; what is not a number stays so.
        more += (sums[N] + tl.where(value == 0, 0.0, h * distance),)
        sums = more
    to = partial + tl.program_id(0) * filters + o
    for tap in tl.static_range(N + 1):
        tl.store(to, tl.sum(sums[tap], 0), mask=o < filters)
        to += tl.num_programs(0) * filters


@triton.jit
def _sum_kernel(
    partial,
    grad,
    grad_log_gamma,
    parts,
    filters,
    stride_out,
    stride_in,
    stride_row,
    stride_column,
    C: tl.constexpr,
    SIDE: tl.constexpr,
    PARTS: tl.constexpr,  # added at once
    FILTERS: tl.constexpr,  # at least as many as there are
):
    tap = tl.program_id(0)
    o = tl.arange(0, FILTERS)
    total = tl.zeros((PARTS, FILTERS), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        at = (tap * parts + part)[:, None] * filters + o[None, :]
        total += tl.load(partial + at, mask=(part < parts)[:, None] & (o < filters)[None, :], other=0.0)
    sums = tl.sum(total, 0)
    if tap == C * SIDE * SIDE:
        tl.store(grad_log_gamma, -tl.sum(sums, 0))
    else:
        place = tap // (C * SIDE) * stride_row + tap // C % SIDE * stride_column + tap % C * stride_in
        tl.store(grad + o * stride_out + place, 2 * sums, mask=o < filters)


@custom_op("kernelhead::kervolution", mutates_args=())
def _forward(x: Tensor, weight: Tensor, log_gamma: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    out: Tensor = _output(x, weight, log_gamma, stride, padding, dtype)
    grid, sizes = _launch(FORWARD, out)
    with torch.cuda.device_of(x):  # where triton launches
        _forward_kernel[grid](
            channels_last(x), weight, log_gamma, out, *sizes, *weight.stride(),
            *_shape(x, weight, stride, padding), *FORWARD[:2], num_warps=FORWARD.warps,
        )  # fmt: skip
    return out


@_forward.register_fake
def _output(x: Tensor, weight: Tensor, log_gamma: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    return empty(x, weight.shape[0], *_sides(x, weight, stride, padding), dtype)


@custom_op("kernelhead::kervolution_backward", mutates_args=())
def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, log_gamma: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """With respect to weight and log gamma."""
    grad, grad_log_gamma = torch.empty_like(weight), torch.empty_like(log_gamma)
    (filters, channels, side, _), taps = weight.shape, weight[0].numel()
    grid, sizes = _launch(BACKWARD, gradient)
    partial = torch.empty((taps + 1, grid[0], filters), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(filters)
    with torch.cuda.device_of(x):
        _backward_kernel[grid](
            channels_last(gradient), channels_last(x), weight, log_gamma, partial, *sizes, *weight.stride(),
            *_shape(x, weight, stride, padding), *BACKWARD[:2], num_warps=BACKWARD.warps,
        )  # fmt: skip
        _sum_kernel[(taps + 1,)](
            partial, grad, grad_log_gamma, grid[0], filters, *grad.stride(), channels, side,
            max(1, ELEMENTS // width), width, num_warps=4,
        )  # fmt: skip
    return grad, grad_log_gamma


@_gradients.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, log_gamma: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(log_gamma)


def _launch(how: Tiles, out: Tensor) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Programs along pixels and filters; pixels, filters, and blocks of pixels for each program. out (N, F, H, W)."""
    filters, pixels = out.shape[1], out.numel() // out.shape[1]
    columns, steps = triton.cdiv(filters, how.filters), triton.cdiv(pixels, how.pixels)
    blocks = triton.cdiv(steps, max(1, how.programs // columns))
    return (triton.cdiv(steps, blocks), columns), (pixels, filters, blocks)


def _sides(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, int]:
    """Height and width of the result."""
    height, width = ((side + 2 * padding - weight.shape[2]) // stride + 1 for side in x.shape[2:])
    return height, width


def _shape(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, ...]:
    """As the kernels take it: sides and channels of the input, sides of the output, and the taps."""
    return (*x.shape[2:], x.shape[1], *_sides(x, weight, stride, padding), weight.shape[2], stride, padding)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, log_gamma, ctx.stride, ctx.padding, _ = inputs
    ctx.save_for_backward(x, weight, log_gamma)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[0]:
        raise RuntimeError("kervolution has no kernel for the gradient of its input")
    grad, grad_log_gamma = _gradients(gradient, *ctx.saved_tensors, ctx.stride, ctx.padding)
    return None, grad, grad_log_gamma, None, None, None


_forward.register_autograd(_backward, setup_context=_save)
