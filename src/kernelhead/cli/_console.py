"""The application that every verb joins. It prints results to stdout and all else to stderr."""

import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kernelhead._version import __version__

console = Console(width=None if sys.stdout.isatty() else max(Console().width, 120))
messages = Console(stderr=True)
# Control characters, marks that change the direction of writing, and halves of characters.
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST_ERROR = 290  # characters


def printable(text: str) -> str:
    """Write out what a terminal would obey, such as escape sequences in the names of files and classes."""
    return COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(sentence: str, style: str = "yellow") -> None:
    """Print a sentence to stderr, without markup."""
    messages.print(printable(sentence), style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_plain(sentence: str) -> None:
    """Print a sentence to stdout, without markup."""
    console.print(printable(sentence), highlight=False, markup=False, emoji=False, soft_wrap=True)


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be made, before any work whose results would go there."""
    there = next((each for each in (out, *out.parents) if each.exists()), None)
    if there is not None and not there.is_dir():
        raise NotADirectoryError(f"--out takes a folder, and {there} is a file; choose another")


def sentence_of(error: Exception) -> str:
    """Return what an error says as one sentence that names the file, or the tensor that had no room."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        size = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ \w?i?B)", text)
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = [f" in {type(each).__name__}" for each in owners if hasattr(each, "named_parameters")]
        tensor = f" for a tensor of {size[2] or f'{int(size[1]) / 1e9:,.1f} GB'}" if size else ""
        tensor += modules[-1] if modules else ""
        text = f"there is no memory left{tensor}; lower the batch size, the image size or the head's points"
        text = f"{error}; give smaller data" if "array with shape" in str(error) else text  # NumPy says which
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'the output'} cannot be used: {error.strerror}"
    elif isinstance(error, LookupError | AssertionError) or not text:
        text = f"{f'unexpected {type(error).__name__} {text}'.strip()}; please report it, with what --debug shows"
    text = printable(text)
    if len(text) > LONGEST_ERROR:
        half = LONGEST_ERROR // 2 - 2
        text = f"{text[:half]} .. {text[-half:]}"
    return text


@contextmanager
def about(file: Path | None) -> Iterator[None]:
    """Let errors name the file that they come from."""
    try:
        yield
    except Exception as error:
        if file is None or str(file) in str(error):
            raise
        raise ValueError(f"{file}: {sentence_of(error)}") from error


def make_app(name: str, help: str, version: str) -> typer.Typer:
    """Make an application with the options that all of its verbs share."""
    made = typer.Typer(
        name=name,
        help=help,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"{name} {version}")
            raise typer.Exit

    @made.callback()
    def _shared(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
        ] = False,
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
        ] = False,
    ) -> None:
        pass

    return made


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line. An error is one sentence; `--debug` shows its traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    try:
        app(arguments, prog_name=name)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(f"error: {sentence_of(error)}", style="red")
        sys.exit(1)


app = make_app("kernelhead", "Classification heads that learn their own kernel.", __version__)
