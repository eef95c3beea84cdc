"""Lengths of features and weights as Triton kernels: rows to unit length, gradients back from it. Needs triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


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


def _row_launch(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    block = min(1024, max(16, int(triton.next_power_of_2(x.shape[1]))))
    rows = 4096 // block
    return (-(-x.shape[0] // rows),), {"ROWS": rows, "BLOCK": block, "num_warps": 4}
