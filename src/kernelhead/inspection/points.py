"""The points of a head in feature space (class weights, prototypes or landmarks) and how they are used."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelhead.functional import kernel_mean
from kernelhead.fused.precision import unit_vectors
from kernelhead.heads import PointHead

COLLAPSED = 0.99  # two points closer than this cosine act as one
ROWS = 1024  # points that are compared at once


@dataclass(frozen=True)
class Points:
    """The rows of `weight`, and how they are used."""

    kind: str  # "class weights", "prototypes" or "landmarks"
    count: int
    collapsed: tuple[int, ...]  # points that another one, of their class if prototypes, has a cosine above 0.99 with
    nearest: tuple[int, ...] | None  # for how many samples each point is the nearest in the RKHS

    def __str__(self) -> str:
        lines = [f"{self.kind.capitalize()}: {self.count}."]
        if self.collapsed:
            shown = ", ".join(map(str, self.collapsed[:10])) + (", .." if len(self.collapsed) > 10 else "")
            lines.append(f"Collapsed (another has a cosine above {COLLAPSED}): {len(self.collapsed)}: {shown}.")
        if self.nearest is not None:
            unused = self.nearest.count(0)
            lines.append(f"Nearest in the RKHS to {sum(self.nearest)} samples: {unused} of {self.count} to none.")
        return "\n".join(lines)


def survey(head: PointHead, features: Tensor | Iterable[Tensor] | None) -> Points:
    """Look for points of a head that act as one, and with features for how many samples each is the nearest."""
    kind = "landmarks" if head.mixing is not None else "prototypes" if head.prototypes > 1 else "class weights"
    unit = unit_vectors(head.weight.detach().double().cpu())
    # Prototypes are compared within their class, other points with each other.
    closest = _closest(unit.view(-1, head.prototypes if kind == "prototypes" else len(unit), unit.shape[1]))
    return Points(
        kind=kind,
        count=len(unit),
        collapsed=tuple(torch.nonzero(closest > COLLAPSED).flatten().tolist()),
        nearest=None if features is None else tuple(_nearest(head, features).tolist()),
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
