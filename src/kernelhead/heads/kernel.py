"""The kernelized classification layer, and what lies beyond it in the same RKHS."""

import math
from collections.abc import Iterable
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead import kernels
from kernelhead.coefficients import INITIAL_RAW, activation
from kernelhead.heads import _loss
from kernelhead.heads._choices import check_choices, check_dropout, check_scale
from kernelhead.heads._leaf import Leaf
from kernelhead.heads._places import as_labels, as_points, as_vectors, check_sizes
from kernelhead.heads.frozen import FrozenKernelClassifier
from kernelhead.losses import kernel_cross_entropy
from kernelhead.ops import cross_entropy
from kernelhead.ops.kernel_mean import kernel_mean
from kernelhead.ops.precision import autocast_enabled, real_dtype

if TYPE_CHECKING:
    from kernelhead.inspection import Description

BEST: dict[str, Any] = {"landmarks": 2048, "coefficients": "softplus", "pool": "rkhs", "scale": 0.25}
FUSED = {"backend": "auto", "mode": "auto", "negligible": 0.0}  # what only a fused loss can be told, and its defaults


def scale_of(landmarks: int) -> float:
    """What makes so many standardised values as long as those of the best head: as 128 of them (docs/beyond.md)."""
    return round(float(BEST["scale"]) * math.sqrt(BEST["landmarks"] / landmarks), 3)


