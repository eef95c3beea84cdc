"""The command line: one thin function a verb."""

import os
import signal
import sys
import traceback
import warnings
from types import FrameType

from kernelhead.cli import (  # noqa: F401  (each adds its verbs)
    bench,
    compare,
    data,
    export,
    inspect,
    report,
    reproduce,
    train,
)
from kernelhead.cli._console import app, say


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point. An error is one sentence; `--debug`, anywhere, shows where it came from."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    signal.signal(signal.SIGTERM, _stop)
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    try:
        app(arguments, prog_name="kernelhead")
    except BrokenPipeError:  # the reader of our output, say `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(f"error: {error}", style="red")
        sys.exit(1)
