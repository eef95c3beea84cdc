"""The words in which a table is written down: cells, what settings are chosen from, and the paper's numbers."""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, Self

from kernelhead_lab.spec import LabSpec


class Candidate(NamedTuple):
    """Settings that are chosen on held-out images; `head_rate` is the head's rate as a multiple of the network's."""

    learning_rate: float
    weight_decay: float
    head_rate: float = 1.0

    def __str__(self) -> str:
        of_head = f", head x{self.head_rate:g}" if self.head_rate != 1 else ""
        return f"{self.learning_rate:g}, {self.weight_decay:g}{of_head}"


@dataclass(frozen=True)
class Protocol:
    """Learning rates and weight decays to choose from on held-out training images, and the batch."""

    name: str
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    batch_size: int
    warmup_epochs: int = 5
    choosing_epochs: int | None = None
    """Epochs of the runs that choose, where they are shorter than those that count."""
    head_rates: tuple[float, ...] = (1.0,)
    below: "Protocol | None" = None
    """The protocol of the networks that runs build on, where it is another."""
    rate_first: bool = False
    """Whether rates are compared with the first weight decay alone, and the others tried with the best rate."""

    @property
    def base(self) -> "Protocol":
        """The protocol of the networks that runs build on."""
        return self.below or self

    def candidates(self) -> list[Candidate]:
        """Return all that is tried, in the order that decides between equals."""
        return [
            Candidate(rate, decay, head_rate)
            for head_rate in self.head_rates
            for decay in self.weight_decays
            for rate in self.learning_rates
        ]

    def epochs_to_choose(self, epochs: int) -> int:
        """Return the epochs of a run that chooses for one of `epochs`."""
        return epochs if self.choosing_epochs is None else min(self.choosing_epochs, epochs)

    def applied(self, spec: LabSpec, candidate: Candidate, epochs: int, seed: int) -> LabSpec:
        """Return the spec with everything that a protocol decides."""
        return replace(
            spec,
            **candidate._asdict(),
            batch_size=self.batch_size,
            warmup_epochs=self.warmup_epochs,
            epochs=epochs,
            seed=seed,
        )


def adapted(protocol: Protocol, quick: bool) -> Protocol:
    """Return the protocol, or a quick one that shows whether everything runs."""
    if not quick:
        return protocol
    below = None if protocol.below is None else adapted(protocol.below, quick)
    return replace(protocol, learning_rates=protocol.learning_rates[:2], batch_size=6, warmup_epochs=1, below=below)


@dataclass(frozen=True)
class Cell:
    """A labelled entry of a table and the run behind it."""

    spec: LabSpec
    """The run, whose epochs, batch, learning rate, weight decay and seed are still open."""
    row: str = ""
    column: str = ""
    chosen_as: "Cell | None" = None
    """The cell whose candidates decide on learning rate and weight decay, unless it is this one."""
    builds_on: "Cell | None" = None
    """The cell of the teacher or of the seed model, whose network of the same seed a run needs."""
    published: tuple[str, str, str] | None = None
    """Table, row and column of the paper's number, unless they are this cell's."""

    @property
    def chooser(self) -> "Cell":
        """The cell whose candidates decide on learning rate and weight decay."""
        return self if self.chosen_as is None else self.chosen_as.chooser

    def at(self, row: str, column: str, published: tuple[str, str, str] | None = None) -> Self:
        """Return this cell at a row and a column of a table."""
        return replace(self, row=row, column=column, published=published)


@dataclass(frozen=True)
class Experiment:
    """A table of the paper, or one beyond it.

    Cells of the column SM, or SM and a word, are the baseline of the cells beside them; other columns are compared with
    `references`, cells of another table.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    protocols: dict[str, Protocol]
    references: dict[str, tuple[str, Cell]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def baseline(self, cell: Cell) -> tuple[str, Cell] | None:
        """Return the SM cell that a cell is compared with, and the name of its table; None for such a cell itself."""
        _, *word = cell.column.split()
        column = " ".join(["SM", *word])
        if cell.column == column:
            return None
        beside = [other for other in self.cells if (other.row, other.column) == (cell.row, column)]
        found = (self.name, beside[0]) if beside else self.references.get(cell.column)
        return None if found is None or found[1].spec == cell.spec else found


def paper_number(table: str, cell: Cell) -> float | str | None:
    """Return what the paper reports: a percentage, or a word; None for what it has not."""
    table, row, column = cell.published or (table, cell.row, cell.column)
    numbers = paper_numbers().get(table)
    if numbers is None or row not in numbers["rows"] or column not in numbers["columns"]:
        return None
    number: float | str | None = numbers["rows"][row][numbers["columns"].index(column)]
    return number


def papers_gain(experiment: Experiment, cell: Cell) -> float | None:
    """Return how far the paper's number is above that of the SM cell; None where one is missing or a word."""
    baseline = experiment.baseline(cell)
    numbers = paper_number(experiment.name, cell), None if baseline is None else paper_number(*baseline)
    return numbers[0] - numbers[1] if isinstance(numbers[0], float) and isinstance(numbers[1], float) else None


@cache
def paper_numbers() -> dict[str, Any]:
    """Return every number of the paper's tables."""
    numbers: dict[str, Any] = json.loads(resources.files("kernelhead_lab.tables").joinpath("numbers.json").read_text())
    return numbers


GRID = (0.05, 0.1, 0.3, 1.0)
# Longer trainings take the rates that 200 epochs chose.
CIFAR_PROTOCOLS = {
    "paper": Protocol("paper", GRID, (1e-4,), 128, choosing_epochs=200),
    "tuned": Protocol("tuned", GRID, (1e-4, 5e-4), 128, choosing_epochs=200),
}
# Fine-tuning needs smaller steps: features of a trained network are long, and a linear head does not scale them.
# The network is trained already: ten epochs, five of them warm-up, tell rates apart.
# With one rate for all, what the new head needs is too much for the trained network. So the other protocol gives the
# head a rate of its own instead of another weight decay, and has one below the lowest, which some heads prefer.
TRANSFER_PROTOCOLS = {
    "paper": Protocol("paper", (0.003, 0.01, 0.03, 0.1), (1e-4,), 64, choosing_epochs=10),
    "tuned": Protocol("tuned", (0.001, 0.003, 0.01, 0.03), (1e-4,), 64, choosing_epochs=10, head_rates=(1.0, 10.0)),
}
# Weight decay hardly moves the best rate, and a run of fine-tuning is long.
LONG_PROTOCOL = Protocol("tuned", (0.003, 0.01, 0.03, 0.1), (5e-4, 1e-4), 64, choosing_epochs=30, rate_first=True)
