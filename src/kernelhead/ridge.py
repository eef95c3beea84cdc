"""Kernel ridge regression with a kernel learned by leave-one-out likelihood.

Scores f(x) = sum_i c_i k(<u_i, u>) + b are fitted to one-hot labels Y by least squares, with ridge / 2 |f|^2 in the
RKHS as penalty. With H = K + ridge diag(1 / w) the solution, and what it would say of a sample it had not seen, are

    c = A Y,  A = H^-1 - H^-1 1 1^T H^-1 / (1^T H^-1 1),      y_i - f_without_i(x_i) = c_i / A_ii,

so the likelihood of all samples, each left out in turn, costs one inverse. It is a smooth function of the kernel's
coefficients, the ridge and the temperature of the softmax, and L-BFGS finds all three.
"""

import math
from dataclasses import dataclass

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
    """alpha (M + 3,) with k(1) = 1, the ridge, the temperature T of softmax(f / T), and the mean leave-one-out loss."""

    alpha: Tensor
    ridge: float
    temperature: float
    loss: float


def learn_kernel(points: Tensor, target: Tensor, weight: Tensor, num_classes: int, degree: int) -> LearnedKernel:
    """Coefficients, ridge and temperature by leave-one-out. points (n, D) of unit length, target (n,), weight (n,)."""
    n = points.shape[0]
    t = points @ points.T
    labels = F.one_hot(target, num_classes).to(t)
    share = weight / weight.sum()
    raw = t.new_zeros(degree + 2, requires_grad=True)

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        bounded = raw.clamp(-FARTHEST, FARTHEST)
        alpha = F.pad(torch.softmax(bounded[:degree], 0), (kernels.END_POINTS + 1, 0))
        return alpha, START_RIDGE * bounded[degree].exp(), START_TEMPERATURE * bounded[degree + 1].exp()

    def loss() -> Tensor:
        alpha, ridge, temperature = parts()
        inverse = torch.linalg.inv(kernels.power_series(t, alpha) + torch.diag(ridge / weight))
        sums = inverse.sum(1)
        projected = inverse - torch.outer(sums, sums) / sums.sum()
        left_out = labels - projected @ labels / projected.diagonal()[:, None]
        return F.cross_entropy(left_out / temperature, target, reduction="none") @ share

    def objective() -> Tensor:
        optimizer.zero_grad()
        value = loss() + raw.square().sum() / (2 * PRIOR_DEVIATION**2 * n)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer = torch.optim.LBFGS([raw], max_iter=ITERATIONS, line_search_fn="strong_wolfe")
    optimizer.step(objective)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        alpha, ridge, temperature = parts()
        final = loss().item()
    if not math.isfinite(final):
        raise ValueError("the leave-one-out loss is not finite: the features are too large or too alike to be scaled")
    return LearnedKernel(alpha, ridge.item(), temperature.item(), final)


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
    """T of the best mean log-loss of softmax(scores / T), between 1/16 and 16 times `start`. scores (n, C)."""
    candidates = (start * torch.logspace(-4, 4, 129, base=2.0, dtype=torch.float64)).tolist()
    losses = [F.cross_entropy(scores.double() / t, target, reduction="none") @ weight.double() for t in candidates]
    best: float = candidates[int(torch.stack(losses).argmin())]
    return best
