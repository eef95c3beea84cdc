"""The loss of the kernel head, block of classes by block of classes: what the fused backends have in common.

With k_nj = k(t_nj) and z_n = log sum_j exp(k_nj) the loss of a sample is z_n - log sum_{j of its class} exp(k_nj), and

    dL/dt_nj = (p_nj - y_nj) k'(t_nj),        dL/da_m = sum_nj (p_nj - y_nj) t_nj^m,

where p = exp(k - z) and y shares the label among the prototypes of its class. Both need the cosines alone. Each pass
goes through the blocks:

    forward    t = f_hat w_hat^T  ->  Observe: sums of exp(k), the kernel values of a sample's own class
    backward   t  ->  Slopes: G = dL/dt / |w|  ->  dL/df += G w,  dL/dw = G^T f_hat,  less what points along f or w

The cosines are kept (three matrix products, N x K numbers) or computed again (four products, one block in memory).
Elementwise work is left to `unit`, `Observe`, `Slopes` and `project`, in plain torch (`chunked`) or in Triton
(`triton`). Sums are taken in a fixed order: the same inputs give the same bits on the same machine.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhead.fused.precision import add_product, product_dtypes, real_dtype


class Precision(NamedTuple):
    """Precision of each kind of number."""

    cosines: torch.dtype
    slopes: torch.dtype  # of products that make gradients
    real: torch.dtype  # of everything else
    ends: bool  # whether a cosine can tell 1 from its neighbours; where not, the end-point terms count as zero


def precision(dtype: torch.dtype, device: str) -> Precision:
    """`product_dtypes` for products in `dtype`; on a CPU, where half precision is no faster, float32."""
    real = real_dtype(dtype)
    return Precision(*product_dtypes(real if device == "cpu" else dtype, device), real, dtype == real)


class Settings(NamedTuple):
    """The arguments that are not tensors."""

    classes: int
    prototypes: int
    ignored: int  # the label of samples that do not count
    smoothing: float
    dtype: torch.dtype  # of matrix products
    width: int  # classes of a block
    keep: bool  # whether cosines are kept for the backward pass
    fused: bool  # whether the passes are Triton's
    total: int  # classes in all, where other processes have more

    def passes(self) -> ModuleType:
        """The module of the backend, where triton is imported only if it is Triton's."""
        return import_module(f"kernelhead.fused.cross_entropy.{'triton' if self.fused else 'chunked'}")

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """The first class of each block, and the block's rows of the weights."""
        for first in range(0, self.classes, self.width):
            last = min(self.classes, first + self.width)
            yield first, slice(first * self.prototypes, last * self.prototypes)

    def empty_cosines(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for the cosines of all classes if kept, else of a block. Rows start at whole cache lines."""
        columns = (self.classes if self.keep else min(self.width, self.classes)) * self.prototypes
        return features.new_empty(features.shape[0], -(-columns // 64) * 64, dtype=dtype)[:, :columns]


class Found(NamedTuple):
    """Results of the forward pass that the backward pass needs."""

    z: Tensor  # (N,): log sum exp(k)
    likelihood: Tensor  # (N,): the same over the prototypes of the target
    norm: Tensor  # (N, 1): lengths of the features
    weight_norm: Tensor  # (K, 1): lengths of the weights
    kept: Tensor  # (N, K) if kept: cosines


class Sums(NamedTuple):
    """What the loss is made of, each (N,)."""

    z: Tensor  # log sum exp(k)
    likelihood: Tensor  # the same over the prototypes of the target; NaN where it is not among the classes
    spread: Tensor  # the sum of all scores, with label smoothing


def forward(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    settings: Settings,
    combine: Callable[[Sums], Sums] = lambda sums: sums,
) -> tuple[Tensor, Found]:
    """The loss (N,) of features (N, D) for labels target (N,). weight (K, D), alpha (M + 3,) with the temperature.

    `combine` adds what other classes than these have.
    """
    passes, keep = settings.passes(), settings.keep
    kind = precision(settings.dtype, features.device.type)
    unit, norm = passes.unit(features, kind.cosines)
    weight_norm = norm.new_empty(weight.shape[0], 1)
    cosines = settings.empty_cosines(features, kind.cosines)
    observe = passes.Observe(alpha.to(kind.real), target, settings, kind)
    for first, rows in settings.blocks():
        directions, weight_norm[rows] = passes.unit(weight[rows], kind.cosines)
        t = cosines[:, rows if keep else slice(directions.shape[0])]
        torch.mm(unit, directions.t(), out=t)
        del directions  # before the next block's are made
        observe(t, first)
    sums = combine(observe.conclude())
    nll = sums.z - (1 - settings.smoothing) * sums.likelihood
    if settings.smoothing:
        nll -= settings.smoothing / settings.total * sums.spread
    nll = torch.where(target != settings.ignored, nll, 0.0)
    return nll, Found(sums.z, sums.likelihood, norm, weight_norm, cosines if keep else cosines.new_empty(0))


def backward(
    gradient: Tensor, inputs: Sequence[Tensor], found: Found, settings: Settings, wants: Sequence[bool], *, spend: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features, weight and alpha, each empty unless `wants` has it. `inputs` are those and the target.

    `spend`: nobody will look at the cosines that were kept again, so that slopes may be written over them.
    """
    features, weight, alpha, target = inputs
    passes, keep = settings.passes(), settings.keep
    kind = precision(settings.dtype, features.device.type)
    wants_features, wants_weight, wants_alpha = wants
    unit_slopes, _ = passes.unit(features, kind.slopes)
    cosines, unit = found.kept, unit_slopes
    if not keep:
        cosines = settings.empty_cosines(features, kind.cosines)
        unit = unit_slopes if kind.slopes == kind.cosines else passes.unit(features, kind.cosines)[0]
    slopes_of = passes.Slopes(alpha.to(kind.real), target, settings, kind, gradient, found)

    total = torch.zeros_like(unit, dtype=kind.real) if wants_features else None
    grad_weight = weight.new_empty(weight.shape if wants_weight else 0)
    for first, rows in settings.blocks():
        directions, lengths = weight[rows], found.weight_norm[rows]
        t = cosines[:, rows if keep else slice(directions.shape[0])]
        if not keep:
            torch.mm(unit, passes.unit(directions, kind.cosines)[0].t(), out=t)
        slopes = slopes_of(t, first, lengths, spend or not keep)
        if total is not None:
            add_product(total, slopes, directions.to(kind.slopes))
        if wants_weight:
            part = grad_weight[rows]
            if part.dtype != kind.slopes:
                part = torch.empty_like(part, dtype=kind.slopes)
            torch.mm(slopes.t(), unit_slopes, out=part)
            passes.project(part, directions, lengths, grad_weight[rows])
        del slopes

    grad_features = features.new_empty(0 if total is None else features.shape)
    if total is not None:
        passes.project(total.div_(found.norm), features, found.norm, grad_features)
    return grad_features, grad_weight, slopes_of.sums.to(alpha.dtype) if wants_alpha else alpha.new_empty(0)
