"""What a chart shows: lines, bars in groups, or dots in rows. `drawing` makes figures of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """One line of a chart. `y` has None, or a value that is not finite, where the line has a gap.

    `dashed` is for the paper's own numbers: such a line has the colour of the solid one whose label its own begins
    with, as "SM (paper)" begins with "SM".
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over a common x axis. Those of `order`, if given, look alike in all charts that are given it."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    notes: Sequence[str] = ()
    order: Sequence[str] = ()  # of labels


@dataclass(frozen=True)
class BarChart:
    """Bars side by side in groups: `values` has, by label, one value a group, None where there is none."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class DotChart:
    """A line of text a row, and beside it a dot for each label: `values` has, by label, one value a row or None."""

    title: str
    x_label: str
    rows: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    notes: Sequence[str] = ()


AnyChart = Chart | BarChart | DotChart
