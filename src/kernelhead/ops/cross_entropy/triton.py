"""The passes over a block of cosines as Triton kernels, for CUDA. See `blocks`. Needs triton.

A program reads a tile of cosines once, and leaves a few numbers a row (`Observe`), or a tile of slopes and a few sums
(`Slopes`): no atomics, so that the same numbers give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from kernelhead import kernels
from kernelhead.ops.cross_entropy import sparse
from kernelhead.ops.cross_entropy.chunked import RANGE
from kernelhead.ops.cross_entropy.products import Precision, Products

COLUMNS = 128  # of a tile
# Rows of a tile and warps of its program: the fastest on an H200, found by benchmarks/loss.py, --tiles.
OBSERVE = (32, 4)
SLOPES = (32, 4)


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
def _observe_kernel(
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
def _slopes_kernel(
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
def _conclude_kernel(
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


@triton.jit
def _unit_kernel(x, out, norm, rows, width, MEASURE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, width, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        at = row[:, None] * width + d[None, :]
        part = tl.load(x + at, mask=exists[:, None] & (d < width)[None, :], other=0.0).to(tl.float32)
        squares += part * part
    length = tl.sqrt(tl.sum(squares, 1))
    length = tl.where(length < 1.1754943508222875e-38, float("inf"), length)
    if MEASURE:
        tl.store(norm + row, length, mask=exists)
    for begin in range(0, width, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        at = row[:, None] * width + d[None, :]
        within = exists[:, None] & (d < width)[None, :]
        part = tl.load(x + at, mask=within, other=0.0).to(tl.float32) / length[:, None]
        tl.store(out + at, part.to(out.dtype.element_ty), mask=within)


@triton.jit
def _project_kernel(part, x, norm, out, rows, width, DIVIDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    length = tl.load(norm + row, mask=exists, other=1.0)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, width, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        at = row[:, None] * width + d[None, :]
        within = exists[:, None] & (d < width)[None, :]
        own = tl.load(part + at, mask=within, other=0.0).to(tl.float32)
        products += own * tl.load(x + at, mask=within, other=0.0).to(tl.float32)
    along = tl.sum(products, 1) / length / length
    for begin in range(0, width, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        at = row[:, None] * width + d[None, :]
        within = exists[:, None] & (d < width)[None, :]
        own = tl.load(part + at, mask=within, other=0.0).to(tl.float32)
        own -= along[:, None] * tl.load(x + at, mask=within, other=0.0).to(tl.float32)
        if not DIVIDED:
            own = own / length[:, None]
        tl.store(out + at, own.to(out.dtype.element_ty), mask=within)


def unit(x: Tensor, dtype: torch.dtype, norm: Tensor | None = None) -> Tensor:
    """Rows of x (R, D) at unit length; their lengths go to norm (R, 1)."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    grid, options = _row_launch(x)
    _unit_kernel[grid](x, out, out if norm is None else norm, *x.shape, MEASURE=norm is not None, **options)
    return out


def project(part: Tensor, x: Tensor, norm: Tensor, out: Tensor, *, divided: bool) -> None:
    """Take what points along x (R, D) out of part (R, D), divide by the length of x if it is not yet, into out."""
    grid, options = _row_launch(part)
    _project_kernel[grid](part, x.contiguous(), norm, out, *part.shape, DIVIDED=divided, **options)


