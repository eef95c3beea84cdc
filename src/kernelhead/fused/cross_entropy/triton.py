"""The passes over a block of cosines as Triton kernels, for CUDA. See `blocks`. Needs triton.

| (8192, 2304) features, 131,072 classes, bfloat16, H200 | ms per step |   GB |  lab/results/bench/loss.json
| triton, mode="speed"                                   |        24.6 |  2.9 |
| triton, mode="memory"                                  |        34.4 |  0.9 |
| powers of t under torch.compile                        |        30.5 | 13.5 |
| linear layer under torch.compile                       |        23.8 |  2.8 |
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from kernelhead import kernels
from kernelhead.fused.cross_entropy import chunked
from kernelhead.fused.cross_entropy.blocks import Precision, Settings
from kernelhead.fused.cross_entropy.triton_kernels import (
    COLUMNS,
    observe_kernel,
    project_kernel,
    slopes_kernel,
    tile_shape,
    unit_kernel,
)

TILE = (32, 4)  # its rows, and the warps of its program: the fastest on an H200, found by benchmarks/loss.py, --tiles


def unit(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `chunked.unit`."""
    x = x.contiguous()
    out, norm = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    grid, options = _row_launch(x)
    unit_kernel[grid](x, out, norm, *x.shape, **options)
    return out, norm


def project(part: Tensor, x: Tensor, norm: Tensor, out: Tensor) -> None:
    """As `chunked.project`."""
    grid, options = _row_launch(part)
    project_kernel[grid](part, x.contiguous(), norm, out, *part.shape, **options)


class Observe(chunked.Observe):
    """As `chunked.Observe`, with a number per tile of columns."""

    def __init__(self, alpha: Tensor, target: Tensor, settings: Settings, kind: Precision) -> None:
        self.tiles = -(-settings.width // tile_shape(settings.prototypes)["CLASSES"])
        super().__init__(alpha, target, settings, kind, self.tiles)

    def __call__(self, t: Tensor, first: int) -> None:
        """Look at the cosines t (N, c P) of the classes from `first` on."""
        grid, options = _tile_launch(t, self.alpha, self.settings, self.kind)
        before = first // self.settings.width * self.tiles
        masses, spread = self.masses[:, before:], self.spread[:, before:]
        sizes = t.shape[0], t.shape[1] // self.settings.prototypes, first, t.stride(0), masses.stride(0)
        inputs = t, self.alpha, self.target
        observe_kernel[grid](*inputs, self.own, masses, spread, *sizes, RANGE=chunked.RANGE, **options)


class Slopes(chunked.Slopes):
    """As `chunked.Slopes`."""

    def __call__(self, t: Tensor, first: int, norm: Tensor, spend: bool) -> Tensor:
        """Slopes (N, c P) of the classes from `first` on, written over the cosines if `spend`; norm (c P, 1)."""
        classes, smoothing, dtype = t.shape[1] // self.settings.prototypes, self.settings.smoothing, self.kind.slopes
        grid, options = _tile_launch(t, self.alpha, self.settings, self.kind)
        found = t.view(dtype) if spend else torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)
        # The sums of a_0, which moves all scores alike, stay zero.
        sums = torch.zeros(self.sums.shape[0], grid[0] * grid[1], dtype=torch.float32, device=t.device)
        inputs = t, self.alpha, self.target, self.gradient, self.z, self.likelihood, norm
        numbers = smoothing / self.settings.total, 1 - smoothing, t.shape[0], classes, first
        slopes_kernel[grid](*inputs, found, sums, *numbers, t.stride(0), found.stride(0), **options)
        self.sums += sums.sum(1)
        return found


def _row_launch(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants of a kernel over the rows of x."""
    block = min(1024, max(16, int(triton.next_power_of_2(x.shape[1]))))
    rows = 4096 // block
    return (-(-x.shape[0] // rows),), {"ROWS": rows, "BLOCK": block, "num_warps": 4}


def _tile_launch(
    t: Tensor, alpha: Tensor, settings: Settings, kind: Precision
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and constants of a kernel over the tiles of t (N, c P)."""
    shape, (rows, warps) = tile_shape(settings.prototypes), TILE
    most = max(1, rows * COLUMNS // (shape["CLASSES"] * shape["SLOTS"]))
    rows = min(rows, int(triton.next_power_of_2(t.shape[0])), most)
    constants = {
        "DEGREE": alpha.shape[0] - kernels.END_POINTS - 1,
        "TOLERANCE": kernels.rounding(kind.real) if kind.ends else 0.0,
        "SMOOTH": settings.smoothing > 0,
    }
    grid = -(-(t.shape[1] // settings.prototypes) // shape["CLASSES"]), -(-t.shape[0] // rows)
    return grid, {**shape, **constants, "ROWS": rows, "num_warps": warps}
