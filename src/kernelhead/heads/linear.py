"""LIN, the paper's second baseline: normalised features and weights, the linear kernel, one learnable coefficient."""

import torch

from kernelhead.heads.kernel import KernelClassifier


class LinearHead(KernelClassifier):
    """Logits a <w_j, f> / (|w_j| |f|) with one learned a >= 0. Features (..., D) -> logits (..., C)."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, kernel="linear", device=device, dtype=dtype)
