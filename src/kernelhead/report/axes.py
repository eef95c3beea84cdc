"""Axes of a chart: where they end, their ticks, and where numbers land."""

import math
from collections.abc import Iterable, Sequence

from kernelhead.report.text import escape, number

WIDTH, HEIGHT = 480, 290
TOP, RIGHT, BOTTOM = 28, 14, 46  # margins of the plot; the left one grows with the labels of its ticks


def round_step(low: float, high: float, about: int) -> float:
    """1, 2 or 5 times a power of ten, to go from `low` to `high` in no more than `about` steps."""
    least = (high - low) / about
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * least)


def ticks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    """The multiples of `step` from `low` to `high`, and how they are written."""
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [(k * step, number(k * step, 10)) for k in range(first, last + 1)]


def rounded(low: float, high: float, about: int) -> tuple[float, float, float]:
    """The ends of an axis that holds both, multiples of its step, and that step."""
    step = round_step(low, high, about)
    return math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step, step


def usual_range(columns: Iterable[Sequence[float]], beyond: float) -> tuple[float, float]:
    """The lowest and the highest value worth an axis, of columns with at least one value among them.

    A diverged run would flatten all others. Usual is the median, or the first value of a column: losses fall from it.
    Where something is more than `beyond` times the usual, values over a quarter of that are left off the chart. What
    is below 100 never is too much: percentages stay as they are, however late they rise.
    """
    found = [column for column in columns if column]
    values = [value for column in found for value in column]
    usual = max(_median([abs(value) for value in values]), _median([abs(column[0]) for column in found]))
    if usual > 0 and max(map(abs, values)) > max(100, beyond * usual):
        values = [value for value in values if abs(value) <= beyond / 4 * usual]
    return min(values), max(values)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def apart(low: float, high: float) -> tuple[float, float]:
    """Two ends of an axis that differ, around those of the data."""
    size = max(abs(low), abs(high))
    if high - low > max(1e-7 * size, 1e-290):  # labels have ten digits
        return low, high
    pad = 0.05 * size if size > 1e-280 else 1.0
    return low - pad, high + pad


class Plot:
    """Where numbers land: the y axis from its lowest to its highest tick, the x axis as given."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.low, self.high, step = rounded(*apart(*y), 6)
        self.y_ticks = ticks(self.low, self.high, step)
        self.x_low, self.x_high = x
        self.left = 12 + 6.8 * max(len(label) for _, label in self.y_ticks)
        self.right, self.bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.bottom - share * (self.bottom - TOP), 1)

    def shows(self, value: float) -> bool:
        slack = 1e-5 * (self.high - self.low)  # the ends are rounded too
        return self.low - slack <= value <= self.high + slack

    def axes(self, x_places: Iterable[tuple[float, str]], x_label: str, y_label: str, *, upright: bool) -> list[str]:
        """Grid, labels and names of both axes; `upright` lines at the places of the x axis too."""
        drawn = []
        for value, label in self.y_ticks:
            y = self.y(value)
            drawn.append(f'<line class="grid" x1="{self.left:.1f}" y1="{y}" x2="{self.right}" y2="{y}"/>')
            drawn.append(f'<text class="y" x="{self.left - 6:.1f}" y="{y + 4:.1f}">{label}</text>')
        for value, label in x_places:
            x = self.x(value)
            if upright:
                drawn.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{self.bottom}"/>')
            drawn.append(f'<text class="x" x="{x}" y="{self.bottom + 16}">{escape(label)}</text>')
        zero = self.y(0 if self.low <= 0 <= self.high else self.low)
        drawn.append(f'<line class="axis" x1="{self.left:.1f}" y1="{zero}" x2="{self.right}" y2="{zero}"/>')
        middle = (self.left + self.right) / 2
        drawn.append(f'<text class="name x" x="{middle:.1f}" y="{HEIGHT - 8}">{escape(x_label)}</text>')
        drawn.append(f'<text class="name" x="4" y="14">{escape(y_label)}</text>')
        return drawn

    def off_notes(self, labels: Sequence[str], columns: Sequence[Sequence[float]]) -> list[str]:
        """What does not fit, said in a sentence a line."""
        notes = []
        for label, column in zip(labels, columns, strict=True):
            off = [value for value in column if not self.shows(value)]
            if off:
                far = number(max(off, key=abs))
                notes.append(f"Off the chart: {len(off)} of {len(column)} values of {label}, the farthest {far}.")
        return notes


def empty(x_label: str, y_label: str) -> list[str]:
    """Axes without numbers."""
    plot = Plot((0, 1), (0, 1))
    plot.y_ticks.clear()
    words = f'<text class="empty x" x="{WIDTH / 2:.0f}" y="{HEIGHT / 2:.0f}">no values yet</text>'
    return [*plot.axes([], x_label, y_label, upright=False), words]
