"""A table for the terminal, as Markdown and as CSV."""

import csv
import io

from rich.console import Console
from rich.table import Table as RichTable

from kernelhead.paper.table import Table


def to_markdown(table: Table) -> str:
    """A Markdown section: heading, table, notes."""
    lines = [f"## {table.title}", "", "| " + " | ".join(table.columns) + " |"]
    lines.append("|" + "---|" + "--:|" * (len(table.columns) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    lines += ["", *(f"{note}  " for note in table.notes)]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """The cells alone."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([table.columns, *table.rows])
    return text.getvalue()


def show(table: Table, console: Console) -> None:
    """Print a table and its notes."""
    rich_table = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        rich_table.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        rich_table.add_row(*row)
    console.print(rich_table)
    for note in table.notes:
        console.print(note, style="dim", soft_wrap=False, highlight=False)
