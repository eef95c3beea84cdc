"""A description as a picture."""

import io
from pathlib import Path
from typing import Any

from kernelhead.inspection import Description
from kernelhead.results import write_bytes

BLUE, ORANGE, GREY = "#1a5aa0", "#cc6105", "#8a8f98"


def write_plot(path: Path, description: Description) -> None:
    """The kernel, its coefficients and the use of its points, in the format that the file's name ends in."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        sentence = f"a plot needs {error.name}; pip install 'kernelhead[plot]' brings it"
        raise ModuleNotFoundError(sentence, name=error.name) from error

    points = description.points
    bars = points.nearest if points.nearest is not None else points.mixing
    figure = Figure(figsize=(10.5 if bars is None else 15, 4), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in canvas.get_supported_filetypes():
        raise ValueError(f"{path} is no picture that can be written; a name such as {path.stem}.png is")
    panels = figure.subplots(1, 2 if bars is None else 3)
    _draw_kernel(panels[0], description)
    _draw_coefficients(panels[1], description)
    if bars is not None:
        total = sum(bars) or 1
        heights = sorted((100 * value / total for value in bars), reverse=True)
        panels[2].bar(range(1, len(heights) + 1), heights, color=BLUE, width=1.0 if len(heights) > 60 else 0.8)
        panels[2].xaxis.get_major_locator().set_params(integer=True)
        panels[2].set_xlabel(f"{points.kind}, the most used first")
        nearest = f"nearest of samples, % of {points.samples}"
        panels[2].set_ylabel(nearest if points.nearest is not None else "squared length of mixing's column, %")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    canvas.print_figure(buffer, format=kind)
    write_bytes(path, buffer.getvalue())


def _draw_kernel(panel: Any, description: Description) -> None:
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.axvline(0, color=GREY, linewidth=0.8)
    panel.plot(description.t, description.k, color=BLUE, linewidth=2)
    even, odd = (term.value for term in description.terms[:2])
    for t, value, jump in ((1, description.k[-1], even + odd), (-1, description.k[0], even - odd)):
        if jump:
            panel.plot([t], [value + jump], "o", color=ORANGE, clip_on=False)
    panel.set_xticks([-1, -0.5, 0, 0.5, 1])
    panel.set_xlabel("t, cosine of feature and weight" + (" (dots: at exactly ±1)" if even or odd else ""))
    panel.set_ylabel("k(t)")


def _draw_coefficients(panel: Any, description: Description) -> None:
    names = [f"$a_{{{term.order}}}$" for term in description.terms]
    values = [term.value for term in description.terms]
    panel.bar(names, values, color=[ORANGE if term.order < 1 else BLUE for term in description.terms])
    for place, term in enumerate(description.terms):
        if term.dead:
            panel.annotate("dead", (place, 0), ha="center", va="bottom", fontsize=8, color=GREY, rotation=90)
    if len(names) > 14:
        panel.tick_params(axis="x", labelsize=7)
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.set_xlabel("orange: constant and end points, which tell no classes apart")
    panel.set_ylabel("coefficient")
