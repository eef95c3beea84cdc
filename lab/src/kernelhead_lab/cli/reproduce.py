"""`kernelhead-lab reproduce`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as RichTable

from kernelhead.cli._console import console, messages, say
from kernelhead.cli._progress import steps_bar
from kernelhead_lab.cli._app import app
from kernelhead_lab.cli.report import QUICK, RunsOption, write_report

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead_lab.tables.queue import Progress
    from kernelhead_lab.tables.queue import Settings as ImageSettings
    from kernelhead_lab.tables.synthetic import Settings as SyntheticSettings

EPOCHS = 200  # of image experiments, unless told
AT_ONCE = 8  # on a GPU
PROTOCOLS = ("paper", "tuned")
TRANSFER = ("transfer", "transfer-long")  # the tables that begin with trained weights
IMAGES, SYNTHETIC = "Tables on images", "The table 'synthetic'"


@app.command()
def reproduce(
    tables: Annotated[
        list[str],
        typer.Argument(metavar="TABLE", help="Tables to run, trained together, or 'list' to see all tables."),
    ],
    runs: RunsOption = Path("runs"),
    protocol: Annotated[
        str | None, typer.Option(help="paper, tuned or both.", show_default="paper; both for 'synthetic'")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Epochs of a run.", show_default="200; 30 for 'synthetic'")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small made-up data and few epochs, to see whether a table runs.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Runs per cell.", show_default="1", rich_help_panel=IMAGES)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Row or column that every table has, such as ResNet-20; may be repeated.",
            show_default="all",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Runs trained at once.", show_default="8 on a GPU, else 1", rich_help_panel=IMAGES
        ),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.", rich_help_panel=IMAGES)] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Local safetensors file of ImageNet weights, for 'transfer' and 'transfer-long'.",
            show_default="torchvision's weights",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.", rich_help_panel=IMAGES)
    ] = "auto",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|auto",
            help="Train on a Ray cluster, a group of runs per GPU, or per core where it has none.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="Draws of the cluster centers.", show_default="10", rich_help_panel=SYNTHETIC
        ),
    ] = None,
) -> None:
    """Run what is missing of tables, then show them beside the paper's.

    A stopped command goes on where it was. Several processes may share a folder of runs. With --ray, all machines of
    the cluster need to share it.
    """
    from kernelhead_lab.tables import EXPERIMENTS, synthetic

    if quick and (epochs or draws or seeds):
        raise ValueError("--quick has its own epochs, draws and seeds; leave them out, or leave out --quick")
    if protocol not in (None, "both", *PROTOCOLS):
        raise ValueError(f"unknown protocol {protocol!r}; choose one of {', '.join(PROTOCOLS)}, both")
    usual = synthetic.QUICK if quick else synthetic.Settings()
    settings = replace(usual, epochs=epochs or usual.epochs, draws=draws or usual.draws)
    unknown = [name for name in tables if name not in ("list", synthetic.NAME, *EXPERIMENTS)]
    if unknown:
        names = ", ".join([synthetic.NAME, *EXPERIMENTS])
        raise ValueError(f"unknown table {unknown[0]!r}; choose one of {names}, or 'list' to see them")
    tables = list(dict.fromkeys(tables))
    for single in ("list", synthetic.NAME):
        if len(tables) > 1 and single in tables:
            raise ValueError(f"{single!r} goes with no other table, got {' '.join(tables)}; ask for it alone")
    table, place = tables[0], runs / QUICK if quick else runs
    alone = {"--only": only, "--at-once": at_once, "--weights": weights, "--ray": ray}
    if table == "list":
        _refuse(table, {"--protocol": protocol, **alone})
        _list_tables(place, settings, epochs or EPOCHS, seeds or 1)
        return
    if table == synthetic.NAME:
        _refuse(table, {"--seeds": seeds, **alone})
        with steps_bar() as progress:
            synthetic.run(place, PROTOCOLS if protocol in (None, "both") else (protocol,), settings, _told(progress))
        write_report(place, place / "report", (table,))
        return
    _refuse(table, {"--draws": draws})
    if weights is not None and not set(TRANSFER).intersection(tables):
        raise ValueError(f"--weights is for {' and '.join(map(repr, TRANSFER))}, got {' '.join(tables)}; leave it out")
    if weights is not None and not Path(weights).is_file():
        raise FileNotFoundError(f"there is no weights file {weights}; give a safetensors file")

    from kernelhead_lab.tables.queue import Settings

    chosen = _device(device)
    image_settings = Settings(
        epochs=1 if quick else epochs or EPOCHS,
        seeds=seeds or 1,
        protocols=PROTOCOLS if protocol == "both" else (protocol or "paper",),
        only=tuple(only or ()),
        at_once=at_once or (AT_ONCE if chosen.startswith("cuda") else 1),
        compiled=compile,
        quick=quick,
        weights=weights,
        device=chosen,
    )
    _run_images(tables, place, image_settings, ray, at_once)


def _device(name: str) -> str:
    """Return the device that is meant; `auto` is the GPU where there is one."""
    import torch

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    kind, _, number = chosen.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ValueError(f"unknown device {name!r}; choose auto, cpu, cuda, or one GPU such as cuda:1")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(number or 0) >= count:
        raise ValueError(f"there is no device {chosen}, only {count} GPUs; choose --device cpu or another GPU")
    if kind == "cuda":
        torch.cuda.set_device(int(number or 0))
    return chosen


def _told(show: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Where there is no terminal for bars, print a line for each thing that begins."""
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
            raise ValueError(f"{owner} has no {name}; leave it out")


