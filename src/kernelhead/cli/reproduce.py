"""`kernelhead reproduce | report`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from kernelhead.cli._console import app, console, messages, print_plain, say
from kernelhead.cli._progress import steps_bar

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.paper.runner import Progress
    from kernelhead.paper.runner import Settings as ImageSettings
    from kernelhead.paper.synthetic import Settings as SyntheticSettings
    from kernelhead.report.page import Section

EPOCHS = 200  # of image experiments, unless told
AT_ONCE = 8  # on a GPU
PROTOCOLS = ("paper", "tuned")
SYNTHETIC_NAME = "synthetic"
QUICK = "quick"  # the folder of quick runs, below that of all runs
MADE_UP = "A quick run on small made-up data: that it ran is all that these numbers show."

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of the result files.")]
IMAGES, SYNTHETIC = "Tables on images", "The table 'synthetic'"


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table of the paper, or 'list' to see them.")],
    runs: RunsOption = Path("runs"),
    protocol: Annotated[
        str | None, typer.Option(help="paper, tuned or both; both for 'synthetic', else paper, unless given.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Epochs of a training; 30 for 'synthetic', else 200.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small made-up data and few epochs: does it run?")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Trainings of each cell. [1]", rich_help_panel=IMAGES)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A row or column, such as ResNet-20 or Ours; may be repeated.", rich_help_panel=IMAGES),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Trainings at a time; 8 on a GPU, else 1.", rich_help_panel=IMAGES),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.", rich_help_panel=IMAGES)] = False,
    weights: Annotated[
        str | None,
        typer.Option(help="Local file of ImageNet weights, for 'transfer'.", rich_help_panel=IMAGES),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=IMAGES)] = "auto",
    draws: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Draws of the centers. [10]", rich_help_panel=SYNTHETIC)
    ] = None,
) -> None:
    """Run what is missing of a table of the paper, then show it beside the paper's."""
    from kernelhead.paper import EXPERIMENTS, synthetic

    if quick and (epochs or draws or seeds):
        raise ValueError("--quick has its own epochs, draws and seeds: leave them out, or --quick")
    if protocol not in (None, "both", *PROTOCOLS):
        raise ValueError(f"unknown protocol {protocol!r}; choose one of {', '.join(PROTOCOLS)}, both")
    usual = synthetic.QUICK if quick else synthetic.Settings()
    settings = replace(usual, epochs=epochs or usual.epochs, draws=draws or usual.draws)
    if table == "list":
        _list_tables(runs, settings, epochs or EPOCHS, seeds or 1)
        return
    if table not in (synthetic.NAME, *EXPERIMENTS):
        names = ", ".join([synthetic.NAME, *EXPERIMENTS])
        raise ValueError(f"unknown table {table!r}; choose one of {names}, or 'list' to see them")
    if table == synthetic.NAME:
        _refuse(table, {"--seeds": seeds, "--only": only, "--at-once": at_once, "--weights": weights})
        with steps_bar() as progress:
            synthetic.run(runs, PROTOCOLS if protocol in (None, "both") else (protocol,), settings, progress)
        _report(runs, runs / "report", table)
        return
    _refuse(table, {"--draws": draws, **({} if table == "transfer" else {"--weights": weights})})

    from kernelhead.paper import runner
    from kernelhead.train.job import choose_device

    chosen = choose_device(device)
    image_settings = runner.Settings(
        epochs=1 if quick else epochs or EPOCHS,
        seeds=seeds or 1,
        protocols=PROTOCOLS if protocol == "both" else (protocol or "paper",),
        only=tuple(only or ()),
        at_once=at_once or (AT_ONCE if chosen.type == "cuda" else 1),
        compiled=compile,
        quick=quick,
        weights=weights,
        device=str(chosen),
    )
    _run_images(table, runs / QUICK if quick else runs, image_settings)


def _refuse(table: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"the table {table!r} has no {name}: leave it out")


def _run_images(table: str, runs: Path, settings: "ImageSettings") -> None:
    from kernelhead.paper import EXPERIMENTS, runner

    with _job_bars() as progress:
        runner.run(EXPERIMENTS[table], runs, settings, progress)
    _report(runs, runs / "report", table)


@contextmanager
def _job_bars() -> Iterator[Callable[["Progress"], None]]:
    """A bar of trainings done, and one of the steps of those that go on."""
    with steps_bar() as steps:
        last = ""

        def show(now: "Progress") -> None:
            nonlocal last
            steps("trainings", now.done, now.total)
            if now.moment is None:
                last = now.what
                if not messages.is_terminal:
                    say(f"{now.done} of {now.total} trainings done; {now.what}", style="")
            else:
                steps(last, now.moment.step, now.moment.steps)

        yield show


@app.command()
def report(
    runs: RunsOption = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Where tables and figures go; RUNS/report unless given.")] = None,
) -> None:
    """Make the tables and figures again from the result files. Never trains."""
    _report(runs, out or runs / "report")


