"""Positive definite kernels on the sphere, as functions of the cosine t = <w, f>.

Every radial kernel that is positive definite on every sphere is (Schoenberg; the paper's Theorem 4.3)

    k(t) = sum_{m >= 0} a_m t^m  +  a_{-1} ([t = 1] - [t = -1])  +  a_{-2} [t = 1 or t = -1],     all a >= 0.

Coefficients are always a vector `alpha` of length M + 3, ordered a_{-2}, a_{-1}, a_0 .. a_M. The linear, polynomial
and Gaussian kernels are points of the same cone: `*_coefficients` gives each as such a vector.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

END_POINTS = 2  # how many coefficients of alpha stand before a_0


def default_tolerance(dtype: torch.dtype) -> float:
    """How far from +-1 a cosine of equal or opposite vectors may land by rounding: 64 machine epsilons."""
    return 64 * torch.finfo(dtype).eps


def end_points(t: Tensor, tolerance: float | None = None) -> Tensor:
    """The kernel k_odd(t) = [t = 1] - [t = -1], up to `tolerance`. Its square is k_even. No gradient flows to t."""
    if tolerance is None:
        tolerance = default_tolerance(t.dtype)
    return F.hardshrink(t.detach(), 1 - tolerance).sign()


def horner(t: Tensor, coefficients: Sequence[Tensor], *, in_place: bool = False) -> Tensor:
    """sum_m c_m t^m by Horner's rule. t (...), coefficients c_0 .. c_M, each () -> (...).

    `in_place` works in one buffer, which stays in the cache; autograd cannot follow it.
    """
    if len(coefficients) < 2:
        return torch.zeros_like(t) + sum(coefficients)
    # The first step as two scalar operations: torch is slower at one addcmul with two scalars.
    value = torch.mul(t, coefficients[-1])
    buffer = value if in_place else None
    value = torch.add(value, coefficients[-2], out=buffer)
    for coefficient in reversed(coefficients[:-2]):
        value = torch.addcmul(coefficient, value, t, out=buffer)
    return value


def power_series(t: Tensor, alpha: Tensor, *, in_place: bool = False) -> Tensor:
    """sum_m a_m t^m, the kernel without its end-point terms. t (...), alpha (M + 3,) -> (...)."""
    return horner(t, alpha.unbind()[END_POINTS:], in_place=in_place)


def series(t: Tensor, alpha: Tensor, *, tolerance: float | None = None, in_place: bool = False) -> Tensor:
    """The kernel k(t) of the paper's equation 8. t (...), alpha (M + 3,) -> (...).

    `tolerance`: t counts as +-1 where it is within that of +-1; None is 64 machine epsilons of t's dtype. In half
    precision that would be half of the interval: a rounded cosine cannot tell t = 1 from its neighbours, and with None
    the end-point terms count as zero there.
    """
    if tolerance is None and t.dtype in (torch.float16, torch.bfloat16):
        return power_series(t, alpha, in_place=in_place)
    odd = end_points(t, tolerance)
    value = power_series(t, alpha, in_place=in_place)
    return torch.addcmul(value, odd, torch.addcmul(alpha[1], odd, alpha[0]))


def series_derivative(t: Tensor, alpha: Tensor) -> Tensor:
    """k'(t) = sum_m m a_m t^(m - 1) by Horner's rule. The end-point terms have no derivative to give."""
    powers = alpha[END_POINTS + 1 :]
    orders = torch.arange(1, powers.shape[0] + 1, dtype=alpha.dtype, device=alpha.device)
    return horner(t, (powers * orders).unbind())


def linear(t: Tensor) -> Tensor:
    """The linear kernel, k(t) = t."""
    return t


def polynomial(t: Tensor, degree: int = 10) -> Tensor:
    """The inhomogeneous polynomial kernel scaled to k(1) = 1, k(t) = ((1 + t) / 2)^degree."""
    return ((1 + t) / 2) ** degree


def rbf(t: Tensor, gamma: float = 1.0) -> Tensor:
    """The Gaussian kernel exp(-gamma |u - v|^2) on the unit sphere, k(t) = exp(-2 gamma (1 - t))."""
    return torch.exp(2 * gamma * (t - 1))


def linear_coefficients() -> Tensor:
    """`linear` as alpha (4,)."""
    return torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)


def polynomial_coefficients(degree: int = 10) -> Tensor:
    """`polynomial` as alpha (degree + 3,): binomial coefficients over 2^degree."""
    powers = [math.comb(degree, m) / 2**degree for m in range(degree + 1)]
    return torch.tensor([0.0, 0.0, *powers], dtype=torch.float64)


def rbf_coefficients(gamma: float = 1.0, degree: int | None = None) -> Tensor:
    """`rbf` as alpha (degree + 3,): a_m = exp(-2 gamma) (2 gamma)^m / m!.

    The terms left out add up to no more than 1 - sum(alpha). `degree=None` takes as many as it needs for that to
    fall below 1e-9, which float32 cannot tell from the Gaussian itself.
    """
    powers: list[float] = []
    remainder = 1.0
    while len(powers) <= degree if degree is not None else remainder > 1e-9:
        m = len(powers)
        powers.append(math.exp(-2 * gamma + m * math.log(2 * gamma) - math.lgamma(m + 1)))
        remainder -= powers[-1]
        if degree is None and m > 2 * gamma and powers[-1] < 1e-12:  # rounding of the sum itself, at large gamma
            break
    return torch.tensor([0.0, 0.0, *powers], dtype=torch.float64)


def fixed_coefficients(kernel: str, degree: int, gamma: float) -> Tensor | None:
    """The coefficients of the fixed kernel called "linear", "polynomial" or "rbf", up to its scale; None for others."""
    if kernel == "linear":
        return linear_coefficients()
    if kernel == "polynomial":
        return polynomial_coefficients(degree)
    if kernel == "rbf":
        return rbf_coefficients(gamma)
    return None


def truncate(alpha: Tensor, degree: int) -> Tensor:
    """Cut a series at `degree`, giving the weight of what is cut to the end-point kernels it approaches.

    As m grows, t^m tends to k_even for even m and to k_odd for odd m (the proof of the paper's Theorem 4.3), so the
    cut terms go to a_{-2} and a_{-1}. The result agrees with the whole series at t = +-1, and elsewhere to within
    |t|^(degree + 1) times the sum of the coefficients cut.
    """
    kept, cut = alpha[: END_POINTS + degree + 1], alpha[END_POINTS + degree + 1 :]
    first_is_odd = (degree + 1) % 2 == 1
    odd, even = (cut[0::2], cut[1::2]) if first_is_odd else (cut[1::2], cut[0::2])
    moved = torch.stack([even.sum(), odd.sum()])
    return torch.cat([kept[:END_POINTS] + moved, kept[END_POINTS:]])
