"""How the runs of an experiment become tables.

`table`: the paper's number and ours for each cell, and both over softmax. `overview`: the same in the paper's own
arrangement. `details`: what else there is to know of a cell's runs. `choices`: what rates and decays were chosen from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelhead.paper.recipe import Cell, Experiment, Protocol, Recipe, paper_number, paper_numbers
from kernelhead.paper.store import Store, weights_of
from kernelhead.paper.table import NOT_RUN, Table, mean_and_deviation, paired_difference
from kernelhead.results import hardware_name

DIVERGED = "diverged"
OURS = {"paper": "paper's protocol", "tuned": "tuned"}


def table(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """One row a cell: paper, paper over softmax, and for each protocol ours and ours over softmax.

    A table that the paper has nothing of goes without its columns.
    """
    papers = any(paper_number(experiment.name, cell) is not None for cell in experiment.cells)
    columns = ["", "", "paper", "over SM"] if papers else ["", ""]
    for protocol in protocols:
        columns += [OURS[protocol.name], "over SM"]
    rows = []
    for cell in experiment.cells:
        row = [cell.row, cell.column, *(_paper(experiment, cell) if papers else [])]
        for protocol in protocols:
            row += _ours(experiment, cell, store, protocol)
        rows.append(row)
    p_value = (
        "Differences are those of the seeds that both have; p: sign-flip test, paired by seed; of n seeds it cannot be "
        "below 2 / 2^n."
    )
    notes = [*_notes(experiment, store, protocols), *_over_softmax(experiment), p_value]
    return Table(experiment.name, experiment.title, columns, rows, notes)


def overview(experiment: Experiment, store: Store, protocol: Protocol) -> Table:
    """A row of the paper's a row: ours, and in square brackets the paper's where it has one."""
    columns = list(dict.fromkeys(cell.column for cell in experiment.cells))
    cells = {(cell.row, cell.column): cell for cell in experiment.cells}
    rows = []
    for row in dict.fromkeys(cell.row for cell in experiment.cells):
        shown = [row]
        for column in columns:
            cell = cells.get((row, column))
            shown.append("" if cell is None else _ours_and_papers(experiment, cell, store, protocol))
        rows.append(shown)
    return Table(experiment.name, experiment.title, ["", *columns], rows, _notes(experiment, store, [protocol]))


def _ours_and_papers(experiment: Experiment, cell: Cell, store: Store, protocol: Protocol) -> str:
    ours, (paper, _) = _ours(experiment, cell, store, protocol)[0], _paper(experiment, cell)
    return f"{ours} [{paper}]" if paper else ours


def details(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """One row for the runs of a cell, of one protocol or shared: means over seeds, what was chosen, what it costs."""
    columns = [
        "",
        "",
        "protocol",
        "n",
        "accuracy",
        "NLL",
        "ECE, %",
        "rate",
        "decay",
        "head's parameters",
        "seconds a run",
    ]
    rows = []
    for cell in experiment.cells:
        sharing: dict[Path | None, list[Protocol]] = {}
        for protocol in protocols:
            sharing.setdefault(store.result_path(cell.recipe, protocol, 0), []).append(protocol)
        for users in sharing.values():
            results = [result for result in store.results(cell.recipe, users[0]).values() if _finished(result)]
            choice = store.choice(cell.recipe, users[0])
            if not results or choice is None:
                continue
            row = [cell.row, cell.column, ", ".join(user.name for user in users), str(len(results))]
            row += [_mean(results, name, digits) for name, digits in (("accuracy", 2), ("nll", 3), ("ece", 2))]
            of_head = f", head {choice.learning_rate * choice.head_rate:g}" if choice.head_rate != 1 else ""
            row += [f"{choice.learning_rate:g}{of_head}", f"{choice.weight_decay:g}"]
            seconds = np.mean([result["seconds"] for result in results])
            rows.append([*row, f"{results[0]['parameters']['head']:,}", f"{seconds:.0f}"])
    notes = [
        f"Last epoch of {store.epochs}, means over n seeds. Learning rate and weight decay are those with the best "
        "accuracy on held-out training images. Seconds a run: several were trained at once, of one kind or mixed; the "
        "time of all is divided by their number.",
        *_dead(experiment, store, protocols),
    ]
    return Table(f"{experiment.name}-details", f"{experiment.title}: details", columns, rows, notes)


def choices(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """Held-out accuracy by learning rate and weight decay, of every network that these were tried with."""
    candidates = list(dict.fromkeys(each for protocol in protocols for each in protocol.candidates()))
    tried: dict[Path, tuple[Recipe, list[Protocol]]] = {}
    for cell in experiment.cells:
        chooser = cell.recipe.chooser
        for protocol in protocols:
            _, users = tried.setdefault(store.folder(chooser, protocol), (chooser, []))
            users += [protocol] if protocol not in users else []
    rows = []
    several = len({cell.recipe.data for cell in experiment.cells}) > 1
    for folder, (recipe, users) in tried.items():
        found = [store.read(store.choice_path(recipe, users[0], candidate)) for candidate in candidates]
        if any(found):
            name = f"{recipe.data}, {folder.name}" if several else folder.name
            chosen = {user.name: best for user in users if (best := store.choice(recipe, user)) is not None}
            told = [f"{user}: {best}" if len(protocols) > 1 else str(best) for user, best in chosen.items()]
            rows.append([name, *map(_held_out, found), "; ".join(told)])
    epochs = protocols[0].epochs_to_choose(store.epochs)
    notes = [
        f"Accuracy (%) on a tenth of the training images, held out, after the last epoch of {epochs}, one "
        "training each (seed 0), by learning rate and weight decay. The best is chosen, once all are there."
    ]
    columns = ["", *map(str, candidates), "chosen"]
    return Table(f"{experiment.name}-choices", f"{experiment.title}: choices", columns, rows, notes)


def _held_out(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    return f"{result['accuracy']:.2f}" if _finished(result) else DIVERGED


def _finished(result: dict[str, Any]) -> bool:
    return result["accuracy"] is not None


def _mean(results: Sequence[dict[str, Any]], name: str, digits: int) -> str:
    """Empty where a run has none, as with logits that are not finite."""
    values = [result[name] for result in results]
    return "" if None in values else f"{np.mean(values):.{digits}f}"


def _dead(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> list[str]:
    """Which coefficients of relu ended at zero, where they stay, and in which cells a whole kernel did."""
    dead: dict[int, int] = {}
    runs, vanished, seen = 0, [], set()
    for cell in experiment.cells:
        options = cell.recipe.head_options
        if cell.recipe.head != "kernel" or options.get("coefficients", "relu") != "relu":
            continue
        for protocol in protocols:
            for seed, result in store.results(cell.recipe, protocol).items():
                path = store.result_path(cell.recipe, protocol, seed)
                if path in seen:  # protocols share runs
                    continue
                seen.add(path)
                powers = result.get("alpha", [])[3:]
                if powers and not any(powers):
                    vanished.append(f"{cell.row}, {cell.column}, {protocol.name}, seed {seed}")
                if _finished(result) and "kernel" not in options:
                    runs += 1
                    for order, a in enumerate(powers, start=1):
                        dead[order] = dead.get(order, 0) + (a == 0)
    notes = []
    if runs:
        counts = ", ".join(f"a_{order} in {count}" for order, count in sorted(dead.items()) if count)
        of = f"{runs} run{'s' * (runs != 1)}"
        notes.append(f"Coefficients of relu that ended at zero, where they stay, of {of}: {counts or 'none'}.")
    if vanished:
        notes.append(f"The whole kernel ended at zero: {'; '.join(vanished)}.")
    return notes


def files_of(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> set[Path | None]:
    """The files of the finished runs of a table."""
    return {
        store.result_path(cell.recipe, protocol, seed)
        for cell in experiment.cells
        for protocol in protocols
        for seed in store.results(cell.recipe, protocol)
    }


def whole(name: str, files: dict[str, set[Path | None]]) -> str | None:
    """The first table that has all of this one's runs, and comes before it or has more; None if there is none.

    A table of the paper gives way to none behind it. One that gives way itself is not named, but what it gives way to.
    """
    place = list(files).index(name)
    before, behind = list(files)[:place], list(files)[place + 1 :]
    found = [table for table in before if files[name] <= files[table]]
    if name not in paper_numbers():
        found += [table for table in behind if files[name] < files[table]]
    return whole(found[0], files) or found[0] if found else None


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
        f"Test accuracy (%) after the last epoch of {store.epochs}; of several seeds the mean ± standard deviation and "
        "(how many).",
        *experiment.notes,
    ]
    for protocol in protocols:
        rates = ", ".join(f"{rate:g}" for rate in protocol.learning_rates)
        decays = ", ".join(f"{decay:g}" for decay in protocol.weight_decays)
        multiples = ", ".join(f"{multiple:g}" for multiple in protocol.head_rates)
        of_head = f"that of the head from {multiples} times it, " if protocol.head_rates != (1.0,) else ""
        notes.append(
            f"{protocol.name}: learning rate from {rates}, {of_head}weight decay from {decays}, chosen on a tenth of "
            f"the training images by one training each (seed 0{_shorter(protocol, store)}), then trained on all; batch "
            f"{protocol.batch_size}."
        )
    results = _all(experiment, store, protocols)
    files = [file for result in results if (file := weights_of(result)) is not None]
    if files:
        named = sorted({f"{file['file']} (sha256 {file['sha256'][:12]})" for file in files})
        notes.append(f"Networks began with the weights of {', '.join(named)}.")
    hardware = {hardware_name(result["hardware"]) for result in results}
    if hardware:
        notes.append(f"Run on {', '.join(sorted(hardware))}.")
    left_out = {
        result["experiment"]: result["images"]["left_out"] for result in results if result["images"]["left_out"]
    }
    notes += [f"{count} pictures of {name} were missing or could not be read." for name, count in left_out.items()]
    return notes + _selections(results)


def _selections(results: Sequence[dict[str, Any]]) -> list[str]:
    """How long k-center took to choose what to label, which is slow, by the networks that chose; margin is a sort."""
    found: dict[tuple[str, int], set[float]] = {}
    for result in results:
        selection = result.get("selection", {})
        if selection.get("strategy") == "k-center" and "seconds" in selection:
            network = result["config"]["backbone"].removeprefix("cifar_"), selection["images"]
            found.setdefault(network, set()).add(selection["seconds"])
    return [
        f"k-center put {images:,} images in order by the features of {backbone} in {np.mean(list(seconds)):.1f} s, "
        "once for all budgets."
        for (backbone, images), seconds in found.items()
    ]


def _over_softmax(experiment: Experiment) -> list[str]:
    """Which softmax cells are meant, where they are not beside the others."""
    if not experiment.references:
        return []
    name = next(iter(experiment.references.values()))[0]
    rows = " or ".join(dict.fromkeys(cell.row for _, cell in experiment.references.values()))
    return [f"Over SM: {rows}{' with softmax' * (rows != 'softmax')}, runs of the table {name}."]


def _shorter(protocol: Protocol, store: Store) -> str:
    epochs = protocol.epochs_to_choose(store.epochs)
    return "" if epochs == store.epochs else f", {epochs} epochs"


def _all(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> list[dict[str, Any]]:
    return [
        result
        for cell in experiment.cells
        for protocol in protocols
        for result in store.results(cell.recipe, protocol).values()
    ]
