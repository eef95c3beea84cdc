"""What is missing of tables, taken group by group by those who train it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from kernelhead_lab.engine.loop import Moment
from kernelhead_lab.tables.claims import Claims
from kernelhead_lab.tables.experiment import Cell, Experiment, Protocol, adapted
from kernelhead_lab.tables.groups import kind_of, name_of, next_group
from kernelhead_lab.tables.outcome import file_of_weights
from kernelhead_lab.tables.store import Missing, Store, is_choice, weights_of


@dataclass(frozen=True)
class Settings:
    """Settings that the user may choose."""

    epochs: int
    seeds: int = 1
    protocols: tuple[str, ...] = ("paper",)
    only: tuple[str, ...] = ()
    at_once: int = 1
    compiled: bool = False
    quick: bool = False
    weights: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Progress:
    """Runs done of those in all, and what goes on now; `waits` while other processes do it."""

    done: int
    total: int
    what: str
    moment: Moment | None = None
    waits: bool = False


def chosen_cells(experiment: Experiment, only: Sequence[str]) -> list[Cell]:
    """Return the cells that are named, one per network; all where nothing is named.

    A name is that of a row, of a column, or of one word of a column. Names of one kind (two rows, the first words of
    columns) add to each other, those of different kinds restrict each other.
    """
    names = [[cell.row, cell.column, *cell.column.split()] for cell in experiment.cells]
    known = {name for own in names for name in own}
    unknown = [word for word in only if word not in known]
    if unknown:
        listed = ", ".join(repr(name) if "," in name else name for name in sorted(known))
        raise ValueError(f"{experiment.name} has no row or column {unknown[0]!r}; it has {listed}")
    wanted = [set(only).intersection(kind) for kind in zip_longest(*names)]
    cells = {
        (cell.spec.data, cell.spec.key): cell
        for cell, own in zip(experiment.cells, names, strict=True)
        if all(name in words for name, words in zip(own, wanted, strict=False) if words)
    }
    if not cells:
        raise ValueError(f"{experiment.name} has no cell that is all of {', '.join(map(repr, only))}; name fewer")
    return list(cells.values())


class Queue:
    """The runs that some tables need, in a folder that several processes may share."""

    def __init__(self, experiments: Sequence[Experiment], root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self.store, self.claims, self.seeds = Store(root, settings.epochs), Claims(root), range(settings.seeds)
        self.wanted = [
            (cell, adapted(experiment.protocols[name], settings.quick))
            for experiment in experiments
            for name in ([name for name in settings.protocols if name in experiment.protocols] or experiment.protocols)
            for cell in chosen_cells(experiment, settings.only)
        ]
        self.kinds = list(dict.fromkeys(kind_of(cell.spec) for cell, _ in self.wanted))
        _check_weights(self.store, self.wanted, settings)  # before data are opened

    def take(self, held: ExitStack, at_once: int, idle: int = 1) -> tuple[Missing, Missing]:
        """Return all that is missing and a group of it, which is claimed until `held` is left.

        The group has at most `at_once` runs, and fewer where there would be none for all of `idle` trainers.
        """
        with self.claims.turn() as taken:  # what is missing is looked for after what is taken
            _check_weights(self.store, self.wanted, self.settings)  # others may have added some
            missing: Missing = {}
            for cell, protocol in self.wanted:
                missing |= self.store.missing(cell, protocol, self.seeds)
            free = {path: spec for path, spec in missing.items() if name_of(path, self.root) not in taken}
            share = at_once if idle == 1 else max(1, min(at_once, -(-len(free) // idle)))
            group = next_group(free, self.root, self.kinds, share)
            held.enter_context(self.claims.hold([name_of(path, self.root) for path in group]))
        return missing, group

    def count(self) -> tuple[int, int]:
        """Return how many runs are done, and how many are needed."""
        return self.store.count(self.wanted, self.seeds)


def description(group: Missing) -> str:
    """Say what a group trains."""
    specs = list(group.values())
    others = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
    data = " and ".join(dict.fromkeys(spec.data for spec in specs))
    return f"{data}: {'choosing' if is_choice(next(iter(group))) else 'training'} {specs[0].key}{others}"


def _check_weights(store: Store, wanted: Sequence[tuple[Cell, Protocol]], settings: Settings) -> None:
    """Refuse to go on where runs of one table began with other weights."""
    given = None if settings.weights is None or settings.quick else file_of_weights(settings.weights)
    for cell, protocol in wanted:
        if not cell.spec.pretrained:
            continue
        for epochs in (protocol.epochs_to_choose(store.epochs), store.epochs):
            for path in sorted(store.folder(cell.spec, protocol, epochs).glob("*.json")):
                result = store.read(path)
                found = given if result is None else weights_of(result)
                if (found and found["sha256"]) != (given and given["sha256"]):
                    began = "the library's weights" if found is None else f"{found['file']} ({found['sha256'][:12]})"
                    raise ValueError(f"{path} began with {began}: go on with them, or give another folder with --runs")