def _report(runs: Path, out: Path, shown: str | None = None) -> None:
    """Write everything; print all tables, or the one called `shown`. Runs that tables share show up in each."""
    sections = [*_synthetic_sections(runs, out, shown), *_image_sections(runs, out, shown)]
    if not sections:
        raise FileNotFoundError(f"no results in {runs}; 'kernelhead reproduce list' shows what can be run")
    from kernelhead.report.page import write_page

    write_page(out / "report.html", "Kernelized classification: the paper's tables, and ours", sections)
    print_plain(f"Written: {out / 'report.html'}")


def _image_sections(runs: Path, out: Path, shown: str | None) -> Iterator["Section"]:
    """The table of every experiment that has runs, for each number of epochs."""
    from kernelhead.paper import EXPERIMENTS
    from kernelhead.paper.grid import started
    from kernelhead.paper.recipe import adapted
    from kernelhead.paper.store import Store
    from kernelhead.report.experiment import section
    from kernelhead.report.tables import show, to_csv, to_markdown
    from kernelhead.results import write_bytes

    quick = runs.name == QUICK
    lengths = {int(path.name.split("-")[0]) for path in runs.glob("*/*-epochs") if path.name.split("-")[0].isdigit()}
    for epochs in sorted(lengths):
        store = Store(runs, epochs)
        for experiment in EXPERIMENTS.values():
            protocols = [adapted(protocol, quick) for protocol in experiment.protocols.values()]
            protocols = [protocol for protocol in protocols if started(experiment, store, [protocol])]
            if not protocols:
                continue
            made = section(experiment, store, protocols)
            if quick:
                made = replace(made, table=replace(made.table, notes=[MADE_UP, *made.table.notes]))
            files = [out / f"{experiment.name}-{epochs}-epochs{suffix}" for suffix in (".md", ".csv")]
            write_bytes(files[0], to_markdown(made.table).encode())
            write_bytes(files[1], to_csv(made.table).encode())
            if shown in (None, experiment.name):
                show(made.table, console)
                print_plain(f"Written: {', '.join(map(str, files))}")
            yield made
        for sentence in store.broken:
            say(f"left out: {sentence}")


def _synthetic_sections(runs: Path, out: Path, shown: str | None) -> Iterator["Section"]:
    if not (runs / SYNTHETIC_NAME).is_dir():
        return  # what follows imports torch, which takes longer than all other tables
    from kernelhead.paper import synthetic
    from kernelhead.report.figures import synthetic_figures
    from kernelhead.report.page import Section
    from kernelhead.report.tables import show, to_csv, to_markdown
    from kernelhead.results import BrokenResultError, find_results, write_bytes
    from kernelhead.train.checkpoint import BrokenCheckpointError

    for place in sorted(path for path in (runs / synthetic.NAME).glob("*") if path.is_dir()):
        broken: list[str] = []
        results = list(find_results(place, broken))
        for sentence in broken:
            say(f"left out: {sentence}")
        if not results:
            continue
        made = synthetic.table(results)
        if shown in (None, synthetic.NAME):
            show(made, console)
        files = [out / f"{made.name}-{place.name}{suffix}" for suffix in (".md", ".csv", ".html", ".png")]
        write_bytes(files[0], to_markdown(made).encode())
        write_bytes(files[1], to_csv(made).encode())
        try:
            with messages.status(f"drawing figures of {escape(place.name)}"):
                synthetic_figures(place, *files[2:])
        except ModuleNotFoundError as error:
            say(f"no picture: {error.name} is missing; 'pip install kernelhead[plot]' brings it")
        except (OSError, BrokenResultError, BrokenCheckpointError) as error:
            say(f"no figures: {error}")
        if shown in (None, synthetic.NAME):
            print_plain(f"Written: {', '.join(str(path) for path in files if path.exists())}")
        yield Section(made)


def _list_tables(runs: Path, settings: "SyntheticSettings", epochs: int, seeds: int) -> None:
    from kernelhead.paper import EXPERIMENTS, synthetic
    from kernelhead.paper.runner import chosen_recipes
    from kernelhead.paper.store import Store

    listing = RichTable(title=f"{settings.epochs} epochs for synthetic, {epochs} for the others", title_justify="left")
    for column in ("table", "what", "protocol", "trainings done", "time left, about"):
        listing.add_column(column)
    done, total, left = synthetic.status(runs, settings)
    listing.add_row(synthetic.NAME, synthetic.TITLE, "both", f"{done} of {total}", left)
    store = Store(runs, epochs)
    for experiment in EXPERIMENTS.values():
        recipes = chosen_recipes(experiment, ())
        for protocol in experiment.protocols.values():
            done, total = store.count(recipes, protocol, range(seeds))
            seconds = store.seconds_left(recipes, protocol, range(seeds))
            left = "none measured yet" if seconds is None else str(timedelta(seconds=round(seconds)))
            title = experiment.title if protocol.name == "paper" else ""
            name = experiment.name if protocol.name == "paper" else ""
            listing.add_row(name, title, protocol.name, f"{done} of {total}", left if done < total else "none")
    console.print(listing)
    for sentence in store.broken:
        say(f"left out: {sentence}")
