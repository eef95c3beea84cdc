"""The kernel averaged over places as a few Triton kernels, for products in half precision on CUDA. Needs triton.

The cosines t (N, L, K) of N samples with L places and K weights never leave the registers: each kernel computes those
of a tile again rather than write and read them. Forward, a program keeps a tile of weights, goes through samples, and
adds up the powers of t over the places of each. Backward, with G = g k'(t) / L,

    dL/df = (G w_hat, less what points along f) / |f|      a program a sample, or 64 places of it: through all weights
    dL/dw = (G^T f_hat, less what points along w) / |w|    a program a tile of weights: through some of the samples

and the parts of dL/dw, and of dL/dalpha, are added up afterwards: no atomics, so that the same numbers give the same
bits, whatever else runs on the device. Coefficients are read on the device: nothing waits for it.

Unit vectors are float16: they fit its range, and a kernel multiplies the error of a cosine by k'(t), so that the three
bits it has over bfloat16 are worth having. Cosines are never rounded. G has no such range, and is bfloat16.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from kernelhead import kernels
from kernelhead.ops.cross_entropy.rows import unit


class Tiles(NamedTuple):
    """How a kernel is launched: tiles of cosines of at most `places` by `weights`, and how many programs are wanted.

    Those of dL/df are as many as there are samples, or pieces of samples.
    """

    places: int
    weights: int
    warps: int
    stages: int
    programs: int = 0


# By width of the features, up to it. A program holds whole vectors, wider ones in the registers of more warps.
# Wanted are four and two programs for each of 132 multiprocessors. See benchmarks/pool.py, --tiles.
POOL = {128: Tiles(64, 64, 4, 2, 528), 256: Tiles(64, 64, 8, 2, 264)}
FEATURES = {128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 2)}
WEIGHT = {128: Tiles(64, 64, 4, 2, 264), 256: Tiles(64, 64, 8, 2, 132)}
PARTS = 32  # of dL/dw, at most
ELEMENTS = 256  # of dL/dw that a program adds up
BLOCK = 1024  # values that a program of dL/dalpha takes


@triton.jit
def _vectors(x, row, exists, width, WIDTH: tl.constexpr):
    """Rows of x (R, width), zeros where there are none. row, exists (B,) -> (B, WIDTH)."""
    d = tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * width + d[None, :]
    return tl.load(x + at, mask=exists[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def _orders(alpha, DEGREE: tl.constexpr):
    """Coefficients of k', m a_m for m = 1 .. DEGREE, of alpha = a_{-2}, a_{-1}, a_0 .. a_DEGREE."""
    slopes = ()
    for m in tl.static_range(1, DEGREE + 1):
        slopes += (m * tl.load(alpha + 2 + m),)
    return slopes


@triton.jit
def _derivative(t, slopes, DEGREE: tl.constexpr):
    """k'(t) by Horner's rule."""
    value = tl.zeros_like(t) + slopes[DEGREE - 1]
    for step in tl.static_range(DEGREE - 1):
        value = value * t + slopes[DEGREE - 2 - step]
    return value


@triton.jit
def _tangent(total, x, norm, row, exists):
    """Take what points along the rows of x, unit vectors, out of those of total, and divide by the lengths."""
    x = x.to(tl.float32)
    along = tl.sum(total * x, 1) / tl.maximum(tl.sum(x * x, 1), 0.5)  # rounded, they are not quite unit vectors; or 0
    return (total - along[:, None] * x) * (1.0 / tl.load(norm + row, mask=exists, other=1.0))[:, None]


