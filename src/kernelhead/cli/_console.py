"""The application that every verb joins, and where it prints: results to stdout, everything else to stderr."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kernelhead._version import __version__

app = typer.Typer(
    name="kernelhead",
    help="Classification layers that learn their own kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(width=None if sys.stdout.isatty() else max(Console().width, 120))
messages = Console(stderr=True)


def say(sentence: str, style: str = "yellow") -> None:
    """A sentence beside the results, as it is."""
    messages.print(sentence, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_plain(sentence: str) -> None:
    """A sentence among the results, as it is."""
    console.print(sentence, highlight=False, markup=False, emoji=False, soft_wrap=True)


def check_folder(out: Path) -> None:
    """That a folder is or can be made there, before any work whose results would go there."""
    there = next((each for each in (out, *out.parents) if each.exists()), None)
    if there is not None and not there.is_dir():
        raise NotADirectoryError(f"--out {out}: a folder is expected, and {there} is a file")


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