def _run_images(tables: list[str], runs: Path, settings: "ImageSettings", ray: str | None, at_once: int | None) -> None:
    from kernelhead_lab.tables import EXPERIMENTS, on_ray, runner

    experiments = [EXPERIMENTS[table] for table in tables]
    with _run_bars() as progress:
        if ray is None:
            runner.run(experiments, runs, settings, progress)
        else:
            on_ray.run(experiments, runs.resolve(), settings, progress, ray, at_once or AT_ONCE)
    write_report(runs, runs / "report", tuple(tables))


@contextmanager
def _run_bars() -> Iterator[Callable[["Progress"], None]]:
    """A bar of runs done, and one of the steps of those that go on."""
    with steps_bar() as steps:
        last = ""

        def show(now: "Progress") -> None:
            nonlocal last
            steps("runs", now.done, now.total)
            if now.moment is None:
                last = now.what
                if now.waits or not messages.is_terminal:
                    say(f"{now.done} of {now.total} runs done; {now.what}", style="")
            else:
                steps(last, now.moment.step, now.moment.steps)

        yield show


def _list_tables(runs: Path, settings: "SyntheticSettings", epochs: int, seeds: int) -> None:
    from kernelhead_lab.tables import EXPERIMENTS, synthetic
    from kernelhead_lab.tables.queue import chosen_cells
    from kernelhead_lab.tables.store import Store

    listing = RichTable(title=f"{settings.epochs} epochs for synthetic, {epochs} for the others", title_justify="left")
    for column in ("table", "what", "protocol", "runs done", "time left, about"):
        listing.add_column(column)
    done, total, left = synthetic.status(runs, settings)
    listing.add_row(synthetic.NAME, synthetic.TITLE, "both", f"{done} of {total}", left)
    store = Store(runs, epochs)
    for experiment in EXPERIMENTS.values():
        cells = chosen_cells(experiment, ())
        for index, protocol in enumerate(experiment.protocols.values()):
            done, total = store.count(((cell, protocol) for cell in cells), range(seeds))
            seconds = store.seconds_left(cells, protocol, range(seeds))
            left = "none measured yet" if seconds is None else str(timedelta(seconds=round(seconds)))
            name, title = ("", "") if index else (experiment.name, experiment.title)
            listing.add_row(name, title, protocol.name, f"{done} of {total}", left if done < total else "none")
    console.print(listing)
    for sentence in store.broken:
        say(f"left out: {sentence}")
