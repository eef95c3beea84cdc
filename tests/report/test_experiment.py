"""The report over result files that are written by hand: tables, charts, the page."""

import csv
import math
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from kernelhead.cli import app
from kernelhead.cli.report import write_report
from kernelhead.paper import EXPERIMENTS
from kernelhead.paper.beyond import HEADS
from kernelhead.paper.store import Store
from kernelhead.report.chart import BarChart, DotChart
from kernelhead.report.experiment import section

EPOCHS = 12
KERNEL = [0.0, 0.1, 1.0, 5.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0]
VOID = {"meta", "link", "br", "hr", "img", "input", "circle", "path", "rect", "line", "polyline"}


def parameters_of(recipe):
    """Not what they are, but different for every size."""
    sizes = [value for value in recipe.head_options.values() if type(value) is int]
    return 1000 * (1 + sum(sizes))


def kernel_of(recipe):
    """Different for every kernel: a₁ tells the place of its name among all."""
    names = sorted({cell.recipe.key for table in EXPERIMENTS.values() for cell in table.cells})
    return [*KERNEL[:3], KERNEL[3] + names.index(recipe.key), *KERNEL[4:]]


@pytest.fixture(scope="module")
def write(write_runs):
    def write(store, recipe, protocol, seed, accuracy, epochs=EPOCHS):
        loss = [4.0 / (epoch + 1) + seed for epoch in range(epochs)]
        more = {"curve": {"loss": loss, "accuracy": [50.0] * epochs}}
        if recipe.head == "kernel" and accuracy is not None:
            more["alpha"] = kernel_of(recipe)
        more["parameters"] = {"backbone": 1, "head": parameters_of(recipe)}
        write_runs(store, recipe, protocol, {seed: accuracy}, **more)

    return write


@pytest.fixture(scope="module")
def fill(write):
    """Write runs for every cell of every table."""

    def fill(root, epochs=EPOCHS, seeds=2, protocols=("paper", "tuned")):
        store = Store(root, epochs)
        for experiment in EXPERIMENTS.values():
            for number, cell in enumerate(experiment.cells):
                for protocol in protocols:
                    for seed in range(seeds):
                        accuracy = 30 + number / 2 + 0.5 * seed * (1 + number % 3) + (protocol == "tuned")
                        write(store, cell.recipe, experiment.protocols[protocol], seed, accuracy, epochs)

    return fill


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
def reported(tmp_path_factory, fill):
    runs = tmp_path_factory.mktemp("runs")
    fill(runs)
    return runs, report(runs)


def test_every_table_is_written_with_the_same_cells(reported):
    runs, done = reported
    page = Page((runs / "report" / "report.html").read_text())
    assert len(page.tables) == 3 * len(EXPERIMENTS)  # each with its details and choices
    groups = zip(*(page.tables[first::3] for first in range(3)), strict=True)
    for experiment, (shown, more, chosen) in zip(EXPERIMENTS.values(), groups, strict=True):
        assert more == read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-details.csv")
        assert chosen == read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-choices.csv")
        assert len(more) == 1 + 2 * len(experiment.cells)
        for protocol in ("paper", "tuned"):
            head, *rows = read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-{protocol}.csv")
            assert [row[0] for row in rows] == list(dict.fromkeys(cell.row for cell in experiment.cells))
            assert head[1:] == list(dict.fromkeys(cell.column for cell in experiment.cells))
        cells = read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs.csv")
        papers = [] if experiment.name in ("landmarks", "saturation", "mixup") else ["paper", "over SM"]
        assert cells[0] == ["", "", *papers, "paper's protocol", "over SM", "tuned", "over SM"]
        assert [row[:2] for row in cells[1:]] == [[cell.row, cell.column] for cell in experiment.cells]
        assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d \(2\)", row[i]) for row in cells[1:] for i in (-4, -2))
        lines = (runs / "report" / f"{experiment.name}-{EPOCHS}-epochs.md").read_text().splitlines()
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        assert {len(row) for row in table} == {len(cells[0])}
        assert table[1] == ["---"] + (len(cells[0]) - 1) * ["--:"]
        assert [table[0], *table[2:]] == cells
        assert shown == cells
        assert f"table-{experiment.name}" in page.ids
        assert experiment.title in "".join(page.text)
        assert all(row[-4] in done.stdout for row in cells[1:])
    assert len(page.ids) == len(set(page.ids))


