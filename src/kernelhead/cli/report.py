"""`kernelhead report`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kernelhead.cli._console import app, check_folder, console, messages, print_plain, say

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.paper.recipe import Experiment, Protocol
    from kernelhead.paper.store import Store
    from kernelhead.paper.table import Table
    from kernelhead.report.page import Section

SYNTHETIC_NAME = "synthetic"
QUICK = "quick"  # the folder of quick runs, below that of all runs
FEW = "A quick run with few samples and epochs: that it ran is all that these numbers show."
MADE_UP = "A quick run on small made-up data: that it ran is all that these numbers show."

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of the result files.")]


@app.command()
def report(
    runs: RunsOption = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Where tables and figures go; RUNS/report unless given.")] = None,
    fill: Annotated[
        list[Path] | None,
        typer.Option(help="A Markdown file to bring up to date: tables between <!-- NAME --> and <!-- /NAME -->."),
    ] = None,
) -> None:
    """Make the tables and figures again from the result files. Never trains."""
    if out is not None:
        check_folder(out)
    written = write_report(runs, out or runs / "report")
    if fill:
        from kernelhead.report.fill import fill_tables
        from kernelhead.results import write_bytes

        for document in fill:
            try:
                text = document.read_bytes().decode()  # line ends as they are
                write_bytes(document, fill_tables(text, written).encode())
            except (OSError, ValueError) as error:
                raise ValueError(f"{document} was not filled: {error}") from error
            print_plain(f"Filled: {document}")


def write_report(runs: Path, out: Path, shown: tuple[str, ...] = ()) -> dict[str, "Table"]:
    """Write everything; print all tables, or those called `shown`.

    Runs that tables share show up in each, but a table whose runs another has is made only if `shown`.
    Returns the tables by the names of their files.
    """
    tables: dict[str, Table] = {}
    sections = [*_synthetic_sections(runs, out, shown, tables), *_image_sections(runs, out, shown, tables)]
    if not sections:
        quick = f" ({runs / QUICK} has those of quick runs)" if (runs / QUICK).is_dir() else ""
        raise FileNotFoundError(f"no results in {runs}{quick}; 'kernelhead reproduce list' shows what can be run")
    from kernelhead.report.page import write_page

    titles = [section.table.title for _, section in sections]
    told_apart = [
        replace(section, table=replace(section.table, title=f"{title}, {length}"))
        if titles.count(title) > 1
        else section
        for title, (length, section) in zip(titles, sections, strict=True)
    ]
    write_page(out / "report.html", "Kernelized classification: the paper's tables, and ours", told_apart)
    print_plain(f"Written: {out / 'report.html'}")
    return tables


def _write(stem: Path, table: "Table") -> list[Path]:
    """A table as Markdown and as CSV."""
    from kernelhead.report.tables import to_csv, to_markdown
    from kernelhead.results import write_bytes

    files = {stem.with_name(f"{stem.name}.md"): to_markdown(table), stem.with_name(f"{stem.name}.csv"): to_csv(table)}
    for path, text in files.items():
        write_bytes(path, text.encode())
    return list(files)


def _image_sections(
    runs: Path, out: Path, shown: tuple[str, ...], tables: dict[str, "Table"]
) -> Iterator[tuple[str, "Section"]]:
    """The table of every experiment that has runs, for each number of epochs, which comes with it."""
    from kernelhead.paper.grid import choices, details, overview
    from kernelhead.paper.store import Store
    from kernelhead.report.experiment import section
    from kernelhead.report.page import Section
    from kernelhead.report.tables import show

    quick = runs.name == QUICK
    lengths = {int(path.name.split("-")[0]) for path in runs.glob("*/*-epochs") if path.name.split("-")[0].isdigit()}
    for epochs in sorted(lengths):
        store = Store(runs, epochs)
        for experiment, protocols in _with_runs(store, shown, quick=quick):
            made = section(experiment, store, protocols)
            name = f"{experiment.name}-{epochs}-epochs"
            more = {f"{name}-{make.__name__}": make(experiment, store, protocols) for make in (details, choices)}
            mine = {name: made.table, **more}
            mine |= {f"{name}-{protocol.name}": overview(experiment, store, protocol) for protocol in protocols}
            if quick:
                mine = {name: replace(table, notes=[MADE_UP, *table.notes]) for name, table in mine.items()}
            files = [file for name, table in mine.items() for file in _write(out / name, table)]
            tables |= mine
            if not shown or experiment.name in shown:
                show(mine[name], console)
                print_plain(f"Written: {', '.join(map(str, files))}")
            length = f"{epochs} epochs"
            yield length, replace(made, table=mine[name])
            for name in more:
                yield length, Section(mine[name])
        for sentence in store.broken:
            say(f"left out: {sentence}")


def _with_runs(
    store: "Store", shown: tuple[str, ...], *, quick: bool
) -> Iterator[tuple["Experiment", list["Protocol"]]]:
    """Experiments and protocols that have runs; none whose runs another has, unless they are `shown`."""
    from kernelhead.paper import EXPERIMENTS
    from kernelhead.paper.grid import files_of, whole
    from kernelhead.paper.recipe import adapted

    found: dict[str, list[Protocol]] = {}
    files: dict[str, set[Path | None]] = {}
    for name, experiment in EXPERIMENTS.items():
        protocols = [adapted(protocol, quick) for protocol in experiment.protocols.values()]
        own = [files_of(experiment, store, [protocol]) for protocol in protocols]
        found[name] = [protocol for protocol, some in zip(protocols, own, strict=True) if some]
        files[name] = set().union(*own)
    for name, protocols in found.items():
        if not protocols:
            continue
        other = whole(name, files)
        if other is None or name in shown:
            yield EXPERIMENTS[name], protocols
        elif not shown:
            print_plain(f"Not shown: {name} of {store.epochs} epochs, whose runs so far are all in {other}")


def _synthetic_sections(
    runs: Path, out: Path, shown: tuple[str, ...], tables: dict[str, "Table"]
) -> Iterator[tuple[str, "Section"]]:
    if not (runs / SYNTHETIC_NAME).is_dir():
        return  # what follows imports torch, which takes longer than all other tables
    from kernelhead.paper import synthetic
    from kernelhead.report.figures import synthetic_figures
    from kernelhead.report.page import Section
    from kernelhead.report.tables import show
    from kernelhead.results import BrokenResultError, find_results
    from kernelhead.train.checkpoint import BrokenCheckpointError

    for place in sorted(path for path in (runs / synthetic.NAME).glob("*") if path.is_dir()):
        broken: list[str] = []
        results = list(find_results(place, broken))
        for sentence in broken:
            say(f"left out: {sentence}")
        if not results:
            continue
        made = synthetic.table(results)
        if runs.name == QUICK:
            made = replace(made, notes=[FEW, *made.notes])
        if not shown or synthetic.NAME in shown:
            show(made, console)
        name = f"{made.name}-{place.name}"
        tables[name] = made
        figures = [out / f"{name}{suffix}" for suffix in (".html", ".png")]
        files = [*_write(out / name, made), *figures]
        try:
            with messages.status(f"drawing figures of {escape(place.name)}"):
                synthetic_figures(place, *figures)
        except ModuleNotFoundError as error:
            say(f"no picture: {error.name} is missing; pip install 'kernelhead[plot]' brings it")
        except (OSError, BrokenResultError, BrokenCheckpointError) as error:
            say(f"no figures: {error}")
        if not shown or synthetic.NAME in shown:
            print_plain(f"Written: {', '.join(str(path) for path in files if path.exists())}")
        yield place.name.replace("-epochs-", "-epochs, ").replace("-", " "), Section(made)
