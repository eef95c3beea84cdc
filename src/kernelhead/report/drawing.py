"""Charts as HTML figures with inline SVG: text in, text out, the same bytes for the same data.

Colours, fonts and dashes are classes, which `page.html` defines for light screens, dark screens and paper.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from kernelhead.report.axes import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Plot,
    apart,
    empty,
    round_step,
    rounded,
    ticks,
    usual_range,
)
from kernelhead.report.chart import AnyChart, BarChart, Chart, DotChart, Series
from kernelhead.report.text import escape, number

WIDE, ROW = 800, 17  # of a chart of many rows
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


def runs_of(series: Series) -> list[list[Point]]:
    """The points of a line, cut where it has gaps."""
    runs: list[list[Point]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None and abs(x) < 1e300 and abs(y) < 1e300:  # beyond, differences overflow; NaN fails it too
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _places(values: Sequence[float | None]) -> dict[int, float]:
    """What a bar or a dot can show, by its place."""
    return {int(x): y for run in runs_of(Series("", range(len(values)), values)) for x, y in run}


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
        return empty(chart.x_label, chart.y_label), legend, []
    low, high = apart(xs[0], xs[-1])
    few = max(len(column) for column in columns) <= MOST_MARKERS
    pad = (high - low) * 0.03 if few else 0  # room for markers at the ends
    plot = Plot((low - pad, high + pad), usual_range(columns, BEYOND))
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


def _line(plot: Plot, chart: Chart, label: str, shape: str, runs: list[list[Point]], offset: float) -> list[str]:
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


def _strokes(plot: Plot, points: Sequence[Point]) -> list[list[Point]]:
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
    places = {label: _places(values) for label, values in chart.values.items()}
    columns = [list(found.values()) for found in places.values()]
    kinds = [f"c{i % COLORS}{' hollow' if i // COLORS % 2 else ''}" for i in range(len(places))]
    legend = [
        _key(f'<rect class="bar {kind}" x="1" y="1" width="28" height="10"/>', label, not found)
        for (label, found), kind in zip(places.items(), kinds, strict=True)
    ]
    if not any(columns):
        return empty(chart.x_label, chart.y_label), legend, []
    low, high = usual_range(columns, BEYOND_BARS)
    plot = Plot((0, len(chart.groups)), (min(low, 0), max(high, 0)))
    names = [(i + 0.5, group) for i, group in enumerate(chart.groups)]
    drawing = plot.axes(names, chart.x_label, chart.y_label, upright=False)
    share = 0.8 / len(places)  # of a group's room, for a bar
    zero = plot.y(0)
    for index, ((label, found), kind) in enumerate(zip(places.items(), kinds, strict=True)):
        for group, value in found.items():
            x, end = (plot.x(group + 0.1 + share * (index + side)) for side in (0, 1))
            y, height = min(zero, plot.y(value)), abs(zero - plot.y(value))
            text = escape(f"{label}\n{chart.groups[group]}: {number(value)}")
            box = f'x="{x}" y="{y}" width="{max(end - x - 0.4, 0.6):.1f}" height="{max(height, 0.6):.1f}"'
            drawing.append(f'<rect class="bar {kind}" {box}><title>{text}</title></rect>')
    return drawing, legend, plot.off_notes(list(places), columns)


def _dots(chart: DotChart) -> tuple[list[str], list[str], list[str]]:
    """Drawing, legend and notes. The axis is from the lowest to the highest value: places are compared, not lengths."""
    places = {label: _places(values) for label, values in chart.values.items()}
    marks = [(f"c{index % COLORS} d0", SHAPES[index % len(SHAPES)]) for index in range(len(places))]
    legend = [
        _key(f'<g class="{kind}"><path d="M15 6{shape}"/></g>', label, not place)
        for (label, place), (kind, shape) in zip(places.items(), marks, strict=True)
    ]
    found = [value for place in places.values() for value in place.values()]
    low, high, step = rounded(*(apart(min(found), max(found)) if found else (0.0, 1.0)), 8)
    left = min(12 + 6.1 * max(map(len, chart.rows), default=0), WIDE / 2)
    right, bottom = WIDE - RIGHT, TOP + ROW * len(chart.rows)

    def at(value: float) -> float:
        return round(left + (value - low) / (high - low) * (right - left), 1)

    drawing = []
    for value, tick in ticks(low, high, step) if found else []:
        drawing.append(f'<line class="grid" x1="{at(value)}" y1="{TOP}" x2="{at(value)}" y2="{bottom}"/>')
        drawing.append(f'<text class="x" x="{at(value)}" y="{bottom + 16}">{tick}</text>')
    middles = [TOP + ROW * (index + 0.5) for index in range(len(chart.rows))]
    for middle, row in zip(middles, chart.rows, strict=True):
        drawing.append(f'<line class="grid" x1="{left:.1f}" y1="{middle}" x2="{right}" y2="{middle}"/>')
        drawing.append(f'<text class="y" x="{left - 6:.1f}" y="{middle + 4}">{escape(row)}</text>')
    center = f'x="{(left + right) / 2:.1f}" y="{bottom + BOTTOM - 8}"'
    drawing.append(f'<text class="name x" {center}>{escape(chart.x_label)}</text>')
    for (label, place), (kind, shape) in zip(places.items(), marks, strict=True):
        drawing.append(f'<g class="{kind}">')
        for index, value in place.items():
            text = escape(f"{chart.rows[index]}\n{label}: {number(value)}")
            drawing.append(f'<path d="M{at(value)} {middles[index]}{shape}"><title>{text}</title></path>')
        drawing.append("</g>")
    return drawing, legend, []
