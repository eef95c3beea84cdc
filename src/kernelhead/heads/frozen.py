"""A trained kernel head for inference: everything that no longer changes is computed once."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernels
from kernelhead.fused import precision
from kernelhead.fused.kernel_mean import block_rows, masked, touches_end_points
from kernelhead.fused.modes import differentiated_by_torch
from kernelhead.fused.precision import divided, lengths, real_dtype, unit_vectors
from kernelhead.heads._base import Head
from kernelhead.heads._points import PointHead


class FrozenHead(Head):
    """A copy of a kernel head for inference, as `freeze` gives it: the logits of evaluation mode, from less work.

    Points have unit length, the temperature is part of the coefficients, and the series ends at its last term that is
    not zero. The deviations of landmarks are part of `mixing`. There is nothing to train; gradients still flow to the
    features.

    Args:
        head: the trained head, which stays as it is. Its forward hooks, which `kernelize` uses, go along.

    Shapes:
        features and logits as of the head. directions `(K, D)`, with prototypes the first of every class, then the
        second. alpha `(M + 3,)`. mean `(Q,)` and mixing `(C, Q)` of landmarks.
    """

    precise = ("alpha", "mean")  # a rounded a_m moves kernel values by more than standardised ones vary
    directions: Tensor
    alpha: Tensor
    bias: Tensor | None
    mean: Tensor | None
    mixing: Tensor | None

    def __init__(self, head: PointHead) -> None:
        super().__init__()
        self.name = head.name  # type: ignore[misc]  # the configuration stays the head's
        self._configure(head.in_features, head.num_classes, **head._options)
        self.prototypes, self.aggregate = head.prototypes, head.aggregate
        with torch.no_grad():
            # In this order the reduction over prototypes goes along whole rows of classes.
            weight = head.weight.view(-1, head.prototypes, head.weight.shape[1]).transpose(0, 1).flatten(0, 1)
            self.register_buffer("directions", unit_vectors(weight).to(weight.dtype))
            alpha = head.alpha / head.temperature
            self.register_buffer("alpha", alpha.to(real_dtype(alpha.dtype)))
            self.register_buffer("bias", None if head.bias is None else head.bias.clone())
            mean = mixing = None
            if head.mixing is not None:
                # A (s (k - mean) / deviation) + b is (A s / deviation) (k - mean) + b. With the mean in the bias it
                # would be a difference of two large numbers where kernel values vary little.
                norm: Any = head.norm
                mean = norm.running_mean.clone()
                gain = head.scale / (norm.running_var.double() + norm.eps).sqrt()
                mixing = (head.mixing.double() * gain).to(head.mixing.dtype)
            self.register_buffer("mean", mean)
            self.register_buffer("mixing", mixing)
        self._survey()
        for name, hooks in vars(head).items():
            if name.startswith("_forward_"):
                # Hooks of torch.nn.utils make parameters out of others, as pruning does; here there are none.
                makers = {key for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils.")}
                getattr(self, name).update({key: hooks[key] for key in hooks if key not in makers})
        self.eval()

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "frozen": True}

    def _survey(self) -> None:
        """Find where the series ends, and whether there are end-point terms."""
        present = (self.alpha != 0).tolist() if not self.alpha.is_meta else [True] * self.alpha.shape[0]
        self.end_points = any(present[: kernels.END_POINTS])
        self.degree = max((m for m, there in enumerate(present[kernels.END_POINTS :]) if there), default=0)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._survey()

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        real, points, share = self._real(features, mask), self.points(features), None
        dtype = precision.product_dtype(points, self.directions)
        if real is not None:
            points, share = masked(points, real, real_dtype(dtype))
        with precision.without_autocast(features.device.type):
            logits = self._values(points, dtype, share)
        if self.mixing is not None and self.mean is not None:
            logits = F.linear((logits - self.mean).to(self.mixing.dtype), self.mixing, self.bias)
        else:
            if self.prototypes > 1:
                grouped = logits.view(-1, self.prototypes, self.num_classes)
                logits = grouped.sum(1) if self.aggregate == "sum" else torch.logsumexp(grouped, 1)
            if self.bias is not None:
                logits = logits + self.bias
        if not precision.autocast_enabled(features.device.type):
            logits = logits.to(dtype)
        return self._as_given(logits, features)

    def _values(self, points: Tensor, dtype: torch.dtype, share: Tensor | None) -> Tensor:
        """Kernel values of points `(N, D)`, or means over positions `(N, L, D)`: `(N, K)`. share as of `masked`."""
        real = real_dtype(dtype)
        alpha = self.alpha[: kernels.END_POINTS + self.degree + 1].to(real)
        a_0 = alpha[kernels.END_POINTS]
        if share is not None:  # positions that do not count add nothing else
            alpha = torch.cat([alpha[: kernels.END_POINTS], 0 * alpha[:1], alpha[kernels.END_POINTS + 1 :]])
        # A compiler, a transform and autograd cannot follow operations in place.
        followed = differentiated_by_torch() or (torch.is_grad_enabled() and points.requires_grad)
        device = points.device.type
        cosines = precision.followed_dtype(dtype, device) if followed else precision.product_dtypes(dtype, device)[0]
        unit = unit_vectors(points).to(cosines) if followed else divided(points, lengths(points), cosines)
        directions = self.directions.to(cosines).t()
        positions = points.shape[1] if points.dim() == 3 else 1
        blocks = [unit] if followed else torch.split(unit, block_rows(positions, directions.shape[1], unit.device))
        values = []
        for block in blocks:
            t = (block @ directions).to(real)
            ends = self.end_points and dtype == real and (followed or touches_end_points(t))
            value = kernels.series(t, alpha, ends=ends, out=None if followed else torch.empty_like(t))
            values.append(value.mean(1) if points.dim() == 3 else value)
        means = values[0] if len(values) == 1 else torch.cat(values)
        return means if share is None else means * share + a_0

    def extra_repr(self) -> str:
        shown = f"{self.name}, in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{shown}, degree={self.degree}, end_points={self.end_points}"
