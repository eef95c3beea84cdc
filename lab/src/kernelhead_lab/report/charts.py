"""Charts of the report, as figures of plotly."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import plotly.graph_objects as go

from kernelhead.kernels import END_POINTS
from kernelhead.page import COLORS, plot

DASHES = ("solid", "dashdot", "dot")
PAPER = " (paper)"
"""The end of the labels of lines with the paper's own numbers."""
BEYOND = 20  # a value this many times the usual is left off the axis at first
MINUS = "\N{MINUS SIGN}"

Values = Sequence[float | None]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, tuple[Sequence[float], Values]],
    *,
    order: Sequence[str] = (),
    log_x: bool = False,
) -> go.Figure:
    """Return lines over a common axis, by label: x and y, None where a line has a gap.

    Lines look alike in all charts that are given the same `order` of labels. A line of the paper is dashed and has the
    colour of ours.
    """
    figure = _figure(title, x_label, y_label)
    known = list(dict.fromkeys([*order, *(label.removesuffix(PAPER) for label in lines)]))
    for label, (x, y) in lines.items():
        number = known.index(label.removesuffix(PAPER))
        dash = "dash" if label.endswith(PAPER) else DASHES[number // len(COLORS) % len(DASHES)]
        style = {"color": COLORS[number % len(COLORS)], "dash": dash}
        mode = "lines" if len(x) > 30 else "lines+markers"
        figure.add_scatter(x=list(x), y=_finite(y), name=label, mode=mode, line=style)
    if log_x:
        figure.update_xaxes(type="log")
    _leave_off(figure, [value for _, y in lines.values() for value in _finite(y) if value is not None])
    return figure


def dot_chart(title: str, x_label: str, rows: Sequence[str], values: Mapping[str, Values]) -> go.Figure:
    """Return a line of text per row, and beside it a dot for each label: `values` has one value per row, or None."""
    figure = _figure(title, x_label, "")
    for number, (label, found) in enumerate(values.items()):
        marker = {"color": COLORS[number % len(COLORS)], "size": 8}
        figure.add_scatter(x=_finite(found), y=list(rows), name=label, mode="markers", marker=marker)
    figure.update_yaxes(autorange="reversed", dtick=1)
    figure.update_layout(height=130 + 18 * len(rows))
    return figure


def curves_chart(title: str, curves: Mapping[str, Values], y_label: str, order: Sequence[str] = ()) -> go.Figure:
    """Return one value per epoch, None where it is not known; the first is of epoch 1."""
    lines = {label: (range(1, len(values) + 1), values) for label, values in curves.items()}
    return line_chart(title, "epoch", y_label, lines, order=order)


def kernel_chart(title: str, alphas: Mapping[str, Sequence[float]]) -> go.Figure:
    """Return shapes of kernels over the cosine t, from 0 at t = 0 to 1 at t = 1. Each alpha (M + 3,): a_{-2} .. a_M.

    They are without end-point terms and without a_0, which shifts the scores of all classes alike. A kernel without a
    scale, such as one whose coefficients are all zero, is an empty line.
    """
    t = np.linspace(-1, 1, 101)
    lines: dict[str, tuple[Sequence[float], Values]] = {}
    for label, alpha in alphas.items():
        powers = np.array([0.0, *alpha[END_POINTS + 1 :]])
        at_one = float(powers.sum())
        usable = 0 < at_one < math.inf
        values = np.polynomial.polynomial.polyval(t, powers / at_one).tolist() if usable else [None] * len(t)
        lines[label] = (t.tolist(), values)
    return line_chart(title, "cosine t", f"(k(t) {MINUS} k(0)) / (k(1) {MINUS} k(0))", lines)


def coefficients_chart(title: str, alphas: Mapping[str, Sequence[float]]) -> go.Figure:
    """Return the coefficients of kernels over their temperatures, a_{-2} to a_M, in groups of one bar per kernel."""
    most = max((len(alpha) for alpha in alphas.values()), default=0)
    digits = str.maketrans("-0123456789", "₋₀₁₂₃₄₅₆₇₈₉")
    names = ["a" + str(i - END_POINTS).translate(digits) for i in range(most)]
    figure = _figure(title, f"coefficient (a₋₂ and a₋₁ count only at t = 1 or {MINUS}1)", "coefficient / T")
    for number, (label, alpha) in enumerate(alphas.items()):
        color = COLORS[number % len(COLORS)]
        figure.add_bar(x=names[: len(alpha)], y=_finite(alpha), name=label, marker_color=color)
    return figure


def _figure(title: str, x_label: str, y_label: str) -> go.Figure:
    figure: go.Figure = plot(x_label, y_label, title, height=400)
    figure.update_layout(showlegend=True)
    return figure


def _finite(values: Values) -> list[float | None]:
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _leave_off(figure: go.Figure, values: list[float]) -> None:
    """Keep a diverged run from flattening all others: its values are off the axis until it is scaled anew."""
    usual = BEYOND * median(map(abs, values)) if values else 0.0
    if usual > 0 and max(map(abs, values)) > max(100.0, usual):
        near = [value for value in values if abs(value) <= usual / 4]
        pad = 0.05 * (max(near) - min(near))
        figure.update_yaxes(range=[min(near) - pad, max(near) + pad])
        figure.update_xaxes(title=f"{figure.layout.xaxis.title.text} (values off the chart: double-click shows all)")
