"""The table of an experiment on images, with its charts.

Training curves and learned kernels; accuracy over labels, over depth or over the size of a head, where a table is about
that, and accuracy alone where it has many rows.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from kernelhead.coefficients import activation
from kernelhead.paper.beyond import SATURATION
from kernelhead.paper.grid import accuracies, table
from kernelhead.paper.recipe import Cell, Experiment, Protocol, paper_number
from kernelhead.paper.store import Store
from kernelhead.report.chart import AnyChart, Chart, DotChart, Series
from kernelhead.report.page import Section, coefficients_chart, curves_chart, kernel_chart

KERNELS_SHOWN = 8
MOST_ROWS = 16  # that have a chart of curves each

Runs = list[tuple[Cell, dict[str, Any]]]


def section(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Section:
    """What the page shows of an experiment.

    Charts are those of the first seed, under the protocol with the most cells first: another may have but what it
    shares with other tables.
    """
    charts: list[AnyChart] = []
    of_protocol = [
        ([(cell, run) for cell in experiment.cells if (run := _first(cell, store, protocol)) is not None], protocol)
        for protocol in protocols
    ]
    for first, protocol in sorted(of_protocol, key=lambda pair: -len(pair[0])):
        if not first:
            continue
        if any(cell.recipe.subset for cell, _ in first):
            charts += _over_labels(experiment, store, protocol)
        elif experiment is SATURATION:
            charts.append(_over_size(first, store, protocol))
        elif len({cell.row for cell in experiment.cells}) > MOST_ROWS:
            charts.append(_dots(experiment, store, protocol))
        else:
            charts += [*_over_depth(experiment, store, protocol), *_curves(experiment, first, protocol)]
        charts += _kernels(first, protocol)
    return Section(table(experiment, store, protocols), charts)


def _first(cell: Cell, store: Store, protocol: Protocol) -> dict[str, Any] | None:
    results = store.results(cell.recipe, protocol)
    return results[min(results)] if results else None


def _curves(experiment: Experiment, first: Runs, protocol: Protocol) -> list[AnyChart]:
    """Training loss over epochs, a chart for each row of the table; runs of one column have one chart."""
    by_row: dict[str, dict[str, list[float | None]]] = {}
    several = len({cell.column for cell, _ in first}) > 1
    order = list(dict.fromkeys(cell.column for cell in experiment.cells)) if several else []
    for cell, result in first:
        row, label = (cell.row, cell.column) if several else ("", cell.row)
        by_row.setdefault(row, {})[label] = result["curve"]["loss"]
    return [
        curves_chart(f"{row + ', t' if row else 'T'}raining loss, {protocol.name} protocol", curves, "loss", order)
        for row, curves in by_row.items()
    ]


def _kernels(first: Runs, protocol: Protocol) -> list[AnyChart]:
    """Shapes of learned kernels, of fixed ones too where there is room, and the coefficients of the learned ones."""
    found = [(cell, run["alpha"]) for cell, run in first if "alpha" in run and cell.recipe.head == "kernel"]
    learned = [(cell, alpha) for cell, alpha in found if "kernel" not in cell.recipe.head_options]
    fixed = [(cell, alpha) for cell, alpha in found if "kernel" in cell.recipe.head_options]
    if not learned:
        return []
    if len(found) > KERNELS_SHOWN:
        fixed = []
    named = [cell for cell, _ in (*learned, *fixed)]
    several_rows, several_columns = len({cell.row for cell in named}) > 1, len({cell.column for cell in named}) > 1

    def name(cell: Cell) -> str:
        return ", ".join([cell.row] * several_rows + [cell.column] * several_columns) or cell.column

    shapes = {name(cell): alpha for cell, alpha in (*learned[:KERNELS_SHOWN], *fixed)}
    values = {name(cell): [a / _temperature(cell) for a in alpha] for cell, alpha in learned[:KERNELS_SHOWN]}
    of = f", the first {len(values)} of {len(learned)}" if len(values) < len(learned) else ""
    titles = ("Kernels", "Coefficients of the learned ones") if fixed else ("Learned kernels", "Their coefficients")
    return [
        kernel_chart(f"{titles[0]}{of}, {protocol.name} protocol", shapes),
        coefficients_chart(f"{titles[1]}, {protocol.name} protocol", values),
    ]


def _temperature(cell: Cell) -> float:
    """That of a learned kernel: no recipe has another than goes with its activation."""
    return activation(cell.recipe.head_options.get("coefficients", "relu")).temperature


def _over_labels(experiment: Experiment, store: Store, protocol: Protocol) -> list[AnyChart]:
    """Accuracy over the share of images that are labelled, ours and the paper's: a chart a network."""
    charts: list[AnyChart] = []
    for network in dict.fromkeys(cell.column.split()[-1] for cell in experiment.cells):
        own = [cell for cell in experiment.cells if cell.column.split()[-1] == network]
        series = []
        for column in dict.fromkeys(cell.column for cell in own):
            label = column.removesuffix(f" {network}")
            cells = [cell for cell in own if cell.column == column and cell.recipe.subset is not None]
            percents = [float(cell.recipe.subset.percent) for cell in cells if cell.recipe.subset is not None]
            series += _ours_and_papers(label, percents, cells, experiment, store, protocol)
        title = f"Accuracy over labels, {network}, {protocol.name} protocol"
        charts.append(Chart(title, "labelled images, %", "test accuracy, %", series))
    return charts


