"""Scores in a basis of kernel functions, fitted by preconditioned conjugate gradients to any number of samples.

Scores f(x) = sum_j c_j k(z_j, x) + b minimise the loss of all samples plus ridge / 2 |f|^2, with the norm of the RKHS.
See `basis` for the points z.

Two losses are fitted: the squared error of one-hot labels, which mostly classifies best, and the log-loss. Samples held
out choose the ridge of each, and the mean of both that has the best likelihood.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from kernelhead.metrics import best_temperature, mean_loss
from kernelhead.sklearn.basis import LandmarkSystem, RowSystem, System, count_points, find_centres
from kernelhead.sklearn.samples import Array, Points, shuffled_ranks
from kernelhead.sklearn.search import LearnedKernel

KEPT_VALUES = 2**28  # of landmarks and samples, kept in float32
EXACT_VALUES = 2**20  # up to so many kernel values are float64
FOLDS, FOLDED, MAX_HELD_OUT = 4, 4000, 4000  # folds, of so many samples together; most held out in one
FACTOR, PACE, MAX_FACTOR, MIN_RIDGE = 0.5, 4.0, 150.0, 3e-4  # of the learned ridge: a path's start and pace; limits
BETTER = 0.998  # a path of ridges ends where one is not better than the last by as much
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the scores of least squares
REFRESH = 10  # steps of a preconditioner
LINE_STEPS = 20  # of Newton's method along a line, at most
PATH_STEPS, PATH_TOLERANCE = 10, 1e-3  # of a fit that chooses; in nats per sample that are left to gain
STEPS, BLOCK_STEPS, TOLERANCE = 60, 8, 4e-4  # of the last one; where features are made anew in every step
UNFINISHED = 1e-2  # nats per sample that are worth a warning

Say = Callable[[str], None]


@dataclass
class Fit:
    """Coefficients of a basis (M, C), and the scores of all samples (N, C), some of which may be held out."""

    coefficients: Tensor
    scores: Tensor
    curvature: Any = None  # that of its preconditioner, with its matrix and how many steps it is old
    gram: Any = None
    age: int = 0

    @classmethod
    def start(cls, system: System, labels: Tensor) -> "Fit":
        return cls(labels.new_zeros(system.size, labels.shape[1]), torch.zeros_like(labels))

    def improve(
        self, system: System, labels: Tensor, weight: Tensor, ridge: float, softmax: bool, steps: int, tolerance: float,
        say: Say = lambda sentence: None,
    ) -> float:  # fmt: skip
        """Take steps of conjugate gradients, and return about how much loss per sample was left to gain.

        labels (N, C) are one-hot, weight (N,) is zero for samples that are held out.
        """
        direction: Any = None
        change: Any = None
        previous: Any = None
        factor: Any = None
        before, left, total = 1.0, 0.0, float(weight.sum())
        for step in range(steps):
            p = torch.softmax(self.scores, 1) if softmax else self.scores
            if self.gram is None or (softmax and self.age >= REFRESH):
                self.curvature = weight * _curvature(p, labels) if softmax else weight
                self.gram, self.age, factor = system.gram(self.curvature), 0, None
            if factor is None:
                factor = torch.linalg.cholesky(self.gram + ridge * torch.eye(len(self.gram)).to(self.gram))
                direction = None
            self.age += 1
            gradient = system.gradient(weight[:, None] * (p - labels)) + ridge * self.coefficients
            downhill = -system.precondition(gradient, factor, self.curvature, ridge)
            its_change = system.scores(downhill)
            slope = -system.inner(gradient, downhill, its_change)
            left = slope / 2 / total
            say(f"step {step + 1}: {left:.2g} per sample left to gain")
            if left < tolerance:  # or below zero, which is rounding
                break
            if direction is None:
                direction, change = downhill, its_change
            else:  # Polak and Ribiere
                share = max(0.0, (slope + system.inner(previous, downhill, its_change)) / before)
                direction, change = downhill + share * direction, its_change + share * change
            previous, before = gradient, slope
            linear = ridge * system.inner(self.coefficients, direction, change)
            square = ridge * system.inner(direction, direction, change)
            length = self._length(labels, weight, change, linear, square, softmax)
            self.coefficients = self.coefficients + length * direction
            self.scores = self.scores + length * change
        return left

    def _length(
        self, labels: Tensor, weight: Tensor, change: Tensor, linear: float, square: float, softmax: bool
    ) -> float:
        """Return the step of the lowest loss along a change of scores: Newton's method, kept between brackets."""
        length, low, high = 0.0, 0.0, math.inf
        for _ in range(LINE_STEPS if softmax else 1):
            at = self.scores + length * change
            p = torch.softmax(at, 1) if softmax else at
            slope = float(weight @ ((p - labels) * change).sum(1)) + linear + length * square
            low, high = (length, high) if slope < 0 else (low, length)
            second = change.square()
            second = (p * second).sum(1) - (p * change).sum(1).square() if softmax else second.sum(1)
            before, length = length, length - slope / max(float(weight @ second) + square, 1e-30)
            if softmax:  # where the loss is flat, a step of Newton's may lead anywhere
                length = min(length, 2 * before + 4.0)
                length = length if low <= length <= high else (low + high) / 2
            if abs(length - before) < 1e-2 * length:
                break
        return length


