"""Accuracy, likelihood and calibration of a classifier's logits."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

PRIOR_DEVIATION = 1.0  # of the logarithm of each hyperparameter: few samples should not send one to infinity


def accuracy(logits: Tensor, target: Tensor) -> float:
    """Percentage of rows whose largest logit is the target's. logits (N, C), target (N,)."""
    return 100 * (logits.argmax(1) == target).double().mean().item()


def negative_log_likelihood(logits: Tensor, target: Tensor) -> float:
    """Mean of -log p(target), in nats. logits (N, C), target (N,)."""
    return F.cross_entropy(logits.double(), target).item()


def expected_calibration_error(logits: Tensor, target: Tensor, *, bins: int = 15) -> float:
    """Mean gap, in percent, between confidence and accuracy over equal bins of confidence (Guo et al., 2017)."""
    confidence, predicted = torch.softmax(logits.double(), 1).max(1)
    correct = (predicted == target).double()
    bin_of = (confidence * bins).long().clamp_max(bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of.cpu(), (confidence - correct).cpu())
    return 100 * gap.abs().sum().item() / max(1, len(target))


def summary(logits: Tensor, target: Tensor) -> dict[str, float | None]:
    """The figures that every result file carries: accuracy, and nll and ece where all logits are finite.

    `top5` comes with more than five classes.
    """
    found = {"accuracy": accuracy(logits, target)}
    if logits.shape[1] > 5:
        found["top5"] = 100 * (logits.topk(5, 1).indices == target[:, None]).any(1).double().mean().item()
    finite = bool(torch.isfinite(logits).all())
    return found | {
        "nll": negative_log_likelihood(logits, target) if finite else None,
        "ece": expected_calibration_error(logits, target) if finite else None,
    }


def best_temperature(scores: Tensor, target: Tensor, weight: Tensor, start: float) -> float:
    """Return the T of the best mean log-loss of softmax(scores / T), at most 16 times off `start`. scores (N, C).

    The prior of all hyperparameters applies: where every sample is classified rightly, no T would be too small. The
    loss has one minimum over T, from which `best` is never further than twice the step.
    """

    def loss(octaves: float) -> float:
        prior = (octaves * math.log(2)) ** 2 / (2 * PRIOR_DEVIATION**2 * len(target))
        return mean_loss(scores / (start * 2**octaves), target, weight) + prior

    best, step = 0.0, 2.0
    while step > 0.01:
        best = min((best - step, best, best + step), key=loss)
        step /= 2
    return start * 2**best


def mean_loss(logits: Tensor, target: Tensor, weight: Tensor) -> float:
    """Return the weighted mean log-loss of logits (N, C), as if one more sample had any label.

    Without it, samples that all are classified rightly would ask for a certainty that they cannot know.
    """
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=1 / (len(target) + 1))
    return float(losses @ (weight / weight.sum()).to(losses))
