"""Kernel functions as a basis: what conjugate gradients need to know of it, and which points it has.

Scores f(x) = sum_j c_j k(z_j, x) + b. Up to some ten thousand samples the points z are all of them, and half of their
kernel matrix is kept. Beyond, they are landmarks, centres of clusters of the samples. The constant b is a kernel of its
own, `CONSTANT` everywhere.
"""

import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernels
from kernelhead.sklearn.samples import Array, Points

CONSTANT = 1.0
MAX_ROWS, MAX_PRODUCT = 50_000, 3e11  # of samples that are all points; of their square times the number of classes
RANK, RANK_SHARE = 1024, 24  # of the preconditioner where all samples are points; one in so many beyond
LANDMARKS = 4096
GRAM_SAMPLES = 4  # per landmark, of the preconditioner
LLOYD_STEPS, LLOYD_SAMPLES = 4, 16  # samples per landmark
BLOCK, STRIP = 1024, 64  # rows of a block; of a strip that stays in the cache with its kernel values
JITTER = 1e-6
MAX_WIDE = 2**28  # coordinates of all points


def kernel_values(a: Any, b: Any, alpha: Tensor) -> Tensor:
    """k(<a_i, b_j>) of points a (N, D) and b (M, D), which may be sparse matrices: (N, M)."""
    if not isinstance(a, Tensor):
        t = torch.from_numpy((a @ b.T).toarray()).to(alpha.device)
        return kernels.power_series(t, alpha.to(t), out=torch.empty_like(t))
    values, alpha = a.new_empty(len(a), len(b)), alpha.to(a)
    strip = STRIP if a.device.type == "cpu" else len(a)
    t, columns = values.new_empty(min(strip, len(a)), len(b)), b.T
    for rows, out in zip(torch.split(a, strip), torch.split(values, strip), strict=True):
        kernels.power_series(torch.mm(rows, columns, out=t[: len(rows)]), alpha, out=out)
    return values


def by_columns(thin: Tensor) -> Tensor:
    """Store a matrix (N, C) by columns: products with it take half the time."""
    return thin.T.contiguous().T


