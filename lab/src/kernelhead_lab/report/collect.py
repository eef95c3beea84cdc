"""Every table of a folder of results, and what the page shows of it. Nothing here trains."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernelhead.finetune.spec import TrainResult
from kernelhead.tables import Table
from kernelhead_lab.report import summary, verdicts
from kernelhead_lab.report.experiment import section
from kernelhead_lab.report.page import Section
from kernelhead_lab.tables import EXPERIMENTS, epochs, synthetic
from kernelhead_lab.tables.experiment import Experiment, Protocol, adapted
from kernelhead_lab.tables.grid import choices, details, files_of, overview, sizes, whole
from kernelhead_lab.tables.pooled import methods_of, tests
from kernelhead_lab.tables.statistics import NOT_RUN
from kernelhead_lab.tables.store import Store

QUICK = "quick"  # the folder of quick runs, below that of all runs
FEW = "A quick run with few samples and epochs: that it ran is all that these numbers show."
MADE_UP = "A quick run on small made-up data: that it ran is all that these numbers show."


@dataclass(frozen=True)
class Made:
    """The tables of an experiment and of runs of one length."""

    experiment: str
    name: str
    """The name of its file, without a suffix."""
    length: str
    """How long the runs were, in words: it tells tables of one title apart."""
    section: Section
    more: dict[str, Table] = field(default_factory=dict)
    """Further tables, by the names of their files."""
    heads: Path | None = None
    """The folder of trained heads on the sphere."""

    @property
    def tables(self) -> dict[str, Table]:
        """All tables, by the names of their files."""
        return {self.name: self.section.table, **self.more}


@dataclass(frozen=True)
class Report:
    """All that is made, and what there is to say beside it."""

    made: list[Made] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def tables(self) -> dict[str, Table]:
        """All tables, by the names of their files."""
        return {name: table for each in self.made for name, table in each.tables.items()}


def collect(runs: Path, shown: Sequence[str] = ()) -> Report:
    """Make every table of the results in `runs`.

    Runs that tables share show up in each, but a table whose runs another has is made only if `shown`.
    """
    report, quick = Report(), runs.name == QUICK
    spheres = dict(_spheres(runs, report.warnings))
    lengths = {int(path.name.split("-")[0]) for path in runs.glob("*/*-epochs") if path.name.split("-")[0].isdigit()}
    stores = {length: Store(runs, length) for length in sorted(lengths)}
    report.made.extend(_synthetic(place, results, quick=quick) for place, results in spheres.items())
    for store in stores.values():
        for experiment, protocols in _with_runs(report.hidden, store, shown, quick=quick):
            report.made.append(_images(experiment, store, protocols, quick=quick))
    if report.made and not quick:
        report.made.extend(_over_lengths(stores))
        by_epochs = {int(place.name.split("-")[0]): results for place, results in spheres.items()}
        claims = verdicts.table(by_epochs, stores)
        more = {table.name: table for table in summary.tables(stores, claims, runs / "bench")}
        report.made.insert(0, Made(claims.name, claims.name, "", Section(claims), more))
    report.warnings.extend(f"left out: {sentence}" for store in stores.values() for sentence in store.broken)
    return report


def _over_lengths(stores: dict[int, Store]) -> Iterator[Made]:
    """Yield the tables of epochs that have a run."""
    for protocol in epochs.EPOCHS.protocols.values():
        made = epochs.table(stores, protocol)
        if any(text not in ("", NOT_RUN) for row in made.rows for text in row[3:]):
            yield Made(epochs.EPOCHS.name, made.name, "", Section(made))


def _images(experiment: Experiment, store: Store, protocols: list[Protocol], *, quick: bool) -> Made:
    name = f"{experiment.name}-{store.epochs}-epochs"
    made = section(experiment, store, protocols)
    more = {f"{name}-{make.__name__}": make(experiment, store, protocols) for make in (tests, details, choices)}
    if all(len(cells) == 1 for cells in methods_of(experiment).values()):
        del more[f"{name}-tests"]  # nothing to put together
    by_size = sizes(experiment, store, protocols)
    more |= {} if by_size is None else {f"{name}-sizes": by_size}
    more |= {f"{name}-{protocol.name}": overview(experiment, store, protocol) for protocol in protocols}
    if quick:
        made = replace(made, table=_noted(MADE_UP, made.table))
        more = {each: _noted(MADE_UP, table) for each, table in more.items()}
    return Made(experiment.name, name, f"{store.epochs} epochs", made, more)


def _noted(note: str, table: Table) -> Table:
    return replace(table, notes=[note, *table.notes])


def _with_runs(
    hidden: list[str], store: Store, shown: Sequence[str], *, quick: bool
) -> Iterator[tuple[Experiment, list[Protocol]]]:
    """Yield experiments and protocols that have runs; none whose runs another has, unless they are `shown`."""
    found: dict[str, list[Protocol]] = {}
    files: dict[str, set[Path | None]] = {}
    for name, experiment in EXPERIMENTS.items():
        protocols = [adapted(protocol, quick) for protocol in experiment.protocols.values()]
        own = [files_of(experiment, store, [protocol]) for protocol in protocols]
        found[name] = [protocol for protocol, some in zip(protocols, own, strict=True) if some]
        files[name] = set().union(*own)
    for name, protocols in found.items():
        if not protocols or (name == epochs.EPOCHS.name and name not in shown):  # it has a table of all lengths
            continue
        other = whole(name, files)
        if other is None or name in shown:
            yield EXPERIMENTS[name], protocols
        elif not shown:
            hidden.append(f"Not shown: {name} of {store.epochs} epochs, whose runs so far are all in {other}")


def _spheres(runs: Path, warnings: list[str]) -> Iterator[tuple[Path, list[TrainResult]]]:
    """Yield the folders of runs on the sphere that have results."""
    for place in sorted(path for path in (runs / synthetic.NAME).glob("*") if path.is_dir()):
        broken: list[str] = []
        results = list(synthetic.find_results(place, broken))
        warnings.extend(f"left out: {sentence}" for sentence in broken)
        if results:
            yield place, results


def _synthetic(place: Path, results: list[TrainResult], *, quick: bool) -> Made:
    made = synthetic.table(results)
    if quick:
        made = _noted(FEW, made)
    length = place.name.replace("-epochs-", "-epochs, ").replace("-", " ")
    return Made(synthetic.NAME, f"{made.name}-{place.name}", length, Section(made), heads=place)
