"""Charts as HTML figures with inline SVG: text in, text out, the same bytes for the same data.

Colours, fonts and dashes are classes, which `page.html` defines for light screens, dark screens and paper.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 480, 290
WIDE, ROW = 800, 17  # of a chart of many rows
TOP, RIGHT, BOTTOM = 28, 14, 46  # margins of the plot; the left one grows with the labels of its ticks

COLORS = 8  # --s0 .. --s7 of page.html
DASHES = 3  # lines beyond the eighth: solid, dash-dotted, dotted
MOST_POINTS = 300  # of a line
MOST_MARKERS = 30  # a line of no more points shows each of them
TARGETS = 40  # points of a longer line that answer to the mouse, about
BEYOND, BEYOND_BARS = 20, 10_000  # a value this many times the usual is off the chart

# Outlines of markers, relative to their middle; all about as large.
SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "m-2.7-2.7h5.4v5.4h-5.4z",
    "m0-3.7l3.6 6.2h-7.2z",
    "m0-3.9l3.9 3.9l-3.9 3.9l-3.9-3.9z",
    "m0 3.7l3.6-6.2h-7.2z",
)


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
Point = tuple[float, float]


def figure(chart: AnyChart) -> str:
    """A chart as an HTML figure: title, SVG, legend, notes."""
    width, height, kind = WIDTH, HEIGHT, ""
    if isinstance(chart, BarChart):
        drawing, legend, notes = _bars(chart)
    elif isinstance(chart, DotChart):
        drawing, legend, notes = _dots(chart)
        width, height, kind = WIDE, TOP + ROW * len(chart.rows) + BOTTOM, ' class="wide"'
    else:
        drawing, legend, notes = _lines(chart)
    parts = [f"<figure{kind}>", f"<figcaption>{escape(chart.title)}</figcaption>"]
    parts.append(f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}">')
    parts += [*drawing, "</svg>"]
    if legend:
        parts += ['<ul class="legend">', *legend, "</ul>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in (*chart.notes, *notes)]
    return "\n".join([*parts, "</figure>"])


def escape(text: str) -> str:
    """Text for HTML and XML: markup escaped, what neither can hold replaced."""
    text = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
    return html.escape(text)


def runs_of(series: Series) -> list[list[Point]]:
    """The points of a line, cut where it has gaps."""
    runs: list[list[Point]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None and abs(x) < 1e300 and abs(y) < 1e300:  # beyond, differences overflow; NaN fails it too
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """No more than `most` of the points (four at least): the ends, the lowest and the highest of each stretch."""
    if len(points) <= max(most, 4):
        return list(points)
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        kept.add(min(stretch, key=lambda j: points[j][1]))
        kept.add(max(stretch, key=lambda j: points[j][1]))
    return [points[j] for j in sorted(kept)]


def round_step(low: float, high: float, about: int) -> float:
    """1, 2 or 5 times a power of ten, to go from `low` to `high` in no more than `about` steps."""
    least = (high - low) / about
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * least)


def ticks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    """The multiples of `step` from `low` to `high`, and how they are written."""
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [(k * step, number(k * step, 10)) for k in range(first, last + 1)]


def number(value: float, digits: int = 6) -> str:
    """A number as people write it, with a true minus sign: 0.25, 1200, 2e30."""
    text = f"{value + 0.0:.{digits}g}" if abs(value) < 1e7 else f"{value:.{digits - 1}e}"
    mantissa, _, exponent = text.partition("e")
    if exponent:
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        mantissa += f"e{int(exponent)}"
    return mantissa.replace("-", "\N{MINUS SIGN}")


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


def _apart(low: float, high: float) -> tuple[float, float]:
    """Two ends of an axis that differ, around those of the data."""
    size = max(abs(low), abs(high))
    if high - low > max(1e-7 * size, 1e-290):  # labels have ten digits
        return low, high
    pad = 0.05 * size if size > 1e-280 else 1.0
    return low - pad, high + pad


class _Plot:
    """Where numbers land: the y axis from its lowest to its highest tick, the x axis as given."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        low, high = _apart(*y)
        step = round_step(low, high, 6)
        self.low, self.high = math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step
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


def _empty(x_label: str, y_label: str) -> list[str]:
    """Axes without numbers."""
    plot = _Plot((0, 1), (0, 1))
    plot.y_ticks.clear()
    words = f'<text class="empty x" x="{WIDTH / 2:.0f}" y="{HEIGHT / 2:.0f}">no values yet</text>'
    return [*plot.axes([], x_label, y_label, upright=False), words]


