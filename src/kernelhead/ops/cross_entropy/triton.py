"""The passes over a block of cosines as Triton kernels, for CUDA. See `blocks`. Needs triton."""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from kernelhead import kernels
from kernelhead.ops.cross_entropy import sparse
from kernelhead.ops.cross_entropy.chunked import RANGE
from kernelhead.ops.cross_entropy.products import Precision, Products
from kernelhead.ops.cross_entropy.rows import project, unit
from kernelhead.ops.cross_entropy.tiles import (
    COLUMNS,
    conclude_kernel,
    observe_kernel,
    slopes_kernel,
    tile_shape,
    tiles,
)

__all__ = ["Observe", "Slopes", "plan", "project", "tiles", "unit"]

# Rows of a tile and warps of its program: the fastest on an H200, found by benchmarks/loss.py, --tiles.
OBSERVE = (32, 4)
SLOPES = (32, 4)


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
        self.width = width
        self.own = alpha.new_full((samples, prototypes), torch.nan)
        self.masses = alpha.new_empty(samples, total)
        self.best = alpha.new_empty(samples, total if ranked else 0)
        self.spread = alpha.new_empty(samples, total if spreads else 0)
        self.options = _tile_options(alpha, kind, prototypes) | {"RANKED": ranked, "SPREAD": spreads, "RANGE": RANGE}

    def __call__(self, t: Tensor, first: int) -> None:
        """Look at the cosines t (N, c P) of the classes from `first` on."""
        classes = t.shape[1] // self.prototypes
        grid, launch = _tile_launch(t.shape[0], classes, self.prototypes, *OBSERVE)
        before = first // self.width * -(-self.width // self.options["CLASSES"])  # tiles of the blocks before
        figures = (x[:, before:] if x.shape[1] else x for x in (self.masses, self.best, self.spread))
        observe_kernel[grid](
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
        conclude_kernel[(-(-samples // 4),)](
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
            SLOTS=self.options["SLOTS"],
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
        slopes_kernel[grid](
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
