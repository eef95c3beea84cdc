"""The Triton kernels of `kernelhead_lab.heads.norm_relu_mean`, and how they are launched. Needs triton.

Values y (N, L, C) are read in tiles of rows, which are positions of samples, by channels.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


class Tiles(NamedTuple):
    """Sides of a tile, and the warps that share it."""

    rows: int
    channels: int
    warps: int


# See benchmarks/baselines.py, --tiles.
STATISTICS = Tiles(32, 64, 4)
PROGRAMS, PARTS = 1056, 64  # of the statistics: wanted, eight for each of 132 multiprocessors; of a channel, at most
POOL = Tiles(64, 64, 4)
SUMS = Tiles(128, 16, 4)
BLOCKS = 8  # of such tiles, for each of its programs
GRADIENT = Tiles(64, 64, 4)


@triton.jit
def _own_channels(channels, CHANNELS: tl.constexpr):
    """Return a program's channels, whether they exist, and its number among programs of the same channels."""
    tiles = tl.cdiv(channels, CHANNELS)
    c = tl.program_id(0) % tiles * CHANNELS + tl.arange(0, CHANNELS)
    return c, c < channels, tl.program_id(0) // tiles


@triton.jit(do_not_specialize=["blocks"])
def _statistics_kernel(
    y,  # (R, C)
    partial,  # (parts, 2, C): sums of differences from the first row, and of their squares
    rows,
    channels,
    blocks,  # of rows, for each part
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c, exists, part = _own_channels(channels, CHANNELS)
    origin = tl.load(y + c, mask=exists, other=0.0).to(tl.float32)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    for block in range(blocks):
        row = (part * blocks + block) * ROWS + tl.arange(0, ROWS)
        within = (row < rows)[:, None] & exists[None, :]
        value = tl.load(y + row.to(tl.int64)[:, None] * channels + c[None, :], mask=within, other=0.0)
        difference = tl.where(within, value.to(tl.float32) - origin[None, :], 0.0)
        first += difference
        second += difference * difference
    own = partial + part * (2 * channels) + c
    tl.store(own, tl.sum(first, 0), mask=exists)
    tl.store(own + channels, tl.sum(second, 0), mask=exists)


@triton.jit
def _finish_kernel(
    partial,
    y,
    statistics,  # (2, C): the mean, and one over the standard deviation
    running_mean,
    running_var,
    batches,  # how many the running statistics have seen
    rows,
    channels,
    parts,
    momentum,
    eps,
    PARTS: tl.constexpr,  # at least, as a power of 2
    CHANNELS: tl.constexpr,
):
    c, exists, _ = _own_channels(channels, CHANNELS)
    part = tl.arange(0, PARTS)[:, None]
    at, within = partial + part * (2 * channels) + c[None, :], (part < parts) & exists[None, :]
    offset = tl.sum(tl.load(at, mask=within, other=0.0), 0) / rows
    variance = tl.sum(tl.load(at + channels, mask=within, other=0.0), 0) / rows - offset * offset
    variance = tl.where(variance < 0, 0.0, variance)
    mean = tl.load(y + c, mask=exists, other=0.0).to(tl.float32) + offset
    tl.store(statistics + c, mean, mask=exists)
    tl.store(statistics + channels + c, 1 / tl.sqrt(variance + eps), mask=exists)
    before = tl.load(running_mean + c, mask=exists)
    spread = tl.load(running_var + c, mask=exists)
    tl.store(running_mean + c, before + momentum * (mean - before), mask=exists)
    tl.store(running_var + c, spread + momentum * (variance * (rows / (rows - 1.0)) - spread), mask=exists)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _normalisation(statistics, weight, bias, c, exists, channels):
    """Return the mean of channels, one over the deviation, the factor of differences from the mean, and the bias."""
    mean = tl.load(statistics + c, mask=exists, other=0.0)
    inverse = tl.load(statistics + channels + c, mask=exists, other=0.0)
    factor = inverse * tl.load(weight + c, mask=exists, other=0.0)
    return mean, inverse, factor, tl.load(bias + c, mask=exists, other=0.0)


@triton.jit
def _centred(y, n, position, c, samples, positions, channels, mean, factor, shift):
    """Return differences from the mean (samples, positions, channels), which pass the ReLU, offsets, which exist."""
    row = (n[:, None] * positions + position[None, :]).to(tl.int64)
    at = row[:, :, None] * channels + c[None, None, :]
    within = ((n < samples)[:, None] & (position < positions)[None, :])[:, :, None] & (c < channels)[None, None, :]
    centred = tl.load(y + at, mask=within, other=0.0).to(tl.float32) - mean[None, None, :]
    stopped = centred * factor[None, None, :] + shift[None, None, :] <= 0  # what is not a number passes
    return centred, within & ~stopped, at, within


@triton.jit
def _pool_kernel(
    y,  # (N, L, C)
    statistics,
    weight,
    bias,
    value,  # (N, C)
    passed,  # (N, 2, C), if wanted: the share of positions that pass the ReLU, the sum of their values x over L
    samples,
    positions,
    channels,
    SAMPLES: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c, exists, group = _own_channels(channels, CHANNELS)
    n = group * SAMPLES + tl.arange(0, SAMPLES)
    mean, inverse, factor, shift = _normalisation(statistics, weight, bias, c, exists, channels)
    count = tl.zeros((SAMPLES, CHANNELS), tl.float32)
    total = tl.zeros((SAMPLES, CHANNELS), tl.float32)
    for begin in range(0, positions, POSITIONS):
        position = begin + tl.arange(0, POSITIONS)
        centred, passes, _, _ = _centred(y, n, position, c, samples, positions, channels, mean, factor, shift)
        count += tl.sum(tl.where(passes, 1.0, 0.0), 1)
        total += tl.sum(tl.where(passes, centred, 0.0), 1)
    count *= 1.0 / positions
    total *= 1.0 / positions
    result = total * factor[None, :] + count * shift[None, :]
    at = n.to(tl.int64)[:, None] * channels + c[None, :]
    within = (n < samples)[:, None] & exists[None, :]
    tl.store(value + at, tl.where(result < 0, 0.0, result), mask=within)  # below zero by rounding alone
    if passed is not None:
        kept = passed + n.to(tl.int64)[:, None] * (2 * channels) + c[None, :]
        tl.store(kept, count, mask=within)
        tl.store(kept + channels, total * inverse[None, :], mask=within)


@triton.jit(do_not_specialize=["blocks"])
def _sums_kernel(
    gradient,  # (N, C)
    passed,
    partial,  # (parts, 2, C): parts of dL/dbias and of dL/dweight
    samples,
    channels,
    blocks,  # of samples, for each part
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c, exists, part = _own_channels(channels, CHANNELS)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    for block in range(blocks):
        n = (part * blocks + block) * ROWS + tl.arange(0, ROWS)
        within = (n < samples)[:, None] & exists[None, :]
        row = n.to(tl.int64)[:, None] * channels
        g = tl.load(gradient + row + c[None, :], mask=within, other=0.0)
        kept = passed + 2 * row + c[None, :]
        first += g * tl.load(kept, mask=within, other=0.0)
        second += g * tl.load(kept + channels, mask=within, other=0.0)
    own = partial + part * (2 * channels) + c
    tl.store(own, tl.sum(first, 0), mask=exists)
    tl.store(own + channels, tl.sum(second, 0), mask=exists)


@triton.jit
def _gradient_kernel(
    gradient,  # (N, C)
    y,
    statistics,
    weight,
    bias,
    sums,  # (2, C): dL/dbias and dL/dweight
    out,  # as y
    samples,
    positions,
    channels,
    SAMPLES: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c, exists, group = _own_channels(channels, CHANNELS)
    n = group * SAMPLES + tl.arange(0, SAMPLES)
    mean, inverse, factor, shift = _normalisation(statistics, weight, bias, c, exists, channels)
    # dy = (dz - mean of dz - normalised y * mean of its product with dz) * factor
    share = factor / (samples * positions)
    level = -tl.load(sums + c, mask=exists, other=0.0) * share
    slope = -tl.load(sums + channels + c, mask=exists, other=0.0) * inverse * share
    given = (n < samples)[:, None] & exists[None, :]
    dz = tl.load(gradient + n.to(tl.int64)[:, None] * channels + c[None, :], mask=given, other=0.0)
    dz *= (factor / positions)[None, :]
    for begin in range(0, positions, POSITIONS):
        position = begin + tl.arange(0, POSITIONS)
        centred, passes, at, within = _centred(y, n, position, c, samples, positions, channels, mean, factor, shift)
        value = tl.where(passes, dz[:, None, :], 0.0) + (centred * slope[None, None, :] + level[None, None, :])
        tl.store(out + at, value.to(out.dtype.element_ty), mask=within)


def batch_statistics(
    y: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor, momentum: float, eps: float
) -> Tensor:
    """Mean and one over the deviation of each channel (2, C), of y (N, L, C); and what BatchNorm keeps of them."""
    rows, channels, how = y.shape[0] * y.shape[1], y.shape[2], STATISTICS
    tiles = triton.cdiv(channels, how.channels)
    blocks = triton.cdiv(rows, how.rows * min(PARTS, max(1, PROGRAMS // tiles)))
    parts = triton.cdiv(rows, how.rows * blocks)
    partial = running_mean.new_empty(parts, 2, channels)
    statistics = running_mean.new_empty(2, channels)
    with torch.cuda.device_of(y):  # where triton launches
        _statistics_kernel[(tiles * parts,)](
            y, partial, rows, channels, blocks, ROWS=how.rows, CHANNELS=how.channels, num_warps=how.warps
        )
        _finish_kernel[(triton.cdiv(channels, 32),)](
            partial, y, statistics, running_mean, running_var, batches, rows, channels, parts, momentum, eps,
            PARTS=triton.next_power_of_2(parts), CHANNELS=32, num_warps=4,
        )  # fmt: skip
    return statistics


def pool(y: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return the mean over positions (N, C) of the rectified values; if `keep`, also what its gradient needs."""
    samples, _, channels = y.shape
    value = statistics.new_empty(samples, channels)
    passed = statistics.new_empty(samples, 2, channels) if keep else None
    grid, options = _launch(POOL, y)
    with torch.cuda.device_of(y):
        _pool_kernel[grid](y, statistics, weight, bias, value, passed, *y.shape, **options)
    return value, passed


def parameter_gradients(gradient: Tensor, passed: Tensor) -> Tensor:
    """dL/dbias and dL/dweight (2, C), of dL/dvalue (N, C) and what `pool` kept."""
    (samples, channels), how = gradient.shape, SUMS
    parts = triton.cdiv(samples, how.rows * BLOCKS)
    blocks = triton.cdiv(samples, how.rows * parts)
    partial = gradient.new_empty(parts, 2, channels)
    with torch.cuda.device_of(gradient):
        _sums_kernel[(triton.cdiv(channels, how.channels) * parts,)](
            gradient, passed, partial, samples, channels, blocks,
            ROWS=how.rows, CHANNELS=how.channels, num_warps=how.warps,
        )  # fmt: skip
    return partial[0] if parts == 1 else partial.sum(0)


def input_gradient(
    gradient: Tensor, y: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, sums: Tensor
) -> Tensor:
    """dL/dy (N, L, C) in y's precision; `sums` are those of `parameter_gradients`."""
    out = torch.empty_like(y)
    grid, options = _launch(GRADIENT, y)
    with torch.cuda.device_of(y):
        _gradient_kernel[grid](gradient, y, statistics, weight, bias, sums, out, *y.shape, **options)
    return out


def _launch(how: Tiles, y: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return programs and options of a kernel that takes whole samples, several small ones or one piece by piece."""
    samples, positions, channels = y.shape
    side = min(how.rows, triton.next_power_of_2(positions))
    options = {"SAMPLES": how.rows // side, "POSITIONS": side, "CHANNELS": how.channels, "num_warps": how.warps}
    return (triton.cdiv(samples, options["SAMPLES"]) * triton.cdiv(channels, how.channels),), options
