"""SM, the paper's baseline: the usual linear layer with bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.heads._leaf import Leaf
from kernelhead.heads._places import as_vectors, check_sizes


class SoftmaxHead(Leaf, nn.Linear):
    """Logits W f + b. Features (..., D) -> logits (..., C)."""

    pools = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("SoftmaxHead", in_features=in_features, num_classes=num_classes)
        super().__init__(in_features, num_classes, device=device, dtype=dtype)
        self.num_classes = num_classes

    def forward(self, features: Tensor) -> Tensor:
        logits = F.linear(as_vectors(features, self.in_features, "SoftmaxHead"), self.weight, self.bias)
        return logits.view(*features.shape[:-1], self.out_features)
