"""The backward pass without tiles of samples and classes whose probabilities are negligible. Needs triton.

|dL/dt| <= p k'(1): where the classes of a tile have next to no probability for any of its samples, its part of every
gradient can be left out. How much probability each tile holds is known from the forward pass. Left out are tiles with
less than an even share of the part `negligible` of all probability that went to wrong classes, and none that holds a
label: together they hold no more than that part. Samples are taken in the order of their own wrong probability, so that
those which the head is sure of share tiles: late in a training, with a large k(1) / T, that is most of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from kernelhead.ops.cross_entropy.products import Products

ROWS = 128  # samples of a tile
WIDTH = 128  # features of a tile
# Share of tiles below which products over single tiles are faster than whole ones: benchmarks/loss.py, --sparse.
PAYS_BELOW = 0.4


class Plan(NamedTuple):
    """Which tiles count. R tiles of samples, T tiles of classes in each of B blocks."""

    order: Tensor
    """(R ROWS,): samples, those that are most wrong first; the number of samples where there is none."""
    active: Tensor
    """(R, B T), bool."""
    by_row: Tensor
    """(B, R, T): the tiles of a block that count for samples r come first."""
    row_counts: Tensor
    """(B, R): how many."""
    by_column: Tensor
    """(B, T, R), and the same the other way round."""
    column_counts: Tensor
    """(B, T)."""
    counts: list[int]
    """How many in each block, of R T."""
    shape: dict[str, int]
    """Of a tile's columns: P, CLASSES, SLOTS."""

    def products(self, block: int) -> "Products | Tiles | None":
        """The products of a block: whole, or of the tiles that count where that is faster; None if none counts."""
        if self.counts[block] == 0:
            return None
        pays = self.counts[block] < PAYS_BELOW * self.row_counts.shape[1] * self.column_counts.shape[1]
        return Tiles(self, block) if pays else Products()


