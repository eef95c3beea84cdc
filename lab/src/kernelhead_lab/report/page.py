"""The HTML page of all tables: one file that needs no network. It holds plotly's JavaScript once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from kernelhead._version import __version__
from kernelhead.files import write_bytes
from kernelhead.page import STYLE, chart
from kernelhead.tables import Table
from kernelhead_lab.tables.statistics import NOT_RUN

MUTED = (NOT_RUN, "diverged")  # cells that begin so hold no number


@dataclass(frozen=True)
class Section:
    """A table and the charts that belong to it."""

    table: Table
    charts: Sequence[go.Figure] = ()


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
    charts = any(section.charts for section in sections)
    parts = {
        "TITLE": escape(title),
        "STYLE": STYLE,
        "SCRIPT": f"<script>{get_plotlyjs()}</script>" if charts else "",
        "LINKS": "\n".join(links) or "<li>no tables yet</li>",
        "SECTIONS": "\n".join(_section(name, section) for name, section in zip(names, sections, strict=True)),
        "VERSION": escape(__version__),
    }
    template = resources.files("kernelhead_lab.report").joinpath("page.html").read_text(encoding="utf-8")
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
    parts += [f'<p class="remark">{escape(note)}</p>' for note in table.notes]
    if section.charts:
        drawn = (_chart(f"{name}-chart-{number}", each) for number, each in enumerate(section.charts, start=1))
        parts += ['<div class="charts">', *drawn, "</div>"]
    return "\n".join([*parts, "</section>"])


def _chart(name: str, figure: go.Figure) -> str:
    """Return a chart's element and data. High charts and rows of spheres take the whole width."""
    spheres = any(trace.type == "surface" for trace in figure.data)
    script = [resources.files("kernelhead_lab.report").joinpath("turn.js").read_text(encoding="utf-8")] * spheres
    drawn = chart(figure, name, figure.layout.title.text or "Chart", script)
    return f'<div class="wide">{drawn}</div>' if spheres or (figure.layout.height or 0) > 450 else drawn


def _cell(index: int, text: str) -> str:
    if index == 0:
        return f'<th scope="row">{escape(text)}</th>'
    kind = ' class="muted"' if text.startswith(MUTED) else ""
    return f"<td{kind}>{escape(text)}</td>"
