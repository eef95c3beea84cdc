"""The points of a head in feature space (class weights, prototypes or landmarks) and how they are used."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelhead.functional import kernel_mean
from kernelhead.fused.precision import unit_vectors
from kernelhead.heads import PointHead
from kernelhead.inspection.text import bars

COLLAPSED = 0.99  # two points closer than this cosine act as one
ROWS = 1024  # points that are compared at once


@dataclass(frozen=True)
class Points:
    """The rows of `weight`, and how they are used."""

    kind: str  # "class weights", "prototypes" or "landmarks"
    count: int
    per_class: int  # how many a class has; with landmarks all of them
    closest: float | None  # the largest cosine of two points, of one class where these are prototypes
    collapsed: tuple[int, ...]  # points that another one is closer to than a cosine of 0.99
    mixing: tuple[float, ...] | None  # the share of each landmark in the squared lengths of the columns of `mixing`
    samples: int | None
    nearest: tuple[int, ...] | None  # for how many of these samples each point is the nearest in the RKHS

    @property
    def unused(self) -> list[int]:
        """Points that are the nearest for no sample."""
        return [index for index, count in enumerate(self.nearest or ()) if count == 0]

    def paragraphs(self) -> list[str]:
        """Return what is to be said of the points."""
        per_class = f", {self.per_class} per class" if self.kind == "prototypes" else ""
        line = f"{self.kind.capitalize()}: {self.count}{per_class}."
        if self.closest is not None:
            line += f" The closest two have cosine {self.closest:.3f}."
        if self.collapsed:
            shown = [str(index) for index in self.collapsed[:10]] + [".."] * (len(self.collapsed) > 10)
            line += f"\nCollapsed (another has a cosine above {COLLAPSED}): {len(self.collapsed)}: {', '.join(shown)}."
        parts = [line]
        if self.mixing is not None:
            parts.append(f"Shares of landmarks in mixing, largest first.\n{bars(self.mixing)}")
        if self.nearest is not None and self.samples:
            line = f"Nearest in the RKHS to {self.samples} samples: {len(self.unused)} of {self.count} to none."
            parts.append(f"{line}\n{bars(self.nearest)}")
        return parts


def survey(head: PointHead, features: Tensor | Iterable[Tensor] | None) -> Points:
    """Measure the points of a head, and with features for how many samples each is the nearest."""
    kind = "landmarks" if head.mixing is not None else "prototypes" if head.prototypes > 1 else "class weights"
    weight = head.weight.detach().double().cpu()
    unit, size = unit_vectors(weight), head.prototypes if kind == "prototypes" else len(weight)
    # Prototypes are compared within their class, other points with each other.
    closest = _closest(unit.view(-1, size, unit.shape[1]))
    mixing = None
    if head.mixing is not None:
        squares = head.mixing.detach().double().cpu().square().sum(0)
        mixing = tuple((squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist())
    nearest = None if features is None else tuple(_nearest(head, features).tolist())
    return Points(
        kind=kind,
        count=len(unit),
        per_class=len(unit) if kind == "landmarks" else head.prototypes,
        closest=closest.max().item() if size > 1 else None,
        collapsed=tuple(torch.nonzero(closest > COLLAPSED).flatten().tolist()),
        mixing=mixing,
        samples=None if nearest is None else sum(nearest),
        nearest=nearest,
    )


def _closest(groups: Tensor) -> Tensor:
    """Return the cosine of each point with the closest other one of its group. groups (G, R, D) of unit vectors."""
    found = []
    for row, block in enumerate(torch.split(groups, ROWS, 1)):
        cosines = block @ groups.mT
        cosines.diagonal(row * ROWS, 1, 2).fill_(-torch.inf)
        found.append(cosines.amax(2))
    return torch.cat(found, 1).flatten()


def _nearest(head: PointHead, features: Tensor | Iterable[Tensor]) -> Tensor:
    """For how many samples each point is the nearest: |phi(f) - phi(w)| is smallest where k is largest."""
    counts = torch.zeros(head.weight.shape[0], dtype=torch.int64)
    with torch.no_grad():
        for batch in [features] if isinstance(features, Tensor) else features:
            for block in torch.split(head.points(batch.to(head.weight.device)), ROWS):
                values = kernel_mean(block, head.weight, head.alpha)
                counts += torch.bincount(values.argmax(1).cpu(), minlength=len(counts))
    return counts
