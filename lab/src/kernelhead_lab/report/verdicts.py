"""The first table of a report: twelve claims of the paper, and what holds of each.

A verdict is a function of the result files alone. The paper's protocol decides; the tuned one stands beside it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernelhead.finetune.spec import TrainResult
from kernelhead.tables import Table
from kernelhead_lab.tables import synthetic
from kernelhead_lab.tables.ablations import ACTIVATIONS, KERNELS, RECTIFICATION
from kernelhead_lab.tables.cifar import CIFAR10, CIFAR100
from kernelhead_lab.tables.distillation import DISTILLATION
from kernelhead_lab.tables.experiment import Cell, Experiment, Protocol, paper_number, paper_numbers
from kernelhead_lab.tables.grid import accuracies
from kernelhead_lab.tables.labelling import ACTIVE
from kernelhead_lab.tables.statistics import NOT_RUN, Pooled, differences, holm, p_text, pooled
from kernelhead_lab.tables.store import Store
from kernelhead_lab.tables.transfer import TRANSFER

NAME, TITLE = "claims", "What the paper claims, and what holds"
WEIGHTS = "resnet50-v1.safetensors"
LEVEL = 0.05
ENOUGH = 2 / 3  # of the paper's figure; less is another result
HOLDS, SMALLER, ABSENT, DIFFERS, OPEN = "holds", "smaller", "absent", "differs", "open"
COLUMNS = ["", "paper", "ours", "n", "p", "verdict", "tuned", "epochs", "other epochs", "missing", "command"]

Place = tuple[str, str, str]
"""Table, row and column of a cell."""
Evidence = dict[Place, dict[int, float]]
"""Differences of a cell by seed; a cell that was not run has none."""
Spheres = Mapping[int, Sequence[TrainResult]]
Stores = Mapping[int, Store]
Results = tuple[Spheres, Stores]

NOTES = [
    "Paper, ours: by how many points of test accuracy the paper's layer is ahead, after the last epoch. Each is a mean "
    "over the cells of the paper's table, each cell alike; the last three have ResNet-20 beside the paper's ResNet-56.",
    "n: pairs of runs, with the same cell and seed; for 1, draws of the data. p: one sign-flip test over all pairs; "
    "with n pairs it is at least 2 / 2^n. Claims 2 to 6 rest on the same runs: their p has Holm's correction.",
    f"The verdict is a function of these figures, by the paper's protocol. holds: p < {LEVEL:g}, and at least two "
    f"thirds of the paper's figure. smaller: p < {LEVEL:g}, above zero, below two thirds. differs: p < {LEVEL:g}, "
    "below zero. absent: p is larger, and ours is below two thirds of the paper's figure by a test with "
    f"p < {LEVEL:g}. open: a cell was not run, or no test decides.",
    "12: n counts all runs, those that chose the rate too; diverged: a loss that is not finite. p: that so few "
    f"diverge, were it half of all. absent: none, and p < {LEVEL:g}. smaller: some. holds: half or more. open: no test "
    "decides.",
    "Epochs: the length with the most cells, of equals the longest. Tuned, other epochs: the same mean, its p alone.",
    f"Commands start from a clean clone; all but the first need a GPU. {WEIGHTS}: IMAGENET1K_V1 of torchvision.",
]


@dataclass(frozen=True)
class Claim:
    """A claim that something is above something else, in the words of the page.

    Claims of one `family` rest on the same runs of the paper's layer: Holm's correction is over them.
    """

    words: str
    family: str
    command: str
    papers: float
    """The paper's figure, in points of accuracy."""
    evidence: Callable[[Results, str], dict[int, Evidence]]
    """The measured differences under a protocol, by epochs."""


class Contrast(NamedTuple):
    """A cell of ours, and those whose mean it is compared with."""

    experiment: Experiment
    ours: Cell
    theirs: list[Cell]

    def papers(self) -> float | None:
        """Return the paper's difference; None for a network that the paper has not."""
        ours, *theirs = (paper_number(self.experiment.name, cell) for cell in (self.ours, *self.theirs))
        numbers = [number for number in theirs if isinstance(number, float)]
        return ours - float(np.mean(numbers)) if isinstance(ours, float) and numbers else None

    def measured(self, store: Store, protocol: Protocol) -> dict[int, float]:
        """Return the differences by seed."""
        return differences(*(accuracies(cell, store, protocol) for cell in (self.ours, *self.theirs)))


