"""The command line: one thin function a verb."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from kernelhead._version import __version__

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.paper.synthetic import Progress as ReportProgress
    from kernelhead.paper.synthetic import Settings

app = typer.Typer(
    name="kernelhead",
    help="Classification layers that learn their own kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(width=None if sys.stdout.isatty() else max(Console().width, 120))
messages = Console(stderr=True)

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of the result files.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kernelhead {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table of the paper, or 'list' to see them.")],
    runs: RunsOption = Path("runs"),
    protocol: Annotated[str, typer.Option(help="paper, tuned or both.")] = "both",
    epochs: Annotated[int | None, typer.Option(min=1, max=100_000, help="Epochs of a training. [default: 30]")] = None,
    draws: Annotated[int | None, typer.Option(min=1, max=1000, help="Draws of the centers. [default: 10]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small data, 2 draws, 4 epochs: does it run at all?")] = False,
) -> None:
    """Run what is missing of a table of the paper, then show it beside the paper's."""
    from kernelhead.paper import synthetic

    if quick and (epochs or draws):
        raise ValueError("--quick has its own epochs and draws: leave out --epochs and --draws, or --quick")
    usual = synthetic.QUICK if quick else synthetic.Settings()
    settings = replace(usual, epochs=epochs or usual.epochs, draws=draws or usual.draws)
    if table == "list":
        _list_tables(runs, settings)
        return
    if table != synthetic.NAME:
        raise ValueError(f"unknown table {table!r}; choose one of {synthetic.NAME}, or 'list' to see them")
    if protocol not in (*synthetic.PROTOCOLS, "both"):
        raise ValueError(f"unknown protocol {protocol!r}; choose one of {', '.join(synthetic.PROTOCOLS)}, both")
    protocols = synthetic.PROTOCOLS if protocol == "both" else (protocol,)
    with _progress() as progress:
        synthetic.run(runs, protocols, settings, progress)
    _report(runs, runs / "report")


@app.command()
def report(
    runs: RunsOption = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Where tables and figures go. [default: RUNS/report]")] = None,
) -> None:
    """Make the tables and figures again from the result files. Never trains."""
    _report(runs, out or runs / "report")


def _report(runs: Path, out: Path) -> None:
    from kernelhead.paper import synthetic
    from kernelhead.report.figures import synthetic_figures
    from kernelhead.report.tables import show, to_csv, to_markdown
    from kernelhead.results import BrokenResultError, find_results, write_bytes
    from kernelhead.train.checkpoint import BrokenCheckpointError

    places = sorted(path for path in (runs / synthetic.NAME).glob("*") if path.is_dir())
    if not places:
        raise FileNotFoundError(f"no results in {runs}; 'kernelhead reproduce list' shows what can be run")
    for place in places:
        broken: list[str] = []
        results = list(find_results(place, broken))
        for sentence in broken:
            _say(f"left out: {sentence}")
        if not results:
            continue
        made = synthetic.table(results)
        show(made, console)
        files = [out / f"{made.name}-{place.name}{suffix}" for suffix in (".md", ".csv", ".html", ".png")]
        write_bytes(files[0], to_markdown(made).encode())
        write_bytes(files[1], to_csv(made).encode())
        try:
            with messages.status(f"drawing figures of {escape(place.name)}"):
                synthetic_figures(place, *files[2:])
        except ModuleNotFoundError as error:
            _say(f"no picture: {error.name} is missing; 'pip install kernelhead[plot]' brings it")
        except (OSError, BrokenResultError, BrokenCheckpointError) as error:
            _say(f"no figures: {error}")
        written = ", ".join(str(path) for path in files if path.exists())
        console.print(f"Written: {written}", highlight=False, markup=False, soft_wrap=True)


def _say(sentence: str, style: str = "yellow") -> None:
    messages.print(sentence, style=style, highlight=False, markup=False, soft_wrap=True)


def _list_tables(runs: Path, settings: "Settings") -> None:
    from kernelhead.paper import synthetic

    done, total, left = synthetic.status(runs, settings)
    listing = RichTable()
    for column in ("table", "what", "runs done", "time left, about"):
        listing.add_column(column)
    listing.add_row(synthetic.NAME, synthetic.TITLE, f"{done} of {total}", left)
    console.print(listing)


data_app = typer.Typer(help="Data sets: where they are, and getting and checking them.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list() -> None:
    """Show the data sets and whether they are here."""
    from kernelhead.data.cifar import CLASSES, cifar_path

    listing = RichTable()
    for column in ("data set", "classes", "file", "here"):
        listing.add_column(column)
    for name, classes in CLASSES.items():
        path = cifar_path(name)
        size = f"{path.stat().st_size / 2**20:.0f} MiB" if path.exists() else "no"
        listing.add_row(name, str(classes), str(path), size)
    console.print(listing)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")]) -> None:
    """Download a data set from its official source, check it, and keep it in the fast local form."""
    from kernelhead.data.cifar import cifar_path, download_cifar

    path = cifar_path(name)
    if path.exists():
        console.print(f"{path} is already here", highlight=False, markup=False, soft_wrap=True)
        return
    console.print(f"made {download_cifar(name)}", highlight=False, markup=False, soft_wrap=True)


@data_app.command("verify")
def data_verify(name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")]) -> None:
    """Check that a data set is complete and unharmed."""
    from kernelhead.data.cifar import cifar_path, problems, read_cifar

    path = cifar_path(name)
    found = problems(read_cifar(name, path))
    if found:
        raise ValueError(f"{path} is not the official {name}: {'; '.join(found)}")
    console.print(f"{path} is complete and unharmed", highlight=False, markup=False, soft_wrap=True)


@data_app.command("pack")
def data_pack(
    folder: Annotated[Path, typer.Argument(help="A folder of class folders of images.")],
    out: Annotated[Path, typer.Option(help="The file to make.")],
    short_side: Annotated[int, typer.Option(min=1, help="Larger images are made smaller, to this short side.")] = 256,
) -> None:
    """Pack a folder of pictures into one file that is fast to read."""
    from kernelhead.data.packed import find_images, pack

    sources, classes = find_images(folder)
    with _progress() as progress:
        packed = pack(
            sources,
            classes,
            out,
            short_side=short_side,
            progress=lambda done, n: progress(f"packing {folder}", done, n),
        )
    for path in packed.left_out:
        _say(f"left out, since it cannot be read: {path}")
    text = f"{out}: {len(packed)} images of {len(classes)} classes, {len(packed.left_out)} left out"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator["ReportProgress"]:
    """A bar that is always about what is going on now."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=messages, transient=not messages.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def report_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)  # type: ignore[arg-type]

        try:
            yield report_progress
        except KeyboardInterrupt:
            bars.stop()
            messages.print(
                "interrupted; what was done is kept, and the same command goes on from there", style="yellow"
            )
            raise typer.Exit(130) from None


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point. An error is one sentence; `--debug`, anywhere, shows where it came from."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    signal.signal(signal.SIGTERM, _stop)
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    try:
        app(arguments, prog_name="kernelhead")
    except BrokenPipeError:  # the reader of our output, say `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        _say(f"error: {error}", style="red")
        sys.exit(1)
