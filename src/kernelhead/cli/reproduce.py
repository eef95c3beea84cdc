"""`kernelhead reproduce | report`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from kernelhead.cli._console import app, console, messages, print_plain, say
from kernelhead.cli._progress import steps_bar

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.paper.synthetic import Settings

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of the result files.")]


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
    with steps_bar() as progress:
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
            say(f"left out: {sentence}")
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
            say(f"no picture: {error.name} is missing; 'pip install kernelhead[plot]' brings it")
        except (OSError, BrokenResultError, BrokenCheckpointError) as error:
            say(f"no figures: {error}")
        written = ", ".join(str(path) for path in files if path.exists())
        print_plain(f"Written: {written}")


def _list_tables(runs: Path, settings: "Settings") -> None:
    from kernelhead.paper import synthetic

    done, total, left = synthetic.status(runs, settings)
    listing = RichTable()
    for column in ("table", "what", "runs done", "time left, about"):
        listing.add_column(column)
    listing.add_row(synthetic.NAME, synthetic.TITLE, f"{done} of {total}", left)
    console.print(listing)
