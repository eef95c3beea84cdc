"""Tables in documents, made again. A document without any stays as it is."""

import re
from collections.abc import Mapping

from kernelhead.tables import Table
from kernelhead_lab.report.text import to_markdown

NAME = r"(?:claims|claims-short|heads|epochs|epochs-tuned|[\w-]+-epochs[\w-]*)"  # other comments are none of ours
MARKER = re.compile(rf"<!-- /?{NAME} -->")
BLOCK = re.compile(rf"<!-- (?P<name>{NAME}) -->(?P<end>\r?\n)(?P<old>.*?)<!-- /(?P=name) -->", re.DOTALL)


def fill_tables(document: str, tables: Mapping[str, Table]) -> str:
    """Return Markdown with each table between <!-- NAME --> and <!-- /NAME --> as it is now, without its heading."""

    def fill(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; the results give {', '.join(sorted(tables))}")
        inside = MARKER.search(block["old"])
        if inside:
            raise ValueError(f"{inside[0]} stands between <!-- {name} --> and its end: is <!-- /{name} --> missing?")
        table = to_markdown(tables[name]).split("\n", 2)[2].replace("\n", block["end"])
        return f"<!-- {name} -->{block['end']}{table}<!-- /{name} -->"

    filled = BLOCK.sub(fill, document)
    alone = MARKER.search(BLOCK.sub("", document))
    if alone:
        raise ValueError(
            f"{alone[0]} stands alone: a table goes between <!-- NAME --> and <!-- /NAME -->, in lines of their own"
        )
    return filled