def _over(column: str, *experiments: Experiment) -> Iterator[Contrast]:
    """Compare the paper's layer with another column, in all cells that the paper has."""
    for experiment in experiments:
        cells = {(cell.row, cell.column): cell for cell in experiment.cells}
        for (row, name), cell in cells.items():
            if name.startswith("Ours") and paper_number(experiment.name, cell) is not None:
                yield Contrast(experiment, cell, [cells[row, name.replace("Ours", column)]])


def _over_rows(experiment: Experiment, row: str, column: str = "") -> Iterator[Contrast]:
    """Compare a row of a table with the mean of its other rows, for each column that begins like this."""
    for cell in experiment.cells:
        if cell.row == row and cell.column.startswith(column):
            others = [other for other in experiment.cells if other.column == cell.column and other.row != row]
            yield Contrast(experiment, cell, others)


def _claim(words: str, family: str, contrasts: Iterator[Contrast], *options: str) -> Claim:
    found = list(contrasts)
    tables = {each.experiment.name: each.experiment for each in found}
    columns = dict.fromkeys(cell.column for each in found for cell in (each.ours, *each.theirs))
    if len(columns) < len({cell.column for table in tables.values() for cell in table.cells}):
        options += tuple(f"--only '{column}'" if " " in column else f"--only {column}" for column in columns)

    def evidence(results: Results, protocol: str) -> dict[int, Evidence]:
        return {
            epochs: {
                (each.experiment.name, each.ours.row, each.ours.column): each.measured(
                    store, each.experiment.protocols[protocol]
                )
                for each in found
            }
            for epochs, store in results[1].items()
        }

    papers = [figure for each in found if (figure := each.papers()) is not None]
    return Claim(words, family, " ".join([*tables, *options]), float(np.mean(papers)), evidence)


def _on_spheres(results: Results, protocol: str) -> dict[int, Evidence]:
    found = {}
    for epochs, runs in results[0].items():
        ours, theirs = (
            {
                run.spec.seed: run.accuracy
                for run in synthetic.by_method(runs).get((protocol, method), [])
                if run.accuracy is not None
            }
            for method in ("kernel", "linear")
        )
        found[epochs] = {(synthetic.NAME, "kernel", "draws"): differences(ours, theirs)}
    return found


_SPHERE = paper_numbers()[synthetic.NAME]["rows"]
CLAIMS = (
    Claim(
        "1. On a sphere the layer beats softmax (Table 1)",
        "sphere",
        synthetic.NAME,
        _SPHERE["kernel"][0] - _SPHERE["softmax"][0],
        _on_spheres,
    ),
    _claim("2. It beats softmax on CIFAR-10 (Table 2)", "cifar", _over("SM", CIFAR10)),
    _claim("3. It beats softmax on CIFAR-100 (Table 3)", "cifar", _over("SM", CIFAR100)),
    _claim("4. It beats a linear kernel (Tables 2, 3)", "cifar", _over("LIN", CIFAR10, CIFAR100)),
    _claim("5. It beats second-order pooling (Tables 2, 3)", "cifar", _over("SOP", CIFAR10, CIFAR100)),
    _claim("6. It beats kervolution (Tables 2, 3)", "cifar", _over("KER", CIFAR10, CIFAR100)),
    _claim("7. It beats softmax in fine-tuning (Table 4)", "transfer", _over("SM", TRANSFER), f"--weights {WEIGHTS}"),
    _claim("8. It learns more from a teacher (Table 5)", "distillation", _over("SM", DISTILLATION)),
    _claim("9. It learns more from the same labels (Table 6)", "active", _over("SM", ACTIVE)),
    _claim("10. A learned kernel beats fixed ones (Table 7)", "kernels", _over_rows(KERNELS, "Learned kernel")),
    _claim(
        "11. It gains by features without ReLU (Table 8)",
        "rectification",
        _over_rows(RECTIFICATION, "unrectified features", "Ours"),
    ),
)
UNSTABLE = "12. Without an activation coefficients diverge (Table 9)"


def verdict(papers: float, ours: float, p: float, p_enough: float, *, complete: bool) -> str:
    """Return the word for a claim.

    `p`: that ours is nothing. `p_enough`: that ours is `ENOUGH` of the paper's figure.
    """
    if not complete:
        return OPEN
    if p < LEVEL:
        if ours <= 0:
            return DIFFERS
        return HOLDS if ours >= ENOUGH * papers else SMALLER
    return ABSENT if ours < ENOUGH * papers and p_enough < LEVEL else OPEN


def divergence(diverged: int, runs: int) -> tuple[float, str]:
    """Return p and the word for the claim that runs diverge often, which is at least half of them.

    p: that as few would diverge, were it half of all runs.
    """
    p = sum(math.comb(runs, each) for each in range(diverged + 1)) / 2**runs
    if p < LEVEL:
        return p, SMALLER if diverged else ABSENT
    return p, HOLDS if 2 * diverged >= runs else OPEN


