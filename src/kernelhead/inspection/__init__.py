"""What a kernel head has learned: its kernel, what its terms are worth, whether it is positive definite, its points.

`describe` measures; `str` of what it gives is a text with a drawing, `as_dict` is for JSON, and `plot.write_png` draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelhead import kernels
from kernelhead.heads.frozen import logit_gain
from kernelhead.heads.kernel import KernelClassifier
from kernelhead.inspection import text
from kernelhead.inspection.definite import Definiteness, examine
from kernelhead.inspection.points import Points, survey

__all__ = ["Definiteness", "Description", "Points", "Term", "describe"]

Array = NDArray[np.float64]
NEGLIGIBLE = 0.01  # share of a series, beyond its effective degree


@dataclass(frozen=True)
class Term:
    """One term of the kernel's series.

    `order` is m of t^m, or -2 and -1 for the end-point terms. `raw` is its raw parameter; the terms of a fixed kernel
    share one. `cost` is by how much a logit changes at most without the term, since |t^m| <= 1. `dead`: its raw
    parameter of relu is not positive, so that it is zero and has no gradient.
    """

    order: int
    raw: float
    value: float
    cost: float
    dead: bool

    @property
    def name(self) -> str:
        return f"a_{self.order}"


@dataclass(frozen=True)
class Description:
    """A kernel head in numbers; `str` makes a text of it.

    Attributes:
        head: its class, sizes and options.
        kernel, coefficients, temperature, pool, window: as the head was made with.
        terms: ordered a_{-2}, a_{-1}, a_0 .. a_M.
        t, k: the kernel without its end-point terms at 201 cosines from -1 to 1.
        largest_logit: no logit is larger in absolute value; None with landmarks, whose bias is not part of the kernel.
        effective_degree: terms of higher order make up no more than a hundredth of a_1 + .. + a_M.
        mean_degree: the mean order of a_1 .. a_M, weighted by their absolute values.
        definiteness: whether the kernel is positive definite, and on which spheres.
        points: class weights, prototypes or landmarks, and how they are used.
        classes: their names, where they were given.
    """

    head: str
    kernel: str
    coefficients: str
    temperature: float
    pool: str | None
    window: int
    terms: tuple[Term, ...]
    t: tuple[float, ...]
    k: tuple[float, ...]
    largest_logit: float | None
    effective_degree: int
    mean_degree: float
    definiteness: Definiteness
    points: Points
    classes: tuple[str, ...] | None

    @property
    def dead(self) -> list[str]:
        """Names of the terms that relu has switched off for good."""
        return [term.name for term in self.terms if term.dead]

    def cost_beyond(self, order: int) -> float:
        """By how much a logit changes at most where the series ends after t^order."""
        return sum(term.cost for term in self.terms if term.order > max(order, 0))

    def as_dict(self) -> dict[str, Any]:
        """Numbers, texts and lists, as JSON has them."""
        terms = [{"name": term.name, **asdict(term)} for term in self.terms]
        return {**asdict(self), "terms": terms, "dead": self.dead}

    def __str__(self) -> str:
        return text.describe(self)


def describe(
    head: KernelClassifier,
    features: Tensor | Iterable[Tensor] | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> Description:
    """Describe a kernel head.

    Args:
        head: with a learned or a fixed kernel.
        features: as the head takes them, a tensor or batches of them, to count also of how many samples each class
            weight, prototype or landmark is the nearest.
        classes: names, for the text.
    """
    if classes is not None and len(classes) != head.num_classes:
        raise ValueError(f"the head has {head.num_classes} classes, got {len(classes)} names")
    alpha = head.alpha.detach().double().cpu()
    if not alpha.isfinite().all():
        raise ValueError("the head has coefficients that are not finite: its training diverged")
    if not all(parameter.isfinite().all() for parameter in head.parameters()):
        raise ValueError("the head has weights that are not finite: its training diverged")
    powers = alpha[kernels.END_POINTS :].numpy()
    t = torch.linspace(-1, 1, 201, dtype=torch.float64)
    gain = logit_gain(head)
    raw = head.raw_alpha.detach().double().cpu().expand_as(alpha).tolist()
    profile = torch.ones_like(alpha) if head.profile is None else head.profile.cpu()
    terms = tuple(
        Term(
            order=index - kernels.END_POINTS,
            raw=raw[index],
            value=value,
            cost=abs(value) * gain,
            dead=head.coefficients == "relu" and raw[index] <= 0 and bool(profile[index]),
        )
        for index, value in enumerate(alpha.tolist())
    )
    return Description(
        head=f"{type(head).__name__}({head.extra_repr()})",
        kernel=head.kernel_name,
        coefficients=head.coefficients,
        temperature=head.temperature,
        pool=head.pool,
        window=head.window,
        terms=terms,
        t=tuple(t.tolist()),
        k=tuple(kernels.power_series(t, alpha).tolist()),
        largest_logit=_largest_logit(head, alpha),
        effective_degree=_effective_degree(powers),
        mean_degree=_mean_degree(powers),
        definiteness=examine(alpha, head.weight.shape[1]),
        points=survey(head, features),
        classes=None if classes is None else tuple(classes),
    )


def _largest_logit(head: KernelClassifier, alpha: Tensor) -> float | None:
    if head.mixing is not None:
        return None
    bound = alpha.abs().sum().item() * logit_gain(head)
    return bound + float(np.log(head.prototypes)) if head.aggregate == "logsumexp" else bound


def _effective_degree(powers: Array) -> int:
    """`powers` are a_0 .. a_M."""
    sizes = np.abs(powers[1:])
    beyond = sizes.sum() - np.cumsum(sizes)  # after t^1, t^2, ..
    if sizes.sum() == 0:
        return 0
    return 1 + int(np.argmax(beyond <= NEGLIGIBLE * sizes.sum()))


def _mean_degree(powers: Array) -> float:
    sizes = np.abs(powers[1:])
    total = float(sizes.sum())
    return float(sizes @ np.arange(1, len(powers))) / total if total else 0.0