@triton.jit(do_not_specialize=["group"])
def _pool_kernel(
    features,  # (N, L, D), unit vectors
    weight,  # (K, D), unit vectors
    alpha,
    value,  # (N, K)
    powers,  # (DEGREE, N, K), if they are wanted: means over places of t, t^2, ..
    samples,
    places,
    classes,
    width,
    group,  # samples of a program
    DEGREE: tl.constexpr,
    PLACES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    q = tl.program_id(0) * WEIGHTS + tl.arange(0, WEIGHTS)
    first = tl.program_id(1) * group
    w = _vectors(weight, q, q < classes, width, WIDTH)
    for n in range(first, tl.minimum(first + group, samples)):
        sums = (tl.zeros((WEIGHTS,), tl.float32),) * DEGREE
        for begin in range(0, places, PLACES):
            place = begin + tl.arange(0, PLACES)
            f = _vectors(features, n * places + place, place < places, width, WIDTH)
            # Places are columns: a warp has all of them, and adds up alone. Beyond the last, t = 0 adds nothing.
            t = tl.dot(w, tl.trans(f))
            power = t
            more = ()
            for m in tl.static_range(DEGREE):
                more += (sums[m] + tl.sum(power, 1),)
                power = power * t
            sums = more
        at = (n * classes + q).to(tl.int64)
        result = tl.zeros((WEIGHTS,), tl.float32) + tl.load(alpha + 2)
        kept = at
        for m in tl.static_range(DEGREE):
            mean = sums[m] * (1.0 / places)
            result += tl.load(alpha + 3 + m) * mean
            if powers is not None:
                tl.store(powers + kept, mean, mask=q < classes)
                kept += samples * classes
        tl.store(value + at, result, mask=q < classes)


@triton.jit
def _features_kernel(
    features,
    weight,
    norm,  # (N, L), of the features
    alpha,
    gradient,  # (N, K)
    out,  # (N, L, D)
    places,
    classes,
    width,
    DEGREE: tl.constexpr,
    PLACES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    n = tl.program_id(0)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    row = n * places + place
    f = _vectors(features, row, place < places, width, WIDTH)
    slopes = _orders(alpha, DEGREE)
    total = tl.zeros((PLACES, WIDTH), tl.float32)
    for begin in range(0, classes, WEIGHTS):
        q = begin + tl.arange(0, WEIGHTS)
        w = _vectors(weight, q, q < classes, width, WIDTH)
        g = tl.load(gradient + n * classes + q, mask=q < classes, other=0.0)
        slope = _derivative(tl.dot(f, tl.trans(w)), slopes, DEGREE) * g[None, :]
        total = tl.dot(slope.to(tl.bfloat16), w.to(tl.bfloat16), total)
    total = _tangent(total * (1.0 / places), f, norm, row, place < places)
    d = tl.arange(0, WIDTH)
    within = (place < places)[:, None] & (d < width)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * width + d[None, :], total.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["group"])
def _weight_kernel(
    features,
    weight,
    alpha,
    gradient,
    partial,  # (parts, K, D)
    samples,
    places,
    classes,
    width,
    group,  # samples of a part
    DEGREE: tl.constexpr,
    PLACES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    q = tl.program_id(0) * WEIGHTS + tl.arange(0, WEIGHTS)
    first = tl.program_id(1) * group
    w = _vectors(weight, q, q < classes, width, WIDTH)
    slopes = _orders(alpha, DEGREE)
    total = tl.zeros((WEIGHTS, WIDTH), tl.float32)
    chunks = tl.cdiv(places, PLACES)
    for step in range((tl.minimum(first + group, samples) - first) * chunks):
        n = first + step // chunks
        place = step % chunks * PLACES + tl.arange(0, PLACES)
        f = _vectors(features, n * places + place, place < places, width, WIDTH)
        g = tl.load(gradient + n * classes + q, mask=q < classes, other=0.0)
        slope = _derivative(tl.dot(w, tl.trans(f)), slopes, DEGREE) * g[:, None]
        total = tl.dot(slope.to(tl.bfloat16), f.to(tl.bfloat16), total)
    d = tl.arange(0, WIDTH)
    to = partial + (tl.program_id(1) * classes + q).to(tl.int64)[:, None] * width + d[None, :]
    tl.store(to, total * (1.0 / places), mask=(q < classes)[:, None] & (d < width)[None, :])


@triton.jit
def _conclude_kernel(
    partial,
    weight,
    norm,  # (K,), of the weights
    out,  # (K, D)
    classes,
    width,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in tl.static_range(PARTS):  # unrolled: no reading waits for another
        total += _vectors(partial, part * classes + q, q < classes, width, WIDTH)
    total = _tangent(total, _vectors(weight, q, q < classes, width, WIDTH), norm, q, q < classes)
    d = tl.arange(0, WIDTH)
    within = (q < classes)[:, None] & (d < width)[None, :]
    tl.store(out + q.to(tl.int64)[:, None] * width + d[None, :], total.to(out.dtype.element_ty), mask=within)


@triton.jit
def _alpha_kernel(powers, gradient, partial, size, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradient + at, mask=at < size, other=0.0)
    own = partial + tl.program_id(0) * (DEGREE + 3)
    tl.store(own, 0.0)
    tl.store(own + 1, 0.0)
    tl.store(own + 2, tl.sum(g, 0))
    of = powers + at.to(tl.int64)
    for m in tl.static_range(DEGREE):
        tl.store(own + 3 + m, tl.sum(g * tl.load(of, mask=at < size, other=0.0), 0))
        of += size


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (..., D), float16, and lengths (..., 1), float32, of x (..., D); a zero vector stays one."""
    norm = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return unit(x.reshape(-1, x.shape[-1]), torch.float16, norm).view(x.shape), norm


def pool(features: Tensor, weight: Tensor, alpha: Tensor, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Mean over places of the kernel (N, K), and if `keep` of the cosines' powers (M, N, K).

    features (N, L, D), weight (K, D): unit vectors; alpha (M + 3,), float32.
    """
    samples, classes = features.shape[0], weight.shape[0]
    value = alpha.new_empty(samples, classes)
    powers = alpha.new_empty(_degree(alpha), samples, classes) if keep else None
    grid, group, options = _launch(POOL, features, weight, alpha)
    _pool_kernel[grid](features, weight, alpha, value, powers, *features.shape[:2], *weight.shape, group, **options)
    return value, powers


def features_gradient(
    gradient: Tensor, features: Tensor, norm: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    """dL/df (N, L, D) in `dtype`, of f with unit vectors `features` and lengths `norm`; gradient (N, K)."""
    samples, places, _ = features.shape
    out = torch.empty_like(features, dtype=dtype)
    options = _options(FEATURES, features, alpha)
    _features_kernel[(samples, _cdiv(places, options["PLACES"]))](
        features, weight, norm, alpha, gradient, out, places, *weight.shape, **options
    )
    return out


def weight_gradient(
    gradient: Tensor, features: Tensor, weight: Tensor, norm: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    """dL/dw (K, D) in `dtype`, of w with unit vectors `weight` and lengths `norm`; gradient (N, K)."""
    classes, width = weight.shape
    grid, group, options = _launch(WEIGHT, features, weight, alpha, PARTS)
    parts = grid[1]
    partial = alpha.new_empty(parts, classes, width)
    _weight_kernel[grid](
        features, weight, alpha, gradient, partial, *features.shape[:2], classes, width, group, **options
    )
    out = torch.empty_like(weight, dtype=dtype)
    rows = max(1, ELEMENTS // options["WIDTH"])
    _conclude_kernel[(_cdiv(classes, rows),)](
        partial, weight, norm, out, classes, width, PARTS=parts, ROWS=rows, WIDTH=options["WIDTH"], num_warps=2
    )
    return out


def alpha_gradient(gradient: Tensor, powers: Tensor) -> Tensor:
    """dL/dalpha (M + 3,). gradient (N, K), powers (M, N, K)."""
    programs = _cdiv(gradient.numel(), BLOCK)
    partial = gradient.new_empty(programs, powers.shape[0] + kernels.END_POINTS + 1)
    _alpha_kernel[(programs,)](
        powers, gradient, partial, gradient.numel(), DEGREE=powers.shape[0], BLOCK=BLOCK, num_warps=4
    )
    return partial.sum(0)


def _launch(
    table: dict[int, Tiles], features: Tensor, weight: Tensor, alpha: Tensor, groups: int | None = None
) -> tuple[tuple[int, int], int, dict[str, Any]]:
    """Programs by tile of weights and group of samples, samples of a group, and options; at most so many groups."""
    samples, options = features.shape[0], _options(table, features, alpha)
    tiles = _cdiv(weight.shape[0], options["WEIGHTS"])
    wanted = max(1, _tiles(table, features).programs // tiles)
    group = _cdiv(samples, wanted if groups is None else min(wanted, groups))
    return (tiles, _cdiv(samples, group)), group, options


def _options(table: dict[int, Tiles], features: Tensor, alpha: Tensor) -> dict[str, Any]:
    how, (_, places, width) = _tiles(table, features), features.shape
    return {
        "DEGREE": _degree(alpha),
        "PLACES": min(how.places, max(16, triton.next_power_of_2(places))),
        "WEIGHTS": how.weights,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "num_warps": how.warps,
        "num_stages": how.stages,
    }


def _tiles(table: dict[int, Tiles], features: Tensor) -> Tiles:
    return next(tiles for widest, tiles in table.items() if features.shape[2] <= widest)


def _degree(alpha: Tensor) -> int:
    return alpha.shape[0] - kernels.END_POINTS - 1


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)
