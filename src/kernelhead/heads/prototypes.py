"""Several points per class: a class weight that is a finite sum in the RKHS, or a mixture."""

from typing import Any

import torch

from kernelhead.heads._inputs import check_choice, check_sizes
from kernelhead.heads._points import ClassPointsHead

AGGREGATES = ("sum", "logsumexp")


class PrototypeHead(ClassPointsHead):
    """Logits sum_p z_jp, or log sum_p exp(z_jp), of z_jp = k(<w_jp, f> / (|w_jp| |f|)) / T for P points per class.

    The sum is the inner product with a class weight sum_p phi(w_jp) in the RKHS. The log-sum-exp is a mixture: the
    probability of a class is the sum of its prototypes' probabilities.

    Args:
        prototypes: P.
        aggregate: "sum" or "logsumexp".
        coefficients: as of `KernelHead`. "softplus" is level with "relu" on held-out images, and none of it can die.
        degree, kernel, temperature, gamma, bias, device, dtype: as of `KernelHead`.

    Shapes:
        features (..., D) -> logits (..., C). weight (C P, D), the prototypes of a class side by side.

    Example:
        >>> head = PrototypeHead(64, 10, prototypes=4)
        >>> head(torch.randn(8, 64)).shape
        torch.Size([8, 10])
    """

    name = "prototypes"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        degree: int = 7,
        kernel: str = "learned",
        coefficients: str = "softplus",
        temperature: float | None = None,
        prototypes: int = 4,
        aggregate: str = "sum",
        gamma: float = 1.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"degree": degree, "kernel": kernel, "coefficients": coefficients}
        options |= {"temperature": temperature, "gamma": gamma}
        self._configure(in_features, num_classes, **options, prototypes=prototypes, aggregate=aggregate, bias=bias)
        check_sizes("PrototypeHead", prototypes=prototypes)
        check_choice("PrototypeHead", "aggregate", aggregate, AGGREGATES)
        self.prototypes, self.aggregate = prototypes, aggregate
        self._build(num_classes * prototypes, bias=bias, device=device, dtype=dtype, **options)
        self.reset_parameters()
