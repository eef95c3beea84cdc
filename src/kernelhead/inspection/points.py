"""The points of a head in feature space - class weights, prototypes or landmarks - and how they are used."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelhead.heads.kernel import KernelClassifier
from kernelhead.ops.kernel_mean import kernel_mean
from kernelhead.ops.precision import raw_unit_norm

COLLAPSED = 0.99  # two points closer than this cosine act as one
NAMED = 1000  # pairs, the closest ones
ROWS = 1024  # that are compared at once


@dataclass(frozen=True)
class Pair:
    """Two points, by their places in `weight`, and the cosine between them."""

    first: int
    second: int
    cosine: float


@dataclass(frozen=True)
class Points:
    """The rows of `weight`.

    Attributes:
        kind: "class weights", "prototypes" or "landmarks".
        count: how many.
        per_class: how many a class has; with landmarks all of them.
        closest: the two closest of one class, or of all where the kind is not prototypes; None where there are not two.
        pairs: how many pairs were compared so.
        collapsed: pairs closer than a cosine of 0.99, the closest first, a thousand at most.
        mixing: of landmarks, which share each has in the squared lengths of the columns of `mixing`.
        samples, nearest: of how many samples each is the nearest in the RKHS, where features were given.
    """

    kind: str
    count: int
    per_class: int
    closest: Pair | None
    pairs: int
    collapsed: tuple[Pair, ...]
    mixing: tuple[float, ...] | None
    samples: int | None
    nearest: tuple[int, ...] | None

    @property
    def unused(self) -> list[int]:
        """Points that are the nearest of no sample."""
        return [index for index, count in enumerate(self.nearest or ()) if count == 0]


def survey(head: KernelClassifier, features: Tensor | Iterable[Tensor] | None) -> Points:
    """Measure the points of a head, and with features how many samples each is the nearest of."""
    kind = "landmarks" if head.mixing is not None else "prototypes" if head.prototypes > 1 else "class weights"
    weight = head.weight.detach().double().cpu()
    unit = weight / raw_unit_norm(weight)
    count = unit.shape[0]
    if kind == "prototypes":
        compared, pairs = (
            _pairs_within(unit, head.prototypes),
            head.num_classes * (head.prototypes * (head.prototypes - 1) // 2),
        )
    else:
        compared, pairs = _pairs_among(unit), count * (count - 1) // 2
    ordered = sorted(compared, key=lambda pair: -pair.cosine)
    mixing = None
    if head.mixing is not None:
        squares = head.mixing.detach().double().cpu().square().sum(0)
        mixing = tuple((squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist())
    nearest = None if features is None else _nearest(head, features)
    return Points(
        kind=kind,
        count=count,
        per_class=count if kind == "landmarks" else head.prototypes,
        closest=ordered[0] if ordered else None,
        pairs=pairs,
        collapsed=tuple(pair for pair in ordered if pair.cosine > COLLAPSED)[:NAMED],
        mixing=mixing,
        samples=None if nearest is None else int(nearest.sum()),
        nearest=None if nearest is None else tuple(nearest.tolist()),
    )


def _pairs_within(unit: Tensor, prototypes: int) -> Iterator[Pair]:
    """Of each class the closest pair, and all that have collapsed. unit (C P, D)."""
    for first_class in range(0, unit.shape[0] // prototypes, ROWS):
        grouped = unit.view(-1, prototypes, unit.shape[1])[first_class : first_class + ROWS]
        start = first_class * prototypes
        yield from _notable(grouped @ grouped.mT, start, torch.arange(len(grouped)) * prototypes)


def _pairs_among(unit: Tensor) -> Iterator[Pair]:
    """Of each block of points the closest pair with any other, and all that have collapsed. unit (K, D)."""
    for start in range(0, unit.shape[0], ROWS):
        cosines = unit[start : start + ROWS] @ unit[start:].t()
        yield from _notable(cosines[None], start, torch.zeros(1, dtype=torch.int64))


def _notable(cosines: Tensor, start: int, offsets: Tensor) -> Iterator[Pair]:
    """The closest pair, and the collapsed ones, above the diagonal of each of cosines (B, R, S)."""
    upper = torch.ones(cosines.shape[1:], dtype=torch.bool).triu(1)
    if not upper.any():
        return
    candidates = cosines.masked_fill(~upper, -torch.inf)
    wanted = candidates > COLLAPSED
    places = wanted.nonzero()
    if len(places) > NAMED:
        places = places[candidates[wanted].topk(NAMED).indices]
    elif not len(places):
        places = torch.stack(torch.unravel_index(candidates.argmax(), candidates.shape))[None]
    for group, row, column in places.tolist():
        first = start + int(offsets[group])
        yield Pair(first + row, first + column, candidates[group, row, column].item())


def _nearest(head: KernelClassifier, features: Tensor | Iterable[Tensor]) -> Tensor:
    """Of how many samples each point is the nearest: |phi(f) - phi(w)| is smallest where k is largest."""
    counts = torch.zeros(head.weight.shape[0], dtype=torch.int64)
    with torch.no_grad():
        for batch in [features] if isinstance(features, Tensor) else features:
            for block in torch.split(head.points(batch.to(head.weight.device)), ROWS):
                values = kernel_mean(block, head.weight, head.alpha)
                counts += torch.bincount(values.argmax(1).cpu(), minlength=len(counts))
    return counts