def _styles(chart: Chart) -> list[tuple[int, str]]:
    """Of each line its number, for colour and marker, and its classes."""
    numbers = {label: index for index, label in enumerate(chart.order)}
    for line in chart.series:
        if not line.dashed:
            numbers.setdefault(line.label, len(numbers))
    free = len(numbers)
    styles = []
    for line in chart.series:
        index = numbers.get(line.label)
        if line.dashed:
            owners = [label for label in numbers if re.match(rf"{re.escape(label)}(?!\w)", line.label)]
            index = numbers[max(owners, key=len)] if owners else None
        if index is None:
            index, free = free, free + 1
        dash = " paper" if line.dashed else f" d{index // COLORS % DASHES}"
        styles.append((index, f"c{index % COLORS}{dash}"))
    return styles


def _key(drawing: str, label: str, empty: bool) -> str:
    """A line of the legend."""
    missing = ' <span class="muted">(no values)</span>' if empty else ""
    return f'<li><svg class="key" viewBox="0 0 30 12" aria-hidden="true">{drawing}</svg>{escape(label)}{missing}</li>'


def _lines(chart: Chart) -> tuple[list[str], list[str], list[str]]:
    """Drawing, legend and notes."""
    styles = _styles(chart)
    runs = [runs_of(series) for series in chart.series]
    legend = [
        _key(
            f'<g class="{classes}"><polyline points="0,6 30,6"/><path d="M15 6{SHAPES[index % len(SHAPES)]}"/></g>',
            series.label,
            not found,
        )
        for series, (index, classes), found in zip(chart.series, styles, runs, strict=True)
    ]
    columns = [[y for run in found for _, y in run] for found in runs]
    xs = sorted({x for found in runs for run in found for x, _ in run})
    if not xs:
        return _empty(chart.x_label, chart.y_label), legend, []
    low, high = _apart(xs[0], xs[-1])
    few = max(len(column) for column in columns) <= MOST_MARKERS
    pad = (high - low) * 0.03 if few else 0  # room for markers at the ends
    plot = _Plot((low - pad, high + pad), usual_range(columns, BEYOND))
    if len(xs) <= 7 and all(after - before >= (high - low) / 14 for before, after in pairwise(xs)):
        places = [(x, number(x)) for x in xs]  # depths of networks, shares of labels: the data are the ticks
    else:
        step = round_step(low, high, 6)
        places = ticks(low, high, max(step, 1) if all(x == round(x) for x in xs) else step)
    drawing = plot.axes(places, chart.x_label, chart.y_label, upright=True)
    for position, (series, (index, classes), found) in enumerate(zip(chart.series, styles, runs, strict=True)):
        drawing.append(f'<g class="{classes}">')
        drawing += _line(plot, chart, series.label, SHAPES[index % len(SHAPES)], found, position / len(runs))
        drawing.append("</g>")
    return drawing, legend, plot.off_notes([series.label for series in chart.series], columns)


