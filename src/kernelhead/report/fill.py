"""Tables in documents, brought up to date."""

import re
from collections.abc import Mapping

from kernelhead.paper.table import Table
from kernelhead.report.tables import to_markdown

NAME = r"[\w-]+-epochs[\w-]*"  # other comments are none of ours
MARKER = re.compile(rf"<!-- /?{NAME} -->")
PLACE = re.compile(rf"<!-- (?P<name>{NAME}) -->(?P<end>\r?\n)(?P<old>.*?)<!-- /(?P=name) -->", re.DOTALL)


def fill_tables(document: str, tables: Mapping[str, Table]) -> str:
    """The Markdown text with each table between <!-- NAME --> and <!-- /NAME --> as it is now, heading left out."""

    def fill(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; the results give {', '.join(sorted(tables))}")
        inside = MARKER.search(place["old"])
        if inside:
            raise ValueError(f"{inside[0]} stands between <!-- {name} --> and its end: is <!-- /{name} --> missing?")
        table = to_markdown(tables[name]).split("\n", 2)[2].replace("\n", place["end"])
        return f"<!-- {name} -->{place['end']}{table}<!-- /{name} -->"

    filled, places = PLACE.subn(fill, document)
    alone = MARKER.search(PLACE.sub("", document))
    if alone:
        raise ValueError(
            f"{alone[0]} stands alone: a table goes between <!-- NAME --> and <!-- /NAME -->, in lines of their own"
        )
    if not places:
        raise ValueError("it has no place for a table, <!-- NAME --> and <!-- /NAME --> in lines of their own")
    return filled
