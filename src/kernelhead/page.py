"""Pages of tables and charts, each in one file that needs no network. Charts show their values under the mouse."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kernelhead.files import needing

BLUE, ORANGE, GREY = "#1a5aa0", "#cc6105", "#8a8f98"
COLORS = "#2c47c9 #b92d05 #257a57 #bd9d08 #f07ab3 #29a5f5 #141414 #6c3f7c".split()  # told apart by all kinds of sight
OPTIONS = {"displaylogo": False, "responsive": True}
STYLE = files("kernelhead").joinpath("page.css").read_text(encoding="utf-8")  # of all pages, light and dark
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}
CLEAR = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
LAYOUT = {"layout": {"margin": {"l": 60, "r": 15, "b": 50}, "legend": LEGEND, **CLEAR}}


def plot(x_label: str, y_label: str, title: str = "", height: int = 380) -> Any:
    """Return an empty figure of plotly in the house look."""
    with needing("a report", "plot"):
        import plotly.graph_objects as go
    figure, top = go.Figure(LAYOUT), {"text": escape(title), "font": {"size": 15}, "x": 0.01}
    figure.update_layout(template="plotly_white", height=height, title=top, margin_t=45 if title else 15)
    figure.update_xaxes(title=x_label, automargin=True)
    figure.update_yaxes(title=y_label, automargin=True)
    return figure


def chart(figure: Any, name: str, label: str, script: Sequence[str] = ()) -> str:
    """Return a chart's element and data; `label` is what a screen reader says of it."""
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=OPTIONS, post_script=script)
    return f'<div class="chart" role="img" aria-label="{escape(label)}">{drawn}</div>'


def charts(*drawn: str) -> str:
    """Return charts side by side, as far as there is room."""
    return f'<div class="charts">{"".join(drawn)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table that scrolls by itself where it is too wide or too long."""
    head = f"<thead><tr>{''.join(f'<th>{escape(each)}</th>' for each in columns)}</tr></thead>" if columns else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def document(title: str, body: str) -> bytes:
    """Return a page; it holds plotly's JavaScript once if it has charts."""
    from plotly.offline import get_plotlyjs

    script = f"<script>{get_plotlyjs()}</script>" if "Plotly.newPlot" in body else ""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'{meta}<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style>{script}'
    text = f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n'
    return text.encode()
