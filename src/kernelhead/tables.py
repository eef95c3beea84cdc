"""A table as plain data, and how it is printed."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Cells are text: what is shown is decided where the numbers are known."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


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