class Tested(NamedTuple):
    """The evidence that decides a claim, and its tests: against nothing, and against the least that would hold."""

    epochs: int
    cells: Evidence
    over: Pooled
    enough: Pooled


def table(spheres: Spheres, stores: Stores) -> Table:
    """Return a row per claim."""
    results = spheres, stores
    evidence = {claim.words: claim.evidence(results, "paper") for claim in CLAIMS}
    tested = {claim.words: _tested(claim, evidence[claim.words]) for claim in CLAIMS}
    rows = []
    for claim in CLAIMS:
        test = tested[claim.words]
        figure = f"{claim.papers:+.2f}"
        if test is None:
            rows.append([claim.words, figure, NOT_RUN, "", "", OPEN, "", "", "", "all", _command(claim.command)])
            continue
        family = [other for each in CLAIMS if each.family == claim.family and (other := tested[each.words]) is not None]
        place = next(number for number, other in enumerate(family) if other is test)
        p, p_enough = (holm([getattr(each, kind).p for each in family])[place] for kind in ("over", "enough"))
        missing = [cell for cell, found in test.cells.items() if not found]
        word = verdict(claim.papers, test.over.mean, p, p_enough, complete=not missing)
        tuned = claim.evidence(results, "tuned").get(test.epochs, {})
        others = [(epochs, pooled(cells.values())) for epochs, cells in evidence[claim.words].items()]
        rows.append(
            [
                claim.words,
                figure,
                f"{test.over.mean:+.2f}",
                str(test.over.pairs),
                p_text(p),
                word,
                _shown(pooled(tuned.values())),
                str(test.epochs),
                "; ".join(f"{epochs}: {_shown(other)}" for epochs, other in others if other and epochs != test.epochs),
                ", ".join(dict.fromkeys(row for _, row, _ in missing)) or ("seeds" if word == OPEN else ""),
                _command(claim.command, test, both=any(tuned.values())),
            ]
        )
    rows.append(_divergence(stores))
    return Table(NAME, TITLE, COLUMNS, rows, NOTES)


def _tested(claim: Claim, evidence: dict[int, Evidence]) -> Tested | None:
    """Return the tests on the length that has the most cells, of equals the longest; None where nothing was run."""
    size = {epochs: sum(map(bool, cells.values())) for epochs, cells in evidence.items()}
    epochs = max(size, key=lambda epochs: (size[epochs], epochs), default=0)
    cells = evidence.get(epochs, {})
    over, enough = pooled(cells.values()), pooled(cells.values(), ENOUGH * claim.papers)
    return None if over is None or enough is None else Tested(epochs, cells, over, enough)


def _shown(test: Pooled | None) -> str:
    return NOT_RUN if test is None else f"{test.mean:+.2f} (n {test.pairs}, p {p_text(test.p)})"


def _command(words: str, test: Tested | None = None, *, both: bool = False) -> str:
    if test is not None:
        runs = f"--{'draws' if words == synthetic.NAME else 'seeds'} {max(map(len, test.cells.values()))}"
        words = f"{words} --epochs {test.epochs} {runs}{' --protocol both' * both}"
    return f'make reproduce TABLE="{words}"'


def _divergence(stores: Stores) -> list[str]:
    """Return the row of the claim that is no difference: how many runs without an activation diverged."""
    protocol = ACTIVATIONS.protocols["paper"]
    runs: dict[Path, TrainResult] = {}
    for store in stores.values():
        for cell in ACTIVATIONS.cells:
            if cell.row == "none":
                paths: list[Path | None] = [
                    store.choice_path(cell.chooser, protocol, each) for each in protocol.candidates()
                ]
                paths += [store.result_path(cell, protocol, seed) for seed in store.results(cell, protocol)]
                runs |= {path: run for path in paths if path is not None and (run := store.read(path)) is not None}
    command = _command("activations --only none --seeds 3")
    if not runs:
        return [UNSTABLE, "often", NOT_RUN, "", "", OPEN, "", "", "", "all", command]
    diverged = sum(run.accuracy is None for run in runs.values())
    p, word = divergence(diverged, len(runs))
    epochs = ", ".join(map(str, sorted({run.spec.epochs or 0 for run in runs.values()})))
    missing = "seeds" if word == OPEN else ""
    return [
        UNSTABLE,
        "often",
        f"{diverged} diverged",
        str(len(runs)),
        p_text(p),
        word,
        "",
        epochs,
        "",
        missing,
        command,
    ]
