"""The HTML page of all tables: one file that needs no network and no JavaScript."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from kernelhead._version import __version__
from kernelhead.paper.table import NOT_RUN, Table
from kernelhead.report.chart import AnyChart, BarChart, Chart, Series
from kernelhead.report.drawing import figure
from kernelhead.report.text import escape, number
from kernelhead.results import write_bytes

END_POINTS = 2  # coefficients a_{-2} and a_{-1}, which come first
MUTED = (NOT_RUN, "diverged")  # cells that begin so hold no number


@dataclass(frozen=True)
class Section:
    """A table and the charts that belong to it."""

    table: Table
    charts: Sequence[AnyChart] = ()


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page, whole or not at all."""
    names: list[str] = []
    for section in sections:
        name = "table-" + (re.sub(r"[^a-z0-9]+", "-", section.table.name.lower()).strip("-") or "unnamed")
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    links = [
        f'<li><a href="#{name}">{escape(section.table.title)}</a></li>'
        for name, section in zip(names, sections, strict=True)
    ]
    parts = {
        "TITLE": escape(title),
        "LINKS": "\n".join(links) or "<li>no tables yet</li>",
        "SECTIONS": "\n".join(_section(name, section) for name, section in zip(names, sections, strict=True)),
        "VERSION": escape(__version__),
    }
    template = resources.files("kernelhead.report").joinpath("page.html").read_text(encoding="utf-8")
    page = re.sub(r"/\*([A-Z]+)\*/", lambda match: parts[match[1]], template)
    write_bytes(path, page.encode())


def _section(name: str, section: Section) -> str:
    table = section.table
    parts = [f'<section id="{name}">', f'<h2 id="{name}-title">{escape(table.title)}</h2>']
    parts.append(f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}-title"><table>')
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    parts += [f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
    parts += [f"<tr>{''.join(_cell(i, cell) for i, cell in enumerate(row))}</tr>" for row in table.rows]
    parts.append("</tbody></table></div>")
    parts += [f'<p class="note">{escape(note)}</p>' for note in table.notes]
    if section.charts:
        parts += ['<div class="charts">', *map(figure, section.charts), "</div>"]
    return "\n".join([*parts, "</section>"])


def _cell(index: int, text: str) -> str:
    if index == 0:
        return f'<th scope="row">{escape(text)}</th>'
    kind = ' class="muted"' if text.startswith(MUTED) else ""
    return f"<td{kind}>{escape(text)}</td>"


def curves_chart(
    title: str, curves: Mapping[str, Sequence[float | None]], y_label: str, order: Sequence[str] = ()
) -> Chart:
    """One value an epoch, None where it is not known; the first is of epoch 1. `order` as for `Chart`."""
    series = [Series(label, range(1, len(values) + 1), values) for label, values in curves.items()]
    return Chart(title, "epoch", y_label, series, order=order)


def kernel_chart(title: str, alphas: Mapping[str, Sequence[float]]) -> Chart:
    """Shapes of kernels over the cosine t, from 0 at t = 0 to 1 at t = 1. Each alpha (M + 3,): a_{-2} .. a_M.

    Without the end-point terms, and without a_0, which shifts the scores of all classes alike.
    """
    t = np.linspace(-1, 1, 101)
    series, notes = [], []
    for label, alpha in alphas.items():
        powers = np.array([0.0, *alpha[END_POINTS + 1 :]])
        at_one = float(powers.sum())
        if 0 < at_one < math.inf:
            series.append(Series(label, t.tolist(), np.polynomial.polynomial.polyval(t, powers / at_one).tolist()))
        else:
            series.append(Series(label, t.tolist(), [None] * len(t)))
            notes.append(f"{label} is left out: its k(1) \N{MINUS SIGN} k(0) is {number(at_one)}.")
    return Chart(title, "cosine t", "(k(t) \N{MINUS SIGN} k(0)) / (k(1) \N{MINUS SIGN} k(0))", series, notes)


def coefficients_chart(title: str, alphas: Mapping[str, Sequence[float]]) -> BarChart:
    """The coefficients of kernels over their temperatures, a_{-2} to a_M, in groups of one bar a kernel."""
    most = max((len(alpha) for alpha in alphas.values()), default=0)
    digits = str.maketrans("-0123456789", "₋₀₁₂₃₄₅₆₇₈₉")
    groups = ["a" + str(i - END_POINTS).translate(digits) for i in range(most)]
    note = "a₋₂ and a₋₁ count only where t is 1 or \N{MINUS SIGN}1; a₀ shifts the scores of all classes alike."
    return BarChart(title, "coefficient", "coefficient / T", groups, alphas, (note,))
