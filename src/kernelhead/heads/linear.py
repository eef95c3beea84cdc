"""SM, the paper's baseline: the usual linear layer with bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.heads._base import Head


class LinearHead(Head, nn.Linear):
    """Logits W f + b. Features (..., D) -> logits (..., C).

    Example:
        >>> LinearHead(64, 10)(torch.randn(8, 64)).shape
        torch.Size([8, 10])
    """

    name = "linear"
    scaled = ("weight", "bias")
    reset_parameters = nn.Linear.reset_parameters

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._configure(in_features, num_classes)  # which checks the sizes
        nn.Linear.__init__(self, in_features, num_classes, device=device, dtype=dtype)

    def forward(self, features: Tensor) -> Tensor:
        return self._as_given(F.linear(self.points(features), self.weight, self.bias), features)
