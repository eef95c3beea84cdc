"""A kernel learned from some samples, by the leave-one-out likelihood of kernel ridge regression.

Scores f(x) = sum_i c_i k(<u_i, u>) + b are fitted to one-hot labels Y by least squares. The penalty is ridge / 2 |f|^2
in the RKHS. With H = K + ridge diag(1 / w), the solution and the residual of a sample that was left out are

    c = A Y,   A = H^-1 - H^-1 1 1^T H^-1 / (1^T H^-1 1),   y_i - f_without_i(x_i) = c_i / A_ii.

The likelihood of all samples, each left out in turn, costs one inverse. L-BFGS maximises it over the coefficients of
the kernel, the ridge, the temperature of the softmax, the constant, and a length for each feature. The constant is a
coordinate that features have appended before they are scaled to unit length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernels
from kernelhead.metrics import PRIOR_DEVIATION

FIRST_ITERATIONS, ITERATIONS, MORE_ITERATIONS = 12, 25, 4  # to choose the scaling; on the same samples; on more
LENGTH_DEVIATION, MAX_LENGTHS = 0.3, 1024  # of the logarithm of each feature's length; features that have their own
START_RIDGE, START_TEMPERATURE = 0.3, 0.2
MAX_LOG_FACTOR = 14.0  # between a hyperparameter and its start, so that H stays invertible


@dataclass(frozen=True)
class LearnedKernel:
    """A kernel and what goes with it."""

    alpha: Tensor  # coefficients (M + 3,), with k(1) = 1
    ridge: float  # weight of the penalty
    temperature: float  # T of softmax(f / T)
    constant: float  # length of the coordinate appended to features
    lengths: Tensor  # factors of the features (D,)
    loss: float  # mean leave-one-out log-loss


class _Residuals(torch.autograd.Function):
    """Leave-one-out residuals (N, C) of a symmetric H (N, N) and labels Y (N, C), in half the time of autograd.

    With dA = -A dH A, and dL/dA a thin product plus a diagonal, the backward pass needs one large product.
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
    """The search for hyperparameters that suit features (N, D), target (N,) and weight (N,)."""

    def __init__(self, features: Tensor, target: Tensor, weight: Tensor, num_classes: int, degree: int) -> None:
        self.features, self.products = features, features @ features.T
        self.target, self.weight, self.degree = target, weight, degree
        self.labels = F.one_hot(target, num_classes).to(features)
        self.share = weight / weight.sum()
        length = (self.share @ self.products.diagonal()).sqrt()  # where the constant starts
        self.length = torch.where(length > 0, length, 1.0)
        self.lengths = features.shape[1] if features.shape[1] <= MAX_LENGTHS else 0
        self.raw = features.new_zeros(degree + 3 + self.lengths, requires_grad=True)
        self.deviation = torch.full_like(self.raw, PRIOR_DEVIATION)
        self.deviation[degree + 3 :] = LENGTH_DEVIATION

    def improve(self, free: int | None = None, iterations: int = ITERATIONS) -> LearnedKernel:
        """Take steps of L-BFGS, with the first hyperparameters free, or all."""

        def objective() -> Tensor:
            self.raw.grad = None
            prior = (self.raw / self.deviation).square().sum() / (2 * len(self.target))
            value = self._loss(fixed_lengths=free is not None) + prior
            value.backward()  # type: ignore[no-untyped-call]
            assert self.raw.grad is not None
            if free is not None:
                self.raw.grad[free:] = 0
            return value

        optimizer = torch.optim.LBFGS([self.raw], max_iter=iterations, line_search_fn="strong_wolfe")
        optimizer.step(objective)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            loss = self._loss().item()
            alpha, *rest = self._parts()
        if not math.isfinite(loss):
            raise ValueError(f"the leave-one-out loss is {loss}; scale the features, or leave out those that are huge")
        ridge, temperature, length = (each.item() for each in rest)
        lengths = self.raw.detach()[self.degree + 3 :].exp() if self.lengths else torch.ones_like(self.features[0])
        return LearnedKernel(alpha, ridge, temperature, length, lengths, loss)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bounded = self.raw.clamp(-MAX_LOG_FACTOR, MAX_LOG_FACTOR)
        alpha = F.pad(torch.softmax(bounded[: self.degree], 0), (kernels.END_POINTS + 1, 0))
        ridge, temperature, constant = bounded[self.degree : self.degree + 3].exp().unbind()
        return alpha, START_RIDGE * ridge, START_TEMPERATURE * temperature, self.length * constant

    def _loss(self, fixed_lengths: bool = False) -> Tensor:
        alpha, ridge, temperature, constant = self._parts()
        products = self.products
        if self.lengths and not fixed_lengths:
            points = self.features * self.raw[self.degree + 3 :].exp()
            products = points @ points.T
        inverse_lengths = (products.diagonal() + constant.square()).rsqrt()
        t = (products + constant.square()) * torch.outer(inverse_lengths, inverse_lengths)
        system = kernels.power_series(t, alpha) + torch.diag(ridge / self.weight)
        residuals: Tensor = _Residuals.apply(system, self.labels)
        return F.cross_entropy((self.labels - residuals) / temperature, self.target, reduction="none") @ self.share


def learn_kernel(
    scaled: Sequence[Tensor], target: Tensor, weight: Tensor, num_classes: int, degree: int, first: int | None = None
) -> tuple[LearnedKernel, int]:
    """Learn a kernel for each scaling of features (N, D), and return the best with the index of its scaling.

    The `first` samples choose the scaling and go most of the way; all go the rest.
    """
    rest = (num_classes, degree)
    searches = [_Search(features[:first], target[:first], weight[:first], *rest) for features in scaled]
    # A constant that is free from the beginning hurries into poorer local optima, and the best scaling shows without.
    losses = [search.improve(degree + 2, FIRST_ITERATIONS).loss for search in searches]
    best = losses.index(min(losses))
    found = searches[best].improve()
    if first is not None and first < len(target):
        search = _Search(scaled[best], target, weight, *rest)
        search.raw, search.length = searches[best].raw, searches[best].length
        found = search.improve(iterations=MORE_ITERATIONS)
    return found, best
