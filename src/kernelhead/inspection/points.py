"""The points of a head in feature space (class weights, prototypes or landmarks) and how they are used."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelhead.functional import kernel_mean
from kernelhead.fused.precision import unit_vectors
from kernelhead.heads import PointHead
from kernelhead.inspection.text import bars

COLLAPSED = 0.99  # two points closer than this cosine act as one
MAX_PAIRS = 1000
ROWS = 1024  # points that are compared at once


@dataclass(frozen=True)
class Pair:
    """Two points, by their rows of `weight`, and the cosine between them."""

    first: int
    second: int
    cosine: float


@dataclass(frozen=True)
class Points:
    """The rows of `weight`, and how they are used."""

    kind: str  # "class weights", "prototypes" or "landmarks"
    count: int
    per_class: int  # how many a class has; with landmarks all of them
    closest: Pair | None  # with prototypes, the closest two of one class
    pairs: int  # how many were compared
    collapsed: tuple[Pair, ...]  # closer than a cosine of 0.99, the closest first, a thousand at most
    mixing: tuple[float, ...] | None  # the share of each landmark in the squared lengths of the columns of `mixing`
    samples: int | None
    nearest: tuple[int, ...] | None  # for how many of these samples each point is the nearest in the RKHS

    @property
    def unused(self) -> list[int]:
        """Points that are the nearest for no sample."""
        return [index for index, count in enumerate(self.nearest or ()) if count == 0]

    def paragraphs(self, classes: Sequence[str] | None) -> list[str]:
        """Return what is to be said of the points."""
        per_class = f", {self.per_class} per class" if self.kind == "prototypes" else ""
        line = f"{self.kind.capitalize()}: {self.count}{per_class}."
        if self.closest is not None:
            line += f" The closest two have cosine {self.closest.cosine:.3f} ({self._named(self.closest, classes)})."
        if self.collapsed:
            count = f"{len(self.collapsed)}{' or more' if len(self.collapsed) == MAX_PAIRS else ''}"
            shown = [self._named(pair, classes) for pair in self.collapsed[:5]] + [".."] * (len(self.collapsed) > 5)
            line += f"\nCollapsed (cosine above {COLLAPSED}): {count} of {self.pairs} pairs: {'; '.join(shown)}."
        parts = [line]
        if self.mixing is not None:
            parts.append(f"Shares of landmarks in mixing, largest first.\n{bars(self.mixing)}")
        if self.nearest is not None and self.samples:
            line = f"Nearest in the RKHS to {self.samples} samples: {len(self.unused)} of {self.count} to none."
            parts.append(f"{line}\n{bars(self.nearest)}")
        return parts

    def _named(self, pair: Pair, classes: Sequence[str] | None) -> str:
        """Name two points: classes of class weights, class and indices of prototypes, indices of landmarks."""
        if self.kind == "landmarks":
            return f"{pair.first} and {pair.second}"
        size = self.per_class
        first, second = (classes[i // size] if classes else f"class {i // size}" for i in (pair.first, pair.second))
        return f"{first} and {second}" if size == 1 else f"{first}: {pair.first % size} and {pair.second % size}"


def survey(head: PointHead, features: Tensor | Iterable[Tensor] | None) -> Points:
    """Measure the points of a head, and with features for how many samples each is the nearest."""
    kind = "landmarks" if head.mixing is not None else "prototypes" if head.prototypes > 1 else "class weights"
    weight = head.weight.detach().double().cpu()
    unit, size = unit_vectors(weight), head.prototypes if kind == "prototypes" else len(weight)
    # Prototypes are compared within their class, other points with each other.
    pairs = sorted(_pairs(unit.view(-1, size, unit.shape[1])), key=lambda pair: -pair.cosine)
    mixing = None
    if head.mixing is not None:
        squares = head.mixing.detach().double().cpu().square().sum(0)
        mixing = tuple((squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist())
    nearest = None if features is None else tuple(_nearest(head, features).tolist())
    return Points(
        kind=kind,
        count=len(unit),
        per_class=len(unit) if kind == "landmarks" else head.prototypes,
        closest=pairs[0] if pairs else None,
        pairs=len(unit) * (size - 1) // 2,
        collapsed=tuple(pair for pair in pairs if pair.cosine > COLLAPSED)[:MAX_PAIRS],
        mixing=mixing,
        samples=None if nearest is None else sum(nearest),
        nearest=nearest,
    )


def _pairs(groups: Tensor) -> Iterator[Pair]:
    """The closest pair of each block of points, and all collapsed ones. groups (G, R, D) of unit vectors."""
    size = groups.shape[1]
    for row in range(0, size, ROWS):
        cosines = groups[:, row : row + ROWS] @ groups[:, row:].mT
        upper = torch.ones_like(cosines, dtype=torch.bool).triu(1)
        candidates = cosines.masked_fill(~upper, -torch.inf).flatten()
        best = candidates.topk(min(max(int((candidates > COLLAPSED).sum()), 1), MAX_PAIRS))
        group, above, below = torch.unravel_index(best.indices, cosines.shape)
        start = group * size + row
        rows = torch.stack([start + above, start + below], 1).tolist()
        for (first, second), cosine in zip(rows, best.values.tolist(), strict=True):
            if cosine > -torch.inf:
                yield Pair(first, second, cosine)


def _nearest(head: PointHead, features: Tensor | Iterable[Tensor]) -> Tensor:
    """For how many samples each point is the nearest: |phi(f) - phi(w)| is smallest where k is largest."""
    counts = torch.zeros(head.weight.shape[0], dtype=torch.int64)
    with torch.no_grad():
        for batch in [features] if isinstance(features, Tensor) else features:
            for block in torch.split(head.points(batch.to(head.weight.device)), ROWS):
                values = kernel_mean(block, head.weight, head.alpha)
                counts += torch.bincount(values.argmax(1).cpu(), minlength=len(counts))
    return counts
