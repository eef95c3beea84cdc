"""A description as a page of charts."""

from pathlib import Path

from kernelhead import page
from kernelhead.files import write_bytes
from kernelhead.inspection import Description


def kernel_charts(description: Description, name: str = "own") -> str:
    """Return charts of the kernel, of its coefficients, and of how much its points are used."""
    terms, points = description.terms, description.points
    kernel = page.plot("t, cosine of feature and weight", "k(t)")
    kernel.add_scatter(x=description.t, y=description.k, line={"color": page.BLUE}, mode="lines", name="k(t)")
    bars = page.plot("orange tells no classes apart", "coefficient")
    colors = [page.ORANGE if term.order < 1 else page.BLUE for term in terms]
    names = [f"{term.name} (dead)" if term.dead else term.name for term in terms]
    bars.add_bar(x=names, y=[term.value for term in terms], marker_color=colors)
    drawn = [page.chart(kernel, f"kernel-{name}", "The learned kernel k(t)")]
    drawn += [page.chart(bars, f"coefficients-{name}", "The coefficients of the kernel")]
    if points.nearest is not None:
        use = page.plot(f"{points.kind}, most used first", f"nearest, of {sum(points.nearest)} samples")
        heights = sorted(points.nearest, reverse=True)
        use.add_bar(x=list(range(1, len(heights) + 1)), y=heights, marker_color=page.BLUE)
        drawn += [page.chart(use, f"points-{name}", "How much each point is used")]
    return page.charts(*drawn)


def write_plot(path: Path, description: Description) -> None:
    """Write a page of kernel, coefficients and use of points."""
    if path.suffix != ".html":
        raise ValueError(f"a chart is a page, and {path.name} does not end in .html; name it {path.stem}.html")
    write_bytes(path, page.document(description.head, kernel_charts(description)))
