"""The application that the laboratory's verbs join."""

from kernelhead.cli._console import make_app
from kernelhead_lab._version import __version__

app = make_app("kernelhead-lab", "The laboratory of kernelhead: every table of the paper, measured.", __version__)