def test_a_table_that_has_the_runs_of_another_alone_is_left_out_unless_asked_for(tmp_path, write, capsys):
    ours, kernel = (
        next(cell.recipe for cell in EXPERIMENTS[name].cells if [cell.row, cell.column] == place)
        for name, *place in (
            ("cifar100", "ResNet-56", "Ours"),
            ("kernels", "Gaussian RBF kernel", "ResNet-56"),
        )
    )
    store, tuned = Store(tmp_path, EPOCHS), EXPERIMENTS["cifar100"].protocols["tuned"]
    write(store, ours, tuned, 0, 70.0)
    assert {name.split("-")[0] for name in write_report(tmp_path, tmp_path / "report")} == {"cifar100"}
    asked = write_report(tmp_path, tmp_path / "report", ("kernels",))
    assert {name.split("-")[0] for name in asked} == {"cifar100", "kernels"}
    assert f"Not shown: kernels of {EPOCHS} epochs, whose runs so far are all in cifar100" in capsys.readouterr().out
    write(store, kernel, tuned, 0, 71.0)  # no table takes the place of one before it
    assert {name.split("-")[0] for name in write_report(tmp_path, tmp_path / "report")} == {"cifar100", "kernels"}
    assert "Not shown: kernels" not in capsys.readouterr().out


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
    kernels = [chart for chart in lines if "ernels" in chart.title]
    (bars,) = [chart for chart in made.charts if isinstance(chart, BarChart)]
    if name == "active":
        charts = [chart for chart in lines if "over labels" in chart.title]
        assert ["ResNet-56" in chart.title for chart in charts] == [True, False]
        assert not curves
        labels = [series.label for series in charts[0].series]
        assert labels[:2] == ["SM random", "SM random (paper)"]
        assert [len(chart.series) for chart in charts] == [12, 7]  # the paper has no ResNet-20, nor the linear kernel
        for chart in charts:
            for series in chart.series:
                assert list(series.x) == ([30] if series.label == "LIN random" else [30, 40, 50, 60, 70, 80, 90])
        ours = next(series for series in charts[0].series if series.label == "Ours margin")
        cells = [cell for cell in experiment.cells if cell.column == "Ours margin ResNet-56"]
        store = Store(runs, EPOCHS)
        means = []
        for cell in cells:
            results = store.results(cell.recipe, experiment.protocols["paper"])
            means.append(sum(result["accuracy"] for result in results.values()) / 2)
        assert list(ours.y) == pytest.approx(means)
    elif name == "saturation":
        (over_size,) = [chart for chart in lines if "size of the head" in chart.title]
        kinds = ["softmax", "second-order", "landmarks", "landmarks with dropout", "expansion"]
        kinds += ["expansion with dropout", "sum of prototypes", "sum of prototypes over places"]
        kinds += ["logsumexp of prototypes"]
        assert [series.label for series in over_size.series] == kinds
        assert [len(series.x) for series in over_size.series] == [1, 1, 7, 4, 7, 1, 4, 4, 3]
        landmarks = [math.log10(1000 * (1 + size)) for size in (64, 128, 256, 512, 1024, 2048, 4096)]
        assert list(over_size.series[2].x) == pytest.approx(landmarks)
        prototypes = [math.log10(1000 * (1 + size)) for size in (1, 2, 4, 8)]
        assert list(over_size.series[6].x) == pytest.approx(prototypes)
    elif name == "landmarks":
        assert not curves
        (dots,) = [chart for chart in made.charts if isinstance(chart, DotChart)]
        assert len(dots.rows) == 39
        for cell in experiment.cells:
            results = Store(runs, EPOCHS).results(cell.recipe, experiment.protocols["paper"])
            mean = sum(result["accuracy"] for result in results.values()) / 2
            assert dots.values[cell.column][dots.rows.index(cell.row)] == pytest.approx(mean)
        empty = section(experiment, Store(runs, EPOCHS + 1), list(experiment.protocols.values()))
        assert not empty.charts
    else:
        rows = list(dict.fromkeys(cell.row for cell in experiment.cells))
        assert len(curves) == len(rows)
        labels = list(dict.fromkeys(cell.column for cell in experiment.cells))
        for chart in curves:
            assert [series.label for series in chart.series] == labels
            assert all(list(series.y) == [4.0 / (epoch + 1) for epoch in range(EPOCHS)] for series in chart.series)
    over_depth = [chart for chart in lines if "over depth" in chart.title]
    assert len(over_depth) == {"cifar10": 1, "cifar100": 1, "beyond": 2, "mixup": 2}.get(name, 0)
    for chart in over_depth:
        depths = [8, 20, 56] if name == "mixup" else [8, 14, 20, 32, 44, 56]
        assert all(list(series.x) == depths for series in chart.series)
    if name == "cifar100":
        (chart,) = over_depth
        assert [series.label for series in chart.series][::2] == ["SM", "LIN", "SOP", "KER", "Ours"]
        ours, papers = chart.series[-2:]
        assert list(papers.y) == [58.27, 66.67, 69.33, 71.30, 73.20, 74.10]
        store, protocol = Store(runs, EPOCHS), experiment.protocols["paper"]
        cells = [cell for cell in experiment.cells if cell.column == "Ours"]
        results = [store.results(cell.recipe, protocol).values() for cell in cells]
        assert list(ours.y) == pytest.approx([sum(r["accuracy"] for r in own) / len(own) for own in results])
    if name == "beyond":
        assert [series.label for series in over_depth[0].series if not series.dashed] == list(HEADS)
    (kernel_chart,) = kernels
    labels = [series.label for series in kernel_chart.series]
    learned = [c for c in experiment.cells if c.recipe.head == "kernel" and "kernel" not in c.recipe.head_options]
    assert (f"the first 8 of {len(learned)}" in kernel_chart.title) == (len(learned) > 8)
    assert len(set(labels)) == len(labels) == (6 if name == "kernels" else min(8, len(learned)))
    assert list(bars.values) == labels[: len(learned)]
    titles = kernel_chart.title.split(",")[0], bars.title.split(",")[0]
    if name == "kernels":  # the learned ones, and there is room for the others
        assert titles == ("Kernels", "Coefficients of the learned ones")
        fixed = [f"{kernel} kernel, ResNet-{depth}" for depth in (56, 20) for kernel in ("Gaussian RBF", "Polynomial")]
        assert labels == ["Learned kernel, ResNet-56", "Learned kernel, ResNet-20", *fixed]
        cells = {f"{cell.row}, {cell.column}": cell for cell in experiment.cells}
        for series in kernel_chart.series:
            first, second, third = kernel_of(cells[series.label].recipe)[3:6]
            assert series.y[0] == pytest.approx((-first + second - third) / (first + second + third))
    else:
        assert titles == ("Learned kernels", "Their coefficients")
    if name == "activations":  # what reaches the loss: coefficients over the paper's temperatures
        cells = {f"{cell.row}, {cell.column}": cell for cell in experiment.cells}
        for label, values in bars.values.items():
            temperature = {"sigmoid": 0.1, "softmax": 0.005, "relu": 1, "none": 1}[label.split(",")[0]]
            assert values == pytest.approx([a / temperature for a in kernel_of(cells[label].recipe)])
    if name == "active":
        assert labels[0] == "30 %, Ours random ResNet-56"


