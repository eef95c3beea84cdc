"""The base of kernel heads: a kernel, points, and kernel values averaged over positions."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead import kernels
from kernelhead.functional import kernel_cross_entropy, kernel_mean
from kernelhead.fused.precision import autocast_enabled
from kernelhead.heads._base import Head
from kernelhead.heads._inputs import check_choice, check_sizes, positive_number
from kernelhead.heads._sharding import ShardableHead
from kernelhead.kernels import INITIAL_RAW, activation

MAX_DEGREE = 1000
KERNELS = ("learned", "cosine", "polynomial", "rbf")
# Of heads with a bias, whose logits are read one by one. Unit vectors lack the length of features that speeds a linear
# layer up: with T = 1 the loss of several labels per sample falls slower than its.
BIASED_TEMPERATURE = 0.1


class Kernel(nn.Module):
    """The kernel k(t) = sum_m a_m t^m + end-point terms of a cosine t, all a >= 0 (the paper's equation 8).

    `owner` names the head in messages. The options are those of `KernelHead`, `factory` is device and dtype.

    Shapes:
        raw_alpha `(M + 3,)`, or `(1,)` for a fixed kernel. alpha `(M + 3,)`, ordered `a_{-2}, a_{-1}, a_0 .. a_M`.
    """

    profile: Tensor | None

    def __init__(
        self,
        owner: str,
        *,
        kernel: str,
        degree: int = 1,
        coefficients: str = "relu",
        temperature: float | None = None,
        gamma: float = 1.0,
        **factory: Any,
    ) -> None:
        check_choice(owner, "kernel", kernel, KERNELS)
        check_sizes(owner, degree=degree)
        if degree > MAX_DEGREE:
            raise ValueError(f"{owner} needs a degree of at most {MAX_DEGREE}; got {degree}")
        usual = activation(coefficients).temperature
        if kernel != "learned" and coefficients == "softmax":
            raise ValueError(
                f"{owner} with kernel={kernel!r} has one coefficient, which softmax makes 1; choose other coefficients"
            )
        super().__init__()
        self.name = kernel
        self.coefficients = coefficients
        self.temperature = usual if temperature is None else positive_number(owner, "temperature", temperature)
        self.gamma = positive_number(owner, "gamma", gamma)
        self._order = degree
        fixed = kernels.fixed_coefficients(kernel, degree, gamma)
        self.degree = degree if fixed is None else fixed.shape[0] - kernels.END_POINTS - 1
        self.register_buffer("profile", None if fixed is None else torch.empty(fixed.shape, **factory))
        self.raw_alpha = nn.Parameter(torch.empty(degree + 3 if fixed is None else 1, **factory))

    @property
    def alpha(self) -> Tensor:
        """The coefficients (M + 3,)."""
        alpha = activation(self.coefficients).apply(self.raw_alpha)
        return alpha if self.profile is None else alpha * self.profile

    def extra_repr(self) -> str:
        gamma = f", gamma={self.gamma:g}" if self.name == "rbf" else ""
        return f"{self.name}, degree={self.degree}, {self.coefficients}, temperature={self.temperature:g}{gamma}"

    def forward(self, t: Tensor) -> Tensor:
        """Return k(t) at cosines t (...), before the temperature."""
        return kernels.series(t, self.alpha)

    def reset_parameters(self) -> None:
        """Start anew, with raw coefficients of one."""
        with torch.no_grad():
            nn.init.constant_(self.raw_alpha, INITIAL_RAW)  # it may be sharded
            fixed = kernels.fixed_coefficients(self.name, self._order, self.gamma)
            if self.profile is not None and fixed is not None:
                self.profile.copy_(fixed)


class PointHead(ShardableHead):
    """A head whose logits are made of the kernel values k(<w_q, f>) of points w_q, both of unit length.

    A subclass calls `_build` with the number of its points and defines `_logits`.
    """

    shown_below = ("degree", "kernel", "coefficients", "temperature", "gamma")
    aggregate = "sum"
    mixing: nn.Parameter | None
    bias: nn.Parameter | None

    def _build(self, points: int, *, bias: bool = False, device: Any, dtype: Any, **kernel: Any) -> None:
        """Make so many points, and the kernel of these options."""
        factory = {"device": device, "dtype": dtype}
        self.kernel = Kernel(type(self).__name__, **kernel, **factory)
        self.weight = nn.Parameter(torch.empty(points, self.in_features, **factory))
        self.register_parameter("mixing", None)
        self.register_parameter("bias", nn.Parameter(torch.empty(self.num_classes, **factory)) if bias else None)

    def reset_parameters(self) -> None:
        """Start anew: points of uniform direction and length about 1, raw coefficients of one."""
        with torch.no_grad():
            self.kernel.reset_parameters()
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    @property
    def raw_alpha(self) -> nn.Parameter:
        """The raw parameters of the coefficients `(M + 3,)`, or `(1,)` for a fixed kernel."""
        return self.kernel.raw_alpha

    @property
    def alpha(self) -> Tensor:
        """The kernel's coefficients `(M + 3,)`, ordered `a_{-2}, a_{-1}, a_0 .. a_M`."""
        return self.kernel.alpha

    @property
    def degree(self) -> int:
        return self.kernel.degree

    @property
    def temperature(self) -> float:
        return self.kernel.temperature

    @property
    def coefficients(self) -> str:
        return self.kernel.coefficients

    @property
    def undecayed(self) -> tuple[nn.Parameter, ...]:
        return (self.raw_alpha,) if activation(self.coefficients).bounded else ()

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.share is not None:
            own = f"{self.share.classes} of {self.num_classes} classes"
            raise ValueError(f"{type(self).__name__} has {own} here, so it has no logits; use loss or top_k")
        logits = self._own_logits(features, mask)
        if not autocast_enabled(features.device.type):
            logits = logits.to(torch.promote_types(features.dtype, self.weight.dtype))
        return self._as_given(logits, features)

    def _own_logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha if self.temperature == 1 else self.alpha / self.temperature
        return self._logits(kernel_mean(self.points(features), self.weight, alpha, self._real(features, mask)))

    def _logits(self, values: Tensor) -> Tensor:
        """Kernel values (N, K) -> logits (N, C)."""
        raise NotImplementedError

    def gain(self) -> float:
        """By how much a logit changes at most where every kernel value changes by at most 1."""
        raise NotImplementedError

    def freeze(self) -> Head:
        """Return a copy for inference: the logits of evaluation mode, faster. See `FrozenHead`.

        A subclass that computes its logits in its own way is copied as it is.
        """
        if self.share is not None:
            raise ValueError(f"{type(self).__name__} has some of the classes here; freeze a whole one")
        from kernelhead.heads.frozen import FrozenHead  # it is made of heads

        homes = {getattr(type(self), method).__module__ for method in ("forward", "points", "_logits")}
        return FrozenHead(self) if all(home.startswith("kernelhead.heads.") for home in homes) else super().freeze()


class ClassPointsHead(PointHead):
    """A head with points of its own for each class, whose loss can do without the logits."""

    by_class = ("weight", "bias")

    def _build(self, points: int, *, bias: bool = False, temperature: float | None = None, **options: Any) -> None:
        if bias and temperature is None:
            temperature = min(activation(options["coefficients"]).temperature, BIASED_TEMPERATURE)
        super()._build(points, bias=bias, temperature=temperature, **options)

    def reset_parameters(self) -> None:
        """Start anew. With a bias, logits are 0 where the cosine is, as it nearly is for random features."""
        super().reset_parameters()
        raw = torch.full(self.raw_alpha.shape, INITIAL_RAW, device="cpu")
        if self.bias is None or self.bias.is_meta or type(raw) is not Tensor:  # without data there is nothing to do
            return
        alpha = activation(self.coefficients).apply(raw)
        if self.kernel.profile is not None:
            alpha = alpha * self.kernel.profile.cpu()
        value = alpha[kernels.END_POINTS].item() / self.temperature
        mixed = self.prototypes * value if self.aggregate == "sum" else value + math.log(self.prototypes)
        nn.init.constant_(self.bias, -mixed)

    @property
    def has_fused_loss(self) -> bool:
        return self.bias is None and not self.pools and (self.prototypes == 1 or self.aggregate == "logsumexp")

    def _gathered_logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        assert self.share is not None
        real = self._real(features, mask)
        real = None if real is None else self.share.gather(real)
        points, alpha = self.share.alike(self.share.gather(self.points(features)), self.alpha / self.temperature)
        return self._logits(kernel_mean(points, self.weight, alpha, real))

    def _logits(self, values: Tensor) -> Tensor:
        if self.prototypes > 1:
            grouped = values.view(values.shape[0], values.shape[1] // self.prototypes, self.prototypes)
            values = grouped.sum(2) if self.aggregate == "sum" else torch.logsumexp(grouped, 2)
        return values if self.bias is None else values + self.bias

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply the logits by a positive number. The temperature of the configuration changes, and the bias."""
        if self.prototypes > 1 and self.aggregate == "logsumexp":
            raise ValueError("the logits of a mixture, aggregate='logsumexp', have no temperature of their own")
        if self.scaled:
            super().rescale(factor)
            return
        self._options["temperature"] = self.kernel.temperature = self.temperature / factor
        if self.bias is not None:
            self.bias.mul_(factor)

    def gain(self) -> float:
        return (self.prototypes if self.aggregate == "sum" else 1) / self.temperature

    def loss(
        self,
        features: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        backend: str = "auto",
        mode: str = "auto",
        **options: Any,
    ) -> Tensor:
        """Return the cross-entropy of this head's logits with labels, without the logits where there are many classes.

        Arguments as of `Head.loss`; `backend` and `mode` as of `kernelhead.kernel_cross_entropy`.
        """
        if mask is not None or not self.has_fused_loss:
            if backend not in ("auto", "eager") or mode != "auto":
                given = f"{type(self).__name__} has no fused loss here; got backend={backend!r}, mode={mode!r}"
                raise ValueError(f"{given}, leave them out")
            return super().loss(features, target, mask=mask, **options)
        labels, points = self._gathered_labels(features, target), self.points(features)
        if self.share is not None:
            points, options["group"] = self.share.gather(points), self.share
        options |= {"temperature": self.temperature, "prototypes": self.prototypes, "backend": backend, "mode": mode}
        found = kernel_cross_entropy(points, self.weight, self.alpha, labels, **options)
        return found.view(-1, *target.shape[1:]) if found.dim() else found