class LandmarkSystem:
    """Scores Phi w of samples, with features Phi (N, M + 1) in which the norm in the RKHS is that of w.

    Phi = [K(x, z) L^-T, sqrt(CONSTANT)] with K(z, z) = L L^T. Features are kept. With a `sample`, a system of samples
    at some indices, they are made anew in every pass, and the sample makes the preconditioner.
    """

    def __init__(
        self,
        points: Points,
        landmarks: Any,
        alpha: Tensor,
        dtype: torch.dtype,
        sample: "tuple[LandmarkSystem, Tensor] | None" = None,
    ) -> None:
        self.points, self.landmarks, self.alpha, self.dtype, self.sample = points, landmarks, alpha, dtype, sample
        self.size, self.whitening = landmarks.shape[0] + 1, torch.empty(0)
        self.kept: list[Tensor] | None = None
        if sample is not None:
            self.whitening = sample[0].whitening
            return
        double = landmarks.double() if isinstance(landmarks, Tensor) else landmarks.astype(np.float64)
        gram = kernel_values(double, double, alpha)
        gram.diagonal().add_(JITTER)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        self.whitening = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), eye, upper=False).T.to(dtype)
        self.kept = [self._raw(part) @ self.whitening for part in points.parts(BLOCK)]

    def _raw(self, part: slice) -> Tensor:
        return kernel_values(self.points.at(part), self.landmarks, self.alpha).to(self.dtype)

    def _blocks(self) -> Any:
        """Yield parts and their features, where these are kept, or kernel values."""
        for number, part in enumerate(self.points.parts(BLOCK)):
            yield part, self._raw(part) if self.kept is None else self.kept[number]

    def scores(self, w: Tensor) -> Tensor:
        inner = by_columns(w[:-1] if self.kept else self.whitening @ w[:-1])
        total = by_columns((math.sqrt(CONSTANT) * w[-1]).expand(len(self.points), -1))
        for part, block in self._blocks():
            total[part].addmm_(block, inner)
        return total

    def gradient(self, residuals: Tensor) -> Tensor:
        """Phi^T r. residuals (N, C) -> (M + 1, C)."""
        residuals = by_columns(residuals)
        total = by_columns(residuals.new_zeros(self.size - 1, residuals.shape[1]))
        for part, block in self._blocks():
            total.addmm_(block.T, residuals[part])
        total = total if self.kept else self.whitening.T @ total
        return torch.cat([total, math.sqrt(CONSTANT) * residuals.sum(0, keepdim=True)])

    def inner(self, gradient: Tensor, w: Tensor, scores: Tensor) -> float:
        return float((gradient * w).sum(dtype=torch.float64))

    def gram(self, curvature: Tensor, most: int | None = None) -> Tensor:
        """Phi^T V Phi (M + 1, M + 1), of second derivatives V of the loss (N,), estimated from `most` samples."""
        if self.sample is not None:
            system, index = self.sample
            return system.gram(curvature[index] * (len(curvature) / len(index)))
        gram, done = curvature.new_zeros(self.size, self.size, dtype=torch.float64), 0
        for part, block in self._blocks():
            padded = F.pad(block, (0, 1), value=math.sqrt(CONSTANT))
            gram += padded.T @ (padded * curvature[part, None])
            done = part.stop
            if done >= (GRAM_SAMPLES * self.size if most is None else most):
                break
        return gram * (len(curvature) / done)

    def precondition(self, gradient: Tensor, factor: Tensor, curvature: Tensor, ridge: float) -> Tensor:
        """(Phi^T V Phi + ridge)^-1 g, by a factor of the matrix."""
        return torch.cholesky_solve(gradient.double(), factor).to(gradient)

    def expansion(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return c (M, C) and b (C,)."""
        return self.whitening.double() @ w[:-1].double(), math.sqrt(CONSTANT) * w[-1].double()


class RowSystem:
    """Scores K c + CONSTANT 1^T c of samples that are all points, with one half of K (N, N) kept in tiles.

    The preconditioner is that of some samples as landmarks.
    """

    def __init__(self, points: Points, alpha: Tensor, dtype: torch.dtype, order: Array) -> None:
        self.landmarks, self.size = points.at(slice(None)), len(points)
        parts = list(points.parts(BLOCK))
        self.tiles = [
            (rows, columns, kernel_values(self.landmarks[rows], self.landmarks[columns], alpha).to(dtype))
            for i, rows in enumerate(parts)
            for columns in parts[: i + 1]
        ]
        self.basis = LandmarkSystem(
            points, points.at(np.sort(order[: max(RANK, self.size // RANK_SHARE)])), alpha, dtype
        )

    def scores(self, c: Tensor) -> Tensor:
        c = by_columns(c)
        total = by_columns((CONSTANT * c.sum(0)).expand_as(c))
        for rows, columns, tile in self.tiles:
            total[rows].addmm_(tile, c[columns])
            if rows != columns:
                total[columns].addmm_(tile.T, c[rows])
        return total

    def gradient(self, residuals: Tensor) -> Tensor:
        """The residuals: as a function in the RKHS, the gradient has them as coefficients."""
        return residuals

    def inner(self, gradient: Tensor, c: Tensor, scores: Tensor) -> float:
        return float((gradient * scores).sum(dtype=torch.float64))

    def gram(self, curvature: Tensor) -> Tensor:
        return self.basis.gram(curvature, self.size)  # Woodbury's identity needs all of it

    def precondition(self, gradient: Tensor, factor: Tensor, curvature: Tensor, ridge: float) -> Tensor:
        """(V Phi Phi^T + ridge)^-1 g, by Woodbury's identity."""
        inner = self.basis.precondition(self.basis.gradient(gradient), factor, curvature, ridge)
        return (gradient - curvature[:, None] * self.basis.scores(inner)) / ridge

    def expansion(self, c: Tensor) -> tuple[Tensor, Tensor]:
        return c.double(), CONSTANT * c.double().sum(0)


System = RowSystem | LandmarkSystem


def count_points(points: Points, num_classes: int) -> int:
    """Return how many points suit so many samples: all of them, or fewer the more there are."""
    n, width = len(points), int(points.width)
    memory = 2**34
    if points.device.type == "cuda":
        memory = torch.cuda.mem_get_info(points.device)[0]
    elif hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if n <= MAX_ROWS and n * n * num_classes <= MAX_PRODUCT and 8 * n * n <= memory and n * width <= MAX_WIDE:
        return n
    return min(LANDMARKS, max(1, MAX_WIDE // width))


def find_centres(points: Points, order: Array, count: int) -> Any:
    """Return centres of clusters of unit vectors, by Lloyd's steps on the sphere; of sparse samples, some of them."""
    if points.sparse:
        return points.at(np.sort(order[:count]))
    pool = points.at(np.sort(order[: LLOYD_SAMPLES * count]))
    centres = points.at(order[:count])
    for _ in range(LLOYD_STEPS):
        nearest = torch.cat([(part @ centres.T).argmax(1) for part in pool.split(BLOCK)])
        sums = torch.zeros_like(centres).index_add_(0, nearest, pool)
        centres = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums), centres)
    return centres
