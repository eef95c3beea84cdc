"""The Triton kernels of `kernelhead_lab.networks.ops.conv3x3`, where their formulas stand."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernelhead_lab.networks.ops.batch_statistics import batch_statistics


@triton.jit
def positions(m, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Return column, row and image of the m-th position; dividing unsigned numbers by a power of 2 is a shift."""
    m = m.to(tl.uint32)
    return (m % WIDTH).to(tl.int32), (m // WIDTH % HEIGHT).to(tl.int32), (m // (WIDTH * HEIGHT)).to(tl.int32)


@triton.constexpr_function
def source_row(row, tap, stride, transposed):
    """The one that a tap takes to a target's row, counted from the first that a strip needs. -1: there is none."""
    if not transposed:
        return row * stride + tap
    return (row + 1 - tap) // stride + 2 - stride if (row + 1 - tap) % stride == 0 else -1


@triton.constexpr_function
def last_source_row(row, stride, transposed):
    return max(source_row(row, tap, stride, transposed) for tap in range(3))


@triton.jit
def lanes_inside(lanes, first, row: tl.constexpr, LOWEST: tl.constexpr, HEIGHT: tl.constexpr):
    """`lanes`, but none where the row `first + row` is outside the image. `first` is -1 at least, LOWEST at most."""
    inside = lanes
    if row == 0:
        inside = tl.where(first >= 0, inside, 0)
    if LOWEST + row >= HEIGHT:
        inside = tl.where(first + row < HEIGHT, inside, 0)
    return inside


@triton.jit
def factor_and_shift(statistics, scale, bias, c, C: tl.constexpr):
    """Return BatchNorm as a multiplication and an addition, for both passes: they must agree on the sign."""
    factor = tl.load(scale + c) * tl.load(statistics + C + c)
    return factor, tl.load(bias + c) - tl.load(statistics + c) * factor


@triton.jit
def shortcut_gradient(passed, rectified, at, kept):
    gradient = tl.load(passed + at, mask=kept, other=0.0).to(tl.float32)
    if rectified is not None:
        stopped = tl.load(rectified + at, mask=kept, other=0.0).to(tl.float32) <= 0
        gradient = tl.where(stopped, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=["lanes", "blocks"])
def map_kernel(
    source,
    weight,
    target,
    lanes,  # groups of target pixels in the first rows of all images; a strip is theirs and the ROWS - 1 rows below
    blocks,  # of BLOCK strips, for each program
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
    ROWS: tl.constexpr,  # a multiple of the stride where TRANSPOSED
    AHEAD: tl.constexpr,  # steps whose pixels are on their way while those of one are multiplied
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
    sums=None,  # (programs, 2, C_TARGET); where the target is dL/dz of z = relu(normalised y): as by `sums_kernel`
    y=None,
    scale=None,
    bias=None,
):
    across: tl.constexpr = (W_TARGET + GROUP - 1) // GROUP
    down: tl.constexpr = (H_TARGET + ROWS - 1) // ROWS
    lowest: tl.constexpr = (down - 1) * ROWS // STRIDE + (STRIDE - 2) if TRANSPOSED else (down - 1) * ROWS * STRIDE - 1
    ragged: tl.constexpr = W_TARGET % GROUP > 0 or H_TARGET % ROWS > 0  # strips reach beyond the image
    source_rows: tl.constexpr = last_source_row(ROWS - 1, STRIDE, TRANSPOSED) + 1
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
    if sums is not None:
        factor, shift = factor_and_shift(statistics, scale, bias, n % C_TARGET, C_TARGET)
        mean = tl.load(statistics + n % C_TARGET)
    if partial is not None or sums is not None:
        first = tl.zeros((BLOCK, C_TARGET), tl.float32)
        second = tl.zeros((BLOCK, C_TARGET), tl.float32)

    for block in range(blocks):
        strip = tl.program_id(0) * blocks + block
        row = strip % down * ROWS
        m = strip // down * BLOCK + tl.arange(0, BLOCK)
        position, _, image = positions(m, across, 1)
        begin = position * (GROUP // STRIDE) + (STRIDE - 2) if TRANSPOSED else position * (GROUP * STRIDE) - 1
        top = row // STRIDE + (STRIDE - 2) if TRANSPOSED else row * STRIDE - 1
        seen = source + (((image * H_SOURCE + top) * W_SOURCE + begin) * C_SOURCE)[:, None] + k[None, :]
        into = (((image * H_TARGET + row) * W_TARGET + position * GROUP) * C_TARGET)[:, None] + n[None, :]
        target_column = position[:, None] * GROUP + to[None, :]
        if partial is not None:
            level = tl.where((m < lanes)[:, None], mean[None, :], 0.0)
        pixels = ()
        totals = ()  # of the strip's rows: those that a row of the source does not meet take no registers
        for _ in tl.static_range(ROWS):
            totals = totals + (tl.zeros((BLOCK, GROUP * C_TARGET), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for turn in tl.static_range(source_rows * STEPS + AHEAD):
            if turn < source_rows * STEPS:
                end = lanes_inside(lanes, top, turn // STEPS, lowest, H_SOURCE)
                column = turn % STEPS * COLUMNS + k // C_SOURCE
                at = begin[:, None] + column[None, :]
                reached = (k < COLUMNS * C_SOURCE) & (column < REACH)
                part = tl.load(
                    seen + (turn // STEPS * W_SOURCE + turn % STEPS * COLUMNS) * C_SOURCE,
                    mask=(m < end)[:, None] & reached[None, :] & (at >= 0) & (at < W_SOURCE),
                    other=0.0,
                )
                pixels = pixels + (part.to(tl.bfloat16),)  # type: ignore[assignment]  # noqa: RUF005
            for i in tl.static_range(ROWS):
                for tap in tl.static_range(3):
                    if turn >= AHEAD and source_row(i, tap, STRIDE, TRANSPOSED) == (turn - AHEAD) // STEPS:
                        total = tl.dot(pixels[turn - AHEAD], taps[tap * STEPS + (turn - AHEAD) % STEPS], totals[i])
                        totals = totals[:i] + (total,) + totals[i + 1 :]  # noqa: RUF005
                if turn - AHEAD == last_source_row(i, STRIDE, TRANSPOSED) * STEPS + STEPS - 1:
                    total = totals[i]
                    within = (m < lanes_inside(lanes, row, i, (down - 1) * ROWS, H_TARGET))[:, None]
                    if W_TARGET % GROUP > 0:
                        within = within & (target_column < W_TARGET)
                    if passed is not None and i % STRIDE == 0:
                        channel = n % C_TARGET + (C_SOURCE - C_TARGET) // 2
                        line = ((image * H_SOURCE + row // STRIDE + i // STRIDE) * W_SOURCE)[:, None]
                        at = (line + target_column // STRIDE) * C_SOURCE + channel[None, :]
                        total += shortcut_gradient(passed, rectified, at, within & (target_column % STRIDE == 0))
                    at = into + i * (W_TARGET * C_TARGET)
                    tl.store(target + at, total.to(target.dtype.element_ty), mask=within)
                    if sums is not None:
                        convolved = tl.load(y + at, mask=within, other=0.0).to(tl.float32)
                        stopped = convolved * factor[None, :] + shift[None, :] <= 0
                        gradient = total.to(target.dtype.element_ty).to(tl.float32)  # as it is read again
                        gradient = tl.where(within & (stopped == 0), gradient, 0.0)
                        product = gradient * (convolved - mean[None, :])
                        first += tl.sum(tl.reshape(gradient, (BLOCK, GROUP, C_TARGET)), 1)
                        second += tl.sum(tl.reshape(product, (BLOCK, GROUP, C_TARGET)), 1)
                    if partial is not None:
                        difference = total - level  # zero where nothing was read
                        if ragged:
                            difference = tl.where(within, difference, 0.0)
                        difference = tl.reshape(difference, (BLOCK, GROUP, C_TARGET))
                        first += tl.sum(difference, 1)
                        second += tl.sum(difference * difference, 1)

    if partial is not None:
        batch_statistics(
            first, second, partial, statistics, running_mean, running_var, batches, tickets,
            lanes // across * (H_TARGET * W_TARGET), momentum, eps, C_TARGET,
        )  # fmt: skip
    if sums is not None:
        c = tl.arange(0, C_TARGET)
        own = sums + tl.program_id(0) * (2 * C_TARGET) + c
        tl.store(own, tl.sum(first, 0))
        tl.store(own + C_TARGET, tl.sum(second, 0) * tl.load(statistics + C_TARGET + c))


@triton.jit(do_not_specialize=["lanes", "blocks"])
def wgrad_kernel(
    x,
    dy,
    partial,  # (parts, GROUP, C_OUT, 3, 3, C_IN)
    lanes,  # groups of columns of dy, in all images
    blocks,  # of BLOCK strips, for each part
    H_IN: tl.constexpr,
    W_IN: tl.constexpr,
    C_IN: tl.constexpr,
    H_OUT: tl.constexpr,
    W_OUT: tl.constexpr,
    C_OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,  # of x that a program takes, of those that a group meets
    ROWS: tl.constexpr,  # of x, for a strip: a multiple of the stride
    K: tl.constexpr,  # COLUMNS * C_IN, at least, as a power of 2
    BLOCK: tl.constexpr,
):
    across: tl.constexpr = (W_OUT + GROUP - 1) // GROUP
    down: tl.constexpr = (H_IN + ROWS - 1) // ROWS
    part = tl.program_id(0)
    k = tl.arange(0, K)
    n = tl.arange(0, GROUP * C_OUT)
    first = tl.program_id(1) * COLUMNS
    column = first + k // C_IN
    zeros = tl.zeros((K, GROUP * C_OUT), tl.float32)
    totals = (zeros, zeros, zeros)  # of the three tap rows
    for block in range(blocks):
        strip = part * blocks + block
        row = strip % down * ROWS
        top = row // STRIDE + (STRIDE - 2)
        m = strip // down * BLOCK + tl.arange(0, BLOCK)
        position, _, image = positions(m, across, 1)
        begin = position * (GROUP * STRIDE) - 1
        at = begin[:, None] + column[None, :]
        met = (k < COLUMNS * C_IN)[None, :] & (at >= 0) & (at < W_IN)
        seen = x + (((image * H_IN + row) * W_IN + begin + first) * C_IN)[:, None] + k[None, :]
        near = position[:, None] * GROUP + (n // C_OUT)[None, :] < W_OUT
        from_dy = dy + (((image * H_OUT + top) * W_OUT + position * GROUP) * C_OUT)[:, None] + n[None, :]
        pixels = ()
        for i in tl.static_range(ROWS):
            inside = m < lanes_inside(lanes, row, i, (down - 1) * ROWS, H_IN)
            part_of_x = tl.load(seen + i * (W_IN * C_IN), mask=inside[:, None] & met, other=0.0)
            pixels = pixels + (part_of_x.to(tl.bfloat16),)  # type: ignore[assignment]  # noqa: RUF005
        gradients = ()
        for i in tl.static_range(last_source_row(ROWS - 1, STRIDE, True) + 1):
            inside = m < lanes_inside(lanes, top, i, (down - 1) * ROWS // STRIDE + STRIDE - 2, H_OUT)
            gradient = tl.load(from_dy + i * (W_OUT * C_OUT), mask=inside[:, None] & near, other=0.0)
            gradients = gradients + (gradient,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(ROWS):
            for tap in tl.static_range(3):
                if source_row(i, tap, STRIDE, True) >= 0:
                    total = tl.dot(tl.trans(pixels[i]), gradients[source_row(i, tap, STRIDE, True)], totals[tap])
                    totals = totals[:tap] + (total,) + totals[tap + 1 :]  # noqa: RUF005
    tap_column = column[:, None] - (n // C_OUT * STRIDE)[None, :]
    meant = (k < COLUMNS * C_IN)[:, None] & (tap_column >= 0) & (tap_column < 3)
    own = ((part * GROUP + n // C_OUT) * C_OUT + n % C_OUT) * (9 * C_IN)
    for tap in tl.static_range(3):
        there = own[None, :] + (tap * 3 + tap_column) * C_IN + (k % C_IN)[:, None]
        tl.store(partial + there, totals[tap], mask=meant)


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
    position = i // (9 * C_IN) * stride_out + i % C_IN * stride_in + tap // 3 * stride_row + tap % 3 * stride_column
    tl.store(grad + position, tl.sum(parts, 0).to(grad.dtype.element_ty), mask=i < SIZE)
