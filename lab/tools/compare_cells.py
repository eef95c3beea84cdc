"""Compare every cell of every table with a snapshot: `python lab/tools/compare_cells.py [--runs lab/results]`.

The snapshot, cells-format1.json.gz, holds the tables of the results as they were in format 1, and the figures behind
them. Tables that came later are not compared. Labels are compared through keys-format1.json (folders of results) and
LABELS. Numbers in notes are compared too.
Exit status 1, with the cells that differ, unless all are equal.
"""

import argparse
import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kernelhead_lab.report.collect import collect
from kernelhead_lab.tables import EXPERIMENTS
from kernelhead_lab.tables.store import Store

HERE = Path(__file__).parent
FIGURES = ("accuracy", "top5", "nll", "ece", "seconds", "at_once", "parameters", "images")
LABELS = {
    "softmax": "linear",
    "linear kernel": "cosine kernel",
    "linear kernel, pooled feature": "cosine kernel, pooled feature",
    "expansion, places normalised": "expansion, positions normalised",
    "expansion, places normalised, standardised": "expansion, positions normalised, standardised",
    "expansion, places normalised, standardised, 2048": "expansion, positions normalised, standardised, 2048",
    "expansion, places normalised, standardised, 2048, dropout": (
        "expansion, positions normalised, standardised, 2048, dropout"
    ),
    **{f"sum of prototypes over places {n}": f"sum of prototypes over positions {n}" for n in (1, 2, 4, 8)},
    "seconds a run": "seconds per run",
    "Kernel, 5 prototypes a class": "Kernel, 5 prototypes per class",
}
KEPT = {"activations": ["softmax"]}  # there it names coefficients


def renamed(label: str, keys: dict[str, str], table: str) -> str:
    """Return what a label of the snapshot is called today."""
    if label in KEPT.get(table.partition("-")[0], []):
        return label
    data, comma, key = label.rpartition(", ")
    return LABELS.get(label, f"{data}{comma}{keys[key]}" if key in keys else label)


def values(runs: Path) -> dict[str, Any]:
    """Return the figures behind every cell, by experiment, epochs, protocol, row and column."""
    found: dict[str, Any] = {}
    for epochs in sorted({int(path.name.split("-")[0]) for path in runs.glob("*/*-epochs")}):
        store = Store(runs, epochs)
        for experiment in EXPERIMENTS.values():
            for protocol in experiment.protocols.values():
                for cell in experiment.cells:
                    results = store.results(cell, protocol)
                    name = f"{experiment.name} | {epochs} | {protocol.name} | {cell.row} | {cell.column}"
                    if results:
                        seeds = {str(seed): _figures(result) for seed, result in results.items()}
                        found[name] = {"choice": list(store.choice(cell, protocol) or ()), **seeds}
    return found


def _figures(result: Any) -> dict[str, Any]:
    rest = json.dumps([result.alpha, result.curve, result.diverged_at], sort_keys=True)
    digest = hashlib.sha256(rest.encode()).hexdigest()[:16]
    return {**{name: getattr(result, name) for name in FIGURES}, "digest": digest}


def differences(runs: Path) -> Iterator[str]:
    """Yield a sentence for each cell, number or figure that is not as in the snapshot."""
    snapshot = json.loads(gzip.decompress((HERE / "cells-format1.json.gz").read_bytes()))
    keys = json.loads((HERE / "keys-format1.json").read_text())
    tables = collect(runs, tuple(EXPERIMENTS)).tables
    if not set(snapshot["tables"]) <= set(tables):
        yield f"tables are missing: {sorted(set(snapshot['tables']) - set(tables))}"
    for name, table in tables.items():
        before = snapshot["tables"].get(name)
        if before is None:
            continue
        old = [before["columns"], *before["rows"]]
        for number, (was, row) in enumerate(zip_longest(old, [table.columns, *table.rows], fillvalue=[])):
            for column, (cell, now) in enumerate(zip_longest(was, row)):
                expected = cell if cell is None or (number and column > 1) else renamed(cell, keys, name)
                if now != expected:
                    yield f"{name}, row {number}, column {column}: {expected!r} before, {now!r} now"
        numbers = [re.findall(r"\d+(?:[.,]\d+)*", " ".join(notes)) for notes in (before["notes"], table.notes)]
        if numbers[0] != numbers[1]:
            yield f"{name}: other numbers in its notes: {numbers[0]} before, {numbers[1]} now"
    behind, today = snapshot["values"], values(runs)
    for name, figures in behind.items():
        *place, row, column = name.split(" | ")
        new = " | ".join([*place, renamed(row, keys, place[0]), column])
        if today.pop(new, None) != figures:
            yield f"other figures behind {name}"
    known = {name.partition(" | ")[0] for name in behind}
    added = [name for name in today if name.partition(" | ")[0] in known]
    yield from (f"figures that were not there before: {name}" for name in added)
    print(f"{len(tables)} tables and the figures of {len(behind)} cells compared")


def main() -> int:
    """Print what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=HERE.parent / "results")
    found = list(differences(parser.parse_args().runs))
    print("\n".join(found) or "all equal")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
