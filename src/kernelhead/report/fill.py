"""Tables in documents, brought up to date."""

import re
from collections.abc import Mapping

from kernelhead.paper.table import Table
from kernelhead.report.tables import to_markdown

PLACE = re.compile(r"<!-- (?P<name>[\w-]+) -->\n(?P<old>.*?)<!-- /(?P=name) -->", re.DOTALL)


def fill_tables(document: str, tables: Mapping[str, Table]) -> str:
    """The Markdown text with each table between <!-- NAME --> and <!-- /NAME --> as it is now, heading left out."""

    def fill(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; the results give {', '.join(sorted(tables))}")
        return f"<!-- {name} -->\n{to_markdown(tables[name]).split(chr(10), 2)[2]}<!-- /{name} -->"

    return PLACE.sub(fill, document)
