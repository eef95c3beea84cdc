"""SOP, the paper's third baseline: bilinear pooling (Lin et al., ICCV 2015)."""

import math

import torch
from torch import Tensor, nn

from kernelhead.fused.precision import autocast_dtype, unit_vectors, without_autocast
from kernelhead.heads._base import Head

# x / sqrt(|x| + EPS) is the signed root without its infinite slope at 0, for moments whose diagonal has the mean 1.
# Some moments of a batch are always close to 0: with 1e-10 one of them ruined a network every few thousand steps.
EPS = 1e-5


class SecondOrderHead(Head):
    """Logits A x + b, with x the D x D entries of mean over positions of f f^T, signed square roots, normalised.

    Scaling the features changes nothing. The linear layer is given vectors of length sqrt(D), as of D features of unit
    variance, and so takes the learning rates of a linear head. Pooling runs in float32 at least: products of
    half-precision features overflow.

    Args:
        in_features: D.
        num_classes: C.
        pool, device, dtype: as of `LandmarkHead`. With pool=None the logits are a polynomial of degree 2.

    Shapes:
        features `(N, D, H, W)`, `(N, L, D)` or `(N, D)` -> logits `(N, C)`. classifier.weight (C, D D).

    Example:
        >>> SecondOrderHead(16, 10)(torch.randn(8, 16, 7, 7)).shape
        torch.Size([8, 10])
    """

    name = "second_order"
    scaled = ("classifier.weight", "classifier.bias")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        pool: str | None = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(in_features, num_classes, pool=pool)
        self.classifier = nn.Linear(in_features**2, num_classes, device=device, dtype=dtype)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        positions = self._positions(features, self._real(features, mask))  # zeros add nothing, and lengths do not count
        logits: Tensor = self.classifier(self._embedded(positions))
        return self._as_given(logits, features)

    def _embedded(self, positions: Tensor) -> Tensor:
        """Positions (N, L, D) -> (N, D D), in the precision of the linear layer."""
        device = positions.device.type
        dtype = autocast_dtype(self.classifier.weight.dtype, device)
        with without_autocast(device):
            scaled = math.sqrt(self.in_features) * unit_vectors(positions.flatten(1)).view_as(positions)
            second_moments = (scaled.mT @ scaled).flatten(1)
            rooted = second_moments * torch.rsqrt(second_moments.abs() + EPS)
            return (math.sqrt(self.in_features) * unit_vectors(rooted)).to(dtype)
