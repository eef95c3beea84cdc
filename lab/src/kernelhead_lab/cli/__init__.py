"""The command line of the laboratory."""

from kernelhead.cli._console import run_app
from kernelhead_lab.cli import report, reproduce  # noqa: F401  (each adds its verb)
from kernelhead_lab.cli._app import app


def main() -> None:
    """Entry point of `kernelhead-lab`."""
    run_app(app, "kernelhead-lab")