def _over_depth(experiment: Experiment, store: Store, protocol: Protocol) -> list[AnyChart]:
    """Accuracy over depth where the rows of a table are depths of ResNets, ours and the paper's: a chart a data set."""
    rows = {cell.row for cell in experiment.cells}
    if len(rows) < 3 or not all(re.fullmatch(r"ResNet-\d+", row) for row in rows):
        return []
    charts: list[AnyChart] = []
    for data in dict.fromkeys(cell.recipe.data for cell in experiment.cells):
        columns: dict[str, list[Cell]] = {}
        for cell in experiment.cells:
            if cell.recipe.data == data:
                columns.setdefault(cell.column, []).append(cell)
        series = []
        for column, cells in columns.items():
            x = [float(cell.row.removeprefix("ResNet-")) for cell in cells]
            series += _ours_and_papers(column.split()[0], x, cells, experiment, store, protocol)
        title = f"Accuracy over depth, {data}, {protocol.name} protocol"
        charts.append(Chart(title, "layers of the ResNet", "test accuracy, %", series))
    return charts


def _ours_and_papers(
    label: str, x: list[float], cells: list[Cell], experiment: Experiment, store: Store, protocol: Protocol
) -> list[Series]:
    """A line of mean accuracies, past what was not run, and, if there are any, a dashed one of the paper's numbers."""
    means = [_mean(cell, store, protocol) for cell in cells]
    ours = [(at, mean) for at, mean in zip(x, means, strict=True) if mean is not None]
    numbers = [paper_number(experiment.name, cell) for cell in cells]
    paper = [number if isinstance(number, float) else None for number in numbers]
    lines = [Series(label, [at for at, _ in ours], [mean for _, mean in ours])]
    return lines + [Series(f"{label} (paper)", x, paper, dashed=True)] * any(paper)


def _dots(experiment: Experiment, store: Store, protocol: Protocol) -> DotChart:
    """The mean accuracy of every cell that was run, for a table of so many rows that a chart each would be too much."""
    means: dict[str, dict[str, float | None]] = {}
    for cell in experiment.cells:
        means.setdefault(cell.row, {})[cell.column] = _mean(cell, store, protocol)
    rows = [row for row, found in means.items() if any(mean is not None for mean in found.values())]
    columns = dict.fromkeys(cell.column for cell in experiment.cells)
    values = {column: [means[row].get(column) for row in rows] for column in columns}
    return DotChart(f"Accuracy, {protocol.name} protocol", "test accuracy, %", rows, values)


def _over_size(first: Runs, store: Store, protocol: Protocol) -> Chart:
    """Accuracy over the number of a head's parameters, a line a kind of head, in the order of the table."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell, run in first:
        mean = _mean(cell, store, protocol)
        if mean is not None:
            kind = cell.row.rstrip("0123456789 ")
            lines.setdefault(kind, []).append((math.log10(run["parameters"]["head"]), mean))
    series = [Series(kind, [x for x, _ in points], [y for _, y in points]) for kind, points in lines.items()]
    title = f"Accuracy over the size of the head, {protocol.name} protocol"
    return Chart(title, "log₁₀ of the head's parameters", "test accuracy, %", series)


def _mean(cell: Cell, store: Store, protocol: Protocol) -> float | None:
    """Of the accuracies of a cell."""
    values = accuracies(cell, store, protocol).values()
    return sum(values) / len(values) if values else None
