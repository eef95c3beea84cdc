"""The report over result files that are written by hand: tables, charts, the page."""

import csv
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from kernelhead.cli import app
from kernelhead.paper import EXPERIMENTS
from kernelhead.paper.store import Store
from kernelhead.report.chart import BarChart
from kernelhead.report.experiment import section
from kernelhead.results import save_result

EPOCHS = 12
KERNEL = [0.0, 0.1, 1.0, 5.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0]
VOID = {"meta", "link", "br", "hr", "img", "input", "circle", "path", "rect", "line", "polyline"}


def write(store, recipe, protocol, seed, accuracy, epochs=EPOCHS):
    result = {
        "experiment": recipe.data,
        "protocol": protocol.name,
        "method": recipe.key,
        "seed": seed,
        "config": {"backbone": recipe.backbone, "head": recipe.head},
        "images": {"train": 9, "test": 9, "left_out": 0},
        "curve": {"loss": [4.0 / (epoch + 1) + seed for epoch in range(epochs)], "accuracy": [50.0] * epochs},
        "seconds": 1.0,
        "accuracy": accuracy,
    }
    if recipe.head == "kernel" and accuracy is not None:
        result["alpha"] = KERNEL
    save_result(store.result_path(recipe, protocol, seed), result)


def fill(root, epochs=EPOCHS, seeds=2, protocols=("paper", "tuned")):
    """Write runs for every cell of every table."""
    store = Store(root, epochs)
    for experiment in EXPERIMENTS.values():
        for number, cell in enumerate(experiment.cells):
            for protocol in protocols:
                for seed in range(seeds):
                    accuracy = 50 + number + 0.5 * seed * (1 + number % 3) + (protocol == "tuned")
                    write(store, cell.recipe, experiment.protocols[protocol], seed, accuracy, epochs)


