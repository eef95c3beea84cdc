"""Heads with landmarks, fitted to feature vectors: in closed form, or by gradient descent that moves the landmarks."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.heads import KernelClassifier
from kernelhead.ops.kernel_mean import kernel_mean
from kernelhead.ridge import LearnedKernel, best_temperature, solve

LANDMARK_PACE, MIXING_PACE = 2.0, 0.1  # learning rates over that of the kernel's coefficients
WARM_UP = 0.1  # of all steps
NOTHING = 1e-12  # share of the kernel's coefficients
NO_TERM = -1000.0  # softplus makes zero of it, in any precision; minus infinity would not be a number of JSON
SEEN = 1024  # samples that the standardisation of kernel values starts from

Watch = Callable[[int, float, float | None], None]  # epoch, training loss, validation loss


@dataclass(frozen=True)
class Samples:
    """Points (n, D) on the chart, whose last coordinate is constant; target (n,); weight (n,)."""

    points: Tensor
    target: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return self.points.shape[0]

    def at(self, index: Tensor) -> "Samples":
        return Samples(self.points[index], self.target[index], self.weight[index])


def _empty_head(samples: Samples, num_classes: int, landmarks: int, alpha: Tensor) -> KernelClassifier:
    degree, width = alpha.shape[0] - 3, samples.points.shape[1]
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten, and nobody's random numbers are used
        head = KernelClassifier(width, num_classes, landmarks=landmarks, degree=degree, coefficients="softplus")
    head = head.to(samples.points)
    # softplus(x) = a. What is too small to be seen in any score becomes exactly zero, and stays so.
    raw = torch.where(alpha < NOTHING * alpha.sum(), NO_TERM, alpha.expm1().log())
    with torch.no_grad():
        head.raw_alpha.copy_(raw)
    return head


def exact_head(
    samples: Samples, num_classes: int, kernel: LearnedKernel, asked: Tensor | None
) -> tuple[KernelClassifier, float]:
    """The head whose landmarks are all samples, mixed by kernel ridge regression, and its temperature.

    That is the best one for the leave-one-out scores of the samples at `asked`, or, with None, the kernel's own.
    """
    unit = F.normalize(samples.points)
    index = torch.arange(0) if asked is None else asked
    solution = solve(unit, samples.target, samples.weight, num_classes, kernel, index.to(unit.device))
    temperature = kernel.temperature
    if asked is not None:
        part = samples.at(asked)
        temperature = best_temperature(solution.left_out, part.target, part.weight, temperature)
    head = _empty_head(samples, num_classes, len(samples), kernel.alpha)
    assert head.mixing is not None
    assert head.bias is not None
    with torch.no_grad():
        head.weight.copy_(unit)
        head.norm.running_mean.copy_(solution.mean)  # type: ignore[union-attr]
        head.norm.running_var.copy_(solution.variance)  # type: ignore[union-attr]
        deviation = (solution.variance + head.norm.eps).sqrt()
        head.mixing.copy_(solution.coefficients.T * deviation / temperature)
        head.bias.copy_((solution.constant + solution.mean @ solution.coefficients) / temperature)
    return head.eval(), temperature


def random_landmarks(
    samples: Samples, num_classes: int, landmarks: int, kernel: LearnedKernel, jitter: float, generator: torch.Generator
) -> KernelClassifier:
    """A head that knows how frequent classes are, with samples at random as landmarks.

    Where there are too few of them, copies are jittered.
    """
    # Coefficients of about one, so that Adam's steps suit them; standardised values don't know their common scale.
    alpha = kernel.alpha * (kernel.alpha.shape[0] - 3)
    head = _empty_head(samples, num_classes, landmarks, alpha)
    assert head.mixing is not None
    assert head.bias is not None
    n = len(samples)
    order = torch.randperm(n, generator=generator, device=samples.points.device)
    chosen = samples.points[order.repeat(-(-landmarks // n))[:landmarks]]
    chosen[n:] += torch.empty_like(chosen[n:]).normal_(0, jitter, generator=generator)
    with torch.no_grad():
        head.weight.copy_(F.normalize(chosen))
        head.mixing.zero_()
        totals = F.one_hot(samples.target, num_classes).to(samples.weight).T @ samples.weight
        head.bias.copy_(totals / totals.sum() / kernel.temperature)
        # A few steps would leave the running statistics where they start: 0 and 1 are far from any kernel's.
        values = kernel_mean(samples.points[order[:SEEN]], head.weight, head.alpha)
        head.norm.running_mean.copy_(values.mean(0))  # type: ignore[union-attr]
        head.norm.running_var.copy_(values.var(0, unbiased=False))  # type: ignore[union-attr]
    return head


class Trainer:
    """Adam on landmarks, kernel and mixing of a head, by the squared error of its scores, logits times temperature.

    Args:
        noise: deviation of the noise added to every coordinate but the constant one.
        dropout: share of landmarks left out of a step. A choice for every sample would be no better, and drawing it
            takes a seventh of the time.
        mixing_alone: leave landmarks, kernel and standardisation as they are. An exact solution is a fine balance of
            many large terms, which their first step would destroy; noise and dropout would, too.
    """

    def __init__(
        self,
        head: KernelClassifier,
        temperature: float,
        *,
        learning_rate: float,
        noise: float,
        dropout: float,
        generator: torch.Generator,
        mixing_alone: bool = False,
    ) -> None:
        self.head, self.temperature, self.learning_rate = head, temperature, learning_rate
        self.noise, self.dropout, self.generator = noise, dropout, generator
        self.mixing_alone = mixing_alone
        head.weight.requires_grad_(not mixing_alone)
        head.raw_alpha.requires_grad_(not mixing_alone)
        groups = [([head.mixing, head.bias], MIXING_PACE)]
        if not mixing_alone:
            groups += [([head.weight], LANDMARK_PACE), ([head.raw_alpha], 1.0)]
        self.paces = [pace for _, pace in groups]
        self.optimizer = torch.optim.Adam([{"params": group} for group, _ in groups], fused=True)

    def epoch(self, samples: Samples, batch_size: int, schedule: Callable[[float], float]) -> float:
        """Go through the samples once; `schedule` gives the learning rate at a share of the epoch. The mean loss."""
        device, n = samples.points.device, len(samples)
        batches = torch.randperm(n, generator=self.generator, device=device).chunk(max(1, n // batch_size))
        mean_weight, total = samples.weight.mean(), torch.zeros((), device=device)
        hook = self.head.norm.register_forward_hook(lambda module, given, values: self._drop(values))
        try:
            for done, index in enumerate(batches):
                self.head.train(len(index) > 1 and not self.mixing_alone)  # one sample has no deviation
                rate = self.learning_rate * schedule(done / len(batches))
                for group, pace in zip(self.optimizer.param_groups, self.paces, strict=True):
                    group["lr"] = rate * pace
                loss = self._loss(samples.at(index)) / mean_weight
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                total += loss.detach() * len(index) / n
        finally:
            hook.remove()
            self.head.eval()
        return total.item()

    def _loss(self, batch: Samples) -> Tensor:
        points = batch.points
        if self.noise:
            shift = torch.empty_like(points).normal_(0, self.noise, generator=self.generator)
            shift[:, -1] = 0
            points = points + shift
        scores: Tensor = self.head(points) * self.temperature
        errors = (scores - F.one_hot(batch.target, scores.shape[1])).square().sum(1)
        return (errors * batch.weight).mean()

    def _drop(self, values: Tensor) -> Tensor:
        if not self.dropout:
            return values
        kept = torch.rand(values.shape[1], generator=self.generator, device=values.device) >= self.dropout
        return values * (kept.to(values) / (1 - self.dropout))


def train(
    trainer: Trainer,
    samples: Samples,
    *,
    epochs: int,
    batch_size: int,
    validation: Samples | None,
    patience: int,
    watch: Watch,
) -> list[float]:
    """Train with a warm-up and a cosine decay, and return the loss of each epoch.

    With `validation` the head with the best log-loss on it is kept, and training ends after `patience` epochs without
    a better one.
    """
    curve: list[float] = []
    best, kept, waited = math.inf, copy.deepcopy(trainer.head.state_dict()), 0
    for epoch in range(epochs):

        def schedule(share: float, epoch: int = epoch) -> float:
            place = (epoch + share) / epochs
            return min(1.0, 0.01 + place / WARM_UP) * 0.5 * (1 + math.cos(math.pi * place))

        curve.append(trainer.epoch(samples, batch_size, schedule))
        loss = None if validation is None else _log_loss(trainer.head, validation)
        watch(epoch + 1, curve[-1], loss)
        if loss is None:
            continue
        if loss < best:
            best, kept, waited = loss, copy.deepcopy(trainer.head.state_dict()), 0
        else:
            waited += 1
            if waited >= patience:
                break
    if validation is not None:
        trainer.head.load_state_dict(kept)
    return curve


def follow_shares(head: KernelClassifier, before: Tensor, after: Tensor, temperature: float) -> None:
    """Move the bias along with the classes' shares of all samples so far, given their totals (C,) of weight.

    Kernel values are standardised, so that the bias is what scores are on average: these shares, over the temperature.
    Adam's steps are far too short to bring it there from the shares of a first batch that is of one class, mostly.
    """
    assert head.bias is not None
    with torch.no_grad():
        head.bias.add_(((after / after.sum() - before / before.sum()) / temperature).to(head.bias))


def calibrate(head: KernelClassifier, samples: Samples, temperature: float) -> float:
    """Scale a head's logits, scores over `temperature`, to the best log-loss on samples it has not seen."""
    with torch.no_grad():
        scores = head(samples.points) * temperature
        better = best_temperature(scores, samples.target, samples.weight, temperature)
        for parameter in (head.mixing, head.bias):
            assert parameter is not None
            parameter.mul_(temperature / better)
    return better


def _log_loss(head: KernelClassifier, samples: Samples) -> float:
    with torch.no_grad():
        losses = F.cross_entropy(head(samples.points), samples.target, reduction="none")
    return (losses @ samples.weight / samples.weight.sum()).item()