def _curvature(p: Tensor, labels: Tensor) -> Tensor:
    """The typical eigenvalue tr S^2 / tr S of S = diag p - p p^T, where few or many classes are likely.

    A sample that is surely wrong has almost none, but a long way to go; it counts as undecided.
    """
    square = p.square()
    s = square.sum(1)
    typical = (s - 2 * (square * p).sum(1) + s.square()) / (1 - s).clamp(min=1e-4)
    return torch.maximum(typical, 0.25 * (1 - (p * labels).sum(1))).clamp(min=1e-4)


def solve(
    points: Points, target: Tensor, weight: Tensor, num_classes: int, kernel: LearnedKernel, landmarks: int | None,
    random: np.random.RandomState, say: Say,
) -> tuple[Any, Tensor, Tensor, float, float | None]:  # fmt: skip
    """Return points z (M, D), a tensor or a sparse matrix, c (M, C) and b (C,) of logits sum_j c_j k(z_j, x) + b.

    Also return the ridge of the log-loss, or of least squares alone, and the log-loss of samples held out, if there are
    any. `landmarks` None takes all samples as points where they are not too many.
    """
    n, order = len(points), random.permutation(len(points))
    count = landmarks or count_points(points, num_classes)
    dtype = torch.float64 if min(n, count) * n <= EXACT_VALUES else torch.float32
    points.dtype, sample = dtype, order
    if count >= n:
        system: System = RowSystem(points, kernel.alpha, dtype, order)
    else:
        sample = order[: max(KEPT_VALUES // count, 10 * num_classes)]
        system = LandmarkSystem(points.part(sample), find_centres(points, order, count), kernel.alpha, dtype)
    index = torch.from_numpy(np.arange(n) if count >= n else sample).to(target.device)
    labels, shares = _one_hot(target[index], num_classes, dtype), weight[index].to(dtype)
    held = _hold_out(target[index].cpu().numpy(), random)
    say(f"{system.size} points for {n} samples; {sum(int(each.sum()) for each in held)} held out for the choices")
    steps = STEPS
    chosen, loss = _choose(system, labels, shares, kernel, held, say)
    if len(sample) < n:
        assert isinstance(system, LandmarkSystem)
        system = LandmarkSystem(points, system.landmarks, kernel.alpha, dtype, (system, index))
        labels, shares, steps = _one_hot(target, num_classes, dtype), weight.to(dtype), BLOCK_STEPS
    total: Any = 0
    for one in chosen:
        fit = replace(one.fits[0], gram=None)
        if len(sample) < n:
            fit = Fit(fit.coefficients, system.scores(fit.coefficients))
        left = fit.improve(system, labels, shares, one.ridge, one.softmax, steps, TOLERANCE, say)
        if abs(left) > UNFINISHED:
            reason = f"after {steps} steps the fit could gain about {left:.2g} more per sample"
            warnings.warn(f"{reason}; scale the features, or leave out what is huge", ConvergenceWarning, stacklevel=4)
        total = total + one.share * fit.coefficients
    c, b = system.expansion(total)
    return system.landmarks, c, b, chosen[-1].ridge, loss


@dataclass
class _Trial:
    """Fits of all folds with one ridge, and what they say of the samples held out, at the best temperature."""

    softmax: bool
    ridge: float
    fits: list[Fit]
    temperature: float
    logits: Any
    loss: Any
    share: float = 1.0  # of the scores of the final fit, in the logits


def _choose(
    system: System, labels: Tensor, weight: Tensor, kernel: LearnedKernel, held: list[Tensor], say: Say
) -> tuple[list[_Trial], float | None]:
    """Choose ridges and shares by the log-loss of samples held out: masks (N,), in one or in several folds."""
    held = [each.to(labels.device) for each in held]
    # A class without samples in training is nobody's to predict.
    known = [mask & (labels[~mask].sum(0) > 0)[labels.argmax(1)] for mask in held]
    bases, start = (kernel.ridge, kernel.ridge * kernel.temperature), Fit.start(system, labels)
    if not any(mask.any() for mask in known):
        return [_Trial(True, bases[True], [start], 1.0, None, None)], None
    target = torch.cat([labels[mask].argmax(1) for mask in known])
    its_weight = torch.cat([weight[mask] for mask in known])

    def attempt(softmax: bool, ridge: float, fits: list[Fit], temperature: float) -> _Trial:
        fits = [replace(fit) for fit in fits]
        for fit, mask in zip(fits, held, strict=True):
            fit.improve(system, labels, weight * ~mask, ridge, softmax, PATH_STEPS, PATH_TOLERANCE)
        scores = torch.cat([fit.scores[mask] for fit, mask in zip(fits, known, strict=True)])
        temperature = best_temperature(scores, target, its_weight, temperature)
        loss = mean_loss(scores / temperature, target, its_weight)
        say(f"{'log-loss' if softmax else 'least squares'}, ridge {ridge:.3g}: held-out log-loss {loss:.4f}")
        return _Trial(softmax, ridge, fits, temperature, scores / temperature, loss)

    def path(softmax: bool, fits: list[Fit], temperature: float) -> _Trial:
        """Go down from ridge to ridge as long as that helps. If it does not help at once, go up."""
        best = first = attempt(softmax, FACTOR * bases[softmax], fits, temperature)
        for pace in (1 / PACE, PACE):
            while best.ridge * pace >= MIN_RIDGE and best.ridge * pace <= MAX_FACTOR * bases[softmax]:
                trial = attempt(softmax, best.ridge * pace, best.fits, best.temperature)
                if trial.loss > BETTER * best.loss:
                    break
                best = trial
            if best is not first:
                break
        return best

    squares = path(False, [start] * len(held), kernel.temperature)
    t = squares.temperature
    likely = path(True, [Fit(fit.coefficients / t, fit.scores / t) for fit in squares.fits], 1.0)
    mixed = []
    for share in SHARES:
        scores = share * squares.logits + (1 - share) * likely.logits
        temperature = best_temperature(scores, target, its_weight, 1.0)
        mixed.append((mean_loss(scores / temperature, target, its_weight), share, temperature))
    loss, share, temperature = min(mixed)
    say(f"least squares have {share:.0%} of the logits: held-out log-loss {loss:.4f}")
    squares.share = share / temperature / squares.temperature
    likely.share = (1 - share) / temperature / likely.temperature
    return [one for one in (squares, likely) if one.share > 0], loss


def _one_hot(target: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """One-hot labels (N, C), without the integers of eight bytes that `F.one_hot` makes."""
    return torch.zeros(len(target), num_classes, dtype=dtype, device=target.device).scatter_(1, target[:, None], 1.0)


def _hold_out(target: Array, random: np.random.RandomState) -> list[Tensor]:
    """Return masks (N,) of samples to be held out, a share of each class."""
    ranks, n = shuffled_ranks(target, random), len(target)
    every = max(FOLDS, n // MAX_HELD_OUT)
    masks = [ranks % every == every - 1 - fold for fold in range(max(1, min(FOLDS, FOLDED // n)))]
    return [torch.from_numpy(mask) for mask in masks if mask.any() and not mask.all()]
