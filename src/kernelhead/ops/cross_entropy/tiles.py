"""Triton kernels over tiles of cosines. Needs triton.

A program reads a tile once, and leaves a few numbers a row (`observe_kernel`), or a tile of slopes and a few sums
(`slopes_kernel`): no atomics, so that the same numbers give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

COLUMNS = 128  # of a tile


def _slots(prototypes: int) -> int:
    """Places that a class takes in a tile: a power of two."""
    return int(triton.next_power_of_2(prototypes))


def tile_shape(prototypes: int) -> dict[str, int]:
    """What a kernel has to know of a tile's columns: P prototypes in SLOTS places of each of CLASSES classes."""
    slots = _slots(prototypes)
    return {"P": prototypes, "CLASSES": max(1, COLUMNS // slots), "SLOTS": slots}


def tiles(classes: int, width: int, prototypes: int) -> int:
    """How many tiles of columns cover the classes, in blocks of `width`."""
    own = tile_shape(prototypes)["CLASSES"]
    whole, rest = divmod(classes, width)
    return whole * -(-width // own) + -(-rest // own)


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
def _tile(classes, P: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr):
    """Classes, prototypes, columns of this program's tile, and which exist."""
    j = tl.arange(0, CLASSES * SLOTS)
    label = tl.program_id(0) * CLASSES + j // SLOTS
    slot = j % SLOTS
    return label, slot, label * P + slot, (label < classes) & (slot < P)


@triton.jit
def observe_kernel(
    t,
    alpha,
    target,
    own,
    masses,
    best,
    spread,
    samples,
    classes,
    first,
    stride,
    masses_stride,
    P: tl.constexpr,
    DEGREE: tl.constexpr,
    TOLERANCE: tl.constexpr,
    RANKED: tl.constexpr,
    SPREAD: tl.constexpr,
    RANGE: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < samples
    label, slot, column, exists = _tile(classes, P, CLASSES, SLOTS)
    at = t + row[:, None] * stride + column[None, :]
    cosines = tl.load(at, mask=present[:, None] & exists[None, :], other=0.0).to(tl.float32)
    k = _kernel_values(cosines, exists, alpha, DEGREE, TOLERANCE)
    wanted = (tl.load(target + row, mask=present, other=-1) - first).to(tl.int32)
    begin = tl.program_id(0) * CLASSES
    here = present & (wanted >= begin) & (wanted < begin + CLASSES) & (wanted < classes)
    if tl.max(here.to(tl.int32), 0) > 0:
        mine = here[:, None] & exists[None, :] & (wanted[:, None] == label[None, :])
        if P == 1:
            tl.store(own + row, tl.sum(tl.where(mine, k, 0.0), 1), mask=here)
        else:
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
    if RANKED or SPREAD:
        score, _ = _class_scores(k, ROWS, CLASSES, SLOTS)
        if RANKED:
            tl.store(best + place, tl.max(score, 1), mask=present)
        if SPREAD:
            tl.store(spread + place, tl.sum(tl.where(score == -float("inf"), 0.0, score), 1), mask=present)


@triton.jit
def slopes_kernel(
    t,
    alpha,
    target,
    gradient,
    z,
    likelihood,
    norm,
    slopes,
    moments,
    active,
    active_stride,
    order,
    everywhere,
    own,
    samples,
    classes,
    first,
    ignored,
    gradient_stride,
    stride,
    slopes_stride,
    P: tl.constexpr,
    DEGREE: tl.constexpr,
    TOLERANCE: tl.constexpr,
    SMOOTH: tl.constexpr,
    SPARSE: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    counts = True
    if SPARSE > 0:  # rows of a tile that is left out or not
        counts = tl.load(active + tl.program_id(1) * ROWS // SPARSE * active_stride + tl.program_id(0)) != 0
    if counts:
        row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        if SPARSE > 0:
            row = tl.load(order + row)
        present = row < samples
        label, _, column, exists = _tile(classes, P, CLASSES, SLOTS)
        within = present[:, None] & exists[None, :]
        cosines = tl.load(t + row[:, None] * stride + column[None, :], mask=within, other=0.0).to(tl.float32)
        k = _kernel_values(cosines, exists, alpha, DEGREE, TOLERANCE)
        total = tl.load(z + row, mask=present, other=float("inf"))
        p = tl.exp2((k - total[:, None]) * 1.4426950408889634)
        if SMOOTH:
            _, shares = _class_scores(k, ROWS, CLASSES, SLOTS)
            p -= everywhere * shares
        wanted = tl.load(target + row, mask=present, other=-1)
        scale = tl.load(gradient + row * gradient_stride, mask=present & (wanted != ignored), other=0.0)
        wanted = (wanted - first).to(tl.int32)
        begin = tl.program_id(0) * CLASSES
        here = present & (wanted >= begin) & (wanted < begin + CLASSES)
        if tl.max(here.to(tl.int32), 0) > 0:
            mine = here[:, None] & exists[None, :] & (wanted[:, None] == label[None, :])
            share = tl.exp(k - tl.load(likelihood + row, mask=here, other=float("inf"))[:, None])
            p = tl.where(mine, p - own * share, p)
        p *= scale[:, None]
        inverse = 1 / tl.load(norm + column, mask=exists, other=1.0)
        slope = p * _slope(cosines, alpha, DEGREE) * inverse[None, :]
        at = slopes + row[:, None] * slopes_stride + column[None, :]
        tl.store(at, slope.to(slopes.dtype.element_ty), mask=within)

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
def conclude_kernel(
    masses,
    own,
    spread,
    best,
    target,
    nll,
    right,
    z,
    likelihood,
    samples,
    tiles,
    ignored,
    smoothing,
    everywhere,
    P: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKED: tl.constexpr,
    SPREAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < samples
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    sum_ = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        at = row[:, None] * tiles + tile[None, :]
        within = present[:, None] & (tile < tiles)[None, :]
        mass = tl.load(masses + at, mask=within, other=-float("inf"))
        before, highest = highest, tl.maximum(highest, tl.max(mass, 1))
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(mass - shift[:, None]), 1)
        if RANKED:
            top = tl.maximum(top, tl.max(tl.load(best + at, mask=within, other=-float("inf")), 1))
        if SPREAD:
            sum_ += tl.sum(tl.load(spread + at, mask=within, other=0.0), 1)
    whole = highest + tl.log(total)
    if P == 1:
        label = tl.load(own + row, mask=present, other=0.0)
    else:
        slot = tl.arange(0, SLOTS)
        at = own + row[:, None] * P + slot[None, :]
        values = tl.load(at, mask=present[:, None] & (slot < P)[None, :], other=-float("inf"))
        most = tl.max(values, 1)
        label = most + tl.log(tl.sum(tl.exp(values - most[:, None]), 1))
    loss = whole - (1 - smoothing) * label
    if SPREAD:
        loss -= everywhere * sum_
    counts = tl.load(target + row, mask=present, other=0) != ignored
    tl.store(nll + row, tl.where(counts, loss, 0.0), mask=present)
    tl.store(z + row, whole, mask=present)
    tl.store(likelihood + row, label, mask=present)
    if RANKED:
        tl.store(right + row, (label >= top) & counts, mask=present)
