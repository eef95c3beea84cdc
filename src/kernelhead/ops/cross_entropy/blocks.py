"""The loss of the kernel head, block of classes by block of classes: what the fused backends have in common.

With k_nj = k(t_nj) and z_n = log sum_j exp(k_nj) the loss of a sample is z_n - log sum_{j of its class} exp(k_nj), and

    dL/dt_nj = (p_nj - y_nj) k'(t_nj),        dL/da_m = sum_nj (p_nj - y_nj) t_nj^m,

where p = exp(k - z) and y shares the label among the prototypes of its class. Both need the cosines alone, of which
one block at a time is held. Forward and backward pass each go through the blocks:

    forward    t = f_hat w_hat^T  ->  Observe: sums of exp(k), the kernel values of a sample's own class
    backward   t  ->  Slopes: G = dL/dt / |w|  ->  dL/df += G w,  dL/dw = G^T f_hat,  less what points along f or w

The cosines are either kept from the first to the second (three matrix products, N x K numbers) or computed again (four
products, no more memory than a block). Elementwise work is left to `passes`: `unit`, `Observe`, `Slopes` and `project`
in plain torch (`chunked`) or in Triton (`triton`).

Sums are taken in a fixed order everywhere: the same inputs give the same bits on the same machine. No order of
derivative above the first.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhead.ops.cross_entropy import chunked
from kernelhead.ops.cross_entropy.products import Products, precision


def passes_of(fused: bool) -> ModuleType:
    if not fused:
        return chunked
    from kernelhead.ops.cross_entropy import triton  # imports triton

    return triton


def _blocks(classes: int, width: int) -> Iterator[tuple[int, int]]:
    for first in range(0, classes, width):
        yield first, min(classes, first + width)


def aligned(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty matrix whose rows start at whole cache lines."""
    return torch.empty(rows, -(-columns // 64) * 64, dtype=dtype, device=like.device)[:, :columns]


class Settings(NamedTuple):
    """All that is no tensor."""

    prototypes: int
    ignored: int
    """The label of samples that do not count."""
    smoothing: float
    dtype: torch.dtype
    """Of matrix products."""
    width: int
    """Classes of a block."""
    keep: bool
    """Whether cosines are kept for the backward pass."""
    ranked: bool
    """Whether to say which samples have their own class on top."""
    fused: bool
    """Whether the passes are Triton's."""
    negligible: float
    """See `sparse`."""


class Found(NamedTuple):
    """What the forward pass leaves."""

    nll: Tensor
    """(N,): negative log-likelihood of the targets."""
    right: Tensor
    """(N,) if ranked, bool: whether no other class has a higher score."""
    z: Tensor
    """(N,): log sum exp(k)."""
    likelihood: Tensor
    """(N,): the same over the prototypes of the target."""
    norm: Tensor
    """(N, 1): lengths of the features."""
    weight_norm: Tensor
    """(K, 1): lengths of the weights."""
    kept: Tensor
    """(N, K) if kept: cosines."""
    masses: Tensor
    """(N, tiles) if anything may be negligible: log sum exp(k) of every tile of classes."""


def forward(features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, settings: Settings) -> Found:
    """The loss of features (N, D) for labels target (N,). weight (K, D), alpha (M + 3,) with the temperature in it."""
    passes = passes_of(settings.fused)
    kind = precision(settings.dtype, features.device.type)
    prototypes, width, keep = settings.prototypes, settings.width, settings.keep
    samples, classes = features.shape[0], weight.shape[0] // prototypes
    norm, weight_norm = (torch.empty(x.shape[0], 1, dtype=kind.real, device=x.device) for x in (features, weight))
    unit = passes.unit(features, kind.cosines, norm)
    cosines = aligned(samples, (classes if keep else min(width, classes)) * prototypes, features, kind.cosines)
    spreads = settings.smoothing > 0
    observe = passes.Observe(alpha.to(kind.real), kind, target, prototypes, classes, width, spreads, settings.ranked)
    for first, last in _blocks(classes, width):
        rows = slice(first * prototypes, last * prototypes)
        t = cosines[:, rows if keep else slice((last - first) * prototypes)]
        _WHOLE.cosines(unit, passes.unit(weight[rows], kind.cosines, weight_norm[rows]), t)
        observe(t, first)
    nll, right, z, likelihood = observe.conclude(settings.ignored, settings.smoothing, classes)
    kept = cosines if keep else cosines.new_empty(0)
    masses = observe.masses if settings.negligible else z.new_empty(0)
    return Found(nll, right, z, likelihood, norm, weight_norm, kept, masses)


def backward(
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    found: Found,
    settings: Settings,
    wants: Sequence[bool],
    spend: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features, weight and alpha, each empty unless `wants` has it.

    `spend`: nobody will look at the cosines that were kept again, so that slopes may be written over them.
    """
    passes = passes_of(settings.fused)
    kind = precision(settings.dtype, features.device.type)
    wants_features, wants_weight, wants_alpha = wants
    prototypes, width, keep = settings.prototypes, settings.width, settings.keep
    samples, classes = features.shape[0], weight.shape[0] // prototypes
    unit_slopes = passes.unit(features, kind.slopes)
    cosines, unit = found.kept, unit_slopes
    if not keep:
        cosines = aligned(samples, min(width, classes) * prototypes, features, kind.cosines)
        unit = unit_slopes if kind.slopes == kind.cosines else passes.unit(features, kind.cosines)
    real_alpha, z, likelihood = alpha.to(kind.real), found.z, found.likelihood
    sizes = prototypes, classes, settings.ignored, settings.smoothing
    slopes_of = passes.Slopes(real_alpha, kind, target, gradient, z, likelihood, *sizes)
    plan = None
    if settings.negligible:
        weights = torch.where(target != settings.ignored, gradient, 0.0).abs()
        plan = passes.plan(
            found.masses, z, likelihood, weights, target, prototypes, classes, width, settings.negligible
        )

    grad_features = torch.zeros_like(unit, dtype=kind.real) if wants_features else features.new_empty(0)
    grad_weight = weight.new_empty(weight.shape if wants_weight else 0)
    for number, (first, last) in enumerate(_blocks(classes, width)):
        rows = slice(first * prototypes, last * prototypes)
        directions, lengths = weight[rows], found.weight_norm[rows]
        products = _WHOLE if plan is None else plan.products(number)
        if products is None:  # nothing in this block counts
            if wants_weight:
                grad_weight[rows] = 0
            continue
        t = cosines[:, rows if keep else slice(directions.shape[0])]
        if not keep:
            products.cosines(unit, passes.unit(directions, kind.cosines), t)
        slopes = slopes_of(t, first, lengths, spend or not keep, products)
        if wants_features:
            products.add_features(grad_features, slopes, directions.to(kind.slopes))
        if wants_weight:
            part = grad_weight[rows]
            if part.dtype != kind.slopes:
                part = torch.empty_like(part, dtype=kind.slopes)
            products.of_weight(slopes, unit_slopes, part)
            passes.project(part, directions, lengths, grad_weight[rows], divided=True)
        del slopes

    if wants_features:
        total, grad_features = grad_features, features.new_empty(features.shape)
        passes.project(total, features, found.norm, grad_features, divided=False)
    grad_alpha = slopes_of.moments().to(alpha.dtype) if wants_alpha else alpha.new_empty(0)
    return grad_features, grad_weight, grad_alpha


_WHOLE = Products()