class Page(HTMLParser):
    """Tags that are closed as they were opened, the cells of each table, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tables, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def report(runs, *options):
    done = CliRunner().invoke(app, ["report", "--runs", str(runs), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    fill(runs)
    return runs, report(runs)


def test_every_table_is_written_with_the_same_cells(reported):
    runs, done = reported
    page = Page((runs / "report" / "report.html").read_text())
    assert len(page.tables) == len(EXPERIMENTS)
    for experiment, shown in zip(EXPERIMENTS.values(), page.tables, strict=True):
        cells = read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs.csv")
        assert cells[0] == ["", "", "paper", "over SM", "paper's protocol", "over SM", "tuned", "over SM"]
        assert [row[:2] for row in cells[1:]] == [[cell.row, cell.column] for cell in experiment.cells]
        assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d \(2\)", row[i]) for row in cells[1:] for i in (4, 6))
        lines = (runs / "report" / f"{experiment.name}-{EPOCHS}-epochs.md").read_text().splitlines()
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        assert {len(row) for row in table} == {8}
        assert table[1] == ["---"] + 7 * ["--:"]
        assert [table[0], *table[2:]] == cells
        assert shown == cells
        assert f"table-{experiment.name}" in page.ids
        assert experiment.title in "".join(page.text)
        assert all(row[4] in done.stdout for row in cells[1:])
    assert len(page.ids) == len(set(page.ids))


def test_a_report_can_be_made_again_and_elsewhere(reported, tmp_path):
    runs, done = reported
    again = report(runs, "--out", str(tmp_path / "elsewhere"))
    assert again.stdout.split("Written")[0] == done.stdout.split("Written")[0]
    for path in (runs / "report").iterdir():
        assert (tmp_path / "elsewhere" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_charts_of_a_table(reported, name):
    runs, _ = reported
    experiment = EXPERIMENTS[name]
    made = section(experiment, Store(runs, EPOCHS), [experiment.protocols["paper"]])
    assert made.table.name == name
    lines = [chart for chart in made.charts if not isinstance(chart, BarChart)]
    curves = [chart for chart in lines if "raining loss" in chart.title]
    kernels = [chart for chart in lines if "earned kernels" in chart.title]
    (bars,) = [chart for chart in made.charts if isinstance(chart, BarChart)]
    if name == "active":
        (over_labels,) = [chart for chart in lines if "over labels" in chart.title]
        assert not curves
        assert [series.label for series in over_labels.series][:2] == ["SM random", "SM random (paper)"]
        assert len(over_labels.series) == 12
        for series in over_labels.series:
            assert list(series.x) == [30, 40, 50, 60, 70, 80, 90]
        ours = next(series for series in over_labels.series if series.label == "Ours margin")
        cells = [cell for cell in experiment.cells if cell.column == "Ours margin"]
        store = Store(runs, EPOCHS)
        means = []
        for cell in cells:
            results = store.results(cell.recipe, experiment.protocols["paper"])
            means.append(sum(result["accuracy"] for result in results.values()) / 2)
        assert list(ours.y) == pytest.approx(means)
    else:
        one_column = name in ("kernels", "activations")
        rows = list(dict.fromkeys(cell.row for cell in experiment.cells))
        assert len(curves) == (1 if one_column else len(rows))
        labels = rows if one_column else list(dict.fromkeys(cell.column for cell in experiment.cells))
        for chart in curves:
            assert [series.label for series in chart.series] == labels
            assert all(list(series.y) == [4.0 / (epoch + 1) for epoch in range(EPOCHS)] for series in chart.series)
    (kernel_chart,) = kernels
    labels = [series.label for series in kernel_chart.series]
    learned = [cell for cell in experiment.cells if cell.recipe.head == "kernel"]
    assert len(set(labels)) == len(labels) == min(8, len(learned))
    assert list(bars.values) == labels
    if name == "active":
        assert labels[0] == "30 %, Ours random"


def test_a_part_that_was_run_is_shown_with_the_rest_not_run(tmp_path):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    write(store, experiment.cells[0].recipe, experiment.protocols["tuned"], 0, 80.0, epochs=3)
    write(store, experiment.cells[4].recipe, experiment.protocols["tuned"], 0, None, epochs=3)
    report(tmp_path)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "cifar10-3-epochs.csv",
        "cifar10-3-epochs.md",
        "report.html",
    ]
    head, *rows = read_csv(tmp_path / "report" / "cifar10-3-epochs.csv")
    assert head[4:] == ["tuned", "over SM"]
    assert [row[4] for row in rows] == ["80.00", "not run", "not run", "not run", "diverged", *25 * ["not run"]]
    page = (tmp_path / "report" / "report.html").read_text()
    assert len(Page(page).tables) == 1
    assert page.count('<td class="muted">') == 29


def test_other_epochs_are_other_tables(tmp_path):
    experiment = EXPERIMENTS["kernels"]
    for epochs, accuracy in ((9, 70.0), (30, 71.0)):
        write(Store(tmp_path, epochs), experiment.cells[2].recipe, experiment.protocols["paper"], 0, accuracy, epochs)
    report(tmp_path)
    page = Page((tmp_path / "report" / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))
    for epochs, accuracy in ((9, "70.00"), (30, "71.00")):
        assert read_csv(tmp_path / "report" / f"kernels-{epochs}-epochs.csv")[3][4] == accuracy
        assert f"last epoch of {epochs};" in "".join(page.text)


def test_many_runs_and_a_damaged_one_among_them(tmp_path):
    fill(tmp_path, epochs=450, seeds=4)
    experiment = EXPERIMENTS["cifar100"]
    damaged = Store(tmp_path, 450).result_path(experiment.cells[7].recipe, experiment.protocols["tuned"], 2)
    damaged.write_text(damaged.read_text()[:-100])
    done = report(tmp_path)
    assert done.stderr.count("left out:") == 1
    assert str(damaged) in done.stderr
    cells = read_csv(tmp_path / "report" / "cifar100-450-epochs.csv")[8]
    assert cells[4].endswith("(4)")
    assert cells[6].endswith("(3)")
    assert len(Page((tmp_path / "report" / "report.html").read_text()).tables) == len(EXPERIMENTS)
