"""What the documents say must be what the result files say."""

import json
from pathlib import Path

import pytest

from kernelhead.paper import synthetic
from kernelhead.report.tables import to_markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_shows_the_synthetic_table():
    paths = sorted((ROOT / "results" / "synthetic").rglob("*.json"))
    table = to_markdown(synthetic.table([json.loads(path.read_text()) for path in paths]))
    body = table.split("\n", 2)[2].strip()
    assert len(paths) == 90
    assert body in README


def test_readme_shows_the_measured_ratios():
    rows = json.loads((ROOT / "results" / "bench" / "head.json").read_text())["rows"]
    for row in rows:
        times = row["milliseconds"]
        ours = times.get("kernel", times.get("landmarks, rkhs pooling"))
        shape = " x ".join(map(str, row["shape"]))
        (line,) = [line for line in README.splitlines() if f" {shape}, {row['classes']} classes" in line]
        assert f"| {ours:.2f} ms |" in line
        assert f"| {ours / times[row['peer']]:.2f} |" in line


@pytest.mark.parametrize("name", ["README.md", "docs/synthetic.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    document = ROOT / name
    targets = [part.split(")")[0] for part in document.read_text().split("](")[1:]]
    for target in targets:
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_study_of_starts_is_quoted_as_measured():
    text = (ROOT / "docs" / "synthetic.md").read_text()
    for row in json.loads((ROOT / "results" / "bench" / "synthetic_starts.json").read_text())["rows"]:
        cells = f"{row['mean_over_starts']:.2f} | {row['best_training_loss']:.2f} | {row['at_zero_percent']:.0f} % |"
        assert cells in text