def test_a_part_that_was_run_is_shown_with_the_rest_not_run(tmp_path, write):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    write(store, experiment.cells[1].recipe, experiment.protocols["tuned"], 0, 80.0, epochs=3)
    write(store, experiment.cells[3].recipe, experiment.protocols["tuned"], 0, None, epochs=3)
    report(tmp_path)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "cifar10-3-epochs-choices.csv",
        "cifar10-3-epochs-choices.md",
        "cifar10-3-epochs-details.csv",
        "cifar10-3-epochs-details.md",
        "cifar10-3-epochs-tuned.csv",
        "cifar10-3-epochs-tuned.md",
        "cifar10-3-epochs.csv",
        "cifar10-3-epochs.md",
        "report.html",
    ]
    head, *rows = read_csv(tmp_path / "report" / "cifar10-3-epochs.csv")
    assert head[4:] == ["tuned", "over SM"]
    assert [row[4] for row in rows] == ["not run", "80.00", "not run", "diverged", *26 * ["not run"]]
    page = (tmp_path / "report" / "report.html").read_text()
    assert [len(table) for table in Page(page).tables] == [1 + 30, 1 + 1, 1 + 2]
    assert page.count('<td class="muted">') == 29


def test_charts_of_a_part_look_like_those_of_the_whole(tmp_path, write):
    """A line passes over depths that were not run, and has the place of its column in the order of looks."""
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    protocol = experiment.protocols["tuned"]
    for cell in experiment.cells:
        if cell.row in ("ResNet-8", "ResNet-56") and cell.column in ("SM", "Ours"):
            write(store, cell.recipe, protocol, 0, 80.0 if cell.row == "ResNet-8" else 90.0, epochs=3)
    over_depth, *more = section(experiment, store, [protocol]).charts
    points = {line.label: (list(line.x), list(line.y)) for line in over_depth.series if not line.dashed}
    empty = dict.fromkeys(("LIN", "SOP", "KER"), ([], []))
    assert points == {"SM": ([8, 56], [80.0, 90.0]), **empty, "Ours": ([8, 56], [80.0, 90.0])}
    curves = [chart for chart in more if "raining loss" in chart.title]
    assert [[line.label for line in chart.series] for chart in curves] == 2 * [["SM", "Ours"]]
    assert all(list(chart.order) == ["SM", "LIN", "SOP", "KER", "Ours"] for chart in curves)


