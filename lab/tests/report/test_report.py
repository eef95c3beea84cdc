"""Tables as text."""

import csv
import io

from rich.console import Console

from kernelhead.tables import Table, show
from kernelhead_lab.report.text import to_csv, to_markdown

TABLE = Table("t", "A title", ["Method", "a, b"], [["Kernel", "1.00 ± 0.50"], ["Linear", "not run"]], ["A note."])


def test_markdown():
    assert to_markdown(TABLE).splitlines() == [
        "## A title",
        "",
        "| Method | a, b |",
        "|---|--:|",
        "| Kernel | 1.00 ± 0.50 |",
        "| Linear | not run |",
        "",
        "A note.  ",
    ]


def test_csv_reads_back():
    assert list(csv.reader(io.StringIO(to_csv(TABLE)))) == [TABLE.columns, *TABLE.rows]


def test_terminal_shows_every_cell():
    console = Console(file=io.StringIO(), width=100)
    show(TABLE, console)
    text = console.file.getvalue()
    for cell in ["A title", *TABLE.columns, *TABLE.rows[0], *TABLE.rows[1], "A note."]:
        assert cell in text