class Observe:
    """As `chunked.Observe`, with a figure a tile of columns rather than one a block: each (N, tiles)."""

    def __init__(
        self,
        alpha: Tensor,
        kind: Precision,
        target: Tensor,
        prototypes: int,
        classes: int,
        width: int,
        spreads: bool,
        ranked: bool,
    ) -> None:
        self.alpha, self.target, self.prototypes = alpha.contiguous(), target.contiguous(), prototypes
        samples, total = target.shape[0], tiles(classes, width, prototypes)
        self.tiles_before = -(-width // tile_shape(prototypes)["CLASSES"]) / width  # tiles a class
        self.own = alpha.new_full((samples, prototypes), torch.nan)
        self.masses = alpha.new_empty(samples, total)
        self.best = alpha.new_empty(samples, total if ranked else 0)
        self.spread = alpha.new_empty(samples, total if spreads else 0)
        self.options = _tile_options(alpha, kind, prototypes) | {"RANKED": ranked, "SPREAD": spreads, "RANGE": RANGE}

    def __call__(self, t: Tensor, first: int) -> None:
        """Look at the cosines t (N, c P) of the classes from `first` on."""
        classes = t.shape[1] // self.prototypes
        grid, launch = _tile_launch(t.shape[0], classes, self.prototypes, *OBSERVE)
        before = round(first * self.tiles_before)
        figures = (x[:, before:] if x.shape[1] else x for x in (self.masses, self.best, self.spread))
        _observe_kernel[grid](
            t,
            self.alpha,
            self.target,
            self.own,
            *figures,
            t.shape[0],
            classes,
            first,
            t.stride(0),
            self.masses.stride(0),
            **self.options,
            **launch,
        )

    def conclude(self, ignored: int, smoothing: float, classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `chunked.Observe.conclude`."""
        samples, tiles = self.masses.shape
        ranked, spreads = self.options["RANKED"], self.options["SPREAD"]
        nll, z, likelihood = (self.masses.new_empty(samples) for _ in range(3))
        right = self.masses.new_empty(samples if ranked else 0, dtype=torch.bool)
        _conclude_kernel[(-(-samples // 4),)](
            self.masses,
            self.own,
            self.spread,
            self.best,
            self.target,
            nll,
            right,
            z,
            likelihood,
            samples,
            tiles,
            ignored,
            smoothing,
            smoothing / classes,
            P=self.prototypes,
            SLOTS=_slots(self.prototypes),
            RANKED=ranked,
            SPREAD=spreads,
            ROWS=4,
            BLOCK=256,
            num_warps=4,
        )
        return nll, right, z, likelihood


class Slopes:
    """As `chunked.Slopes`."""

    def __init__(
        self,
        alpha: Tensor,
        kind: Precision,
        target: Tensor,
        gradient: Tensor,
        z: Tensor,
        likelihood: Tensor,
        prototypes: int,
        classes: int,
        ignored: int,
        smoothing: float,
    ) -> None:
        self.alpha, self.target = alpha.contiguous(), target.contiguous()
        self.gradient, self.z, self.likelihood, self.ignored = gradient, z, likelihood, ignored
        self.prototypes, self.dtype = prototypes, kind.slopes
        self.everywhere, self.label = smoothing / classes, 1 - smoothing
        self.options = _tile_options(alpha, kind, prototypes) | {"SMOOTH": smoothing > 0}
        self.sums: list[Tensor] = []

    def __call__(self, t: Tensor, first: int, norm: Tensor, spend: bool, products: Products | sparse.Tiles) -> Tensor:
        """Slopes (N, c P) of the classes from `first` on, written over the cosines if `spend`; norm (c P, 1).

        Where `products` are of some tiles alone, those alone are written.
        """
        classes = t.shape[1] // self.prototypes
        grid, launch = _tile_launch(t.shape[0], classes, self.prototypes, *SLOPES)
        found = (
            t.view(self.dtype) if spend else torch.empty_strided(t.shape, t.stride(), dtype=self.dtype, device=t.device)
        )
        skipped: tuple[Any, ...] = found, 0, found
        if isinstance(products, sparse.Tiles):
            skipped = products.active, products.active.stride(0), products.order
        # Sums of tiles that are left out stay zero, as do those of a_0, which moves all scores alike.
        sums = torch.zeros(self.alpha.shape[0], grid[0] * grid[1], dtype=torch.float32, device=t.device)
        _slopes_kernel[grid](
            t,
            self.alpha,
            self.target,
            self.gradient,
            self.z,
            self.likelihood,
            norm,
            found,
            sums,
            *skipped,
            self.everywhere,
            self.label,
            t.shape[0],
            classes,
            first,
            self.ignored,
            self.gradient.stride(0),
            t.stride(0),
            found.stride(0),
            SPARSE=sparse.ROWS if isinstance(products, sparse.Tiles) else 0,
            **self.options,
            **launch,
        )
        self.sums.append(sums.sum(1))
        return found

    def moments(self) -> Tensor:
        """dL/dalpha (M + 3,) of all blocks so far."""
        if len(self.sums) == 1:
            return self.sums[0]
        return torch.stack(self.sums).sum(0) if self.sums else torch.zeros_like(self.alpha)


def plan(
    masses: Tensor,
    z: Tensor,
    likelihood: Tensor,
    weight: Tensor,
    target: Tensor,
    prototypes: int,
    classes: int,
    width: int,
    negligible: float,
) -> sparse.Plan | None:
    """See `sparse.plan`."""
    shape = tile_shape(prototypes)
    tiles_of_block = -(-min(width, classes) // shape["CLASSES"])
    return sparse.plan(masses, z, likelihood, weight, target, shape, tiles_of_block, negligible)


def _tile_options(alpha: Tensor, kind: Precision, prototypes: int) -> dict[str, Any]:
    return {
        **tile_shape(prototypes),
        "DEGREE": alpha.shape[0] - kernels.END_POINTS - 1,
        "TOLERANCE": kernels.default_tolerance(kind.real) if kind.ends else 0.0,
    }


def _tile_launch(
    samples: int, classes: int, prototypes: int, rows: int, warps: int
) -> tuple[tuple[int, int], dict[str, int]]:
    shape = tile_shape(prototypes)
    rows = min(
        rows, int(triton.next_power_of_2(samples)), max(1, rows * COLUMNS // (shape["CLASSES"] * shape["SLOTS"]))
    )
    return (-(-classes // shape["CLASSES"]), -(-samples // rows)), {"ROWS": rows, "num_warps": warps}


def _row_launch(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    block = min(1024, max(16, int(triton.next_power_of_2(x.shape[1]))))
    rows = 4096 // block
    return (-(-x.shape[0] // rows),), {"ROWS": rows, "BLOCK": block, "num_warps": 4}
