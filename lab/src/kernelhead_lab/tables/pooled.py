"""One test per method of a table, over its networks and seeds together."""

import re
from collections.abc import Sequence

from kernelhead.tables import Table
from kernelhead_lab.tables.experiment import Cell, Experiment, Protocol
from kernelhead_lab.tables.grid import OURS, accuracies
from kernelhead_lab.tables.statistics import differences, holm, p_text, pooled
from kernelhead_lab.tables.store import Store

POOLED_WORDS = re.compile(r"ResNet-\d+|\d+ %")  # words of a label that are no method's
NOTE = (
    "Mean difference to SM over the networks and budgets of a method, each alike; pairs: runs of both with the same "
    "seed. p: one sign-flip test over all pairs of a method; with n pairs it is at least 2 / 2^n. Holm: the same, "
    "corrected for the number of methods in the column."
)


def over_baseline(experiment: Experiment, cell: Cell, store: Store, protocol: Protocol) -> dict[int, float]:
    """Return the differences of a cell to its SM cell by seed; none for an SM cell."""
    baseline = experiment.baseline(cell)
    if baseline is None:
        return {}
    return differences(accuracies(cell, store, protocol), accuracies(baseline[1], store, protocol))


def methods_of(experiment: Experiment) -> dict[str, list[Cell]]:
    """Return the cells that are compared with SM by method: their labels without network and budget."""
    found: dict[str, list[Cell]] = {}
    for cell in experiment.cells:
        if experiment.baseline(cell) is not None:
            words = [" ".join(POOLED_WORDS.sub("", label).split()) for label in (cell.row, cell.column)]
            found.setdefault(", ".join(filter(None, words)), []).append(cell)
    return found


def tests(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """Return a row per method: its mean difference to SM and the p of all networks and seeds together."""
    methods = methods_of(experiment)
    rows = {method: [method] for method in methods}
    columns = [""]
    for protocol in protocols:
        columns += [f"over SM, {OURS[protocol.name]}", "pairs", "p", "Holm"]
        found = {
            method: test
            for method, cells in methods.items()
            if (test := pooled(over_baseline(experiment, cell, store, protocol) for cell in cells)) is not None
        }
        corrected = dict(zip(found, holm([test.p for test in found.values()]), strict=True))
        for method, row in rows.items():
            test = found.get(method)
            shown = ["", "", ""] if test is None else [str(test.pairs), p_text(test.p), p_text(corrected[method])]
            row += ["not run" if test is None else f"{test.mean:+.2f}", *shown]
    notes = [f"Test accuracy (%) after the last epoch of {store.epochs}. {NOTE}"]
    return Table(f"{experiment.name}-tests", f"{experiment.title}: tests", columns, list(rows.values()), notes)
