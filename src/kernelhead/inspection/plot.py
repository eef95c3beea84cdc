"""A description as a chart."""

import io
from pathlib import Path

from kernelhead.files import needing, write_bytes
from kernelhead.inspection import Description

BLUE, ORANGE, GREY = "#1a5aa0", "#cc6105", "#8a8f98"


def write_plot(path: Path, description: Description) -> None:
    """Draw kernel, coefficients and use of points, in the format that the file's name ends in."""
    with needing("a chart", "plot"):
        from matplotlib.figure import Figure

    points, terms = description.points, description.terms
    used = points.nearest if points.nearest is not None else points.mixing
    figure = Figure(figsize=(10.5 if used is None else 15, 4), dpi=130, layout="constrained")
    kernel, coefficients, *rest = figure.subplots(1, 2 if used is None else 3)

    kernel.plot(description.t, description.k, color=BLUE, linewidth=2)
    even, odd = terms[0].value, terms[1].value
    for t, value, jump in ((1, description.k[-1], even + odd), (-1, description.k[0], even - odd)):
        if jump:
            kernel.plot([t], [value + jump], "o", color=ORANGE, clip_on=False)
    kernel.set(xlabel="t, cosine of feature and weight (dots: at exactly ±1)", ylabel="k(t)")

    colors = [ORANGE if term.order < 1 else BLUE for term in terms]
    coefficients.bar([f"$a_{{{term.order}}}$" for term in terms], [term.value for term in terms], color=colors)
    for index, term in enumerate(terms):
        if term.dead:
            coefficients.annotate("dead", (index, 0), ha="center", va="bottom", fontsize=8, color=GREY, rotation=90)
    coefficients.tick_params(axis="x", labelsize=7 if len(terms) > 14 else 10)
    coefficients.set(xlabel="orange: constant and end points, which tell no classes apart", ylabel="coefficient")

    if used is not None:
        heights = sorted((100 * value / (sum(used) or 1) for value in used), reverse=True)
        rest[0].bar(range(1, len(heights) + 1), heights, color=BLUE, width=1.0 if len(heights) > 60 else 0.8)
        what = f"nearest, % of {points.samples} samples" if points.nearest is not None else "share of mixing, %"
        rest[0].set(xlabel=f"{points.kind}, most used first", ylabel=what)
    for panel in (kernel, coefficients, *rest):
        panel.spines[["top", "right"]].set_visible(False)
    for panel in (kernel, coefficients):
        panel.axhline(0, color=GREY, linewidth=0.8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."))
    write_bytes(path, buffer.getvalue())
