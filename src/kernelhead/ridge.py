"""Kernel ridge regression with a kernel learned by leave-one-out likelihood.

Scores f(x) = sum_i c_i k(<u_i, u>) + b are fitted to one-hot labels Y by least squares, with ridge / 2 |f|^2 in the
RKHS as penalty. With H = K + ridge diag(1 / w) the solution, and what it would say of a sample it had not seen, are

    c = A Y,  A = H^-1 - H^-1 1 1^T H^-1 / (1^T H^-1 1),      y_i - f_without_i(x_i) = c_i / A_ii,

so the likelihood of all samples, each left out in turn, costs one inverse. It is a smooth function of the kernel's
coefficients, the ridge, the temperature of the softmax, and the length of the constant coordinate that features have
appended before they are scaled to unit length: L-BFGS finds them all.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernels

ITERATIONS = 25
PRIOR_DEVIATION = 1.0  # of every hyperparameter, in the logarithm: a few samples alone should not send one to infinity
START_RIDGE, START_TEMPERATURE = 0.3, 0.2
FARTHEST = 14.0  # no hyperparameter is farther than a factor of e^14 from its start, so that H stays invertible


@dataclass(frozen=True)
class LearnedKernel:
    """A kernel and what goes with it.

    Attributes:
        alpha: (M + 3,), with k(1) = 1.
        ridge: weight of the penalty.
        temperature: T of softmax(f / T).
        constant: length of the coordinate appended to features.
        loss: mean leave-one-out log-loss.
    """

    alpha: Tensor
    ridge: float
    temperature: float
    constant: float
    loss: float


class _Residuals(torch.autograd.Function):
    """y_i - f_without_i(x_i) of all samples, from H (n, n), symmetric, and Y (n, C) -> (n, C).

    dA = -A dH A, and of dL/dA there is a thin product and a diagonal: one large product instead of torch's three.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor, labels: Tensor) -> Tensor:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
        sums = inverse.sum(1)
        projected = inverse.addr_(sums, sums / sums.sum(), alpha=-1)
        coefficients, diagonal = projected @ labels, projected.diagonal()[:, None]
        ctx.save_for_backward(projected, coefficients, diagonal)
        return coefficients / diagonal

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        projected, coefficients, diagonal = ctx.saved_tensors
        of_coefficients = gradient / diagonal
        of_diagonal = -(of_coefficients * coefficients / diagonal).sum(1)
        thin = (projected @ of_coefficients) @ coefficients.T
        return -((projected * of_diagonal) @ projected).add_(thin), None


def learn_kernel(features: Tensor, target: Tensor, weight: Tensor, num_classes: int, degree: int) -> LearnedKernel:
    """Kernel, ridge, temperature and constant by leave-one-out. features (n, D), target (n,), weight (n,)."""
    n = features.shape[0]
    products = features @ features.T
    squares = products.diagonal()
    labels = F.one_hot(target, num_classes).to(products)
    share = weight / weight.sum()
    length = (share @ squares).sqrt()  # where the constant starts
    length = torch.where(length > 0, length, 1.0)
    raw = products.new_zeros(degree + 3, requires_grad=True)
    free = torch.ones_like(raw)

    def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bounded = raw.clamp(-FARTHEST, FARTHEST)
        alpha = F.pad(torch.softmax(bounded[:degree], 0), (kernels.END_POINTS + 1, 0))
        ridge, temperature, constant = bounded[degree:].exp().unbind()
        return alpha, START_RIDGE * ridge, START_TEMPERATURE * temperature, length * constant

    def loss() -> Tensor:
        alpha, ridge, temperature, constant = parts()
        inverse_lengths = (squares + constant.square()).rsqrt()
        t = (products + constant.square()) * torch.outer(inverse_lengths, inverse_lengths)
        residuals: Tensor = _Residuals.apply(kernels.power_series(t, alpha) + torch.diag(ridge / weight), labels)
        return F.cross_entropy((labels - residuals) / temperature, target, reduction="none") @ share

    def objective() -> Tensor:
        raw.grad = None
        value = loss() + raw.square().sum() / (2 * PRIOR_DEVIATION**2 * n)
        value.backward()  # type: ignore[no-untyped-call]
        assert raw.grad is not None
        raw.grad *= free
        return value

    # The constant stays where it starts at first. Free from the beginning, it hurried into poorer local optima.
    for constant_free in (0.0, 1.0):
        free[-1] = constant_free
        optimizer = torch.optim.LBFGS([raw], max_iter=ITERATIONS, line_search_fn="strong_wolfe")
        optimizer.step(objective)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        alpha, ridge, temperature, constant = parts()
        final = loss().item()
    if not math.isfinite(final):
        raise ValueError("the leave-one-out loss is not finite: the features are too large or too alike to be scaled")
    return LearnedKernel(alpha, ridge.item(), temperature.item(), constant.item(), final)


@dataclass(frozen=True)
class Solution:
    """Coefficients c (n, C), constant b (C,), and leave-one-out scores (m, C) of the samples asked for."""

    coefficients: Tensor
    constant: Tensor
    left_out: Tensor


def solve(
    points: Tensor, target: Tensor, weight: Tensor, num_classes: int, kernel: LearnedKernel, asked: Tensor
) -> Solution:
    """Fit the scores. points (n, D) of unit length, target (n,), weight (n,); `asked` (m,) are indices of samples."""
    system = kernels.power_series(points @ points.T, kernel.alpha, in_place=True)
    system.diagonal().add_(kernel.ridge / weight)
    factor = torch.linalg.cholesky(system)
    labels = F.one_hot(target, num_classes).to(points)
    solution = torch.cholesky_solve(torch.cat([labels, torch.ones_like(points[:, :1])], 1), factor)
    values, sums = solution[:, :-1], solution[:, -1:]
    constant = values.sum(0) / sums.sum()
    coefficients = values - sums * constant
    columns = F.one_hot(asked, points.shape[0]).to(points).T
    inverse = torch.cholesky_solve(columns, factor)[asked].diagonal()[:, None]
    projected = inverse - sums[asked].square() / sums.sum()
    return Solution(coefficients, constant, labels[asked] - coefficients[asked] / projected)


def best_temperature(scores: Tensor, target: Tensor, weight: Tensor, start: float) -> float:
    """T of the best mean log-loss of softmax(scores / T), between 1/16 and 16 times `start`. scores (n, C).

    With the prior that all hyperparameters have: where every sample is classified rightly, no T would be too small.
    """
    steps = torch.linspace(-4, 4, 129, dtype=torch.float64) * math.log(2)
    candidates = (start * steps.exp()).tolist()
    share = (weight / weight.sum()).double()
    losses = [F.cross_entropy(scores.double() / t, target, reduction="none") @ share for t in candidates]
    prior = steps.square().to(share.device) / (2 * PRIOR_DEVIATION**2 * len(target))
    best: float = candidates[int((torch.stack(losses) + prior).argmin())]
    return best