def _line(plot: _Plot, chart: Chart, label: str, shape: str, runs: list[list[Point]], offset: float) -> list[str]:
    """The strokes of a line, then its points: each of a short line; of a long one some, seen or only felt."""
    total = sum(map(len, runs))
    drawn: list[str] = []
    marks: list[str] = []
    for run in runs:
        points = thin(run, MOST_POINTS * len(run) // total)
        last = len(points) - 1
        for stroke in _strokes(plot, points):
            drawn.append(f'<polyline points="{" ".join(f"{plot.x(x)},{plot.y(y)}" for x, y in stroke)}"/>')
        seen = felt = set(range(len(points)))
        if total > MOST_MARKERS and last > 0:
            # Markers of different lines at different places, so that lines on top of each other can be told apart.
            seen = {round((part + 0.1 + 0.8 * offset) * last / 4) for part in range(4)}
            felt = {*range(0, last, math.ceil(len(points) / TARGETS)), last}
            felt |= {find(range(len(points)), key=lambda j: points[j][1]) for find in (min, max)}
        shown = [plot.shows(y) for _, y in points]
        # Off the chart: an arrow where the line leaves it and where it comes back.
        arrows = {j for j in range(len(points)) if not shown[j] and (j in (0, last) or shown[j - 1] or shown[j + 1])}
        for j in sorted(seen | felt | arrows):
            x, y = points[j]
            visible = j in seen if shown[j] else j in arrows
            outline = shape if shown[j] else SHAPES[2 if y > plot.high else 4]
            text = escape(f"{label}\n{chart.x_label} {number(x)}: {number(y)}")
            kind = "" if visible else ' class="felt"'
            marks.append(f'<path{kind} d="M{plot.x(x)} {plot.y(y)}{outline}"><title>{text}</title></path>')
    return drawn + marks


def _strokes(plot: _Plot, points: Sequence[Point]) -> list[list[Point]]:
    """Where a line is drawn: not along the edge between two points that are off the chart."""
    strokes = [list(points[:1])]
    for before, after in pairwise(points):
        if plot.shows(before[1]) or plot.shows(after[1]):
            strokes[-1].append(after)
        else:
            strokes.append([after])
    return [stroke for stroke in strokes if len(stroke) > 1]


def _bars(chart: BarChart) -> tuple[list[str], list[str], list[str]]:
    """Drawing, legend and notes."""
    lines = [Series(label, range(len(values)), values) for label, values in chart.values.items()]
    places = [{int(x): y for run in runs_of(line) for x, y in run} for line in lines]
    columns = [list(found.values()) for found in places]
    kinds = [f"c{i % COLORS}{' hollow' if i // COLORS % 2 else ''}" for i in range(len(lines))]
    legend = [
        _key(f'<rect class="bar {kind}" x="1" y="1" width="28" height="10"/>', line.label, not column)
        for line, kind, column in zip(lines, kinds, columns, strict=True)
    ]
    if not any(columns):
        return _empty(chart.x_label, chart.y_label), legend, []
    low, high = usual_range(columns, BEYOND_BARS)
    plot = _Plot((0, len(chart.groups)), (min(low, 0), max(high, 0)))
    names = [(i + 0.5, group) for i, group in enumerate(chart.groups)]
    drawing = plot.axes(names, chart.x_label, chart.y_label, upright=False)
    share = 0.8 / len(lines)  # of a group's room, for a bar
    zero = plot.y(0)
    for index, (line, kind, found) in enumerate(zip(lines, kinds, places, strict=True)):
        for group, value in found.items():
            x, end = (plot.x(group + 0.1 + share * (index + side)) for side in (0, 1))
            y, height = min(zero, plot.y(value)), abs(zero - plot.y(value))
            text = escape(f"{line.label}\n{chart.groups[group]}: {number(value)}")
            box = f'x="{x}" y="{y}" width="{max(end - x - 0.4, 0.6):.1f}" height="{max(height, 0.6):.1f}"'
            drawing.append(f'<rect class="bar {kind}" {box}><title>{text}</title></rect>')
    return drawing, legend, plot.off_notes([line.label for line in lines], columns)


def _dots(chart: DotChart) -> tuple[list[str], list[str], list[str]]:
    """Drawing, legend and notes. The axis is from the lowest to the highest value: places are compared, not lengths."""
    lines = [Series(label, range(len(values)), values) for label, values in chart.values.items()]
    places = [{int(row): value for run in runs_of(line) for row, value in run} for line in lines]
    marks = [(f"c{index % COLORS} d0", SHAPES[index % len(SHAPES)]) for index in range(len(lines))]
    legend = [
        _key(f'<g class="{kind}"><path d="M15 6{shape}"/></g>', line.label, not found)
        for line, (kind, shape), found in zip(lines, marks, places, strict=True)
    ]
    found = [value for place in places for value in place.values()]
    low, high = _apart(min(found), max(found)) if found else (0.0, 1.0)
    step = round_step(low, high, 8)
    low, high = math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step
    left = min(12 + 6.1 * max(map(len, chart.rows), default=0), WIDE / 2)
    right, bottom = WIDE - RIGHT, TOP + ROW * len(chart.rows)

    def at(value: float) -> float:
        return round(left + (value - low) / (high - low) * (right - left), 1)

    drawing = []
    for value, label in ticks(low, high, step) if found else []:
        drawing.append(f'<line class="grid" x1="{at(value)}" y1="{TOP}" x2="{at(value)}" y2="{bottom}"/>')
        drawing.append(f'<text class="x" x="{at(value)}" y="{bottom + 16}">{label}</text>')
    middles = [TOP + ROW * (index + 0.5) for index in range(len(chart.rows))]
    for middle, row in zip(middles, chart.rows, strict=True):
        drawing.append(f'<line class="grid" x1="{left:.1f}" y1="{middle}" x2="{right}" y2="{middle}"/>')
        drawing.append(f'<text class="y" x="{left - 6:.1f}" y="{middle + 4}">{escape(row)}</text>')
    center = f'x="{(left + right) / 2:.1f}" y="{bottom + BOTTOM - 8}"'
    drawing.append(f'<text class="name x" {center}>{escape(chart.x_label)}</text>')
    for line, (kind, shape), place in zip(lines, marks, places, strict=True):
        drawing.append(f'<g class="{kind}">')
        for index, value in place.items():
            text = escape(f"{chart.rows[index]}\n{line.label}: {number(value)}")
            drawing.append(f'<path d="M{at(value)} {middles[index]}{shape}"><title>{text}</title></path>')
        drawing.append("</g>")
    return drawing, legend, []
