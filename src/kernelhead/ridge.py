"""Kernel ridge regression with a kernel learned by leave-one-out likelihood.

Scores f(x) = sum_i c_i k(<u_i, u>) + b are fitted to one-hot labels Y by least squares, with ridge / 2 |f|^2 in the
RKHS as penalty. With H = K + ridge diag(1 / w) the solution, and what it would say of a sample it had not seen, are

    c = A Y,  A = H^-1 - H^-1 1 1^T H^-1 / (1^T H^-1 1),      y_i - f_without_i(x_i) = c_i / A_ii,

so the likelihood of all samples, each left out in turn, costs one inverse. It is a smooth function of the kernel's
coefficients, the ridge, the temperature of the softmax, and the length of the constant coordinate that features have
appended before they are scaled to unit length: L-BFGS finds them all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernels

ITERATIONS = 25
PRIOR_DEVIATION = 1.0  # of every hyperparameter, in the logarithm: a few samples alone should not send one to infinity
START_RIDGE, START_TEMPERATURE = 0.3, 0.2
ROWS = 2048  # of the kernel's matrix, squared at a time
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


class _Search:
    """For the kernel, ridge, temperature and constant that suit features (n, D), target (n,) and weight (n,)."""

    def __init__(self, features: Tensor, target: Tensor, weight: Tensor, num_classes: int, degree: int) -> None:
        self.products = features @ features.T
        self.squares = self.products.diagonal()
        self.target, self.weight, self.degree = target, weight, degree
        self.labels = F.one_hot(target, num_classes).to(self.products)
        self.share = weight / weight.sum()
        length = (self.share @ self.squares).sqrt()  # where the constant starts
        self.length = torch.where(length > 0, length, 1.0)
        self.raw = self.products.new_zeros(degree + 3, requires_grad=True)

    def improve(self, *, constant: bool) -> float:
        """Go on by L-BFGS, with the constant or without it. The mean leave-one-out log-loss."""
        free = torch.ones_like(self.raw)
        free[-1] = float(constant)

        def objective() -> Tensor:
            self.raw.grad = None
            value = self._loss() + self.raw.square().sum() / (2 * PRIOR_DEVIATION**2 * len(self.target))
            value.backward()  # type: ignore[no-untyped-call]
            assert self.raw.grad is not None
            self.raw.grad *= free
            return value

        optimizer = torch.optim.LBFGS([self.raw], max_iter=ITERATIONS, line_search_fn="strong_wolfe")
        optimizer.step(objective)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            loss = self._loss().item()
        if not math.isfinite(loss):
            raise ValueError(
                "the leave-one-out loss is not finite: the features are too large or too alike to be scaled"
            )
        return loss

    def found(self, loss: float) -> LearnedKernel:
        with torch.no_grad():
            alpha, ridge, temperature, constant = self._parts()
        return LearnedKernel(alpha, ridge.item(), temperature.item(), constant.item(), loss)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bounded = self.raw.clamp(-FARTHEST, FARTHEST)
        alpha = F.pad(torch.softmax(bounded[: self.degree], 0), (kernels.END_POINTS + 1, 0))
        ridge, temperature, constant = bounded[self.degree :].exp().unbind()
        return alpha, START_RIDGE * ridge, START_TEMPERATURE * temperature, self.length * constant

    def _loss(self) -> Tensor:
        alpha, ridge, temperature, constant = self._parts()
        inverse_lengths = (self.squares + constant.square()).rsqrt()
        t = (self.products + constant.square()) * torch.outer(inverse_lengths, inverse_lengths)
        system = kernels.power_series(t, alpha) + torch.diag(ridge / self.weight)
        residuals: Tensor = _Residuals.apply(system, self.labels)
        return F.cross_entropy((self.labels - residuals) / temperature, self.target, reduction="none") @ self.share


def learn_kernel(
    scaled: Sequence[Tensor], target: Tensor, weight: Tensor, num_classes: int, degree: int
) -> tuple[LearnedKernel, int]:
    """Kernel, ridge, temperature and constant by leave-one-out, and the index of the features they are for.

    scaled: the features of the same samples, scaled in one way or another, each (n, D). target (n,), weight (n,).
    """
    searches = [_Search(features, target, weight, num_classes, degree) for features in scaled]
    # The constant stays where it starts at first. Free from the beginning, it hurried into poorer local optima. What
    # scaling is best shows without it: going on with the other, too, gave the same in 42 of 46 fits, was no better
    # on average in the other 4, and took a quarter more time.
    losses = [search.improve(constant=False) for search in searches]
    best = losses.index(min(losses))
    return searches[best].found(searches[best].improve(constant=True)), best


@dataclass(frozen=True)
class Solution:
    """Coefficients c (n, C), constant b (C,), and leave-one-out scores (m, C) of the samples asked for.

    mean, variance: (n,), of the kernel's values at each sample, over all of them by their weight.
    """

    coefficients: Tensor
    constant: Tensor
    left_out: Tensor
    mean: Tensor
    variance: Tensor


def solve(
    points: Tensor, target: Tensor, weight: Tensor, num_classes: int, kernel: LearnedKernel, asked: Tensor
) -> Solution:
    """Fit the scores. points (n, D) of unit length, target (n,), weight (n,); `asked` (m,) are indices of samples."""
    system = kernels.power_series(points @ points.T, kernel.alpha, in_place=True)
    share = weight / weight.sum()
    mean, square = share @ system, torch.zeros_like(share)
    for begin in range(0, len(share), ROWS):  # a second (n, n) would be too much
        square += share[begin : begin + ROWS] @ system[begin : begin + ROWS].square()
    system.diagonal().add_(kernel.ridge / weight)
    factor = torch.linalg.cholesky(system)
    labels = F.one_hot(target, num_classes).to(points)
    solution = torch.cholesky_solve(torch.cat([labels, torch.ones_like(points[:, :1])], 1), factor)
    values, sums = solution[:, :-1], solution[:, -1:]
    constant = values.sum(0) / sums.sum()
    coefficients = values - sums * constant
    columns = F.one_hot(asked, points.shape[0]).to(points).T
    # Of the inverse's diagonal, half a solution is enough: H^-1 = (L^-1)^T L^-1.
    inverse = torch.linalg.solve_triangular(factor, columns, upper=False).square().sum(0)[:, None]
    projected = inverse - sums[asked].square() / sums.sum()
    left_out = labels[asked] - coefficients[asked] / projected
    return Solution(coefficients, constant, left_out, mean, (square - mean.square()).clamp(min=0))


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
