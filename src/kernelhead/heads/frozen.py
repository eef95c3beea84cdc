"""A trained `KernelClassifier` for inference alone: everything that no longer changes is computed once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from kernelhead import kernels
from kernelhead.heads._leaf import Leaf
from kernelhead.heads._places import as_points
from kernelhead.ops.kernel_mean import BLOCK, BLOCK_ELSEWHERE, is_pooled, touches_end_points
from kernelhead.ops.modes import transformed
from kernelhead.ops.precision import (
    autocast_enabled,
    product_dtypes,
    raw_unit_norm,
    real_dtype,
    unit_norm,
    without_autocast,
)

if TYPE_CHECKING:
    from kernelhead.heads.kernel import KernelClassifier

# What nn.Module keeps its forward hooks in.
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# Hooks that make a parameter of others before every pass: of a frozen head's numbers, none is made any more.
MAKERS = (BasePruningMethod, SpectralNorm, WeightNorm)
SMALL = 80.0  # a sum of exponentials of so much neither overflows nor vanishes in float32


def logit_gain(head: "KernelClassifier") -> float:
    """By how much a logit changes at most where every kernel value changes by at most 1."""
    gain = 1 / head.temperature
    if head.mixing is not None:
        deviation = (head.norm.running_var.detach().double() + head.norm.eps).sqrt()  # type: ignore[union-attr]
        return gain * head.scale * (head.mixing.detach().double().abs() / deviation).sum(1).max().item()
    return gain * head.prototypes if head.aggregate == "sum" else gain


class FrozenKernelClassifier(Leaf):
    """What `KernelClassifier.freeze` gives: the same logits as the head in evaluation mode, from less work.

    Class weights are of unit length, the temperature is part of the coefficients, and the series ends at its last
    term that is not zero. The statistics of landmarks have become part of `mixing` and of a constant for each of
    them, which takes the place of a_0. There is nothing to train; gradients still flow to the features.

    Args:
        head: the trained head, which stays as it is. Its forward hooks, of which `kernelize` makes use, go along.
        tolerance: terms are left out, the smallest first, as long as no logit changes by more than this. At 0 only
            those go whose coefficient is zero. a_0, which costs nothing, always stays.

    Shapes:
        As of the head: features (..., D) -> logits (..., C); where it pools, a map (N, D, H, W) or tokens (N, L, D).
        directions (K, D), with prototypes the first of every class, then the second; alpha (M + 3,), with zeros for
        what is left out; constant (Q,), mixing (C, Q) and bias (C,) with landmarks.
    """

    # A rounded a_m moves kernel values by more than they vary, where they were standardised.
    precise = ("alpha", "constant")
    directions: Tensor
    alpha: Tensor
    constant: Tensor | None
    mixing: Tensor | None
    bias: Tensor | None
    window = 1  # of a module that was pickled before there were windows

    def __init__(self, head: "KernelClassifier", *, tolerance: float = 0.0) -> None:
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be zero or positive, got {tolerance}")
        super().__init__()
        self.in_features = head.in_features
        self.num_classes = head.num_classes
        self.prototypes = head.prototypes
        self.aggregate = head.aggregate
        self.pools = head.pools
        self.window = head.window
        with torch.no_grad():
            # In this order the reduction over prototypes goes along whole rows of classes.
            weight = head.weight.detach()
            weight = weight.reshape(-1, head.prototypes, weight.shape[1]).transpose(0, 1).reshape(weight.shape)
            self.register_buffer("directions", (weight / raw_unit_norm(weight)).to(weight.dtype))
            alpha = head.alpha.detach()
            left_out = _smallest(alpha.double() * logit_gain(head), tolerance) if tolerance else []
            alpha = (alpha / head.temperature).index_fill(0, torch.tensor(left_out, device=alpha.device).long(), 0)
            self.register_buffer("alpha", alpha.to(real_dtype(alpha.dtype)))
            self._fold(head)
        self._survey()
        makers = {key for key, hook in head._forward_pre_hooks.items() if isinstance(hook, MAKERS)}
        for hooks in HOOKS:
            known = getattr(head, hooks)
            getattr(self, hooks).update({key: known[key] for key in known if key not in makers})
        self.eval()

    def _fold(self, head: "KernelClassifier") -> None:
        """Standardising and mixing, A (s (k - mean) / deviation) + b, as (A s / deviation) (k - mean) + b, in float64.

        The mean goes into the series, not on into the bias: that would be a difference of two large numbers where
        kernel values vary little.
        """
        if head.mixing is None or head.bias is None:
            for name in ("constant", "mixing", "bias"):
                self.register_buffer(name, None)
            return
        mean, variance = head.norm.running_mean, head.norm.running_var
        assert mean is not None
        assert variance is not None
        dtype = head.mixing.dtype
        a_0 = self.alpha[kernels.END_POINTS].double()
        self.register_buffer("constant", (a_0 - mean.double()).to(real_dtype(dtype)))
        gain = head.scale / (variance.double() + head.norm.eps).sqrt()
        self.register_buffer("mixing", (head.mixing.double() * gain).to(dtype))
        self.register_buffer("bias", head.bias.detach().clone())

    def _survey(self) -> None:
        """Find where the series ends, whether there are end-point terms, and whether no exponential can overflow."""
        known = self.alpha.device.type != "meta"
        present = (self.alpha != 0).tolist() if known else [True] * self.alpha.shape[0]
        self.small = known and self.alpha.double().abs().sum().item() < SMALL
        self.end_points = any(present[: kernels.END_POINTS])
        self.degree = max((m for m, there in enumerate(present[kernels.END_POINTS :]) if there), default=0)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._survey()

    def forward(self, features: Tensor) -> Tensor:
        name = "FrozenKernelClassifier"
        points = as_points(features, self.in_features, name, pools=self.pools, window=self.window)
        device = features.device.type
        autocast = autocast_enabled(device)
        dtype = torch.promote_types(features.dtype, self.directions.dtype)
        if autocast and dtype != torch.float64:
            with without_autocast(device):
                values = self._values(points, torch.get_autocast_dtype(device))
        else:
            values = self._values(points, dtype)
        if self.mixing is not None:
            logits = F.linear(values.to(self.mixing.dtype), self.mixing, self.bias)
        elif self.prototypes > 1:
            grouped = values.view(-1, self.prototypes, self.num_classes)
            if self.aggregate == "sum":
                logits = grouped.sum(1)
            else:
                logits = grouped.exp().sum(1).log() if self.small else torch.logsumexp(grouped, 1)
        else:
            logits = values
        if not autocast:
            logits = logits.to(dtype)
        return logits if self.pools or features.dim() == 2 else logits.view(*features.shape[:-1], self.num_classes)

    def _values(self, points: Tensor, dtype: torch.dtype) -> Tensor:
        """Kernel values of points (N, D), or their means over places of (N, L, D), with products in `dtype`: (N, K)."""
        real = real_dtype(dtype)
        alpha = self.alpha.to(real)
        a_0, *powers = alpha.unbind()[kernels.END_POINTS : kernels.END_POINTS + self.degree + 1]
        series = [a_0 if self.constant is None else self.constant.to(real), *powers]
        ends = alpha if self.end_points and dtype == real else None
        if _is_followed(points):
            # An exported program has nothing to differentiate, so it needs no care for the slope at zero.
            norm = raw_unit_norm(points) if torch.compiler.is_exporting() else unit_norm(points)
            t = ((points / norm).to(dtype) @ self.directions.to(dtype).t()).to(real)
            value = _kernel(t, series, ends)
            return value.mean(1) if points.dim() == 3 else value
        if points.dim() == 3 and is_pooled(points, self.directions, self.alpha, dtype):
            return self._pooled(points)

        norm = raw_unit_norm(points)
        cosines, _ = product_dtypes(dtype, points.device.type)
        directions = self.directions.to(cosines).t()
        samples, classes = points.shape[0], directions.shape[1]
        if points.dim() == 2:
            if cosines == real and classes < self.in_features:  # N C divisions, not N D; halves have no range for it
                t = torch.mm(points.to(cosines), directions).div_(norm)
            else:
                t = torch.mm((points / norm).to(cosines), directions).to(real)
            rows = _block_rows(1, classes, points.device)
            if samples <= rows:
                return _kernel(t, series, ends, in_place=True)
            return torch.cat([_kernel(block, series, ends, in_place=True) for block in _split(t, rows)])
        unit = (points / norm).to(cosines)
        values = unit.new_empty(samples, classes, dtype=real)
        rows = _block_rows(points.shape[1], classes, points.device)
        for block, out in zip(_split(unit, rows), _split(values, rows), strict=True):
            t = torch.matmul(block, directions).to(real)
            torch.mean(_kernel(t, series, ends, in_place=True), 1, out=out)
        return values

    def _pooled(self, points: Tensor) -> Tensor:
        """`_values` of places (N, L, D) with products in half precision, in the Triton kernel that training has."""
        from kernelhead.ops import kernel_pool  # imports triton

        alpha = self.alpha[: kernels.END_POINTS + 1 + max(self.degree, 1)].float()
        if self.constant is not None:  # which takes the place of a_0
            alpha = torch.cat([alpha[: kernels.END_POINTS], alpha.new_zeros(1), alpha[kernels.END_POINTS + 1 :]])
        with torch.cuda.device_of(points):  # type: ignore[no-untyped-call]  # where triton launches
            unit, _ = kernel_pool.normalised(points)
            values, _ = kernel_pool.pool(unit, self.directions.to(torch.float16), alpha, keep=False)
        return values if self.constant is None else values.add_(self.constant)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}, num_classes={self.num_classes}, degree={self.degree}"]
        parts.append(f"end_points={self.end_points}")
        if self.prototypes > 1:
            parts.append(f"prototypes={self.prototypes}, aggregate={self.aggregate!r}")
        if self.mixing is not None:
            parts.append(f"landmarks={self.mixing.shape[1]}")
        if self.pools:
            parts.append("pool='rkhs'" + (f", window={self.window}" if self.window > 1 else ""))
        return ", ".join(parts)


def _smallest(costs: Tensor, budget: float) -> list[int]:
    """Places of the smallest terms but a_0, as many as cost no more than `budget` together. costs (M + 3,)."""
    order = [place for place in costs.abs().argsort().tolist() if place != kernels.END_POINTS]
    sums = costs.abs()[order].cumsum(0)
    return order[: int((sums <= budget).sum())]


def _block_rows(places: int, classes: int, device: torch.device) -> int:
    """How many samples go through the series at once, for its buffers to stay in the cache."""
    return max(BLOCK.get(device.type, BLOCK_ELSEWHERE) // (places * classes), -(-256 // places))


def _split(x: Tensor, rows: int) -> Sequence[Tensor]:
    blocks: Sequence[Tensor] = torch.split(x, rows)
    return blocks


def _is_followed(points: Tensor) -> bool:
    """Whether something watches that cannot follow work in place: a compiler, a transform, or autograd."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or transformed()
        or (torch.is_grad_enabled() and points.requires_grad)
    )


def _kernel(t: Tensor, series: list[Tensor], ends: Tensor | None, *, in_place: bool = False) -> Tensor:
    """sum_m c_m t^m, and the end-point terms of `ends`, if any. t (..., K), c_0 () or (K,), the others ()."""
    value = kernels.horner(t, series, in_place=in_place)
    if ends is None or (in_place and not touches_end_points(t)):
        return value
    odd = kernels.end_points(t)
    return torch.addcmul(value, odd, torch.addcmul(ends[1], odd, ends[0]), out=value if in_place else None)
