"""Triton kernels over tiles of cosines and rows of vectors. Needs triton.

A program reads a tile once. It leaves a few numbers per row (`observe_kernel`), or a tile of slopes and a few sums
(`slopes_kernel`). There are no atomics, so the same numbers give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

COLUMNS = 128  # of a tile


def tile_shape(prototypes: int) -> dict[str, int]:
    """Columns of a tile: P prototypes in SLOTS columns, a power of two, of each of CLASSES classes."""
    slots = int(triton.next_power_of_2(prototypes))
    return {"P": prototypes, "CLASSES": max(1, COLUMNS // slots), "SLOTS": slots}


@triton.jit
def _slope(t, alpha, DEGREE: tl.constexpr):
    """The derivative of the series, the sum of m a_m t^(m - 1)."""
    value = tl.zeros_like(t) + DEGREE * tl.load(alpha + 2 + DEGREE)
    for step in tl.static_range(DEGREE - 1):
        value = value * t + (DEGREE - 1 - step) * tl.load(alpha + (1 + DEGREE - step))
    return value


@triton.jit
def _ends(t, TOLERANCE: tl.constexpr):
    """k_odd: 1 at t = 1, -1 at t = -1."""
    return tl.where(t > 1 - TOLERANCE, 1.0, tl.where(t < TOLERANCE - 1, -1.0, 0.0))


@triton.jit
def _kernel_values(t, exists, alpha, DEGREE: tl.constexpr, TOLERANCE: tl.constexpr):
    """k(t), -inf in columns that do not exist. A tolerance of 0 leaves the end-point terms out."""
    value = tl.zeros_like(t) + tl.load(alpha + 2 + DEGREE)
    for step in tl.static_range(DEGREE - 1):
        value = value * t + tl.load(alpha + (1 + DEGREE - step))
    value = value * t + tl.where(exists, tl.load(alpha + 2), -float("inf"))[None, :]
    if TOLERANCE > 0:
        ends = _ends(t, TOLERANCE)
        value += ends * (tl.load(alpha + 1) + ends * tl.load(alpha))
    return value


@triton.jit
def _class_scores(k, ROWS: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr):
    """A class's log sum exp(k) over its prototypes, (ROWS, CLASSES), and each prototype's share of it, as k."""
    if SLOTS == 1:
        score = k
        share = tl.where(k == -float("inf"), 0.0, 1.0)
    else:
        grouped = tl.reshape(k, (ROWS, CLASSES, SLOTS))
        highest = tl.max(grouped, 2)
        highest = tl.where(highest == -float("inf"), 0.0, highest)
        power = tl.exp(grouped - highest[:, :, None])
        total = tl.sum(power, 2)
        score = highest + tl.log(total)
        share = tl.reshape(power / tl.where(total == 0, 1.0, total)[:, :, None], (ROWS, CLASSES * SLOTS))
    return score, share


@triton.jit
def _tile(
    t, alpha, target, samples, classes, first, stride,
    P: tl.constexpr, DEGREE: tl.constexpr, TOLERANCE: tl.constexpr,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Rows and columns of a program, which of them exist, cosines, k, targets, and which targets are in its tile."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < samples
    j = tl.arange(0, CLASSES * SLOTS)
    begin = tl.program_id(0) * CLASSES
    label = begin + j // SLOTS
    slot = j % SLOTS
    column = label * P + slot
    exists = (label < classes) & (slot < P)
    at = t + row[:, None] * stride + column[None, :]
    cosines = tl.load(at, mask=present[:, None] & exists[None, :], other=0.0).to(tl.float32)
    k = _kernel_values(cosines, exists, alpha, DEGREE, TOLERANCE)
    wanted = (tl.load(target + row, mask=present, other=-1) - first).to(tl.int32)
    here = present & (wanted >= begin) & (wanted < begin + CLASSES) & (wanted < classes)
    return row, present, label, slot, column, exists, cosines, k, wanted, here


@triton.jit
def observe_kernel(
    t, alpha, target, own, masses, spread,
    samples, classes, first, stride, masses_stride,
    P: tl.constexpr, DEGREE: tl.constexpr, TOLERANCE: tl.constexpr, SMOOTH: tl.constexpr, RANGE: tl.constexpr,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row, present, label, slot, _, exists, _, k, wanted, here = _tile(
        t, alpha, target, samples, classes, first, stride, P, DEGREE, TOLERANCE, ROWS, CLASSES, SLOTS
    )
    if tl.max(here.to(tl.int32), 0) > 0:
        mine = here[:, None] & exists[None, :] & (wanted[:, None] == label[None, :])
        tl.store(own + row[:, None] * P + slot[None, :], k, mask=mine)
    place = row * masses_stride + tl.program_id(0)
    most = 0.0  # |k| can't be more
    for m in tl.static_range(DEGREE + 3):
        most += tl.abs(tl.load(alpha + m))
    if 2 * most < RANGE:
        total = tl.sum(tl.exp2((k - most) * 1.4426950408889634), 1)
        tl.store(masses + place, most + tl.log(total), mask=present)
    else:
        highest = tl.max(k, 1)
        total = tl.sum(tl.exp2((k - highest[:, None]) * 1.4426950408889634), 1)
        tl.store(masses + place, highest + tl.log(total), mask=present)
    if SMOOTH:
        score, _ = _class_scores(k, ROWS, CLASSES, SLOTS)
        tl.store(spread + place, tl.sum(tl.where(score == -float("inf"), 0.0, score), 1), mask=present)


@triton.jit
def slopes_kernel(
    t, alpha, target, gradient, z, likelihood, norm, slopes, moments,
    everywhere, own, samples, classes, first, stride, slopes_stride,
    P: tl.constexpr, DEGREE: tl.constexpr, TOLERANCE: tl.constexpr, SMOOTH: tl.constexpr,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row, present, label, _, column, exists, cosines, k, wanted, here = _tile(
        t, alpha, target, samples, classes, first, stride, P, DEGREE, TOLERANCE, ROWS, CLASSES, SLOTS
    )
    total = tl.load(z + row, mask=present, other=float("inf"))
    p = tl.exp2((k - total[:, None]) * 1.4426950408889634)
    if SMOOTH:
        _, shares = _class_scores(k, ROWS, CLASSES, SLOTS)
        p -= everywhere * shares
    if tl.max(here.to(tl.int32), 0) > 0:
        mine = here[:, None] & exists[None, :] & (wanted[:, None] == label[None, :])
        share = tl.exp(k - tl.load(likelihood + row, mask=here, other=float("inf"))[:, None])
        p = tl.where(mine, p - own * share, p)
    p *= tl.load(gradient + row, mask=present, other=0.0)[:, None]
    inverse = 1 / tl.load(norm + column, mask=exists, other=1.0)
    slope = p * _slope(cosines, alpha, DEGREE) * inverse[None, :]
    at = slopes + row[:, None] * slopes_stride + column[None, :]
    tl.store(at, slope.to(slopes.dtype.element_ty), mask=present[:, None] & exists[None, :])

    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    if TOLERANCE > 0:
        ends = _ends(cosines, TOLERANCE)
        tl.store(moments + program, tl.sum(p * ends * ends))
        tl.store(moments + programs + program, tl.sum(p * ends))
    for m in tl.static_range(DEGREE):
        p = p * cosines
        tl.store(moments + (3 + m) * programs + program, tl.sum(p))


@triton.jit
def _places(row, exists, begin, width, BLOCK: tl.constexpr):
    """Where in a matrix the columns from `begin` on of these rows are, and which of them exist."""
    d = begin + tl.arange(0, BLOCK)
    return row[:, None] * width + d[None, :], exists[:, None] & (d < width)[None, :]


@triton.jit
def unit_kernel(x, out, norm, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    largest = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, width, BLOCK):
        at, within = _places(row, exists, begin, width, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, mask=within, other=0.0).to(tl.float32)))
    most = tl.max(largest, 1)
    most = tl.where(most == 0, float("inf"), most)  # as the length of a zero vector
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, width, BLOCK):
        at, within = _places(row, exists, begin, width, BLOCK)
        part = tl.load(x + at, mask=within, other=0.0).to(tl.float32) / most[:, None]
        squares += part * part
    relative = tl.sqrt(tl.sum(squares, 1))
    relative = tl.where(relative == 0, 1.0, relative)
    length = relative * most
    tl.store(norm + row, length, mask=exists)
    for begin in range(0, width, BLOCK):
        at, within = _places(row, exists, begin, width, BLOCK)
        part = tl.load(x + at, mask=within, other=0.0).to(tl.float32) / most[:, None] / relative[:, None]
        tl.store(out + at, part.to(out.dtype.element_ty), mask=within)


@triton.jit
def project_kernel(part, x, norm, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    length = tl.load(norm + row, mask=exists, other=1.0)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, width, BLOCK):
        at, within = _places(row, exists, begin, width, BLOCK)
        own = tl.load(part + at, mask=within, other=0.0).to(tl.float32)
        products += own * (tl.load(x + at, mask=within, other=0.0).to(tl.float32) / length[:, None])
    along = tl.sum(products, 1)
    for begin in range(0, width, BLOCK):
        at, within = _places(row, exists, begin, width, BLOCK)
        own = tl.load(part + at, mask=within, other=0.0).to(tl.float32)
        own -= along[:, None] * (tl.load(x + at, mask=within, other=0.0).to(tl.float32) / length[:, None])
        tl.store(out + at, own.to(out.dtype.element_ty), mask=within)
