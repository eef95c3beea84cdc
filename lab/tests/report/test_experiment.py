"""The report over result files that are written by hand: tables, charts, the page."""

import csv
import re
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs
from typer.testing import CliRunner

from kernelhead_lab.cli import app
from kernelhead_lab.cli.report import write_report
from kernelhead_lab.report.charts import PAPER
from kernelhead_lab.report.experiment import section
from kernelhead_lab.tables import EXPERIMENTS
from kernelhead_lab.tables.beyond import HEADS
from kernelhead_lab.tables.grid import OURS
from kernelhead_lab.tables.store import Store

EPOCHS = 12
KERNEL = [0.0, 0.1, 1.0, 5.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0]
VOID = {"meta", "link", "br", "hr", "img", "input", "circle", "path", "rect", "line", "polyline"}


def parameters_of(spec):
    """Not what they are, but different for every size."""
    sizes = [spec.head_options.get(name, 0) for name in ("landmarks", "width", "prototypes")]
    return 1000 * (1 + sum(sizes))


KEYS = sorted({cell.spec.key for table in EXPERIMENTS.values() for cell in table.cells})


def kernel_of(spec):
    """Different for every kernel: a₁ tells the place of its name among all."""
    return [*KERNEL[:3], KERNEL[3] + KEYS.index(spec.key), *KERNEL[4:]]


@pytest.fixture(scope="module")
def write(write_runs):
    def write(store, cell, protocol, seed, accuracy, epochs=EPOCHS):
        loss = [4.0 / (epoch + 1) + seed for epoch in range(epochs)]
        more = {"curve": {"loss": loss, "accuracy": [50.0] * epochs}}
        if "kernel" in cell.spec.head_options and accuracy is not None:
            more["alpha"] = kernel_of(cell.spec)
        more["parameters"] = {"backbone": 1, "head": parameters_of(cell.spec)}
        write_runs(store, cell, protocol, {seed: accuracy}, **more)

    return write


@pytest.fixture(scope="module")
def fill(write):
    """Write runs for every cell of every table."""

    def fill(root, epochs=EPOCHS, seeds=2, protocols=("paper", "tuned")):
        store = Store(root, epochs)
        for experiment in EXPERIMENTS.values():
            for number, cell in enumerate(experiment.cells):
                for protocol in set(protocols).intersection(experiment.protocols):
                    for seed in range(seeds):
                        accuracy = 30 + number / 2 + 0.5 * seed * (1 + number % 3) + (protocol == "tuned")
                        write(store, cell, experiment.protocols[protocol], seed, accuracy, epochs)

    return fill


