"""Inspection of a trained kernel head: its kernel, the worth of its terms, whether it is positive definite, its points.

`head.describe()` measures. `str` of the result is a text with a drawing, `as_dict` is for JSON, and `plot.write_plot`
writes a page of charts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernelhead import kernels
from kernelhead.heads import PointHead
from kernelhead.inspection.points import Points, survey
from kernelhead.inspection.text import draw

__all__ = ["Description", "Points", "Term", "describe"]


@dataclass(frozen=True)
class Term:
    """One term of the kernel's series.

    `order` is m of t^m, or -2 and -1 for the end-point terms. `raw` is its raw parameter; the terms of a fixed kernel
    share one. `cost` bounds the change of a logit without the term, since |t^m| <= 1. A `dead` term has a raw parameter
    of relu that is not positive: it is zero and has no gradient.
    """

    order: int
    raw: float
    value: float
    cost: float
    dead: bool

    @property
    def name(self) -> str:
        return f"a_{self.order}"

    @property
    def note(self) -> str:
        """What the value means for the head."""
        if self.dead:
            return "dead: zero, and relu gives it no gradient any more"
        if self.order < 0 and self.value:
            return "only where t = ±1, which is rare"
        return "tells no classes apart" if self.order == 0 else "negative" if self.value < 0 else ""


@dataclass(frozen=True)
class Description:
    """A kernel head in numbers; `str` makes a text of it."""

    head: str  # its class, sizes and options
    config: dict[str, Any]
    kernel: str  # "learned", or the name of a fixed one
    terms: tuple[Term, ...]  # ordered a_{-2}, a_{-1}, a_0 .. a_M
    t: tuple[float, ...]  # 201 cosines from -1 to 1
    k: tuple[float, ...]  # the kernel there, without its end-point terms
    points: Points

    @property
    def dead(self) -> list[str]:
        """Names of the terms that relu has switched off for good."""
        return [term.name for term in self.terms if term.dead]

    @property
    def negative(self) -> list[str]:
        """Names of the terms below zero. Without any, the kernel is positive definite on every sphere (Schoenberg)."""
        return [term.name for term in self.terms if term.value < 0]

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, texts and lists, as JSON has them."""
        terms = [{"name": term.name, **asdict(term)} for term in self.terms]
        return {**asdict(self), "terms": terms, "dead": self.dead, "negative": self.negative}

    def __str__(self) -> str:
        definite = "Positive definite on every sphere: no coefficient is negative (Schoenberg)."
        if self.negative:
            definite = f"Not positive definite on every sphere: {', '.join(self.negative)} negative (Schoenberg)."
        return "\n\n".join([self.head, draw(self.k), *self._remarks(), self._table(), definite, str(self.points)])

    def _remarks(self) -> Iterator[str]:
        """Yield what the drawing does not show."""
        even, odd = (term.value for term in self.terms[:2])
        if even or odd:
            yield f"At t = 1 the kernel jumps by {even + odd:.4g}, at t = -1 by {even - odd:.4g} (a_-2 and a_-1)."
        if self.config.get("pool"):
            yield "The head averages k over positions of a map or tokens."
        if self.kernel != "learned":
            yield "The kernel is fixed except for its scale, the one raw parameter."

    def _table(self) -> str:
        """Terms, one per line, and what they mean."""
        lines = [f"{'term':<5}{'raw':>11}{'a':>11}{'without it':>12}"]
        for term in self.terms:
            numbers = f"{term.name:<5}{term.raw:>11.5f}{term.value:>11.5f}{term.cost:>12.4g}"
            lines.append(f"{numbers}  {term.note}".rstrip())
        lines.append("without it: the most that a logit changes without this term.")
        if self.dead:
            lines.append(f"Dead terms: {', '.join(self.dead)}. Softplus coefficients cannot die.")
        return "\n".join(lines)


def describe(head: PointHead, features: Tensor | Iterable[Tensor] | None = None) -> Description:
    """Describe a kernel head; see `Head.describe`."""
    if not all(parameter.isfinite().all() for parameter in head.parameters()):
        raise ValueError("the head has numbers that are not finite, as its run diverged; train it anew")
    kernel, gain = head.kernel, head.gain()
    alpha = kernel.alpha.detach().double().cpu()
    raw = kernel.raw_alpha.detach().double().cpu().expand_as(alpha)
    dead = (raw <= 0) & (kernel.coefficients == "relu")
    if kernel.profile is not None:
        dead &= kernel.profile.cpu() != 0
    rows = zip(*(each.tolist() for each in (raw, alpha, alpha.abs() * gain, dead)), strict=True)
    terms = tuple(Term(index - kernels.END_POINTS, *row) for index, row in enumerate(rows))
    t = torch.linspace(-1, 1, 201, dtype=torch.float64)
    return Description(
        head=f"{type(head).__name__}({head.extra_repr()}, kernel={kernel.extra_repr()})",
        config=head.config,
        kernel=kernel.name,
        terms=terms,
        t=tuple(t.tolist()),
        k=tuple(kernels.power_series(t, alpha).tolist()),
        points=survey(head, features),
    )
