"""Second-order pooling with dropout."""

from typing import Any

from torch import Tensor

from kernelhead.heads import SecondOrderHead
from kernelhead_lab.heads._dropout import check_dropout, dropped


class SecondOrderVariant(SecondOrderHead):
    """`SecondOrderHead` that trains each sample without the share `dropout` of its D x D entries.

    Shapes are those of `SecondOrderHead`.
    """

    name = "second_order_variant"

    def __init__(self, in_features: int, num_classes: int, *, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        self._options |= {"dropout": dropout}
        self.dropout = check_dropout("SecondOrderVariant", dropout)

    def _embedded(self, positions: Tensor) -> Tensor:
        return dropped(super()._embedded(positions), self.dropout, self.training)
