"""Does the paper's gain come with time? The same heads after 100, 200 and 450 epochs, the paper's most."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from kernelhead.tables import Table
from kernelhead_lab.tables import beyond, cifar
from kernelhead_lab.tables.beyond import DATA_SETS, HEADS, PAPERS, WHICH
from kernelhead_lab.tables.cifar import Head, resnet
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment, Protocol, papers_gain
from kernelhead_lab.tables.grid import accuracies
from kernelhead_lab.tables.statistics import (
    NOT_RUN,
    differences,
    holm,
    mean_and_deviation,
    p_text,
    paired_difference,
    pooled,
)
from kernelhead_lab.tables.store import Store

LENGTHS = (100, 200, 450)
DEPTHS = (8, 20, 56)
ALL = "ResNet-8, 20, 56"
COMPARED: dict[str, Head] = {**HEADS, "LIN": ("cosine", {})}
PUBLISHED = {**PAPERS, "LIN": "LIN"}

BySeed = dict[int, float]
Found = dict[tuple[str, str], BySeed]
"""Accuracies by row and column."""


def _cells(choosing: int) -> tuple[Cell, ...]:
    return tuple(
        resnet(data, depth, own, choosing=choosing).at(
            f"ResNet-{depth}",
            f"{head} {name}",
            (data, f"ResNet-{depth}", PUBLISHED[head]) if head in PUBLISHED else None,
        )
        for (data, name), depth, (head, own) in product(DATA_SETS.items(), DEPTHS, COMPARED.items())
    )


EPOCHS = Experiment(
    "epochs",
    "The same heads after 100, 200 and 450 epochs",
    _cells(cifar.CHOOSING),
    CIFAR_PROTOCOLS,
    notes=(f"{WHICH} LIN: the cosine head.", cifar.SHARED),
)


def table(stores: Mapping[int, Store], protocol: Protocol) -> Table:
    """Return a row per network and head: accuracy after each length, the difference to SM, and how that changed."""
    found = {length: _found(stores[length], protocol) if length in stores else {} for length in LENGTHS}
    *_, before, last = LENGTHS
    columns = ["", "", "paper, over SM"]
    for length in LENGTHS:
        columns += [f"{length} epochs", "over SM"]
    columns.append(f"{last} over {before}")
    rows = []
    for cell in EPOCHS.cells:
        row = [cell.row, cell.column, _points(papers_gain(EPOCHS, cell))]
        for length in LENGTHS:
            ours, theirs = _beside(cell, found[length])
            row += [mean_and_deviation(list(ours.values())), paired_difference(ours, theirs)]
        gains = [differences(*_beside(cell, found[length])) for length in (last, before)]
        rows.append([*row, paired_difference(*gains)])
    notes = [
        "Test accuracy (%) after the last epoch; of several seeds the mean ± standard deviation. p: sign-flip test, "
        f"paired by seed. {last} over {before}: how much the difference to SM grew.",
        *EPOCHS.notes,
        f"{protocol.name}: rates and decays are those of {protocol.choosing_epochs} epochs. A length without "
        f"such runs shows those of the table {beyond.LANDMARKS.name}, chosen by short runs of "
        f"ResNet-{beyond.CHOOSING}.",
        f"{ALL}: mean over the networks, and one sign-flip test over all their pairs of runs, with Holm's correction "
        "over the rows of the column. With n pairs p is at least 2 / 2^n.",
    ]
    name = EPOCHS.name if protocol.name == "paper" else f"{EPOCHS.name}-{protocol.name}"
    return Table(name, f"{EPOCHS.title}, {protocol.name} protocol", columns, rows + _together(found), notes)


def _found(store: Store, protocol: Protocol) -> Found:
    """Return what a length has. Runs of a data set are all of one table: rates chosen in one way are compared."""
    found: Found = {}
    for data in DATA_SETS:
        for choosing, own in ((cifar.CHOOSING, protocol), (beyond.CHOOSING, beyond.PROTOCOLS[protocol.name])):
            cells = [cell for cell in _cells(choosing) if cell.spec.data == data]
            runs = {(cell.row, cell.column): accuracies(cell, store, own) for cell in cells}
            if any(runs.values()):
                found |= runs
                break
    return found


def _beside(cell: Cell, found: Found) -> tuple[BySeed, BySeed]:
    """Return accuracies of a cell and of its SM cell, which has none itself."""
    baseline = EPOCHS.baseline(cell)
    theirs = {} if baseline is None else found.get((cell.row, baseline[1].column), {})
    return found.get((cell.row, cell.column), {}), theirs


def _together(found: Mapping[int, Found]) -> list[list[str]]:
    """Return a row per data set and head: means over the networks, and the test of all pairs."""
    columns: dict[str, list[Cell]] = {}
    for cell in EPOCHS.cells:
        if EPOCHS.baseline(cell) is not None:
            columns.setdefault(cell.column, []).append(cell)
    gains = {
        length: {column: [differences(*_beside(cell, runs)) for cell in cells] for column, cells in columns.items()}
        for length, runs in found.items()
    }
    *_, before, last = LENGTHS
    grown = {
        column: [
            differences(late, early) for late, early in zip(gains[last][column], gains[before][column], strict=True)
        ]
        for column in columns
    }
    shown = [_tested(each) for each in (*gains.values(), grown)]
    rows = []
    for column, cells in columns.items():
        published = [gain for cell in cells if (gain := papers_gain(EPOCHS, cell)) is not None]
        *over, change = (each[column] for each in shown)
        between = [word for text in over for word in ("", text)]
        rows.append([ALL, column, _points(float(np.mean(published)) if published else None), *between, change])
    return rows


def _tested(by_column: Mapping[str, Sequence[Mapping[int, float]]]) -> dict[str, str]:
    tests = {column: test for column, cells in by_column.items() if (test := pooled(cells)) is not None}
    corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    shown = {
        column: f"{test.mean:+.2f} (n {test.pairs}, p {p_text(corrected[column])})" for column, test in tests.items()
    }
    return {column: shown.get(column, NOT_RUN) for column in by_column}


def _points(gain: float | None) -> str:
    return "" if gain is None else f"{gain:+.2f}"
