"""The control for landmarks with its parts left out, one by one."""

from typing import Any

import torch
from torch import Tensor

from kernelhead.fused.precision import unit_vectors
from kernelhead.heads import ExpansionHead
from kernelhead_lab.heads._dropout import check_dropout, dropped
from kernelhead_lab.heads.norm_relu_mean import norm_relu_mean, supported


class ExpansionVariant(ExpansionHead):
    """`ExpansionHead` with more options.

    Args:
        normalized: whether each position is scaled to unit length.
        standardized: whether the averages over positions are standardised over the batch.
        dropout: the share of the channels that each sample is trained without.

    The other options and the shapes are those of `ExpansionHead`.
    """

    name = "expansion_variant"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        normalized: bool = True,
        standardized: bool = True,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        self._options |= {"normalized": normalized, "standardized": standardized, "dropout": dropout}
        self.normalized, self.standardized = normalized, standardized
        self.dropout = check_dropout("ExpansionVariant", dropout)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError("ExpansionVariant takes no mask; use ExpansionHead")
        pooled = self._pooled(self._positions(features))
        if self.standardized:
            pooled = self.standard(pooled)
        logits: Tensor = self.classifier(dropped(self.scale * pooled, self.dropout, self.training))
        return self._as_given(logits, features)

    def _pooled(self, positions: Tensor, real: None = None) -> Tensor:  # type: ignore[override]
        if self.normalized:
            positions = unit_vectors(positions).to(positions.dtype)
        expanded = self.expand(positions)
        if supported(self.expand, self.norm, positions):
            return norm_relu_mean(expanded, self.norm)
        return torch.relu(self.norm(expanded.mT)).mean(2)