def plan(
    masses: Tensor,
    z: Tensor,
    likelihood: Tensor,
    weight: Tensor,
    target: Tensor,
    shape: dict[str, int],
    tiles: int,
    negligible: float,
) -> Plan | None:
    """What to leave out, or None where that would not pay.

    masses (N, all tiles): log-mass of every tile; z, likelihood (N,): of all classes, and of a sample's own; weight
    (N,): how much the loss of each sample counts; `tiles` a block, of columns as `shape` says. Waits for the device.
    """
    samples, total = masses.shape
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    blocks = -(-total // tiles)
    rows = -(-samples // ROWS)
    wrong = torch.where(weight > 0, -torch.expm1(likelihood - z) * weight, 0.0).clamp_(min=0)
    order = wrong.argsort(descending=True, stable=True)
    mass = (masses - z[:, None]).exp_().mul_(weight[:, None])[order]
    mass = torch.nn.functional.pad(mass, (0, blocks * tiles - total, 0, rows * ROWS - samples))
    active = mass.view(rows, ROWS, blocks * tiles).sum(1) >= negligible * wrong.sum() / (rows * total)
    at = torch.arange(samples, device=target.device) // ROWS, target[order].clamp(min=0) // shape["CLASSES"]
    active.index_put_(at, active.new_ones(()))
    active[:, total:] = False
    of_block = active.view(rows, blocks, tiles).transpose(0, 1).contiguous()
    of_column = of_block.mT.contiguous()
    counts: list[int] = of_block.sum((1, 2)).tolist()
    if sum(counts) >= PAYS_BELOW * rows * total:
        return None
    by_row = of_block.to(torch.int8).argsort(dim=2, descending=True, stable=True).int()
    by_column = of_column.to(torch.int8).argsort(dim=2, descending=True, stable=True).int()
    row_counts, column_counts = of_block.sum(2).int(), of_column.sum(2).int()
    order = torch.nn.functional.pad(order, (0, rows * ROWS - samples), value=samples)
    return Plan(order, active, by_row, row_counts, by_column, column_counts, counts, shape)


@triton.jit
def _columns(tile, classes, P: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr):
    """Columns of a tile of classes, and which of them exist."""
    j = tl.arange(0, CLASSES * SLOTS)
    label = tile * CLASSES + j // SLOTS
    slot = j % SLOTS
    return label * P + slot, (label < classes) & (slot < P)


@triton.jit
def _cosines_kernel(
    features,
    weight,
    samples_order,
    active,
    active_stride,
    out,
    out_stride,
    samples,
    classes,
    width,
    P: tl.constexpr,
    CLASSES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Cosines of a tile, if it counts."""
    if tl.load(active + tl.program_id(1) * active_stride + tl.program_id(0)) != 0:
        row = tl.load(samples_order + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
        column, exists = _columns(tl.program_id(0), classes, P, CLASSES, SLOTS)
        total = tl.zeros((ROWS, CLASSES * SLOTS), tl.float32)
        for begin in range(0, width, DEPTH):
            d = begin + tl.arange(0, DEPTH)
            left_mask = (row < samples)[:, None] & (d < width)[None, :]
            left = tl.load(features + row[:, None] * width + d[None, :], mask=left_mask, other=0.0)
            right_mask = (d < width)[:, None] & exists[None, :]
            right = tl.load(weight + column[None, :].to(tl.int64) * width + d[:, None], mask=right_mask, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        at = out + row[:, None] * out_stride + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=(row < samples)[:, None] & exists[None, :])


@triton.jit
def _features_kernel(
    slopes,
    slopes_stride,
    weight,
    total,
    samples_order,
    order,
    counts,
    tiles,
    samples,
    classes,
    width,
    P: tl.constexpr,
    CLASSES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add slopes @ weight, over the tiles that count, to total."""
    row = tl.load(samples_order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = (row < samples)[:, None] & (d < width)[None, :]
    count = tl.load(counts + tl.program_id(0))
    if count > 0:
        found = tl.zeros((ROWS, WIDTH), tl.float32)
        for number in range(count):
            tile = tl.load(order + tl.program_id(0) * tiles + number)
            column, exists = _columns(tile, classes, P, CLASSES, SLOTS)
            mask = (row < samples)[:, None] & exists[None, :]
            left = tl.load(slopes + row[:, None] * slopes_stride + column[None, :], mask=mask, other=0.0)
            at = weight + column[:, None].to(tl.int64) * width + d[None, :]
            right = tl.load(at, mask=exists[:, None] & (d < width)[None, :], other=0.0)
            found = tl.dot(left, right, found, input_precision="ieee")
        at = total + row[:, None] * width + d[None, :]
        tl.store(at, tl.load(at, mask=within, other=0.0) + found, mask=within)


@triton.jit
def _weight_kernel(
    slopes,
    slopes_stride,
    features,
    out,
    samples_order,
    order,
    counts,
    row_tiles,
    samples,
    classes,
    width,
    P: tl.constexpr,
    CLASSES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write slopes^T @ features, over the tiles that count, to out."""
    column, exists = _columns(tl.program_id(0), classes, P, CLASSES, SLOTS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    found = tl.zeros((CLASSES * SLOTS, WIDTH), tl.float32)
    for number in range(tl.load(counts + tl.program_id(0))):
        tile = tl.load(order + tl.program_id(0) * row_tiles + number)
        row = tl.load(samples_order + tile * ROWS + tl.arange(0, ROWS))
        mask = (row < samples)[:, None] & exists[None, :]
        left = tl.load(slopes + row[:, None] * slopes_stride + column[None, :], mask=mask, other=0.0)
        at = features + row[:, None] * width + d[None, :]
        right = tl.load(at, mask=(row < samples)[:, None] & (d < width)[None, :], other=0.0)
        found = tl.dot(tl.trans(left), right, found, input_precision="ieee")
    at = out + column[:, None].to(tl.int64) * width + d[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=exists[:, None] & (d < width)[None, :])


class Tiles:
    """The three matrix products of a block, over the tiles that count."""

    def __init__(self, found: Plan, block: int) -> None:
        rows, tiles = found.by_row.shape[1:]
        self.plan, self.block, self.rows, self.tiles = found, block, rows, tiles
        self.active, self.order = found.active[:, block * tiles :], found.order
        self.options = {**found.shape, "ROWS": ROWS, "num_warps": 8, "num_stages": 3}

    def _used(self, columns: int) -> tuple[int, int]:
        """Classes, and the tiles of them, in a block that may be the last."""
        classes = columns // self.plan.shape["P"]
        return classes, -(-classes // self.plan.shape["CLASSES"])

    def cosines(self, unit: Tensor, unit_weight: Tensor, out: Tensor) -> None:
        """Out (N, c P) = unit (N, D) @ unit_weight^T (D, c P), where it counts."""
        (samples, width), (classes, used) = unit.shape, self._used(out.shape[1])
        sizes = self.order, self.active, self.active.stride(0), out, out.stride(0), samples, classes, width
        _cosines_kernel[(used, self.rows)](unit, unit_weight, *sizes, DEPTH=64, **self.options)

    def add_features(self, total: Tensor, slopes: Tensor, weight: Tensor) -> None:
        """Total (N, D) += slopes (N, c P) @ weight (c P, D)."""
        (samples, width), (classes, _) = total.shape, self._used(slopes.shape[1])
        order, counts = self.plan.by_row[self.block], self.plan.row_counts[self.block]
        sizes = self.order, order, counts, self.tiles, samples, classes, width
        grid = self.rows, -(-width // WIDTH)
        _features_kernel[grid](slopes, slopes.stride(0), weight, total, *sizes, WIDTH=WIDTH, **self.options)

    def of_weight(self, slopes: Tensor, unit: Tensor, out: Tensor) -> None:
        """Out (c P, D) = slopes^T (c P, N) @ unit (N, D)."""
        (samples, width), (classes, used) = unit.shape, self._used(slopes.shape[1])
        order, counts = self.plan.by_column[self.block], self.plan.column_counts[self.block]
        sizes = self.order, order, counts, self.rows, samples, classes, width
        grid = used, -(-width // WIDTH)
        _weight_kernel[grid](slopes, slopes.stride(0), unit, out, *sizes, WIDTH=WIDTH, **self.options)
