"""`kernelhead reproduce`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as RichTable

from kernelhead.cli._console import app, console, messages, say
from kernelhead.cli._progress import steps_bar
from kernelhead.cli.report import QUICK, RunsOption, write_report

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.paper.runner import Progress
    from kernelhead.paper.runner import Settings as ImageSettings
    from kernelhead.paper.synthetic import Settings as SyntheticSettings

EPOCHS = 200  # of image experiments, unless told
AT_ONCE = 8  # on a GPU
PROTOCOLS = ("paper", "tuned")
TRANSFER = "transfer"  # the table that begins with trained weights
IMAGES, SYNTHETIC = "Tables on images", "The table 'synthetic'"


@app.command()
def reproduce(
    tables: Annotated[
        list[str],
        typer.Argument(metavar="TABLE", help="Tables of the paper, trained together, or 'list' to see them."),
    ],
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
        typer.Option(
            help="A row or column that each table has, such as ResNet-20; may be repeated.", rich_help_panel=IMAGES
        ),
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
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.", rich_help_panel=IMAGES)
    ] = "auto",
    draws: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Draws of the centers. [10]", rich_help_panel=SYNTHETIC)
    ] = None,
) -> None:
    """Run what is missing of tables of the paper, then show them beside the paper's."""
    from kernelhead.paper import EXPERIMENTS, synthetic

    if quick and (epochs or draws or seeds):
        raise ValueError("--quick has its own epochs, draws and seeds: leave them out, or --quick")
    if protocol not in (None, "both", *PROTOCOLS):
        raise ValueError(f"unknown protocol {protocol!r}; choose one of {', '.join(PROTOCOLS)}, both")
    usual = synthetic.QUICK if quick else synthetic.Settings()
    settings = replace(usual, epochs=epochs or usual.epochs, draws=draws or usual.draws)
    unknown = [name for name in tables if name not in ("list", synthetic.NAME, *EXPERIMENTS)]
    if unknown:
        names = ", ".join([synthetic.NAME, *EXPERIMENTS])
        raise ValueError(f"unknown table {unknown[0]!r}; choose one of {names}, or 'list' to see them")
    tables = list(dict.fromkeys(tables))
    for alone in ("list", synthetic.NAME):
        if len(tables) > 1 and alone in tables:
            raise ValueError(f"{alone!r} goes with no other table: ask for it alone")
    table = tables[0]
    if table == "list":
        _refuse(table, {"--only": only, "--protocol": protocol, "--at-once": at_once, "--weights": weights})
        _list_tables(runs / QUICK if quick else runs, settings, epochs or EPOCHS, seeds or 1)
        return
    if table == synthetic.NAME:
        _refuse(table, {"--seeds": seeds, "--only": only, "--at-once": at_once, "--weights": weights})
        place = runs / QUICK if quick else runs
        with steps_bar() as progress:
            synthetic.run(place, PROTOCOLS if protocol in (None, "both") else (protocol,), settings, _told(progress))
        write_report(place, place / "report", (table,))
        return
    _refuse(table, {"--draws": draws})
    if weights is not None and TRANSFER not in tables:
        raise ValueError(f"--weights is for the table {TRANSFER!r} alone: leave it out")
    if weights is not None and not Path(weights).is_file():
        raise FileNotFoundError(f"there is no file {weights} of weights")

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
    _run_images(tables, runs / QUICK if quick else runs, image_settings)


def _told(show: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Where there is no terminal for bars, a line for each thing that begins."""
    begun: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in begun and not messages.is_terminal:
            say(what, style="")
        begun.add(what)
        show(what, done, total)

    return tell


def _refuse(table: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        if value:
            owner = "the list" if table == "list" else f"the table {table!r}"
            raise ValueError(f"{owner} has no {name}: leave it out")


def _run_images(tables: list[str], runs: Path, settings: "ImageSettings") -> None:
    from kernelhead.paper import EXPERIMENTS, runner

    with _job_bars() as progress:
        runner.run([EXPERIMENTS[table] for table in tables], runs, settings, progress)
    write_report(runs, runs / "report", tuple(tables))


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
                if now.waits or not messages.is_terminal:
                    say(f"{now.done} of {now.total} trainings done; {now.what}", style="")
            else:
                steps(last, now.moment.step, now.moment.steps)

        yield show


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
            done, total = store.count(((recipe, protocol) for recipe in recipes), range(seeds))
            seconds = store.seconds_left(recipes, protocol, range(seeds))
            left = "none measured yet" if seconds is None else str(timedelta(seconds=round(seconds)))
            title = experiment.title if protocol.name == "paper" else ""
            name = experiment.name if protocol.name == "paper" else ""
            listing.add_row(name, title, protocol.name, f"{done} of {total}", left if done < total else "none")
    console.print(listing)
    for sentence in store.broken:
        say(f"left out: {sentence}")
