"""Whether a kernel is positive definite, and on which spheres (Schoenberg 1942; the paper's section 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelhead import kernels

Array = NDArray[np.float64]
GRAM_POINTS = 128  # and as many opposite to them
ROUNDING = 1e-12  # of the sum of the coefficients


@dataclass(frozen=True)
class Definiteness:
    """What is known of a kernel k(<u, v>).

    `everywhere`: on the spheres of all dimensions, which is so exactly where no coefficient is negative; `negative`
    names those that are. `here`: on the unit sphere of the head's own D features, where some negative coefficients
    do no harm. The eigenvalues are the smallest and the largest of the Gram matrix of random points on that sphere and
    those opposite to them, `gram_points` in all: a negative one refutes, a positive one alone proves nothing.
    """

    everywhere: bool
    negative: tuple[str, ...]
    here: bool
    dimension: int
    gram_points: int
    smallest_eigenvalue: float
    largest_eigenvalue: float


def examine(alpha: Tensor, dimension: int) -> Definiteness:
    """Decide for coefficients alpha (M + 3,), float64, and the sphere in `dimension` dimensions."""
    values = alpha.tolist()
    negative = tuple(f"a_{index - kernels.END_POINTS}" for index, value in enumerate(values) if value < 0)
    random = torch.Generator().manual_seed(0)
    u = torch.randn(GRAM_POINTS, dimension, generator=random, dtype=torch.float64)
    u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
    u = torch.cat([u, -u])
    eigenvalues = torch.linalg.eigvalsh(kernels.series(u @ u.t(), alpha))
    return Definiteness(
        everywhere=not negative,
        negative=negative,
        here=not negative or _definite_on_sphere(values, dimension),
        dimension=dimension,
        gram_points=len(u),
        smallest_eigenvalue=eigenvalues[0].item(),
        largest_eigenvalue=eigenvalues[-1].item(),
    )


def _definite_on_sphere(alpha: Sequence[float], dimension: int) -> bool:
    """Whether k is positive definite on one sphere: no coefficient of its harmonic expansion may be negative.

    The end-point terms must not be negative by themselves: a polynomial has finite rank, so that on enough points
    they are all that is left in some directions. In one dimension, where t is always 1 or -1, they are 1 and t.
    """
    ends, powers = list(alpha[: kernels.END_POINTS]), list(alpha[kernels.END_POINTS :])
    if dimension == 1:
        powers[0] += ends[0]
        powers[1] += ends[1]
        ends = [0.0, 0.0]
    harmonics = harmonic_coefficients(powers, dimension)
    least = -ROUNDING * float(np.abs(np.asarray(alpha)).sum())
    return min(ends) >= 0 and float(harmonics.min()) >= least


def harmonic_coefficients(powers: Sequence[float], dimension: int) -> Array:
    """Coefficients b_0 .. b_M of sum_m a_m t^m in Gegenbauer polynomials P_n of the sphere, scaled to P_n(1) = 1.

    By Horner's rule, from (2 n + D - 2) t P_n = (n + D - 2) P_{n + 1} + n P_{n - 1}.
    """
    result = np.zeros(len(powers))
    for power in reversed(powers):
        times_t = np.zeros_like(result)
        for n, value in enumerate(result[:-1]):
            scale = 2 * n + dimension - 2
            up = 1.0 if n == 0 else (n + dimension - 2) / scale
            times_t[n + 1] += up * value
            if n:
                times_t[n - 1] += n / scale * value
        result = times_t
        result[0] += power
    return result
