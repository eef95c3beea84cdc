"""How the runs of an experiment become tables.

`table`: the paper's number and ours for each cell, and both over SM. `overview`: the same in the paper's arrangement.
`details`: what else there is to know of a cell's runs. `choices`: what rates and decays were chosen from.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kernelhead.files import hardware_name
from kernelhead.finetune.spec import TrainResult
from kernelhead.tables import Table
from kernelhead_lab.tables.experiment import Cell, Experiment, Protocol, paper_number, paper_numbers, papers_gain
from kernelhead_lab.tables.statistics import NOT_RUN, mean_and_deviation, paired_difference
from kernelhead_lab.tables.store import Store, hardware_of, weights_of

DIVERGED = "diverged"
IMAGE_SIZE = 224  # at which networks are fine-tuned and tested
SHOWN = (("accuracy", 2), ("nll", 3))  # figures by the size of test images, and their digits
OURS = {"paper": "paper's protocol", "tuned": "tuned"}
DETAILS = [
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
    "seconds per run",
]
BATCH_OF_SEVERAL = "several were trained at once, of one kind or mixed; the time of all is divided by their number."
P_VALUE = (
    "Differences are those of the seeds that both have; p: sign-flip test, paired by seed; of n seeds it cannot be "
    "below 2 / 2^n."
)


def table(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """Return one row per cell: paper, paper over SM, and for each protocol ours and ours over SM.

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
    notes = [*_notes(experiment, store, protocols), *_references(experiment), P_VALUE]
    return Table(experiment.name, experiment.title, columns, rows, notes)


def overview(experiment: Experiment, store: Store, protocol: Protocol) -> Table:
    """Return one row per row of the paper: ours, and in square brackets the paper's where it has one."""
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
    """Return one row for the runs of a cell, of one protocol or shared: means over seeds, what was chosen, its cost."""
    rows = []
    for cell in experiment.cells:
        sharing: dict[Path | None, list[Protocol]] = {}
        for protocol in protocols:
            sharing.setdefault(store.result_path(cell, protocol, 0), []).append(protocol)
        for users in sharing.values():
            results = [result for result in store.results(cell, users[0]).values() if result.accuracy is not None]
            choice = store.choice(cell, users[0])
            if not results or choice is None:
                continue
            figures = [
                _mean([result.accuracy for result in results], 2),
                _mean([result.nll for result in results], 3),
                _mean([result.ece for result in results], 2),
            ]
            of_head = f", head {choice.learning_rate * choice.head_rate:g}" if choice.head_rate != 1 else ""
            chosen = [f"{choice.learning_rate:g}{of_head}", f"{choice.weight_decay:g}"]
            cost = [f"{results[0].parameters['head']:,}", f"{np.mean([result.seconds for result in results]):.0f}"]
            users_named = ", ".join(user.name for user in users)
            rows.append([cell.row, cell.column, users_named, str(len(results)), *figures, *chosen, *cost])
    notes = [
        f"Last epoch of {store.epochs}, means over n seeds. Learning rate and weight decay are those with the best "
        f"accuracy on held-out training images. Seconds per run: {BATCH_OF_SEVERAL}",
        *_dead(experiment, store, protocols),
    ]
    return Table(f"{experiment.name}-details", f"{experiment.title}: details", DETAILS, rows, notes)


