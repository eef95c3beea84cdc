"""A head that starts from a trained linear layer.

Softmax does not change when one vector v is added to all class weights. Where all |w_j + v| are equal, logits
<w_j + v, f> rank the classes as the cosines do, and so does every kernel that grows with the cosine. Equal lengths are
a linear condition on v,

    2 <w_j - mean(w), v> = mean(|w|^2) - |w_j|^2    for all j,

which has a solution where there are no more classes than features, and otherwise a best one. What lengths then lack
can be added in the one direction in which the features of a batch have the least extent, often none after a ReLU.

A single class has no others to be compared with: its logit itself is kept, as far as a cosine can.
"""

import math

import torch
from torch import Tensor, nn

from kernelhead import kernels
from kernelhead.heads import KernelClassifier, SoftmaxHead

RIDGE = 1e-4
"""Of the squared singular values. A longer v would make lengths more equal, and crowd the class weights around it."""
SPARK = 0.01
"""The other coefficients, relative to that of t: small, as k is to be nearly linear, but alive. At zero a relu
coefficient has no gradient."""
SPREAD = 0.01
"""How far the prototypes of a class begin from each other, relative to their length."""


def check_warm_start(head: str, options: dict[str, object]) -> None:
    """Refuse heads that a linear layer says nothing about."""
    if head not in ("kernel", "linear", "softmax"):
        raise ValueError(f"warm_start needs a head with class weights, 'kernel', 'linear' or 'softmax', not {head!r}")
    if options.get("landmarks") is not None:
        raise ValueError("warm_start cannot start landmarks, which belong to no class; use prototypes, or start anew")
    if options.get("pool") is not None:
        raise ValueError("warm_start starts from weights for pooled features; pool='rkhs' has none, start it anew")


def _check_one_class(head: KernelClassifier) -> None:
    """Refuse what adds to all logits alike: softmax doesn't see it, but a single logit is read by its sign."""
    mixture = head.prototypes > 1 and head.aggregate == "logsumexp"
    if mixture or head.coefficients == "softmax" or head.kernel_name in ("polynomial", "rbf"):
        raise ValueError(
            "warm_start of one class cannot keep the sign of its logit with prototypes under logsumexp, coefficients "
            "'softmax' or the kernels 'polynomial' and 'rbf'; use others, or start anew"
        )


def start_from(head: nn.Module, weight: Tensor, bias: Tensor | None, features: Tensor | None) -> list[str]:
    """Let a head begin as the linear layer with this weight (C, D) and bias (C,) ends. Returns what there is to say.

    `features` (n, D) are of the network's own inputs: with them the bias is kept, as well as a head without bias can,
    and the confidence.
    """
    if isinstance(head, SoftmaxHead):
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.zero_() if bias is None else head.bias.copy_(bias)
        return ["starts as the trained layer"]
    assert isinstance(head, KernelClassifier)
    if len(weight) == 1:
        _check_one_class(head)
    notes = ["starts from the trained layer"]
    w = weight.detach().double().cpu()
    b = w.new_zeros(w.shape[0]) if bias is None else bias.detach().double().cpu()
    own_bias = _centred(b[None])[0]
    profile = _profile(head)
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
        w = w + torch.outer(own_bias, constant_direction(f))
        w = w + common_shift(w)
        if len(f) >= 2 * w.shape[1]:  # fewer don't show in which direction there is nothing
            longer = lengthened(w, least_direction(f))
            right = [(_cosines(f, each).argmax(1) == logits.argmax(1)).sum() for each in (w, longer)]
            w = longer if right[1] > right[0] else w
        else:
            notes.append(f"{len(f)} inputs are few for {w.shape[1]} features: twice as many as features serve better")
        values = _centred(kernels.power_series(_cosines(f, w), profile))
        scale = ((values * _centred(logits)).sum() / values.square().sum().clamp_min(1e-300)).item()
    lengths = w.norm(dim=1)
    unequal = (lengths.std(correction=0) / lengths.mean()).item()
    if unequal > 0.01:
        notes.append(f"lengths of its class weights differ by {unequal:.0%}, which the head cannot follow")
    if head.prototypes > 1 and head.aggregate == "sum":
        scale /= head.prototypes
    return notes + _set(head, w, profile, scale * head.temperature)