def test_the_protocol_with_the_most_cells_has_its_charts_first(tmp_path, write):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["beyond"]
    paper, tuned = experiment.protocols.values()
    for cell in experiment.cells:
        if cell.row == "ResNet-8":
            write(store, cell.recipe, tuned, 0, 80.0, epochs=3)
    softmax = experiment.cells[0].recipe
    write(store, softmax, paper, 0, 70.0, epochs=3)
    titles = [chart.title for chart in section(experiment, store, [paper, tuned]).charts]
    order = [next(name for name in ("paper", "tuned") if f"{name} protocol" in title) for title in titles]
    assert order == sorted(order, reverse=True)
    assert set(order) == {"paper", "tuned"}


def test_other_epochs_are_other_tables(tmp_path, write):
    experiment = EXPERIMENTS["kernels"]
    for epochs, accuracy in ((9, 70.0), (30, 71.0)):
        write(Store(tmp_path, epochs), experiment.cells[1].recipe, experiment.protocols["paper"], 0, accuracy, epochs)
    report(tmp_path)
    page = Page((tmp_path / "report" / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))
    for epochs, accuracy in ((9, "70.00"), (30, "71.00")):
        assert read_csv(tmp_path / "report" / f"kernels-{epochs}-epochs.csv")[2][4] == accuracy
        assert f"last epoch of {epochs};" in "".join(page.text)
        assert page.text.count(f"{experiment.title}, {epochs} epochs") == 2  # in the list, and above the table


def test_many_runs_and_a_damaged_one_among_them(tmp_path, fill):
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
    assert len(Page((tmp_path / "report" / "report.html").read_text()).tables) == 3 * len(EXPERIMENTS)


def test_documents_are_filled(tmp_path, write):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    write(store, experiment.cells[1].recipe, experiment.protocols["paper"], 0, 80.0, epochs=3)
    document = tmp_path / "d.md"
    place = "<!-- cifar10-3-epochs-paper -->\n{}<!-- /cifar10-3-epochs-paper -->"
    document.write_text(f"before\n{place.format('| old |')}\nbetween <!-- toc -->\n{place.format('')} after")
    report(tmp_path, "--fill", str(document))
    _, table = (tmp_path / "report" / "cifar10-3-epochs-paper.md").read_text().split("\n\n", 1)
    assert "| ResNet-8 | not run [83.73] | 80.00 [82.45] |" in table
    filled = document.read_text()
    assert filled == f"before\n{place.format(table)}\nbetween <!-- toc -->\n{place.format(table)} after"
    report(tmp_path, "--fill", str(document))
    assert document.read_text() == filled
    document.write_bytes(filled.replace("\n", "\r\n").encode())
    report(tmp_path, "--fill", str(document))
    assert document.read_bytes() == filled.replace("\n", "\r\n").encode()

    for text, sentence in (
        (
            "<!-- cifar11-3-epochs -->\n<!-- /cifar11-3-epochs -->",
            "there is no table 'cifar11-3-epochs'; the results give cifar10-3-epochs, cifar10-",
        ),
        (
            "<!-- cifar10-3-epochs -->\n<!-- /cifar100-3-epochs -->",
            "<!-- cifar10-3-epochs --> stands alone: a table goes between",
        ),
        (  # what is between would be lost
            f"<!-- cifar10-3-epochs-paper -->\nwords\n{place.format('| old |')}",
            "<!-- cifar10-3-epochs-paper --> stands between <!-- cifar10-3-epochs-paper --> and its end: is",
        ),
        ("no table", "it has no place for a table, <!-- NAME -->"),
    ):
        document.write_text(text)
        done = CliRunner().invoke(app, ["report", "--runs", str(tmp_path), "--fill", str(document)])
        assert f"{document} was not filled: {sentence}" in str(done.exception)
        assert document.read_text() == text
