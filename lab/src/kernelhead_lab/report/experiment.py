"""The table of an experiment on images, with its charts.

Charts show training curves and learned kernels. A table about labels, depth or the size of a head has its accuracy over
that, and a table of many rows has its accuracy alone.
"""

import re
from collections.abc import Sequence

import plotly.graph_objects as go

from kernelhead.finetune.spec import TrainResult
from kernelhead.kernels import activation
from kernelhead_lab.report.charts import (
    PAPER,
    Values,
    coefficients_chart,
    curves_chart,
    dot_chart,
    kernel_chart,
    line_chart,
)
from kernelhead_lab.report.page import Section
from kernelhead_lab.tables.beyond import SATURATION
from kernelhead_lab.tables.experiment import Cell, Experiment, Protocol, paper_number
from kernelhead_lab.tables.grid import accuracies, table
from kernelhead_lab.tables.store import Store

KERNELS_SHOWN = 8
MOST_ROWS = 16  # that have a chart of curves each
ACCURACY = "test accuracy, %"

Runs = list[tuple[Cell, TrainResult]]
Lines = dict[str, tuple[Sequence[float], Values]]


def section(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Section:
    """Return what the page shows of an experiment.

    Charts are those of the first seed, under the protocol with the most cells first: another may have only what it
    shares with other tables.
    """
    charts: list[go.Figure] = []
    of_protocol = [
        ([(cell, run) for cell in experiment.cells if (run := _first(cell, store, protocol)) is not None], protocol)
        for protocol in protocols
    ]
    for first, protocol in sorted(of_protocol, key=lambda pair: -len(pair[0])):
        if not first:
            continue
        if any(cell.spec.subset for cell, _ in first):
            charts += _over_labels(experiment, store, protocol)
        elif experiment is SATURATION:
            charts.append(_over_size(first, store, protocol))
        elif len({cell.row for cell in experiment.cells}) > MOST_ROWS:
            charts.append(_dots(experiment, store, protocol))
        else:
            charts += [*_over_depth(experiment, store, protocol), *_curves(experiment, first, protocol)]
        charts += _kernels(first, protocol)
    return Section(table(experiment, store, protocols), charts)


def _first(cell: Cell, store: Store, protocol: Protocol) -> TrainResult | None:
    results = store.results(cell, protocol)
    return results[min(results)] if results else None


def _curves(experiment: Experiment, first: Runs, protocol: Protocol) -> list[go.Figure]:
    """Return training loss over epochs, a chart for each row of the table; runs of one column have one chart."""
    by_row: dict[str, dict[str, Values]] = {}
    several = len({cell.column for cell, _ in first}) > 1
    order = list(dict.fromkeys(cell.column for cell in experiment.cells)) if several else []
    for cell, result in first:
        row, label = (cell.row, cell.column) if several else ("", cell.row)
        by_row.setdefault(row, {})[label] = result.curve["loss"]
    return [
        curves_chart(f"{row + ', t' if row else 'T'}raining loss, {protocol.name} protocol", curves, "loss", order)
        for row, curves in by_row.items()
    ]


def _kernels(first: Runs, protocol: Protocol) -> list[go.Figure]:
    """Return shapes of learned kernels, of fixed ones too where there is room, and coefficients of the learned ones."""
    found = [(cell, run.alpha) for cell, run in first if run.alpha is not None and "kernel" in cell.spec.head_options]
    learned = [(cell, alpha) for cell, alpha in found if cell.spec.head_options["kernel"] == "learned"]
    fixed = [(cell, alpha) for cell, alpha in found if cell.spec.head_options["kernel"] != "learned"]
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
    """Return the temperature of a learned kernel: no cell has another than goes with its activation."""
    return activation(cell.spec.head_options["coefficients"]).temperature


def _over_labels(experiment: Experiment, store: Store, protocol: Protocol) -> list[go.Figure]:
    """Return accuracy over the share of images that are labelled, ours and the paper's: a chart per network."""
    charts: list[go.Figure] = []
    for network in dict.fromkeys(cell.column.split()[-1] for cell in experiment.cells):
        own = [cell for cell in experiment.cells if cell.column.split()[-1] == network]
        lines: Lines = {}
        for column in dict.fromkeys(cell.column for cell in own):
            cells = [cell for cell in own if cell.column == column and cell.spec.subset is not None]
            percents = [float(cell.spec.subset.percent) for cell in cells if cell.spec.subset is not None]
            label = column.removesuffix(f" {network}")
            lines |= _ours_and_papers(label, percents, cells, experiment, store, protocol)
        title = f"Accuracy over labels, {network}, {protocol.name} protocol"
        charts.append(line_chart(title, "labelled images, %", ACCURACY, lines))
    return charts


def _over_depth(experiment: Experiment, store: Store, protocol: Protocol) -> list[go.Figure]:
    """Return accuracy over depth where the rows of a table are depths of ResNets: a chart per data set."""
    rows = {cell.row for cell in experiment.cells}
    if len(rows) < 3 or not all(re.fullmatch(r"ResNet-\d+", row) for row in rows):
        return []
    charts: list[go.Figure] = []
    for data in dict.fromkeys(cell.spec.data for cell in experiment.cells):
        columns: dict[str, list[Cell]] = {}
        for cell in experiment.cells:
            if cell.spec.data == data:
                columns.setdefault(cell.column, []).append(cell)
        lines: Lines = {}
        for column, cells in columns.items():
            x = [float(cell.row.removeprefix("ResNet-")) for cell in cells]
            lines |= _ours_and_papers(column.split()[0], x, cells, experiment, store, protocol)
        title = f"Accuracy over depth, {data}, {protocol.name} protocol"
        charts.append(line_chart(title, "layers of the ResNet", ACCURACY, lines))
    return charts


def _ours_and_papers(
    label: str, x: list[float], cells: list[Cell], experiment: Experiment, store: Store, protocol: Protocol
) -> Lines:
    """Return a line of mean accuracies, past what was not run, and one of the paper's numbers if there are any."""
    means = [_mean(cell, store, protocol) for cell in cells]
    ours = [(at, mean) for at, mean in zip(x, means, strict=True) if mean is not None]
    numbers = [paper_number(experiment.name, cell) for cell in cells]
    paper = [number if isinstance(number, float) else None for number in numbers]
    lines: Lines = {label: ([at for at, _ in ours], [mean for _, mean in ours])}
    return {**lines, f"{label}{PAPER}": (x, paper)} if any(paper) else lines


def _dots(experiment: Experiment, store: Store, protocol: Protocol) -> go.Figure:
    """Return the mean accuracy of every cell that was run, for a table of too many rows for a chart each."""
    means: dict[str, dict[str, float | None]] = {}
    for cell in experiment.cells:
        means.setdefault(cell.row, {})[cell.column] = _mean(cell, store, protocol)
    rows = [row for row, found in means.items() if any(mean is not None for mean in found.values())]
    columns = dict.fromkeys(cell.column for cell in experiment.cells)
    values = {column: [means[row].get(column) for row in rows] for column in columns}
    return dot_chart(f"Accuracy, {protocol.name} protocol", ACCURACY, rows, values)


def _over_size(first: Runs, store: Store, protocol: Protocol) -> go.Figure:
    """Return accuracy over the number of a head's parameters, a line per kind of head, in the order of the table."""
    points: dict[str, list[tuple[float, float]]] = {}
    for cell, run in first:
        mean = _mean(cell, store, protocol)
        if mean is not None:
            kind = cell.row.rstrip("0123456789 ")
            points.setdefault(kind, []).append((run.parameters["head"], mean))
    lines: Lines = {kind: ([x for x, _ in found], [y for _, y in found]) for kind, found in points.items()}
    title = f"Accuracy over the size of the head, {protocol.name} protocol"
    return line_chart(title, "the head's parameters", ACCURACY, lines, log_x=True)


def _mean(cell: Cell, store: Store, protocol: Protocol) -> float | None:
    values = accuracies(cell, store, protocol).values()
    return sum(values) / len(values) if values else None
