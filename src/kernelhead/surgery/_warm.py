"""A head that starts from a trained linear layer.

Softmax does not change when one vector v is added to all class weights. If all |w_j + v| are equal, logits <w_j + v, f>
rank the classes as the cosines do, and so does every kernel that grows with the cosine. Equal lengths are a linear
condition on v, 2 <w_j - mean(w), v> = mean(|w|^2) - |w_j|^2 for all j. It has a solution if there are no more classes
than features. Otherwise the rest can be added in the direction in which the features of a batch have the least extent.

A single class has no others to be compared with: its logit itself is kept, as far as a cosine can.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions.transforms import SoftplusTransform
from torch.nn import functional as F

from kernelhead import kernels
from kernelhead.heads import Head

WARM = ("linear", "cosine", "kernel", "prototypes")  # heads with weights of their own for each class
CUT = 0.01  # of singular values. A longer v makes lengths more equal, but crowds the class weights.
SPARK = 0.01  # the other coefficients, relative to that of t: k is nearly linear, but at zero relu has no gradient
SPREAD = 0.01  # the first distance between prototypes of a class, relative to their length


def start_from(head: Head, weight: Tensor, bias: Tensor | None, features: Tensor | None) -> list[str]:
    """Let a head begin as the linear layer with this weight (C, D) and bias (C,) ends. Returns notes about it.

    `features` (n, D) are of the network's own inputs. They keep the confidence, and the bias, as well as a head without
    bias can.
    """
    made: Any = head
    b = weight.new_zeros(len(weight)) if bias is None else bias.detach()
    if head.name == "linear":
        with torch.no_grad():
            made.weight.copy_(weight)
            made.bias.copy_(b)
        return ["starts as the trained layer"]
    mixture = made.prototypes > 1 and made.aggregate == "logsumexp"
    if len(weight) == 1 and (mixture or made.coefficients == "softmax" or made.kernel.name in ("polynomial", "rbf")):
        raise ValueError(  # they add to all logits alike: softmax doesn't see it, but one logit is read by its sign
            f"warm_start of one class cannot keep the sign of its logit with aggregate={made.aggregate!r}, "
            f"coefficients={made.coefficients!r}, kernel={made.kernel.name!r}; use 'sum', 'relu' and 'learned'"
        )
    notes = ["starts from the trained layer"]
    w, b = weight.detach().double().cpu(), b.double().cpu()
    own_bias = _centred(b[None])[0]
    profile = _profile(made)
    if features is None:
        if own_bias.any():
            notes.append("its bias is left out: give a batch of inputs to keep it")
        notes.append("its confidence is a guess: give a batch of inputs to keep it")
        w = w + common_shift(w)
        # Features of about unit size in every coordinate. It sets the confidence, not the ranking.
        ends = kernels.power_series(w.new_tensor([0.0, 1.0]), profile)
        scale = (w.norm(dim=1).mean() * math.sqrt(w.shape[1]) / (ends[1] - ends[0])).item()
    else:
        f = features.detach().double().cpu()
        logits = f @ w.t() + b
        u = torch.linalg.pinv(f.t() @ f, rtol=CUT**2, hermitian=True) @ f.sum(0)  # <u, f> is near 1 for all features f
        w = w + torch.outer(own_bias, u)
        w = w + common_shift(w)
        if len(f) >= 2 * w.shape[1]:  # fewer don't show in which direction there is nothing
            w = max(w, _lengthened(w, f), key=lambda each: (_cosines(f, each).argmax(1) == logits.argmax(1)).sum())
        else:
            notes.append(f"{len(f)} inputs are few for {w.shape[1]} features: twice as many as features serve better")
        values = _centred(kernels.power_series(_cosines(f, w), profile))
        scale = ((values * _centred(logits)).sum() / values.square().sum().clamp_min(1e-300)).item()
    unequal = (w.norm(dim=1).std(correction=0) / w.norm(dim=1).mean()).item()
    if unequal > 0.01:
        notes.append(f"lengths of its class weights differ by {unequal:.0%}, which the head cannot follow")
    if made.aggregate == "sum":
        scale /= made.prototypes
    return notes + _set(made, w, profile, scale * made.temperature)


def common_shift(weight: Tensor) -> Tensor:
    """Return the v (D,) that makes the rows of weight + v as equal in length as a short v can. weight (C, D)."""
    squares = weight.square().sum(1)
    shift: Tensor = torch.linalg.pinv(weight - weight.mean(0), rtol=CUT) @ ((squares.mean() - squares) / 2)
    return shift


def _lengthened(weight: Tensor, features: Tensor) -> Tensor:
    """Make the rows of weight (C, D) as long as the longest, in the direction where features (n, D) extend least."""
    direction = torch.linalg.eigh(features.t() @ features).eigenvectors[:, 0]
    along = weight @ direction
    missing = weight.square().sum(1).max() - weight.square().sum(1)
    longer = (along.square() + missing).sqrt().copysign(along)
    return weight + torch.outer(longer - along, direction)


def _centred(logits: Tensor) -> Tensor:
    """Take out the mean over classes, which softmax doesn't see. (n, C) -> (n, C); one class stays as it is."""
    return logits - logits.mean(1, keepdim=True) if logits.shape[1] > 1 else logits


def _cosines(features: Tensor, weight: Tensor) -> Tensor:
    return F.normalize(features, eps=1e-300) @ F.normalize(weight, eps=1e-300).t()


def _profile(head: Any) -> Tensor:
    """Return the coefficients to start with, up to their scale."""
    if head.kernel.profile is not None:
        return cast(Tensor, head.kernel.profile.double().cpu())
    profile = torch.full((head.degree + 3,), SPARK, dtype=torch.float64, device="cpu")
    profile[kernels.END_POINTS + 1] = 1
    if head.num_classes == 1:
        profile[kernels.END_POINTS] = SPARK**2  # it moves the one logit, which softmax would not see
    return profile


def _set(head: Any, weight: Tensor, profile: Tensor, scale: float) -> list[str]:
    """Write weights and coefficients, `scale` times the profile if the activation can give them."""
    alpha = profile if head.kernel.profile is None else profile.new_ones(1)
    # Each sigmoid coefficient is below 1. Softmax coefficients add up to 1: a_0 takes the rest and changes nothing.
    together = {"sigmoid": alpha.max().item(), "softmax": alpha.sum().item()}.get(head.coefficients, 0.0)
    lowered = scale * together > 0.99
    raw = (alpha * (0.99 / together if lowered else scale)).clamp_min(1e-12)
    if head.coefficients == "softmax":
        raw[kernels.END_POINTS] += 1 - raw.sum()
    inverses: dict[str, Any] = {"sigmoid": torch.logit, "softmax": torch.log, "softplus": SoftplusTransform().inv}
    raw = inverses.get(head.coefficients, torch.clone)(raw)
    rows = weight.repeat_interleave(head.prototypes, 0)
    if head.prototypes > 1:
        rows = rows + SPREAD * torch.randn_like(rows) * (rows.norm(dim=1, keepdim=True) / math.sqrt(rows.shape[1]))
    with torch.no_grad():
        head.weight.copy_(rows)
        head.raw_alpha.copy_(raw)
        if head.bias is not None:
            head.bias.zero_()
    return [f"its confidence is lowered: {head.coefficients} coefficients are bounded"] if lowered else []