def sizes(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table | None:
    """Return accuracy and NLL by the size of test images, where networks were tested at several; else None.

    The size that a user would take is the one of the best accuracy on held-out images, of the run whose learning rate
    and weight decay were chosen.
    """
    rows = []
    shown: dict[str, None] = {str(IMAGE_SIZE): None}
    for cell in experiment.cells:
        for protocol in protocols:
            results = [_by_size(result) for result in store.results(cell, protocol).values() if "crops" in result.extra]
            choice = store.choice(cell, protocol)
            chosen = choice and store.read(store.choice_path(cell.chooser, protocol, choice))
            if not results or chosen is None:
                continue
            shown |= dict.fromkeys(results[0])
            means = {
                size: [_mean([result[size][name] for result in results], digits) for name, digits in SHOWN]
                for size in results[0]
            }
            held_out = {size: figures["accuracy"] or -1.0 for size, figures in _by_size(chosen).items()}
            best = max(held_out, key=lambda size: held_out[size])
            by_size = {size: " / ".join(figures) for size, figures in means.items()}
            rows.append(([cell.row, cell.column, str(len(results))], by_size, [best, means[best][0]]))
    if not rows:
        return None
    notes = [
        f"Accuracy (%) / NLL after the last epoch of {store.epochs}, means over n seeds, by the side of test images in "
        f"pixels. {IMAGE_SIZE}: the centre of an image, as usual; other sizes show the whole square.",
        "Own statistics: what the head standardises by is estimated from training images of that size.",
        "Chosen: the size of the best accuracy on held-out images, and the test accuracy there.",
    ]
    columns = ["", "", "n", *shown, "chosen", "accuracy there"]
    cells = [[*names, *(by_size.get(size, "") for size in shown), *last] for names, by_size, last in rows]
    return Table(f"{experiment.name}-sizes", f"{experiment.title}: sizes of test images", columns, cells, notes)


def _by_size(result: TrainResult) -> dict[str, dict[str, float | None]]:
    usual = {"accuracy": result.accuracy, "nll": result.nll}
    return {f"{IMAGE_SIZE}": usual, **result.extra.get("crops", {})}


def choices(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> Table:
    """Return held-out accuracy by learning rate and weight decay, of every network that these were tried with."""
    candidates = list(dict.fromkeys(each for protocol in protocols for each in protocol.candidates()))
    tried: dict[Path, tuple[Cell, list[Protocol]]] = {}
    for cell in experiment.cells:
        chooser = cell.chooser
        for protocol in protocols:
            _, users = tried.setdefault(store.folder(chooser.spec, protocol), (chooser, []))
            users += [protocol] if protocol not in users else []
    rows = []
    several = len({cell.spec.data for cell in experiment.cells}) > 1
    for folder, (cell, users) in tried.items():
        found = [store.read(store.choice_path(cell, users[0], candidate)) for candidate in candidates]
        if any(found):
            name = f"{cell.spec.data}, {folder.name}" if several else folder.name
            chosen = {user.name: best for user in users if (best := store.choice(cell, user)) is not None}
            told = [f"{user}: {best}" if len(protocols) > 1 else str(best) for user, best in chosen.items()]
            rows.append([name, *map(_held_out, found), "; ".join(told)])
    epochs = protocols[0].epochs_to_choose(store.epochs)
    notes = [
        f"Accuracy (%) on a tenth of the training images, held out, after the last epoch of {epochs}, one run each "
        "(seed 0), by learning rate and weight decay. The best is chosen, once all are there."
    ]
    columns = ["", *map(str, candidates), "chosen"]
    return Table(f"{experiment.name}-choices", f"{experiment.title}: choices", columns, rows, notes)


def _held_out(result: TrainResult | None) -> str:
    if result is None:
        return ""
    return DIVERGED if result.accuracy is None else f"{result.accuracy:.2f}"


def _mean(values: Sequence[float | None], digits: int) -> str:
    """Return a mean; empty where a run has no value."""
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.{digits}f}" if len(known) == len(values) else ""


def _dead(experiment: Experiment, store: Store, protocols: Sequence[Protocol]) -> list[str]:
    """Say which coefficients of relu ended at zero, where they stay, and in which cells a whole kernel did."""
    dead: dict[int, int] = {}
    runs, vanished, seen = 0, [], set()
    for cell in experiment.cells:
        options = cell.spec.head_options
        if options.get("coefficients") != "relu":
            continue
        for protocol in protocols:
            for seed, result in store.results(cell, protocol).items():
                path = store.result_path(cell, protocol, seed)
                if path in seen:  # protocols share runs
                    continue
                seen.add(path)
                powers = (result.alpha or [])[3:]
                if powers and not any(powers):
                    vanished.append(f"{cell.row}, {cell.column}, {protocol.name}, seed {seed}")
                if result.accuracy is not None and options["kernel"] == "learned":
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
    """Return the files of the finished runs of a table."""
    return {
        store.result_path(cell, protocol, seed)
        for cell in experiment.cells
        for protocol in protocols
        for seed in store.results(cell, protocol)
    }


def whole(name: str, files: dict[str, set[Path | None]]) -> str | None:
    """Return the first table that has all of this one's runs, and comes before it or has more; None without one.

    A table of the paper gives way to none behind it. One that gives way itself is not named, but what it gives way to.
    """
    place = list(files).index(name)
    before, behind = list(files)[:place], list(files)[place + 1 :]
    found = [table for table in before if files[name] <= files[table]]
    if name not in paper_numbers():
        found += [table for table in behind if files[name] < files[table]]
    return whole(found[0], files) or found[0] if found else None


def accuracies(cell: Cell, store: Store, protocol: Protocol) -> dict[int, float]:
    """Return test accuracy by seed, of the runs that did not diverge."""
    results = store.results(cell, protocol)
    return {seed: result.accuracy for seed, result in results.items() if result.accuracy is not None}


def _paper(experiment: Experiment, cell: Cell) -> list[str]:
    number, gain = paper_number(experiment.name, cell), papers_gain(experiment, cell)
    if not isinstance(number, float):
        return ["" if number is None else number, ""]
    return [f"{number:.2f}", "" if gain is None else f"{gain:+.2f}"]


def _ours(experiment: Experiment, cell: Cell, store: Store, protocol: Protocol) -> list[str]:
    results = store.results(cell, protocol)
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
            f"the training images by one run each (seed 0{_shorter(protocol, store)}), then trained on all; batch "
            f"{protocol.batch_size}."
        )
    results = [
        result
        for cell in experiment.cells
        for protocol in protocols
        for result in store.results(cell, protocol).values()
    ]
    files = [file for result in results if (file := weights_of(result)) is not None]
    if files:
        named = sorted({f"{file['file']} (sha256 {file['sha256'][:12]})" for file in files})
        notes.append(f"Networks began with the weights of {', '.join(named)}.")
    hardware = {hardware_name(hardware_of(result)) for result in results}
    if hardware:
        notes.append(f"Run on {', '.join(sorted(hardware))}.")
    left_out = {result.spec.data: result.images["left_out"] for result in results if result.images["left_out"]}
    notes += [f"{count} images of {name} were missing or could not be read." for name, count in left_out.items()]
    return notes + _selections(results)


