"""How the runs of an experiment become its table: the paper's number and ours for each cell, and both over softmax."""

from collections.abc import Sequence
from typing import Any

from kernelhead.paper.recipe import Cell, Experiment, Protocol, paper_number
from kernelhead.paper.store import Store
from kernelhead.paper.table import NOT_RUN, Table, mean_and_deviation, paired_difference

DIVERGED = "diverged"
OURS = {"paper": "paper's protocol", "tuned": "tuned"}


def table(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """One row a cell: paper, paper over softmax, and for each protocol ours and ours over softmax."""
    columns = ["", "", "paper", "over SM"]
    for protocol in protocols:
        columns += [OURS[protocol.name], "over SM"]
    rows = []
    for cell in experiment.cells:
        row = [cell.row, cell.column, *_paper(experiment, cell)]
        for protocol in protocols:
            row += _ours(experiment, cell, store, protocol)
        rows.append(row)
    return Table(experiment.name, experiment.title, columns, rows, _notes(experiment, store, protocols))


def started(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> bool:
    """Whether any cell has a run."""
    return any(store.results(cell.recipe, protocol) for cell in experiment.cells for protocol in protocols)


def accuracies(cell: Cell, store: Store, protocol: Protocol) -> dict[int, float]:
    """Test accuracy by seed, of the runs that did not diverge."""
    results = store.results(cell.recipe, protocol)
    return {seed: result["accuracy"] for seed, result in results.items() if result["accuracy"] is not None}


def _paper(experiment: Experiment, cell: Cell) -> list[str]:
    number = paper_number(experiment.name, cell)
    if not isinstance(number, float):
        return ["" if number is None else number, ""]
    baseline = experiment.baseline(cell)
    if baseline is None:
        return [f"{number:.2f}", ""]
    theirs = paper_number(*baseline)
    return [f"{number:.2f}", f"{number - theirs:+.2f}" if isinstance(theirs, float) else ""]


def _ours(experiment: Experiment, cell: Cell, store: Store, protocol: Protocol) -> list[str]:
    results = store.results(cell.recipe, protocol)
    found = accuracies(cell, store, protocol)
    lost = len(results) - len(found)
    if not results:
        return [NOT_RUN, ""]
    text = mean_and_deviation(list(found.values())) if found else DIVERGED
    if len(found) > 1:
        text += f" ({len(found)})"
    if found and lost:
        text += f", {lost} {DIVERGED}"
    baseline = experiment.baseline(cell)
    over = "" if baseline is None else paired_difference(found, accuracies(baseline[1], store, protocol))
    return [text, over]


def _notes(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> list[str]:
    notes = [
        f"Ours: test accuracy (%) of the last epoch of {store.epochs}; of several seeds the mean ± standard deviation "
        "and (how many). p: sign-flip test of the differences, paired by seed.",
        *experiment.notes,
    ]
    if experiment.reference is not None:
        name, cell = experiment.reference
        notes.append(f"Over SM: {cell.row} with softmax, a run of the table {name}.")
    for protocol in protocols:
        rates = ", ".join(f"{rate:g}" for rate in protocol.learning_rates)
        decays = ", ".join(f"{decay:g}" for decay in protocol.weight_decays)
        notes.append(
            f"{protocol.name}: learning rate from {rates}, weight decay from {decays}, chosen on a tenth of the "
            f"training images by one training each (seed 0), then trained on all; batch {protocol.batch_size}."
        )
    hardware = {_hardware(result) for result in _all(experiment, store, protocols)}
    if hardware:
        notes.append(f"Run on {', '.join(sorted(hardware))}.")
    left_out = {
        result["experiment"]: result["images"]["left_out"]
        for result in _all(experiment, store, protocols)
        if result["images"]["left_out"]
    }
    notes += [f"{count} pictures of {name} were missing or could not be read." for name, count in left_out.items()]
    return notes


def _all(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> list[dict[str, Any]]:
    return [
        result
        for cell in experiment.cells
        for protocol in protocols
        for result in store.results(cell.recipe, protocol).values()
    ]


def _hardware(result: dict[str, Any]) -> str:
    return str(result["hardware"]["gpu"] or f"{result['hardware']['threads']} CPU threads")
