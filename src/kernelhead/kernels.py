"""Positive definite kernels on the sphere, as functions of the cosine t = <w, f>.

Every radial kernel that is positive definite on every sphere is (Schoenberg; the paper's Theorem 4.3)

    k(t) = sum_{m >= 0} a_m t^m  +  a_{-1} ([t = 1] - [t = -1])  +  a_{-2} [t = 1 or t = -1],     all a >= 0.

Coefficients are always a vector `alpha` of length M + 3, ordered a_{-2}, a_{-1}, a_0 .. a_M. The linear, polynomial
and Gaussian kernels are points of the same cone: `fixed_coefficients` gives each as such a vector.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

END_POINTS = 2  # how many coefficients of alpha stand before a_0


def rounding(dtype: torch.dtype) -> float:
    """How far from +-1 a cosine of equal or opposite vectors may land by rounding: 64 machine epsilons."""
    return 64 * torch.finfo(dtype).eps


def end_points(t: Tensor) -> Tensor:
    """The kernel k_odd(t) = [t = 1] - [t = -1], up to rounding. Its square is k_even. No gradient flows to t."""
    return F.hardshrink(t.detach(), 1 - rounding(t.dtype)).sign()


def horner(t: Tensor, coefficients: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """sum_m c_m t^m by Horner's rule. t (...), coefficients c_0 .. c_M, each () -> (...).

    All steps work in the buffer `out`, which stays in the cache; autograd cannot follow them.
    """
    if len(coefficients) < 2:
        constant = torch.zeros_like(t) + sum(coefficients)
        return constant if out is None else out.copy_(constant)
    # The first step as two scalar operations: torch is slower at one addcmul with two scalars.
    value = torch.add(torch.mul(t, coefficients[-1], out=out), coefficients[-2], out=out)
    for coefficient in reversed(coefficients[:-2]):
        value = torch.addcmul(coefficient, value, t, out=out)
    return value


def power_series(t: Tensor, alpha: Tensor, *, out: Tensor | None = None) -> Tensor:
    """sum_m a_m t^m, the kernel without its end-point terms. t (...), alpha (M + 3,) -> (...)."""
    return horner(t, alpha.unbind()[END_POINTS:], out=out)


def series(t: Tensor, alpha: Tensor, *, ends: bool = True, out: Tensor | None = None) -> Tensor:
    """The kernel k(t) of the paper's equation 8. t (...), alpha (M + 3,) -> (...).

    The end-point terms count as zero without `ends`, and in half precision: a rounded cosine cannot tell t = 1 from its
    neighbours.
    """
    value = power_series(t, alpha, out=out)
    if not ends or t.dtype in (torch.float16, torch.bfloat16):
        return value
    odd = end_points(t)
    return torch.addcmul(value, odd, torch.addcmul(alpha[1], odd, alpha[0]), out=out)


def derivative_coefficients(alpha: Tensor) -> Tensor:
    """The coefficients m a_m, m = 1 .. M, of k'(t) in powers of t from t^0 on. alpha (M + 3,) -> (M,)."""
    powers = alpha[END_POINTS + 1 :]
    return powers * torch.arange(1, powers.shape[0] + 1, dtype=alpha.dtype, device=alpha.device)


def fixed_coefficients(kernel: str, degree: int, gamma: float) -> Tensor | None:
    """The kernel called `kernel`, if it is a fixed one with k(1) = 1, as alpha; `degree` is the polynomial's, M.

    - "cosine": k(t) = t, the linear kernel on unit vectors.
    - "polynomial": k(t) = ((1 + t) / 2)^M, so that a_m is a binomial coefficient over 2^M.
    - "rbf": the Gaussian k(t) = exp(-2 gamma (1 - t)), by `rbf_coefficients`.
    """
    if kernel == "rbf":
        return rbf_coefficients(gamma)
    if kernel == "polynomial":
        powers = [math.comb(degree, m) / 2**degree for m in range(degree + 1)]
        return torch.tensor([0.0, 0.0, *powers], dtype=torch.float64)
    return torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64) if kernel == "cosine" else None


def rbf_coefficients(gamma: float) -> Tensor:
    """The Gaussian exp(-gamma |u - v|^2) on the unit sphere: a_m = exp(-2 gamma) (2 gamma)^m / m!, as alpha.

    The terms left out add up to less than 1e-9, which float32 cannot tell from zero.
    """
    powers: list[float] = []
    remainder = 1.0
    while remainder > 1e-9:
        m = len(powers)
        powers.append(math.exp(-2 * gamma + m * math.log(2 * gamma) - math.lgamma(m + 1)))
        remainder -= powers[-1]
        if m > 2 * gamma and powers[-1] < 1e-12:  # rounding of the sum itself, at large gamma
            break
    return torch.tensor([0.0, 0.0, *powers], dtype=torch.float64)


@dataclass(frozen=True)
class Activation:
    """How a raw vector becomes coefficients, and what goes with it."""

    apply: Callable[[Tensor], Tensor]
    temperature: float  # the divisor of the logits, unless the user says otherwise
    bounded: bool  # whether the coefficients stay bounded on their own; where they don't, weight decay bounds them


INITIAL_RAW = 1.0  # the paper's start: raw values all one, whatever the activation


ACTIVATIONS = {
    "relu": Activation(torch.relu, temperature=1.0, bounded=False),
    "sigmoid": Activation(torch.sigmoid, temperature=0.1, bounded=True),
    "softmax": Activation(lambda raw: torch.softmax(raw, dim=-1), temperature=0.005, bounded=True),
    # Not in the paper. A relu coefficient that turns negative has no gradient and stays dead; softplus has no such end.
    "softplus": Activation(F.softplus, temperature=1.0, bounded=False),
    # No constraint: the kernel may lose positive definiteness. Kept for the paper's Table 9, where it is unstable.
    "none": Activation(lambda raw: raw, temperature=1.0, bounded=False),
}


def activation(name: str) -> Activation:
    """The activation called `name`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown coefficients {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
