"""What is reported of a classifier's logits."""

import torch
from torch import Tensor
from torch.nn import functional as F


def accuracy(logits: Tensor, target: Tensor) -> float:
    """Percentage of rows whose largest logit is the target's. logits (N, C), target (N,)."""
    return 100 * (logits.argmax(1) == target).double().mean().item()


def top_accuracy(logits: Tensor, target: Tensor, k: int = 5) -> float:
    """Percentage of rows whose target is among the `k` largest logits. logits (N, C), target (N,)."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return 100 * (best == target[:, None]).any(1).double().mean().item()


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
    """The figures that every result file carries. Of logits that are not finite, the accuracy alone has a meaning.

    `top5` is there where there are more than five classes.
    """
    finite = bool(torch.isfinite(logits).all())
    return {
        "accuracy": accuracy(logits, target),
        **({"top5": top_accuracy(logits, target)} if logits.shape[1] > 5 else {}),
        "nll": negative_log_likelihood(logits, target) if finite else None,
        "ece": expected_calibration_error(logits, target) if finite else None,
    }
