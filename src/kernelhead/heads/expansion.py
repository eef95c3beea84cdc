"""The control for landmarks: the same shape, parameters and cost, with a ReLU instead of the kernel."""

import torch
from torch import Tensor, nn

from kernelhead.fused.precision import real_dtype, unit_vectors
from kernelhead.heads._base import Head
from kernelhead.heads._inputs import check_sizes, scale_of


class ExpansionHead(Head):
    """Logits A (s (psi - mean) / deviation) + b, with psi_q = mean over positions of relu(norm(<w_q, f> / |f|)).

    It is `LandmarkHead` with a BatchNorm and a ReLU instead of the kernel.

    Args:
        in_features: D.
        num_classes: C.
        width: Q, the number of channels.
        pool, scale, device, dtype: as of `LandmarkHead`.

    Shapes:
        features `(N, D, H, W)`, `(N, L, D)` or `(N, D)` -> logits `(N, C)`.

    Example:
        >>> ExpansionHead(64, 10, width=128)(torch.randn(8, 64, 7, 7)).shape
        torch.Size([8, 10])
    """

    name = "expansion"
    scaled = ("classifier.weight", "classifier.bias")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        width: int = 2048,
        pool: str | None = "auto",
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(in_features, num_classes, width=width, pool=pool, scale=scale)
        check_sizes(type(self).__name__, width=width)
        self.width = width
        self.scale = scale_of(type(self).__name__, scale, width)
        self.expand = nn.Linear(in_features, width, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, device=device, dtype=dtype)
        self.standard = nn.BatchNorm1d(width, affine=False, device=device, dtype=dtype)
        self.classifier = nn.Linear(width, num_classes, device=device, dtype=dtype)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        real = self._real(features, mask)
        pooled = self._pooled(self._positions(features, real), real)
        logits: Tensor = self.classifier(self.scale * self.standard(pooled))
        return self._as_given(logits, features)

    def _pooled(self, positions: Tensor, real: Tensor | None = None) -> Tensor:
        """Positions (N, L, D) -> means of the rectified channels (N, Q) over those that are real."""
        unit = unit_vectors(positions).to(positions.dtype)
        expanded = self.expand(unit)
        if real is None or not self.norm.training:
            channels = torch.relu(self.norm(expanded.flatten(0, 1)))  # rows of all samples: contiguous
            channels = channels.view(*positions.shape[:2], self.width)
        else:  # the others stay out of the statistics
            rows = torch.relu(self.norm(expanded[real]))
            channels = rows.new_zeros(expanded.shape).masked_scatter(real[..., None], rows)
        if real is None:
            return channels.mean(1)
        sums = channels.masked_fill(~real[..., None], 0).sum(1, dtype=real_dtype(channels.dtype))
        return (sums / real.sum(1, keepdim=True).clamp(min=1)).to(channels.dtype)
