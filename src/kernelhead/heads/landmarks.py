"""Points shared by all classes, averaged over positions in the RKHS and mixed by a signed matrix."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.functional import kernel_mean
from kernelhead.fused.precision import real_dtype
from kernelhead.heads._inputs import check_sizes, scale_of
from kernelhead.heads._points import PointHead


class LandmarkHead(PointHead):
    """Logits A (s (psi - mean) / deviation) + b, with psi_q = mean over positions of k(<w_q, f> / (|w_q| |f|)).

    The Q landmarks w_q are shared by all classes, and psi_q is the inner product of a sample's kernel mean embedding
    with phi(w_q). These values are standardised over the batch, multiplied by the scale s and mixed by a signed matrix
    A. The paper's layer has one landmark per class and the identity as A.

    Standardising takes out a_0, the temperature and, as far as variances are above its epsilon, the common scale of the
    coefficients.

    Args:
        in_features: D, the length of a feature vector.
        num_classes: C.
        degree, kernel, coefficients, gamma: of the kernel, as of `KernelHead`.
        landmarks: Q.
        pool: "auto" averages over the positions of a map `(N, D, H, W)` or of tokens `(N, L, D)`, and takes vectors
            `(N, D)` as they are. None takes vectors with any leading dimensions.
        scale: what the standardised values are multiplied by. It changes how the head learns, not what it can be: the
            step that gradient descent on the mixing takes is proportional to its square. None is sqrt(128 / landmarks).
        device, dtype: of parameters and buffers, as for `nn.Linear`. Batch statistics are float32 at least.

    Shapes:
        features `(N, D, H, W)`, `(N, L, D)` or `(N, D)` -> logits `(N, C)`. weight (Q, D), mixing (C, Q), bias (C,).

    Example:
        >>> head = LandmarkHead(64, 10, landmarks=128)
        >>> head(torch.randn(8, 64, 7, 7)).shape
        torch.Size([8, 10])
    """

    name = "landmarks"
    scaled = by_class = ("mixing", "bias")
    precise = ("norm.running_mean", "norm.running_var")
    mixing: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        degree: int = 7,
        kernel: str = "learned",
        coefficients: str = "softplus",
        gamma: float = 1.0,
        landmarks: int = 2048,
        pool: str | None = "auto",
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"degree": degree, "kernel": kernel, "coefficients": coefficients, "gamma": gamma}
        self._configure(in_features, num_classes, **options, landmarks=landmarks, pool=pool, scale=scale)
        check_sizes(type(self).__name__, landmarks=landmarks)
        self.landmarks = landmarks
        self.scale = scale_of(type(self).__name__, scale, landmarks)
        self._build(landmarks, bias=True, device=device, dtype=dtype, **options)
        # Means of kernel values are large beside their deviations: in half precision the difference would be lost.
        self.norm = nn.BatchNorm1d(landmarks, affine=False, device=device, dtype=real_dtype(self.weight.dtype))
        self.mixing = nn.Parameter(torch.empty(num_classes, landmarks, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: points, kernel, mixing and statistics."""
        super().reset_parameters()
        bound = self.mixing.shape[1] ** -0.5
        nn.init.uniform_(self.mixing, -bound, bound)
        self.norm.reset_running_stats()

    def gain(self) -> float:
        deviation = (self.norm.get_buffer("running_var").double() + self.norm.eps).sqrt()
        return self.scale / self.temperature * (self.mixing.detach().double().abs() / deviation).sum(1).max().item()

    def _standardised(self, values: Tensor) -> Tensor:
        """Kernel values (N, Q) -> the same with mean 0 and variance 1 over the batch, times the scale."""
        if self.norm.training and values.shape[0] == 1:
            raise ValueError(
                f"{type(self).__name__} needs two or more samples to standardise over; got a batch of 1, train with "
                "larger batches (drop_last=True of a DataLoader leaves out a smaller last one)"
            )
        standardised: Tensor = self.norm(values.to(self.norm.get_buffer("running_mean").dtype))
        return self.scale * standardised

    def _gathered_logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        assert self.share is not None
        weight, alpha = self.share.alike(self.weight, self.alpha / self.temperature, mean=True)
        values = kernel_mean(self.points(features), weight, alpha, self._real(features, mask))
        return self._logits(*self.share.alike(self.share.gather(values)))

    def _logits(self, values: Tensor) -> Tensor:
        return F.linear(self._standardised(values).to(self.mixing.dtype), self.mixing, self.bias)