def _selections(results: Sequence[TrainResult]) -> list[str]:
    """Say how long k-center took to choose what to label, by the networks that chose; margin is a sort."""
    found: dict[tuple[str, int], set[float]] = {}
    for result in results:
        selection = result.extra.get("selection", {})
        if selection.get("strategy") == "k-center" and "seconds" in selection:
            network = result.spec.backbone.partition("_resnet")[2], selection["images"]
            found.setdefault(network, set()).add(selection["seconds"])
    return [
        f"k-center put {images:,} images in order by the features of resnet{depth} in {np.mean(list(seconds)):.1f} s, "
        "once for all budgets."
        for (depth, images), seconds in found.items()
    ]


def _references(experiment: Experiment) -> list[str]:
    """Say which SM cells are meant, where they are not beside the others."""
    if not experiment.references:
        return []
    name = next(iter(experiment.references.values()))[0]
    rows = " or ".join(dict.fromkeys(cell.row for _, cell in experiment.references.values()))
    return [f"Over SM: {rows}{' with the linear head' * (rows != 'linear')}, runs of the table {name}."]


def _shorter(protocol: Protocol, store: Store) -> str:
    epochs = protocol.epochs_to_choose(store.epochs)
    return "" if epochs == store.epochs else f", {epochs} epochs"