def best_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the best head, and `options` over them; other numbers of landmarks have a scale of their own."""
    landmarks = options.get("landmarks")
    scaled = {"scale": scale_of(int(landmarks))} if isinstance(landmarks, Integral) and int(landmarks) > 0 else {}
    return {**BEST, **scaled, **options}


class _AsItIs(nn.Module):
    """Stands where BatchNorm1d stands and changes nothing: mean 0 and variance 1, known beforehand."""

    running_mean: Tensor
    running_var: Tensor
    eps = 0.0

    def __init__(self, landmarks: int, **place: Any) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(landmarks, **place), persistent=False)
        self.register_buffer("running_var", torch.ones(landmarks, **place), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        return values

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1)


class KernelClassifier(Leaf):
    """Classification in a reproducing kernel Hilbert space that is learned with the rest of the network.

    The logit of class j is k(<w_j, f>) / T with w_j and f of unit length and k(t) = sum_m a_m t^m + end-point terms,
    all a >= 0 (the paper's equations 4 and 8). No bias.

    Args:
        in_features: D, the length of a feature vector.
        num_classes: C.
        degree: M, where the series ends; the layer has M + 3 coefficients. Also the order of `kernel="polynomial"`.
        kernel: "learned", or a fixed kernel times one learned coefficient: "linear", "polynomial" ((1 + t)^degree)
            or "rbf" (exp(-gamma |w - f|^2)).
        coefficients: how raw parameters become coefficients a: "relu", "sigmoid", "softmax", "softplus" or "none".
        temperature: T. None is the paper's: 1, or 0.1 with sigmoid, 0.005 with softmax.
        prototypes: P points a class. A class weight is then an expansion, and its logit the `aggregate` of P kernel
            values: "sum" (linear in the RKHS), or "logsumexp" (a mixture: class probability is the sum of P).
        landmarks: Q points shared by all classes instead. Their kernel values are standardised over the batch (as by
            BatchNorm without affine part) and mixed into logits by a signed matrix and a bias. Standardising takes out
            a_0 and the temperature and, as far as variances are above `eps`, the common scale of the coefficients.
        standardize: False mixes the landmarks' kernel values as they are.
        scale: what the standardised kernel values are multiplied by. It changes nothing that the head can be, but how
            it learns: the steps of the logits that gradient descent on the mixing takes are multiplied by its square.
        dropout: the share of the landmarks that each sample is trained without, drawn anew for every step.
        eps: what standardising adds to the variance. Kernel values vary little: means over places have variances of
            1e-7 to 1e-3, so that the usual 1e-5 leaves the coefficients a say in how large the result is.
        pool: "rkhs" takes a feature map or tokens and averages k over the places, which is a linear classifier on
            the kernel mean embedding; None takes feature vectors.
        window: w. With `pool="rkhs"` on a feature map, the kernel compares windows of w x w neighbouring places
            instead of single ones: vectors of w w D features, which see what is beside what.
        gamma: the width of `kernel="rbf"`.
        device, dtype: of parameters and buffers, as for `nn.Linear`. The statistics of landmarks are float32 at least.

    Shapes:
        features (..., D) -> logits (..., C); with `pool="rkhs"` a map (N, D, H, W) or tokens (N, L, D) -> (N, C).
        weight (C P, D), the prototypes of a class side by side, or (Q, D) with landmarks; with windows w w D for D,
        place by place; mixing (C, Q); bias (C,); raw_alpha (M + 3,), or (1,) for a fixed kernel; alpha (M + 3,),
        ordered a_{-2}, a_{-1}, a_0 .. a_M.
    """

    profile: Tensor | None
    mixing: nn.Parameter | None
    bias: nn.Parameter | None
    window = 1  # of a module that was pickled before there were windows
    dropout = 0.0  # or dropout
    scale = 1.0  # or a scale

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        degree: int = 7,
        kernel: str = "learned",
        coefficients: str = "relu",
        temperature: float | None = None,
        prototypes: int = 1,
        aggregate: str = "logsumexp",
        landmarks: int | None = None,
        pool: str | None = None,
        window: int = 1,
        standardize: bool = True,
        scale: float = 1.0,
        eps: float = 1e-5,
        dropout: float = 0.0,
        gamma: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"in_features": in_features, "num_classes": num_classes, "degree": degree, "prototypes": prototypes}
        check_sizes("KernelClassifier", **sizes, window=window)
        if landmarks is not None:
            check_sizes("KernelClassifier", landmarks=landmarks)
        dropout, scale = check_dropout(dropout), check_scale(scale)
        check_choices(
            kernel=kernel,
            coefficients=coefficients,
            temperature=temperature,
            prototypes=prototypes,
            aggregate=aggregate,
            landmarks=landmarks,
            pool=pool,
            window=window,
            standardize=standardize,
            scale=scale,
            eps=eps,
            dropout=dropout,
            gamma=gamma,
        )
        super().__init__()
        self.in_features = in_features
        self.num_classes = num_classes
        self.kernel_name = kernel
        self.coefficients = coefficients
        self.temperature = activation(coefficients).temperature if temperature is None else float(temperature)
        self.prototypes = prototypes
        self.aggregate = aggregate
        self.landmarks = landmarks
        self.pool = pool
        self.window = window
        self.standardize = standardize
        self.scale = scale
        self.dropout = dropout
        self.gamma = gamma

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        fixed = kernels.fixed_coefficients(kernel, degree, gamma)
        self.register_buffer("profile", None if fixed is None else torch.empty(fixed.shape, **place))
        self.degree = degree if fixed is None else fixed.shape[0] - kernels.END_POINTS - 1
        self.raw_alpha = nn.Parameter(torch.empty(degree + 3 if fixed is None else 1, **place))
        points = landmarks or num_classes * prototypes
        self.weight = nn.Parameter(torch.empty(points, in_features * window**2, **place))
        if landmarks is not None:
            standardized = partial(nn.BatchNorm1d, eps=eps, affine=False) if standardize else _AsItIs
            # Means of kernel values are large beside their deviations: in half precision the difference would be lost.
            self.norm = standardized(landmarks, device=device, dtype=real_dtype(self.weight.dtype))
            self.precise = ("norm.running_mean", "norm.running_var")
            self.mixing = nn.Parameter(torch.empty(num_classes, landmarks, **place))
            self.bias = nn.Parameter(torch.zeros(num_classes, **place))
        else:
            self.register_parameter("mixing", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def best(cls, in_features: int, num_classes: int, **options: Any) -> Self:
        """The head to begin with where a network has a feature map: `BEST`, which docs/beyond.md gives the reasons for.

        2048 landmarks pooled in the RKHS, with softplus coefficients, their standardised values times a quarter.
        `options` are those of the layer, and come before these; Q landmarks are scaled by sqrt(128 / Q) unless told.
        """
        return cls(in_features, num_classes, **best_options(options))

    @property
    def pools(self) -> bool:
        """Whether the head wants the feature map rather than the pooled feature vector."""
        return self.pool is not None

    @property
    def alpha(self) -> Tensor:
        """The kernel's coefficients (M + 3,), ordered a_{-2}, a_{-1}, a_0 .. a_M."""
        alpha = activation(self.coefficients).apply(self.raw_alpha)
        return alpha if self.profile is None else alpha * self.profile

    def kernel(self, t: Tensor) -> Tensor:
        """k(t) at cosines t (...), before the temperature."""
        return kernels.series(t, self.alpha)

    def reset_parameters(self) -> None:
        """Start anew: weights of uniform direction and length about 1, raw coefficients of one."""
        with torch.no_grad():
            nn.init.constant_(self.raw_alpha, INITIAL_RAW)  # in place: it may be sharded
            fixed = kernels.fixed_coefficients(self.kernel_name, self.degree, self.gamma)
            if self.profile is not None and fixed is not None:
                self.profile.copy_(fixed)
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
            if self.mixing is not None and self.bias is not None:
                nn.init.uniform_(self.mixing, -(self.mixing.shape[1] ** -0.5), self.mixing.shape[1] ** -0.5)
                nn.init.zeros_(self.bias)
                self.norm.reset_running_stats()

    def points(self, features: Tensor) -> Tensor:
        """What k compares with the weights: features (..., D) as (N, D); places or windows of each sample (N, L, D)."""
        return as_points(features, self.in_features, "KernelClassifier", pools=self.pools, window=self.window)

    def forward(self, features: Tensor) -> Tensor:
        points = self.points(features)
        alpha = self.alpha if self.temperature == 1 else self.alpha / self.temperature
        values = kernel_mean(points, self.weight, alpha)
        if self.mixing is not None:
            if self.norm.training and type(self.norm) is nn.BatchNorm1d and values.shape[0] == 1:
                raise ValueError(
                    "landmarks are standardised over the batch, and one sample has no variance: train with two or more "
                    "(a DataLoader's drop_last=True leaves out a last one)"
                )
            values = self.norm(values.to(self.norm.running_mean.dtype))  # type: ignore[union-attr]
            if self.scale != 1:
                values = self.scale * values
            if self.dropout:
                values = F.dropout(values, self.dropout, self.training)
            logits = F.linear(values.to(self.mixing.dtype), self.mixing, self.bias)
        elif self.prototypes > 1:
            grouped = values.view(-1, self.num_classes, self.prototypes)
            logits = grouped.sum(2) if self.aggregate == "sum" else torch.logsumexp(grouped, 2)
        else:
            logits = values
        if not autocast_enabled(features.device.type):
            logits = logits.to(torch.promote_types(features.dtype, self.weight.dtype))
        return logits if self.pools or features.dim() == 2 else logits.view(*features.shape[:-1], self.num_classes)

    def freeze(self, *, tolerance: float = 0.0) -> FrozenKernelClassifier:
        """A copy for inference: the same logits as in evaluation mode, faster. See `FrozenKernelClassifier`."""
        return FrozenKernelClassifier(self, tolerance=tolerance)

    def describe(self, features: Tensor | Iterable[Tensor] | None = None) -> "Description":
        """What it has learned, in numbers; `print` shows them with the kernel drawn. See `kernelhead.inspection`.

        With features as the head takes them, or batches of them, also how its weights are used.
        """
        from kernelhead.inspection import describe  # it is made of heads

        return describe(self, features)

    def loss(self, features: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The cross-entropy of this head's logits with labels, without the logits where there are many classes.

        features as `forward` takes them, target (...): labels, integers of the same leading shape, (N,) with pooling.
        reduction="none" gives losses of that shape. Options are those of `kernel_cross_entropy`: ignore_index,
        label_smoothing, reduction, backend, mode. Landmarks, pooling and aggregate="sum" have no fused loss: there, it
        is `F.cross_entropy` of the logits.
        """
        if "weight" in options:
            raise ValueError(
                "KernelClassifier has a loss without weights of classes: take F.cross_entropy(head(features), target, "
                "weight=...)"
            )
        if not self._has_fused_loss:
            fused = {name: options.pop(name, usual) for name, usual in FUSED.items()}
            if fused not in (FUSED, {**FUSED, "backend": "eager"}):
                raise ValueError(
                    f"{', '.join(FUSED)} are for the fused loss of class weights and of prototypes with logsumexp; "
                    "landmarks, pooling and aggregate='sum' have none"
                )
            logits = self(features)
            labels = as_labels(target, logits.shape[:-1], "KernelClassifier")
            found = F.cross_entropy(logits.reshape(-1, self.num_classes), labels, **options)
            return found.view(target.shape) if found.dim() else found
        vectors = as_vectors(features, self.in_features, "KernelClassifier")
        settings = {"temperature": self.temperature, "prototypes": self.prototypes, **options}
        labels = as_labels(target, features.shape[:-1], "KernelClassifier")
        found = kernel_cross_entropy(vectors, self.weight, self.alpha, labels, **settings)
        return found.view(target.shape) if found.dim() else found

    def loss_and_hits(self, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss (), and which samples have their own class on top (N,). features (N, D), target (N,).

        Samples of the label -100 do not count.
        """
        backend = cross_entropy.choose(features, self.weight) if self._has_fused_loss else "eager"
        if backend == "eager":
            return _loss.loss_and_hits(self(features), target)
        vectors = as_vectors(features, self.in_features, "KernelClassifier")
        alpha = self.alpha / self.temperature
        losses, hits = cross_entropy.fused_nll(
            vectors, self.weight, alpha, target, prototypes=self.prototypes, backend=backend, ranked=True
        )
        return losses.sum() / (target != -100).sum(), hits

    @property
    def _has_fused_loss(self) -> bool:
        mixture = self.prototypes == 1 or self.aggregate == "logsumexp"
        return self.landmarks is None and not self.pools and mixture

    def extra_repr(self) -> str:
        """Sizes first, then the options, those of the plain layer left out."""
        parts = [f"in_features={self.in_features}", f"num_classes={self.num_classes}", f"degree={self.degree}"]
        parts.append(
            f"kernel={self.kernel_name!r}, coefficients={self.coefficients!r}, temperature={self.temperature:g}"
        )
        if self.kernel_name == "rbf":
            parts.append(f"gamma={self.gamma:g}")
        if self.prototypes > 1:
            parts.append(f"prototypes={self.prototypes}, aggregate={self.aggregate!r}")
        if self.landmarks is not None:
            parts.append(f"landmarks={self.landmarks}" + ("" if self.standardize else ", standardize=False"))
        if self.scale != 1:
            parts.append(f"scale={self.scale:g}")
        if self.dropout:
            parts.append(f"dropout={self.dropout:g}")
        if self.pool is not None:
            parts.append(f"pool={self.pool!r}" + (f", window={self.window}" if self.window > 1 else ""))
        return ", ".join(parts)
