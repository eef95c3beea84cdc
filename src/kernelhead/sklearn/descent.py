"""A head whose landmarks move along with the kernel by gradient descent, in batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.functional import kernel_mean
from kernelhead.heads import LandmarkHead
from kernelhead.metrics import best_temperature
from kernelhead.sklearn.samples import Array, Samples
from kernelhead.sklearn.search import LearnedKernel

NOISE, DROPOUT = 0.2, 0.2  # deviation for each coordinate but the constant; share of the landmarks in each step
LANDMARK_PACE, MIXING_PACE = 2.0, 0.1  # learning rates over that of the kernel's coefficients
WARM_UP = 0.1  # of all steps
MAX_STATISTICS_SAMPLES = 1024  # that the standardisation of kernel values starts from
NEGLIGIBLE = 1e-12  # share of the kernel's coefficients
RAW_ZERO = -1000.0  # softplus makes zero of it in any precision; JSON has no minus infinity

Watch = Callable[[int, float], None]  # epoch, training loss


def random_landmarks(
    samples: Samples, num_classes: int, landmarks: int, kernel: LearnedKernel, generator: torch.Generator
) -> LandmarkHead:
    """Return a head with random samples as landmarks, or noisy copies of them. Logits say how frequent classes are."""
    n = len(samples)
    order = torch.randperm(n, generator=generator, device=samples.points.device)
    chosen = samples.points[order.repeat(-(-landmarks // n))[:landmarks]]
    chosen[n:] += torch.empty_like(chosen[n:]).normal_(0, NOISE, generator=generator)
    # Coefficients of about one suit Adam's steps. Standardised values do not depend on their common scale.
    head = head_at(F.normalize(chosen), num_classes, kernel.alpha * (kernel.alpha.shape[0] - 3))
    with torch.no_grad():
        head.mixing.zero_()
        totals = F.one_hot(samples.target, num_classes).to(samples.weight).T @ samples.weight
        head.bias.copy_(totals / totals.sum() / kernel.temperature)
        # Running statistics start at 0 and 1, far from those of any kernel: a few steps would leave them there.
        take_statistics(head, samples.points[order[:MAX_STATISTICS_SAMPLES]])
    return head


def take_statistics(head: LandmarkHead, points: Tensor) -> None:
    """Let the head standardise its kernel values by their mean and variance over points (N, D)."""
    values = kernel_mean(points, head.weight, head.alpha)
    statistics = {"running_mean": values.mean(0), "running_var": values.var(0, unbiased=False)}
    head.norm.load_state_dict(statistics, strict=False)


@torch.no_grad()
def solved_head(unit: Tensor, alpha: Tensor, coefficients: Tensor, bias: Tensor, points: Tensor) -> LandmarkHead:
    """Return a head of the logits sum_j c_j k(<z_j, u>) + b, with `unit` z (M, D), c (M, C), b (C,)."""
    head = head_at(unit, coefficients.shape[1], alpha)
    take_statistics(head, points)
    deviation = (head.norm.get_buffer("running_var") + head.norm.eps).sqrt()
    head.mixing.copy_(coefficients.T * deviation)
    head.bias.copy_(bias + head.norm.get_buffer("running_mean") @ coefficients)
    return head.eval()


def head_at(unit: Tensor, num_classes: int, alpha: Tensor) -> LandmarkHead:
    """Return a head with landmarks (Q, D) of unit length and this kernel. Mixing and statistics are to be set."""
    options: dict[str, Any] = {"degree": alpha.shape[0] - 3, "landmarks": len(unit), "pool": None, "scale": 1.0}
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten, so it should use up no random numbers
        head = LandmarkHead(unit.shape[1], num_classes, coefficients="softplus", **options).to(unit)
    with torch.no_grad():  # softplus(raw) = alpha; a coefficient too small to matter becomes exactly zero, and stays so
        head.weight.copy_(unit)
        head.raw_alpha.copy_(torch.where(alpha < NEGLIGIBLE * alpha.sum(), RAW_ZERO, alpha.expm1().log()))
    return head


@dataclass
class Trainer:
    """Adam on landmarks, kernel and mixing of a head, by the squared error of its scores (logits times temperature).

    `mixing_alone` leaves all else as it is, for an exact solution is a fine balance of many large terms.
    """

    head: LandmarkHead
    temperature: float
    generator: torch.Generator
    learning_rate: float
    batch_size: int
    mixing_alone: bool = False

    def __post_init__(self) -> None:
        head, moving = self.head, not self.mixing_alone
        head.weight.requires_grad_(moving)
        head.raw_alpha.requires_grad_(moving)
        groups = [{"params": [head.mixing, head.bias], "pace": MIXING_PACE}]
        if moving:
            groups += [{"params": [head.weight], "pace": LANDMARK_PACE}, {"params": [head.raw_alpha], "pace": 1.0}]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    def epoch(self, samples: Samples, schedule: Callable[[float], float], steps: int = 1) -> float:
        """Go through the samples once, in so many steps at least, and return the mean loss.

        `schedule`: share of the epoch -> share of the rate.
        """
        device, n = samples.points.device, len(samples)
        batches = torch.randperm(n, generator=self.generator, device=device).chunk(max(steps, n // self.batch_size))
        mean_weight, total = samples.weight.mean(), torch.zeros((), device=device)
        for done, index in enumerate(batches):
            self.head.train(len(index) > 1 and not self.mixing_alone)  # one sample has no deviation
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * schedule(done / len(batches)) * group["pace"]
            loss = self._loss(samples.at(index)) / mean_weight
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total += loss.detach() * len(index) / n
        self.head.eval()
        return total.item()

    def _loss(self, batch: Samples) -> Tensor:
        points, head = batch.points, self.head
        if not self.mixing_alone:
            noise = torch.empty_like(points).normal_(0, NOISE, generator=self.generator)
            points = torch.cat([(points + noise)[:, :-1], points[:, -1:]], 1)
        values = head.norm(kernel_mean(points, head.weight, head.alpha))
        if not self.mixing_alone:  # for the whole batch: a choice per sample is no better, and drawing it takes longer
            kept = torch.rand(values.shape[1], generator=self.generator, device=values.device) >= DROPOUT
            values = values * (kept.to(values) / (1 - DROPOUT))
        scores = F.linear(values, head.mixing, head.bias) * self.temperature
        errors = (scores - F.one_hot(batch.target, scores.shape[1])).square().sum(1)
        return (errors * batch.weight).mean()

    def fit(self, samples: Samples, epochs: int, watch: Watch) -> list[float]:
        """Train with a warm-up and a cosine decay, and return the loss of each epoch."""
        curve: list[float] = []
        for epoch in range(epochs):

            def schedule(share: float, epoch: int = epoch) -> float:
                done = (epoch + share) / epochs
                return min(1.0, 0.01 + done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))

            curve.append(self.epoch(samples, schedule))
            watch(epoch + 1, curve[-1])
        return curve

    @torch.no_grad()
    def calibrate(self, samples: Samples) -> float:
        """Scale the logits to the best log-loss on samples that the head has not seen; return the temperature."""
        scores = self.head(samples.points) * self.temperature
        better = best_temperature(scores, samples.target, samples.weight, self.temperature)
        for parameter in (self.head.mixing, self.head.bias):
            parameter.mul_(self.temperature / better)
        self.temperature = better
        return better

    @torch.no_grad()
    def follow_shares(self, before: Array, after: Array) -> None:
        """Move the bias along with the shares of classes, given their total weights (C,) before and after a batch.

        It is what scores are on average. Adam's steps are too short to bring it there from a batch of mostly one class.
        """
        shares = after / after.sum() - before / before.sum()
        self.head.bias.add_(torch.as_tensor(shares / self.temperature).to(self.head.bias))
