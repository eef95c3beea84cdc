"""What is trained for one cell of a table, and how: the words in which tables of the paper are written down."""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Subset:
    """A share of the training images, chosen by `strategy` (see `kernelhead.active`) for a model trained on a tenth."""

    strategy: str
    percent: int


@dataclass(frozen=True)
class Recipe:
    """A network, its head, and the images it is trained on.

    Args:
        data: cifar10, cifar100, pets or cars.
        backbone, backbone_options, head, head_options: as in `Run`.
        mixup: train by `mixup_cross_entropy`.
        subset: train on these images alone.
        teacher: learn the scores of this one's networks, by seed, instead of the labels.
        seed_model: the one that chooses the subset, by seed.
        chosen_as: take learning rate and weight decay as chosen for this one.
    """

    data: str
    backbone: str
    head: str
    backbone_options: dict[str, Any] = field(default_factory=dict)
    head_options: dict[str, Any] = field(default_factory=dict)
    mixup: bool = False
    subset: Subset | None = None
    teacher: "Recipe | None" = None
    seed_model: "Recipe | None" = None
    chosen_as: "Recipe | None" = None

    @property
    def chooser(self) -> "Recipe":
        """The one whose candidates decide on learning rate and weight decay."""
        return self if self.chosen_as is None else self.chosen_as.chooser

    @property
    def key(self) -> str:
        """A name that tells it from all others on the same data, fit for a folder."""
        words = [self.backbone.removeprefix("cifar_"), *_words(self.backbone_options)]
        words += [self.head, *_words(self.head_options)]
        if self.mixup:
            words.append("mixup")
        if self.teacher is not None:
            words.append(f"taught-by-{self.teacher.key}")
        if self.subset is not None:
            words.append(f"{self.subset.strategy.replace('-', '')}{self.subset.percent}")
        return "-".join(words)


def _words(options: dict[str, Any]) -> list[str]:
    """Options as words: {"rectified": True, "kernel": "rbf"} -> ["kernel_rbf", "rectified"]."""
    return [name if value is True else f"{name}_{value}" for name, value in sorted(options.items())]


class Candidate(NamedTuple):
    """What may be chosen; the head's learning rate is `head_rate` times the other."""

    learning_rate: float
    weight_decay: float
    head_rate: float = 1.0

    def __str__(self) -> str:
        of_head = f", head x{self.head_rate:g}" if self.head_rate != 1 else ""
        return f"{self.learning_rate:g}, {self.weight_decay:g}{of_head}"


@dataclass(frozen=True)
class Protocol:
    """What learning rate and weight decay are chosen from, on held-out training images, and the batch.

    `choosing_epochs`: of the trainings that choose, where they are shorter than those that count. `head_rates`: what
    the head's learning rate is chosen from, as multiples of the other. `below`: the protocol of networks that runs
    build on, where it is not their own.
    """

    name: str
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    batch_size: int
    warmup_epochs: int = 5
    choosing_epochs: int | None = None
    head_rates: tuple[float, ...] = (1.0,)
    below: "Protocol | None" = None

    @property
    def base(self) -> "Protocol":
        """How the networks that runs build on are trained."""
        return self.below or self

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(rate, decay, head_rate)
            for head_rate in self.head_rates
            for decay in self.weight_decays
            for rate in self.learning_rates
        ]

    def epochs_to_choose(self, epochs: int) -> int:
        """Of a training that chooses for one of `epochs`."""
        return epochs if self.choosing_epochs is None else min(self.choosing_epochs, epochs)


def adapted(protocol: Protocol, quick: bool) -> Protocol:
    """A protocol as it is, or one that shows in a moment whether everything runs."""
    if not quick:
        return protocol
    below = None if protocol.below is None else adapted(protocol.below, quick)
    return replace(protocol, learning_rates=protocol.learning_rates[:2], batch_size=6, warmup_epochs=1, below=below)


@dataclass(frozen=True)
class Cell:
    """A place in a table: its row and column as the paper has them, and what is trained for it."""

    row: str
    column: str
    recipe: Recipe
    published: tuple[str, str, str] | None = None  # table, row and column of the paper's number, if not its own


@dataclass(frozen=True)
class Experiment:
    """A table of the paper.

    Cells of the column SM, or SM and a word, are the softmax baseline of the cells beside them; other columns are
    compared with `references`, cells of another table.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    protocols: dict[str, Protocol]
    references: "dict[str, tuple[str, Cell]]" = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def baseline(self, cell: Cell) -> tuple[str, Cell] | None:
        """The softmax cell that a cell is compared with, and the name of its table; None for such a one itself."""
        _, *word = cell.column.split()
        column = " ".join(["SM", *word])
        if cell.column == column:
            return None
        beside = [other for other in self.cells if (other.row, other.column) == (cell.row, column)]
        found = (self.name, beside[0]) if beside else self.references.get(cell.column)
        return None if found is None or found[1].recipe == cell.recipe else found


def paper_number(table: str, cell: Cell) -> float | str | None:
    """What the paper reports: a percentage, or a word; None for what it has not."""
    table, row, column = cell.published or (table, cell.row, cell.column)
    numbers = paper_numbers().get(table)
    if numbers is None or row not in numbers["rows"] or column not in numbers["columns"]:
        return None
    number: float | str | None = numbers["rows"][row][numbers["columns"].index(column)]
    return number


@cache
def paper_numbers() -> dict[str, Any]:
    """Every number of the paper's tables."""
    numbers: dict[str, Any] = json.loads(resources.files("kernelhead.paper").joinpath("numbers.json").read_text())
    return numbers


GRID = (0.05, 0.1, 0.3, 1.0)
CIFAR_PROTOCOLS = {
    "paper": Protocol("paper", GRID, (1e-4,), 128),
    "tuned": Protocol("tuned", GRID, (1e-4, 5e-4), 128),
}
# Fine-tuning needs smaller steps: features of a trained network are long, and a softmax head does not scale them.
# The network is trained already: rates are told apart by ten epochs, five of them warm-up.
# With one rate for all, what the new head needs is too much for the trained network. So the other protocol gives the
# head a rate of its own instead of another weight decay, and has one below the lowest, which some heads prefer.
TRANSFER_PROTOCOLS = {
    "paper": Protocol("paper", (0.003, 0.01, 0.03, 0.1), (1e-4,), 64, choosing_epochs=10),
    "tuned": Protocol("tuned", (0.001, 0.003, 0.01, 0.03), (1e-4,), 64, choosing_epochs=10, head_rates=(1.0, 10.0)),
}
