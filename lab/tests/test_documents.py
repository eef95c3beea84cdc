"""Generated parts of documents, against what the results give now."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernelhead_lab.report.collect import collect
from kernelhead_lab.report.fill import BLOCK, fill_tables
from kernelhead_lab.report.text import to_csv, to_markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "lab" / "docs").glob("*.md"))]
TOOLS = ROOT / "lab" / "tools"


@pytest.fixture(scope="module")
def report():
    return collect(RESULTS)


def test_every_result_can_be_read(report):
    assert not report.warnings


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_in_documents_are_what_the_results_give(report, path):
    text = path.read_text()
    assert fill_tables(text, report.tables) == text, "run: make tables"


def test_some_documents_have_tables():
    assert sum(len(BLOCK.findall(path.read_text())) for path in DOCUMENTS) >= 10


def test_written_tables_are_what_the_results_give(report):
    folder = RESULTS / "report"
    for name, table in report.tables.items():
        assert (folder / f"{name}.md").read_text() == to_markdown(table), "run: make tables"
        assert (folder / f"{name}.csv").read_text() == to_csv(table), "run: make tables"
    assert {path.stem for path in folder.glob("*.md")} == set(report.tables)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    for link in re.findall(r"\]\(([^)#h][^)#]*)", path.read_text()):
        assert (path.parent / link).exists(), link


@pytest.mark.slow
def test_all_cells_are_as_in_format_1_and_a_change_is_seen(tmp_path):
    command = [sys.executable, str(TOOLS / "compare_cells.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all equal")
    snapshot = json.loads(gzip.decompress((TOOLS / "cells-format1.json.gz").read_bytes()))
    assert sum(len(row) for table in snapshot["tables"].values() for row in table["rows"]) > 10_000

    runs = tmp_path / "results"
    for path in RESULTS.glob("*/*/*/*.json"):
        (runs / path.relative_to(RESULTS)).parent.mkdir(parents=True, exist_ok=True)
        (runs / path.relative_to(RESULTS)).write_bytes(path.read_bytes())
    changed = runs / "cifar100" / "200-epochs" / "resnet20-cosine" / "lr1-wd0.0001-seed0.json"
    result = json.loads(changed.read_text())
    changed.write_text(json.dumps({**result, "accuracy": result["accuracy"] + 0.01}))
    done = subprocess.run([*command, "--runs", str(runs)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "other figures behind cifar100 | 200 | paper | ResNet-20 | LIN" in done.stdout
