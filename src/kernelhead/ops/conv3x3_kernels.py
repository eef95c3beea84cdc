"""The Triton kernels of `kernelhead.ops.conv3x3`, which says what they compute and how they are launched."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernelhead.ops.batch_statistics import batch_statistics


@triton.jit
def places(m, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Column, row and image of the m-th place. As unsigned numbers: their division by a power of 2 is a shift."""
    m = m.to(tl.uint32)
    return (m % WIDTH).to(tl.int32), (m // WIDTH % HEIGHT).to(tl.int32), (m // (WIDTH * HEIGHT)).to(tl.int32)


@triton.jit(do_not_specialize=["blocks"])
def map_kernel(
    source,
    weight,
    target,
    groups,  # of target pixels, in all images
    blocks,  # of BLOCK groups, for each program
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
    AHEAD: tl.constexpr,  # steps whose pixels are loaded at once: a divisor of 3 * STEPS
    K: tl.constexpr,  # COLUMNS * C_SOURCE, at least, as a power of 2
    BLOCK: tl.constexpr,
    partial=None,  # (programs, 2, C_TARGET); this and the next seven where `batch_statistics` is wanted
    statistics=None,
    running_mean=None,
    running_var=None,
    batches=None,
    tickets=None,
    momentum=0.0,
    eps=0.0,
    passed=None,  # shaped like the source: what a shortcut adds to the target, where `rectified` is None or positive
    rectified=None,
):
    across: tl.constexpr = (W_TARGET + GROUP - 1) // GROUP
    k = tl.arange(0, K)
    n = tl.arange(0, GROUP * C_TARGET)
    to = n // C_TARGET

    taps = ()  # the banded weight, one matrix a step: loaded once for all blocks
    for step in tl.static_range(3 * STEPS):
        column = step % STEPS * COLUMNS + k // C_SOURCE
        if TRANSPOSED:
            tap_column = to[None, :] + (3 - STRIDE) - column[:, None] * STRIDE
        else:
            tap_column = column[:, None] - to[None, :] * STRIDE
        reached = (k < COLUMNS * C_SOURCE) & (column < REACH)
        matrix = tl.load(
            weight
            + (k % C_SOURCE * stride_source)[:, None]
            + (n % C_TARGET * stride_target)[None, :]
            + step // STEPS * stride_row
            + tap_column * stride_column,
            mask=reached[:, None] & (tap_column >= 0) & (tap_column < 3),
            other=0.0,
        )
        taps = taps + (matrix.to(tl.bfloat16),)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no stars
    if partial is not None:
        mean = tl.load(running_mean + n % C_TARGET)
        first = tl.zeros((BLOCK, C_TARGET), tl.float32)
        second = tl.zeros((BLOCK, C_TARGET), tl.float32)

    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        place, row, image = places(m, across, H_TARGET)
        begin = place * (GROUP // STRIDE) + (STRIDE - 2) if TRANSPOSED else place * (GROUP * STRIDE) - 1
        total = tl.zeros((BLOCK, GROUP * C_TARGET), tl.float32)
        for batch in tl.static_range(3 * STEPS // AHEAD):
            pixels = ()  # of the next AHEAD steps: they are on their way at the same time
            for step in tl.static_range(batch * AHEAD, (batch + 1) * AHEAD):
                column = step % STEPS * COLUMNS + k // C_SOURCE
                if TRANSPOSED:
                    scaled = row + 1 - step // STEPS
                    source_row = scaled // STRIDE
                    inside = (m < groups) & (scaled % STRIDE == 0)
                else:
                    source_row = row * STRIDE + step // STEPS - 1
                    inside = m < groups
                inside = inside & (source_row >= 0) & (source_row < H_SOURCE)
                at = begin[:, None] + column[None, :]
                reached = (k < COLUMNS * C_SOURCE) & (column < REACH)
                start = ((image * H_SOURCE + source_row) * W_SOURCE + begin + step % STEPS * COLUMNS) * C_SOURCE
                part = tl.load(
                    source + start[:, None] + k[None, :],
                    mask=inside[:, None] & reached[None, :] & (at >= 0) & (at < W_SOURCE),
                    other=0.0,
                )
                pixels = pixels + (part.to(tl.bfloat16),)  # type: ignore[assignment]  # noqa: RUF005
            for step in tl.static_range(AHEAD):
                total = tl.dot(pixels[step], taps[batch * AHEAD + step], total)

        target_column = place[:, None] * GROUP + to[None, :]
        within = (m < groups)[:, None] & (target_column < W_TARGET)
        if passed is not None:
            channel = n % C_TARGET + (C_SOURCE - C_TARGET) // 2
            across_pixels = ((image * H_SOURCE + row // STRIDE) * W_SOURCE)[:, None] + target_column // STRIDE
            at = across_pixels * C_SOURCE + channel[None, :]
            kept = within & (row % STRIDE == 0)[:, None] & (target_column % STRIDE == 0)
            gradient = tl.load(passed + at, mask=kept, other=0.0)
            if rectified is not None:
                stopped = tl.load(rectified + at, mask=kept, other=0.0).to(tl.float32) <= 0
                gradient = tl.where(stopped, tl.zeros_like(gradient), gradient)
            total += gradient.to(tl.float32)
        out = ((image * H_TARGET + row) * W_TARGET + place * GROUP) * C_TARGET
        tl.store(target + out[:, None] + n[None, :], total.to(target.dtype.element_ty), mask=within)
        if partial is not None:
            difference = tl.where(within, total - mean[None, :], 0.0)
            difference = tl.reshape(difference, (BLOCK, GROUP, C_TARGET))
            first += tl.sum(difference, 1)
            second += tl.sum(difference * difference, 1)

    if partial is not None:
        batch_statistics(
            first, second, partial, statistics, running_mean, running_var, batches, tickets,
            groups // across * W_TARGET, momentum, eps, C_TARGET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
def wgrad_kernel(
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
    ROWS: tl.constexpr,  # of taps that a program takes: 1, or at stride 1 all 3
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,  # COLUMNS * C_IN, at least, as a power of 2
    N: tl.constexpr,  # ROWS * CHANNELS, at least, as a power of 2
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    middle = tl.program_id(1) // (3 // COLUMNS) + ROWS // 2  # tap row
    tap_column = tl.program_id(1) % (3 // COLUMNS) * COLUMNS
    k = tl.arange(0, K)
    n = tl.arange(0, N)
    below = n // CHANNELS - ROWS // 2  # of the middle tap row: a row of x meets the row of dy that much above its own
    channel = tl.program_id(2) * CHANNELS + n % CHANNELS
    total = tl.zeros((K, N), tl.float32)
    for block in range(blocks):
        m = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        column, row, image = places(m, W_OUT, H_OUT)
        source_row = row * STRIDE + middle - 1
        first = column * STRIDE + tap_column - 1
        inside = (m < pixels) & (source_row >= 0) & (source_row < H_IN)
        at = first[:, None] + (k // C_IN)[None, :]
        start = ((image * H_IN + source_row) * W_IN + first) * C_IN
        seen = tl.load(
            x + start[:, None] + k[None, :],
            mask=inside[:, None] & (k < COLUMNS * C_IN)[None, :] & (at >= 0) & (at < W_IN),
            other=0.0,
        )
        near = (m < pixels)[:, None] & (n < ROWS * CHANNELS)[None, :]
        if ROWS > 1:
            target_row = row[:, None] - below[None, :]
            near = near & (target_row >= 0) & (target_row < H_OUT)
        gradient = tl.load(dy + (m * C_OUT)[:, None] + (channel - below * (W_OUT * C_OUT))[None, :], near, other=0.0)
        total = tl.dot(tl.trans(seen.to(tl.bfloat16)), gradient, total)
    begin = ((part * C_OUT + channel) * 9 + (middle + below) * 3 + tap_column) * C_IN
    meant = (k < COLUMNS * C_IN)[:, None] & (n < ROWS * CHANNELS)[None, :]
    tl.store(partial + begin[None, :] + k[:, None], total, mask=meant)


@triton.jit
def sum_kernel(
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