class Page(HTMLParser):
    """Tags that are closed as they were opened, the cells of each table, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tables, self.text = [], [], [], []
        self.feed(text.replace(get_plotlyjs(), ""))
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
    left = iter(page.tables)
    assert next(left) == read_csv(runs / "report" / "claims.csv")
    for experiment in EXPERIMENTS.values():
        if experiment.name == "epochs":  # one table for its lengths, none of which was run
            continue
        shown = next(left)
        tests = runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-tests.csv"
        assert tests.exists() == (experiment.name not in ("transfer", "transfer-long", "distillation", "saturation"))
        if tests.exists():
            assert next(left) == read_csv(tests)
        more, chosen = next(left), next(left)
        assert more == read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-details.csv")
        assert chosen == read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-choices.csv")
        protocols = list(experiment.protocols)
        assert len(more) == 1 + len(protocols) * len(experiment.cells)
        for protocol in protocols:
            head, *rows = read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs-{protocol}.csv")
            assert [row[0] for row in rows] == list(dict.fromkeys(cell.row for cell in experiment.cells))
            assert head[1:] == list(dict.fromkeys(cell.column for cell in experiment.cells))
        cells = read_csv(runs / "report" / f"{experiment.name}-{EPOCHS}-epochs.csv")
        papers = [] if experiment.name in ("landmarks", "saturation", "mixup") else ["paper", "over SM"]
        ours = [name for each in protocols for name in (OURS[each], "over SM")]
        assert cells[0] == ["", "", *papers, *ours]
        assert [row[:2] for row in cells[1:]] == [[cell.row, cell.column] for cell in experiment.cells]
        assert all(
            re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d \(2\)", row[i]) for row in cells[1:] for i in range(-len(ours), 0, 2)
        )
        lines = (runs / "report" / f"{experiment.name}-{EPOCHS}-epochs.md").read_text().splitlines()
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        assert {len(row) for row in table} == {len(cells[0])}
        assert table[1] == ["---"] + (len(cells[0]) - 1) * ["--:"]
        assert [table[0], *table[2:]] == cells
        assert shown == cells
        assert f"table-{experiment.name}" in page.ids
        assert experiment.title in "".join(page.text)
        assert all(row[-len(ours)] in done.stdout for row in cells[1:])
    assert next(left, None) is None
    assert len(page.ids) == len(set(page.ids))


def test_a_table_that_has_the_runs_of_another_alone_is_left_out_unless_asked_for(tmp_path, write, capsys):
    ours, kernel = (
        next(cell for cell in EXPERIMENTS[name].cells if [cell.row, cell.column] == place)
        for name, *place in (
            ("cifar100", "ResNet-56", "Ours"),
            ("kernels", "Gaussian RBF kernel", "ResNet-56"),
        )
    )
    store, tuned = Store(tmp_path, EPOCHS), EXPERIMENTS["cifar100"].protocols["tuned"]
    write(store, ours, tuned, 0, 70.0)
    assert {name.split("-")[0] for name in write_report(tmp_path, tmp_path / "report")} == {"claims", "cifar100"}
    asked = write_report(tmp_path, tmp_path / "report", ("kernels",))
    assert {name.split("-")[0] for name in asked} == {"claims", "cifar100", "kernels"}
    assert f"Not shown: kernels of {EPOCHS} epochs, whose runs so far are all in cifar100" in capsys.readouterr().out
    write(store, kernel, tuned, 0, 71.0)  # no table takes the place of one before it
    again = write_report(tmp_path, tmp_path / "report")
    assert {name.split("-")[0] for name in again} == {"claims", "cifar100", "kernels"}
    assert "Not shown: kernels" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_report_can_be_made_again_and_elsewhere(reported, tmp_path):
    runs, done = reported
    again = report(runs, "--out", str(tmp_path / "elsewhere"))
    assert again.stdout.split("Written")[0] == done.stdout.split("Written")[0]
    for path in (runs / "report").iterdir():
        assert (tmp_path / "elsewhere" / path.name).read_bytes() == path.read_bytes()


def title_of(chart):
    return chart.layout.title.text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_charts_of_a_table(reported, name):
    runs, _ = reported
    experiment = EXPERIMENTS[name]
    made = section(experiment, Store(runs, EPOCHS), [next(iter(experiment.protocols.values()))])
    assert made.table.name == name
    lines = [chart for chart in made.charts if chart.data[0].type == "scatter"]
    curves = [chart for chart in lines if "raining loss" in title_of(chart)]
    kernels = [chart for chart in lines if "ernels" in title_of(chart)]
    (bars,) = [chart for chart in made.charts if chart.data[0].type == "bar"]
    if name == "active":
        charts = [chart for chart in lines if "over labels" in title_of(chart)]
        assert ["ResNet-56" in title_of(chart) for chart in charts] == [True, False]
        assert not curves
        labels = [series.name for series in charts[0].data]
        assert labels[:2] == ["SM random", "SM random (paper)"]
        assert [len(chart.data) for chart in charts] == [12, 7]  # the paper has no ResNet-20, nor the linear kernel
        for chart in charts:
            for series in chart.data:
                assert list(series.x) == ([30] if series.name == "LIN random" else [30, 40, 50, 60, 70, 80, 90])
        ours = next(series for series in charts[0].data if series.name == "Ours margin")
        cells = [cell for cell in experiment.cells if cell.column == "Ours margin ResNet-56"]
        store = Store(runs, EPOCHS)
        means = []
        for cell in cells:
            results = store.results(cell, experiment.protocols["paper"])
            means.append(sum(result.accuracy for result in results.values()) / 2)
        assert list(ours.y) == pytest.approx(means)
    elif name == "saturation":
        (over_size,) = [chart for chart in lines if "size of the head" in title_of(chart)]
        kinds = ["linear", "second-order", "landmarks", "landmarks with dropout", "expansion"]
        kinds += ["expansion with dropout", "sum of prototypes", "sum of prototypes over positions"]
        kinds += ["logsumexp of prototypes"]
        assert [series.name for series in over_size.data] == kinds
        assert [len(series.x) for series in over_size.data] == [1, 1, 7, 4, 7, 1, 4, 4, 3]
        landmarks = [1000 * (1 + size) for size in (64, 128, 256, 512, 1024, 2048, 4096)]
        assert list(over_size.data[2].x) == pytest.approx(landmarks)
        prototypes = [1000 * (1 + size) for size in (1, 2, 4, 8)]
        assert list(over_size.data[6].x) == pytest.approx(prototypes)
    elif name == "landmarks":
        assert not curves
        (dots,) = [chart for chart in lines if title_of(chart).startswith("Accuracy")]
        values = {line.name: dict(zip(line.y, line.x, strict=True)) for line in dots.data}
        assert [len(found) for found in values.values()] == [39, 39]
        for cell in experiment.cells:
            results = Store(runs, EPOCHS).results(cell, experiment.protocols["paper"])
            mean = sum(result.accuracy for result in results.values()) / 2
            assert values[cell.column][cell.row] == pytest.approx(mean)
        empty = section(experiment, Store(runs, EPOCHS + 1), list(experiment.protocols.values()))
        assert not empty.charts
    else:
        rows = list(dict.fromkeys(cell.row for cell in experiment.cells))
        assert len(curves) == len(rows)
        labels = list(dict.fromkeys(cell.column for cell in experiment.cells))
        for chart in curves:
            assert [series.name for series in chart.data] == labels
            assert all(list(series.y) == [4.0 / (epoch + 1) for epoch in range(EPOCHS)] for series in chart.data)
    over_depth = [chart for chart in lines if "over depth" in title_of(chart)]
    assert len(over_depth) == {"cifar10": 1, "cifar100": 1, "beyond": 2, "mixup": 2, "epochs": 2}.get(name, 0)
    for chart in over_depth:
        depths = [8, 20, 56] if name in ("mixup", "epochs") else [8, 14, 20, 32, 44, 56]
        assert all(list(series.x) == depths for series in chart.data)
    if name == "cifar100":
        (chart,) = over_depth
        assert [series.name for series in chart.data][::2] == ["SM", "LIN", "SOP", "KER", "Ours"]
        ours, papers = chart.data[-2:]
        assert list(papers.y) == [58.27, 66.67, 69.33, 71.30, 73.20, 74.10]
        store, protocol = Store(runs, EPOCHS), experiment.protocols["paper"]
        cells = [cell for cell in experiment.cells if cell.column == "Ours"]
        results = [store.results(cell, protocol).values() for cell in cells]
        assert list(ours.y) == pytest.approx([sum(r.accuracy for r in own) / len(own) for own in results])
    if name == "beyond":
        assert [series.name for series in over_depth[0].data if not series.name.endswith(PAPER)] == list(HEADS)
    (kernel_chart,) = kernels
    labels = [series.name for series in kernel_chart.data]
    learned = [c for c in experiment.cells if c.spec.head_options.get("kernel") == "learned"]
    assert (f"the first 8 of {len(learned)}" in title_of(kernel_chart)) == (len(learned) > 8)
    assert len(set(labels)) == len(labels) == (6 if name == "kernels" else min(8, len(learned)))
    assert [bar.name for bar in bars.data] == labels[: len(learned)]
    titles = title_of(kernel_chart).split(",")[0], title_of(bars).split(",")[0]
    if name == "kernels":  # the learned ones, and there is room for the others
        assert titles == ("Kernels", "Coefficients of the learned ones")
        fixed = [f"{kernel} kernel, ResNet-{depth}" for depth in (56, 20) for kernel in ("Gaussian RBF", "Polynomial")]
        assert labels == ["Learned kernel, ResNet-56", "Learned kernel, ResNet-20", *fixed]
        cells = {f"{cell.row}, {cell.column}": cell for cell in experiment.cells}
        for series in kernel_chart.data:
            first, second, third = kernel_of(cells[series.name].spec)[3:6]
            assert series.y[0] == pytest.approx((-first + second - third) / (first + second + third))
    else:
        assert titles == ("Learned kernels", "Their coefficients")
    if name == "activations":  # what reaches the loss: coefficients over the paper's temperatures
        cells = {f"{cell.row}, {cell.column}": cell for cell in experiment.cells}
        for bar in bars.data:
            temperature = {"sigmoid": 0.1, "softmax": 0.005, "relu": 1, "none": 1}[bar.name.split(",")[0]]
            assert list(bar.y) == pytest.approx([a / temperature for a in kernel_of(cells[bar.name].spec)])
    if name == "active":
        assert labels[0] == "30 %, Ours random ResNet-56"


def test_a_part_that_was_run_is_shown_with_the_rest_not_run(tmp_path, write):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    write(store, experiment.cells[1], experiment.protocols["tuned"], 0, 80.0, epochs=3)
    write(store, experiment.cells[3], experiment.protocols["tuned"], 0, None, epochs=3)
    report(tmp_path)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "cifar10-3-epochs-choices.csv",
        "cifar10-3-epochs-choices.md",
        "cifar10-3-epochs-details.csv",
        "cifar10-3-epochs-details.md",
        "cifar10-3-epochs-tests.csv",
        "cifar10-3-epochs-tests.md",
        "cifar10-3-epochs-tuned.csv",
        "cifar10-3-epochs-tuned.md",
        "cifar10-3-epochs.csv",
        "cifar10-3-epochs.md",
        "claims-short.csv",
        "claims-short.md",
        "claims.csv",
        "claims.md",
        "report.html",
    ]
    head, *rows = read_csv(tmp_path / "report" / "cifar10-3-epochs.csv")
    assert head[4:] == ["tuned", "over SM"]
    assert [row[4] for row in rows] == ["not run", "80.00", "not run", "diverged", *26 * ["not run"]]
    page = (tmp_path / "report" / "report.html").read_text()
    assert [len(table) for table in Page(page).tables] == [1 + 12, 1 + 30, 1 + 4, 1 + 1, 1 + 2]
    assert page.count('<td class="muted">') == 12 + 29 + 4


def test_charts_of_a_part_look_like_those_of_the_whole(tmp_path, write):
    """A line passes over depths that were not run, and has the place of its column in the order of looks."""
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    protocol = experiment.protocols["tuned"]
    for cell in experiment.cells:
        if cell.row in ("ResNet-8", "ResNet-56") and cell.column in ("SM", "Ours"):
            write(store, cell, protocol, 0, 80.0 if cell.row == "ResNet-8" else 90.0, epochs=3)
    over_depth, *more = section(experiment, store, [protocol]).charts
    points = {line.name: (list(line.x), list(line.y)) for line in over_depth.data if not line.name.endswith(PAPER)}
    empty = dict.fromkeys(("LIN", "SOP", "KER"), ([], []))
    assert points == {"SM": ([8, 56], [80.0, 90.0]), **empty, "Ours": ([8, 56], [80.0, 90.0])}
    curves = [chart for chart in more if "raining loss" in title_of(chart)]
    assert [[line.name for line in chart.data] for chart in curves] == 2 * [["SM", "Ours"]]
    looks = {line.name: line.line.color for line in over_depth.data}
    assert all(line.line.color == looks[line.name] for chart in curves for line in chart.data)


def test_the_protocol_with_the_most_cells_has_its_charts_first(tmp_path, write):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["beyond"]
    paper, tuned = experiment.protocols.values()
    for cell in experiment.cells:
        if cell.row == "ResNet-8":
            write(store, cell, tuned, 0, 80.0, epochs=3)
    linear = experiment.cells[0]
    write(store, linear, paper, 0, 70.0, epochs=3)
    titles = [title_of(chart) for chart in section(experiment, store, [paper, tuned]).charts]
    order = [next(name for name in ("paper", "tuned") if f"{name} protocol" in title) for title in titles]
    assert order == sorted(order, reverse=True)
    assert set(order) == {"paper", "tuned"}


def test_other_epochs_are_other_tables(tmp_path, write):
    experiment = EXPERIMENTS["kernels"]
    for epochs, accuracy in ((9, 70.0), (30, 71.0)):
        write(Store(tmp_path, epochs), experiment.cells[1], experiment.protocols["paper"], 0, accuracy, epochs)
    report(tmp_path)
    page = Page((tmp_path / "report" / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))
    for epochs, accuracy in ((9, "70.00"), (30, "71.00")):
        assert read_csv(tmp_path / "report" / f"kernels-{epochs}-epochs.csv")[2][4] == accuracy
        assert f"last epoch of {epochs};" in "".join(page.text)
        assert page.text.count(f"{experiment.title}, {epochs} epochs") == 2  # in the list, and above the table


@pytest.mark.slow
def test_many_runs_and_a_damaged_one_among_them(tmp_path, fill):
    fill(tmp_path, epochs=450, seeds=4)
    experiment = EXPERIMENTS["cifar100"]
    damaged = Store(tmp_path, 450).result_path(experiment.cells[7], experiment.protocols["tuned"], 2)
    damaged.write_text(damaged.read_text()[:-100])
    done = report(tmp_path)
    assert done.stderr.count("left out:") == 1
    assert str(damaged) in done.stderr
    cells = read_csv(tmp_path / "report" / "cifar100-450-epochs.csv")[8]
    assert cells[4].endswith("(4)")
    assert cells[6].endswith("(3)")
    others = len(EXPERIMENTS) - 1
    tested = others - len(("transfer", "transfer-long", "distillation", "saturation"))
    page = Page((tmp_path / "report" / "report.html").read_text())
    assert len(page.tables) == len(("claims", "epochs", "epochs-tuned")) + 3 * others + tested


def test_documents_are_filled(tmp_path, write):
    store, experiment = Store(tmp_path, 3), EXPERIMENTS["cifar10"]
    write(store, experiment.cells[1], experiment.protocols["paper"], 0, 80.0, epochs=3)
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

    document.write_text("no table")
    report(tmp_path, "--fill", str(document))
    assert document.read_text() == "no table"
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
    ):
        document.write_text(text)
        done = CliRunner().invoke(app, ["report", "--runs", str(tmp_path), "--fill", str(document)])
        assert f"{document} was not filled: {sentence}" in str(done.exception)
        assert document.read_text() == text
