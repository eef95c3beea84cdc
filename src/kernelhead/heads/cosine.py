"""LIN, the paper's second baseline: the linear kernel on unit vectors."""

import torch

from kernelhead.heads._points import ClassPointsHead


class CosineHead(ClassPointsHead):
    """Logits a <w_j, f> / (|w_j| |f|) with one learned a >= 0. Features (..., D) -> logits (..., C).

    Example:
        >>> CosineHead(64, 10)(torch.randn(8, 64)).shape
        torch.Size([8, 10])
    """

    name = "cosine"
    scaled = ("kernel.raw_alpha",)

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(in_features, num_classes)
        self._build(num_classes, kernel="cosine", device=device, dtype=dtype)
        self.reset_parameters()