def common_shift(weight: Tensor) -> Tensor:
    """The v (D,) that makes the lengths of the rows of weight + v as equal as a short v can. weight (C, D)."""
    centred = weight - weight.mean(0)
    squares = weight.square().sum(1)
    left, singular, right = torch.linalg.svd(centred, full_matrices=False)
    if singular[0] == 0:
        return torch.zeros_like(weight[0])
    damped = singular / (singular.square() + RIDGE * singular[0].square())
    shift: Tensor = right.t() @ (damped * (left.t() @ ((squares.mean() - squares) / 2)))
    return shift


def lengthened(weight: Tensor, direction: Tensor) -> Tensor:
    """The rows of weight (C, D), all made as long as the longest by a change along a unit vector (D,)."""
    along = weight @ direction
    missing = weight.square().sum(1).max() - weight.square().sum(1)
    longer = (along.square() + missing).sqrt() * torch.where(along < 0, -1.0, 1.0)
    return weight + torch.outer(longer - along, direction)


def least_direction(features: Tensor) -> Tensor:
    """The unit vector u (D,) with the least sum of <u, f>^2 over features f (n, D)."""
    direction: Tensor = torch.linalg.eigh(features.t() @ features).eigenvectors[:, 0]
    return direction


def constant_direction(features: Tensor) -> Tensor:
    """The u (D,) with <u, f> as near to 1 as can be for all features f (n, D): a bias is then a part of the weights."""
    squares = features.t() @ features
    ridge = 1e-3 * squares.diagonal().mean().clamp_min(1e-300)
    identity = torch.eye(squares.shape[0], dtype=squares.dtype, device=squares.device)
    direction: Tensor = torch.linalg.solve(squares + ridge * identity, features.sum(0))
    return direction


def _centred(logits: Tensor) -> Tensor:
    """Without what they have in common, which softmax doesn't see. (n, C) -> (n, C); one class stays as it is."""
    return logits - logits.mean(1, keepdim=True) if logits.shape[1] > 1 else logits


def _cosines(features: Tensor, weight: Tensor) -> Tensor:
    unit, directions = (x / x.norm(dim=1, keepdim=True).clamp_min(1e-300) for x in (features, weight))
    cosines: Tensor = unit @ directions.t()
    return cosines


def _profile(head: KernelClassifier) -> Tensor:
    """The coefficients to start with, up to their scale."""
    if head.profile is not None:
        return head.profile.detach().double().cpu()
    profile = torch.full((head.degree + 3,), SPARK, dtype=torch.float64, device="cpu")
    profile[kernels.END_POINTS + 1] = 1
    if head.num_classes == 1:
        profile[kernels.END_POINTS] = SPARK**2  # it moves the one logit, where softmax would not see it
    return profile


def _set(head: KernelClassifier, weight: Tensor, profile: Tensor, scale: float) -> list[str]:
    """Write weights and coefficients, which are `scale` times the profile where the activation can give them."""
    notes = []
    fixed = head.profile is not None
    alpha = profile.new_ones(1) if fixed else profile.clone()
    if head.coefficients in ("sigmoid", "softmax"):
        # Bounded: all of them below 1, or all of them together 1, where a_0 takes what is left and changes nothing.
        most = 0.99 / (alpha.max() if head.coefficients == "sigmoid" else alpha.sum()).item()
        if scale > most:
            notes.append(f"its confidence is lowered: {head.coefficients} coefficients are bounded")
        scale = min(scale, most)
    alpha = (alpha * scale).clamp_min(1e-12)
    if head.coefficients == "sigmoid":
        raw = torch.logit(alpha)
    elif head.coefficients == "softmax":
        alpha[kernels.END_POINTS] += 1 - alpha.sum()
        raw = alpha.log()
    elif head.coefficients == "softplus":
        raw = alpha + torch.log(-torch.expm1(-alpha))
    else:
        raw = alpha
    rows = weight.repeat_interleave(head.prototypes, 0)
    if head.prototypes > 1:
        rows = rows + SPREAD * torch.randn_like(rows) * (rows.norm(dim=1, keepdim=True) / math.sqrt(rows.shape[1]))
    with torch.no_grad():
        head.weight.copy_(rows)
        head.raw_alpha.copy_(raw)
    return notes
