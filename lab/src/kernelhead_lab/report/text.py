"""Tables as Markdown and as CSV."""

import csv
import io

from kernelhead.tables import Table


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
