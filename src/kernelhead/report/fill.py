"""Tables in documents, brought up to date."""

import re
from collections.abc import Mapping

from kernelhead.paper.table import Table
from kernelhead.report.tables import to_markdown

MARKER = re.compile(r"<!-- /?[\w-]+ -->")
PLACE = re.compile(r"<!-- (?P<name>[\w-]+) -->\n(?P<old>.*?)<!-- /(?P=name) -->", re.DOTALL)


def fill_tables(document: str, tables: Mapping[str, Table]) -> str:
    """The Markdown text with each table between <!-- NAME --> and <!-- /NAME --> as it is now, heading left out."""

    def fill(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; the results give {', '.join(sorted(tables))}")
        return f"<!-- {name} -->\n{to_markdown(tables[name]).split(chr(10), 2)[2]}<!-- /{name} -->"

    filled, places = PLACE.subn(fill, document)
    alone = MARKER.search(PLACE.sub("", document))
    if alone:
        raise ValueError(
            f"{alone[0]} stands alone: a table goes between <!-- NAME --> and <!-- /NAME -->, in lines of their own"
        )
    if not places:
        raise ValueError("it has no place for a table, <!-- NAME --> and <!-- /NAME --> in lines of their own")
    return filled
