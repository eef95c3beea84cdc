"""The paper's layer: one point per class."""

from typing import Any

import torch

from kernelhead.heads._points import ClassPointsHead


class KernelHead(ClassPointsHead):
    """Logits k(<w_j, f> / (|w_j| |f|)) / T with a learned kernel k(t) = sum_m a_m t^m + end-point terms, all a >= 0.

    The classifier is linear in the reproducing kernel Hilbert space of k, which is learned with the rest of the network
    (the paper's equations 4 and 8).

    Args:
        in_features: D, the length of a feature vector.
        num_classes: C.
        degree: M, where the series ends; the kernel has M + 3 coefficients. Also the order of `kernel="polynomial"`.
        kernel: "learned", or a fixed kernel times one learned coefficient: "cosine", "polynomial" ((1 + t)^degree) or
            "rbf" (exp(-gamma |w - f|^2)).
        coefficients: how raw parameters become coefficients: "relu", "sigmoid", "softmax", "softplus" or "none". None
            is "sigmoid", which measured best on held-out images. It bounds the logits, so None is "softplus" for a
            fixed kernel and with a bias. The paper has "relu".
        temperature: T. None is the paper's: 1, or 0.1 with sigmoid, 0.005 with softmax. With a bias it is 0.1 at most.
        gamma: the width of `kernel="rbf"`.
        bias: add a learned number to each logit, for several labels per sample, or one class. The paper has none.
        device, dtype: of parameters and buffers, as for `nn.Linear`.

    Shapes:
        features `(..., D)` -> logits `(..., C)`. weight `(C, D)`. raw_alpha `(M + 3,)`, or `(1,)` for a fixed kernel.
        alpha `(M + 3,)`, ordered `a_{-2}, a_{-1}, a_0 .. a_M`.

    Example:
        >>> head = KernelHead(64, 10)
        >>> head(torch.randn(8, 64)).shape
        torch.Size([8, 10])
    """

    name = "kernel"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        degree: int = 7,
        kernel: str = "learned",
        coefficients: str | None = None,
        temperature: float | None = None,
        gamma: float = 1.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"degree": degree, "kernel": kernel, "coefficients": coefficients}
        options |= {"temperature": temperature, "gamma": gamma, "bias": bias}
        self._configure(in_features, num_classes, **options)
        options["coefficients"] = coefficients or ("softplus" if bias or kernel != "learned" else "sigmoid")
        self._build(num_classes, device=device, dtype=dtype, **options)
        self.reset_parameters()
