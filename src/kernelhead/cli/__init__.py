"""The command line: one thin function per verb."""

import os
import sys

from kernelhead.cli import bench, classifier, compare, data, train  # noqa: F401  (each adds its verbs)
from kernelhead.cli._console import app, run_app


def main() -> None:
    """Run `kernelhead`."""
    sys.path.insert(0, os.getcwd())  # for --backbone package.module:function
    run_app(app, "kernelhead")
