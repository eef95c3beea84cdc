"""What the documents say must be what the result files say."""

import csv
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kernelhead.backbones import count_parameters
from kernelhead.cli import app
from kernelhead.paper import EXPERIMENTS, synthetic
from kernelhead.paper.grid import accuracies
from kernelhead.paper.recipe import paper_number
from kernelhead.paper.store import Store
from kernelhead.report.tables import to_markdown
from kernelhead.results import load_result

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("synthetic", "training", "paper", "cifar", "loss", "features", "beyond", "tables", "ablations")
README = (ROOT / "README.md").read_text()
TUNED = ("SM", "SOP", "Ours")


def test_tables_are_what_the_results_give(tmp_path):
    """As `make tables` makes them."""
    (documents,) = re.findall(r"^DOCUMENTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    copies = {name: tmp_path / name.replace("/", "-") for name in documents.split()}
    fills = []
    for name, copy in copies.items():
        copy.write_text((ROOT / name).read_text())
        assert copy.read_text().count("<!-- /") >= 1
        fills += ["--fill", str(copy)]
    made = tmp_path / "report"
    done = CliRunner().invoke(app, ["report", "--runs", str(ROOT / "results"), "--out", str(made), *fills])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "left out" not in done.stderr
    for name, copy in copies.items():
        assert copy.read_text() == (ROOT / name).read_text(), f"{name}: run make tables"
    page = made / "report.html"  # megabytes of what the tables and results have: made by who wants to see it
    assert page.stat().st_size > 0
    kept = sorted(path for path in (ROOT / "results" / "report").iterdir() if path.name != page.name)
    assert [path.name for path in kept] == sorted(path.name for path in made.iterdir() if path != page)
    for path in kept:
        assert path.read_text() == (made / path.name).read_text(), f"{path.name}: run make tables"


@pytest.mark.parametrize("epochs", [30, 450])
def test_the_synthetic_results_are_complete(epochs):
    paths = sorted((ROOT / "results" / "synthetic" / f"{epochs}-epochs-10000-samples").rglob("*.json"))
    assert len(paths) == 90
    table = to_markdown(synthetic.table([json.loads(path.read_text()) for path in paths]))
    document = "README.md" if epochs == 30 else "docs/synthetic.md"
    assert table.split("\n", 2)[2] in (ROOT / document).read_text()


def test_the_heads_that_were_tried_are_those_of_the_program():
    """The table of docs/beyond.md is of lines of the file, and the program makes heads of as many parameters."""
    make_head = runpy.run_path(str(ROOT / "benchmarks" / "variants.py"))["make_head"]
    tried, controls, short, scales, dropout = (
        list(csv.DictReader((ROOT / "results" / name).read_text().splitlines()))
        for name in ("variants.csv", "expansions.csv", "warmup.csv", "scales.csv", "dropout.csv")
    )
    assert len(controls) == 24
    assert [row["accuracy"] for row in short] == ["3.23", "35.47"]  # docs/beyond.md quotes them
    for row in [*tried, *controls, *short, *scales, *dropout]:
        assert count_parameters(make_head(row["head"], 64, 100)) == int(row["head_parameters"])

    def line(row):
        figures = f"{row['accuracy']} | {float(row['nll']):.3f} | {row['training_accuracy']}"
        return f"| {row['network']} | {row['head']} | {row['rate']}, {row['decay']} | {figures} |"

    lines = {f"{line(row)} {int(row['head_parameters']):,} |" for row in tried}
    before, document = (ROOT / "docs" / "beyond.md").read_text().split("## What was tried first", 1)
    assert re.findall(r"^\| ResNet.*$", before.split("## The scale", 1)[1], re.MULTILINE) == [
        line(row) for row in [*scales, *dropout] if row["epochs"] == "100"
    ]
    shown = re.findall(r"^\| ResNet.*$", document, re.MULTILINE)
    assert len(shown) == 44
    assert lines.issuperset(shown)
    assert f"all {len(tried)} trainings" in document


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_the_cifar_tables_are_as_complete_as_the_document_says(data):
    """All cells with the paper's protocol, three methods with the tuned one, three seeds of two depths."""
    experiment, store = EXPERIMENTS[data], Store(ROOT / "results", 200)
    for cell in experiment.cells:
        for name, protocol in experiment.protocols.items():
            if name == "tuned" and cell.column not in TUNED:
                continue
            runs = store.results(cell.recipe, protocol)
            assert set(runs) >= ({0, 1, 2} if cell.row in ("ResNet-8", "ResNet-20") else {0})
            for run in runs.values():
                assert run["images"] == {"train": 50000, "test": 10000, "left_out": 0}
                assert len(run["curve"]["loss"]) == 200
                assert run["accuracy"] is not None


def measured(name, epochs):
    """Accuracies of each seed by row and column of a table, tuned protocol."""
    experiment, store = EXPERIMENTS[name], Store(ROOT / "results", epochs)
    return {
        (cell.row, cell.column): list(accuracies(cell, store, experiment.protocols["tuned"]).values())
        for cell in experiment.cells
    }


def test_the_best_head_is_quoted_as_measured():
    found, words = measured("beyond", 200), " ".join(README.split())
    for column, sentence in {
        "Best": "it has {:.2f}, {:.2f} and {:.2f} % with ResNet-8, 20 and 56 after 200 epochs (three seeds, one with",
        "SM": "softmax has {:.2f}, {:.2f} and {:.2f}",
        "SOP": "second-order pooling {:.2f}, {:.2f} and {:.2f}",
        "EXP": "ReLUs in the place of the kernel {:.2f}, {:.2f} and {:.2f}",
    }.items():
        means = [np.mean(found[f"ResNet-{depth}", f"{column} CIFAR-100"]) for depth in (8, 20, 56)]
        assert sentence.format(*means) in words
    assert [len(found[f"ResNet-{depth}", "Best CIFAR-100"]) for depth in (8, 20, 56)] == [3, 3, 1]
    for column, sentence in {
        "Best": "On CIFAR-10 it has {:.2f}, {:.2f} and {:.2f}",
        "SM": "softmax {:.2f}, {:.2f} and {:.2f}",
        "SOP": "second-order pooling {:.2f}, {:.2f} and {:.2f}",
        "EXP": "the same head with ReLUs {:.2f}, {:.2f} and {:.2f}",
    }.items():
        seeds = [found[f"ResNet-{depth}", f"{column} CIFAR-10"] for depth in (8, 20, 56)]
        assert sentence.format(*map(np.mean, seeds)) in words
        assert [len(accuracy) for accuracy in seeds] == [3, 3, 1]


def test_the_best_head_is_ahead_in_every_row():
    """As docs/beyond.md says: of every other head, and of the paper's figure for its layer, on both data sets."""
    found = measured("beyond", 200)
    published = {(cell.row, cell.column): paper_number("beyond", cell) for cell in EXPERIMENTS["beyond"].cells}
    for data in ("CIFAR-100", "CIFAR-10"):
        for depth in (8, 14, 20, 32, 44, 56):
            row = f"ResNet-{depth}"
            others = [np.mean(found[row, f"{column} {data}"]) for column in ("SM", "SOP", "EXP", "Kernel")]
            assert np.mean(found[row, f"Best {data}"]) > max(*others, published[row, f"Kernel {data}"])


def test_the_kernel_is_ahead_of_its_control_with_each_seed():
    """The rows of `landmarks` that docs/beyond.md rests on have three seeds, and no seed of the control is ahead."""
    found = measured("landmarks", 100)
    for network in ("ResNet-8", "ResNet-20"):
        for ending in ("", ", 2048"):
            kernel = found[f"learned kernel, softplus{ending}", network]
            control = found[f"expansion, places normalised, standardised{ending}", network]
            assert (len(kernel), len(control)) == (3, 3)
            assert min(kernel) > max(control)
        fixed = found["polynomial kernel of degree 10", network]
        assert len(fixed) == 3
        assert max(fixed) < min(found["learned kernel, softplus", network])


def test_costs_stand_beside_the_accuracies():
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "cost.py"))
    rows = benchmark["together"]([json.loads((ROOT / path).read_text())["rows"] for path in benchmark["MEASURED"]])
    told = benchmark["with_accuracies"](rows, ROOT / "results", 200)
    assert len(rows) == 5 * 6  # heads and depths of the table
    assert all(list(row["accuracies"]) == ["CIFAR-100", "CIFAR-10"] for row in told.values())
    assert benchmark["markdown"](told) in (ROOT / "docs" / "beyond.md").read_text()


def of_seeds(head, depth=20):
    """Results by seed of a ResNet on CIFAR-100 under the paper's protocol; `head` as its folder is called."""
    tables = [EXPERIMENTS[name] for name in ("cifar100", "kernels", "rectification", "activations")]
    recipes = {cell.recipe.key: cell.recipe for table in tables for cell in table.cells}
    results = Store(ROOT / "results", 200).results(recipes[f"resnet{depth}-{head}"], tables[0].protocols["paper"])
    assert set(results) == ({0, 1, 2} if depth == 20 or head == "softmax" else {0})
    return results


def mean_of(name, head, depth=20):
    return np.mean([run[name] for run in of_seeds(head, depth).values()])


def differences(name, one, other, depth=20):
    """Of accuracy or NLL, by seed; of the means where there are not as many seeds of both."""
    ours, theirs = of_seeds(one, depth), of_seeds(other, depth)
    if set(ours) != set(theirs):
        return np.array([mean_of(name, one, depth) - mean_of(name, other, depth)])
    return np.array([ours[seed][name] - theirs[seed][name] for seed in sorted(ours)])


def spread(values):
    return f"{abs(values.mean()):.1f} ± {values.std(ddof=1):.1f}"


RBF, POLYNOMIAL = "kernel-kernel_rbf", "kernel-degree_10-kernel_polynomial"
SIGMOID, SOFTMAX, NONE = (f"kernel-coefficients_{name}" for name in ("sigmoid", "softmax", "none"))
SHAPES = {  # heads and their temperatures
    "linear": ("linear", 1.0),
    "Gaussian": (RBF, 1.0),
    "polynomial, degree 10": (POLYNOMIAL, 1.0),
    "learned, relu": ("kernel", 1.0),
    "learned, sigmoid": (SIGMOID, 0.1),
    "learned, softmax": (SOFTMAX, 0.005),
    "learned, no activation": (NONE, 1.0),
}


def test_kernels_are_drawn_as_measured():
    """The table of docs/ablations.md: scores (k(t) - k(0)) / T, by polynomials in NumPy."""
    text = (ROOT / "docs" / "ablations.md").read_text()
    for name, (head, temperature) in SHAPES.items():
        runs = of_seeds(head).values()
        powers = np.mean([run["alpha"][3:] for run in runs], 0) / temperature
        scores = np.polynomial.polynomial.polyval([-1, -0.5, 0.5, 1], [0, *powers])
        accuracy, nll = ([run[what] for run in runs] for what in ("accuracy", "nll"))
        figures = [f"{score:.1f}".replace("-0.0", "0.0") for score in scores]
        figures += [f"{np.mean(accuracy):.2f} ± {np.std(accuracy, ddof=1):.2f}", f"{np.mean(nll):.3f}"]
        assert f"| {name} | {' | '.join(figures)} |" in text


def in_document(*sentences):
    text = " ".join((ROOT / "docs" / "ablations.md").read_text().split())
    for sentence in sentences:
        assert sentence in text, sentence


def held_out(head, name="accuracy"):
    """By learning rate, of the trainings that choose."""
    folder = ROOT / "results" / "cifar100" / "200-epochs" / f"resnet20-{head}"
    return [json.loads((folder / f"choice-lr{rate}-wd0.0001.json").read_text())[name] for rate in (0.05, 0.1, 0.3, 1)]


def test_learned_and_fixed_kernels_are_quoted_as_measured():
    below = [spread(differences("accuracy", "kernel", other)) for other in (RBF, POLYNOMIAL, "linear")]
    above = [differences("accuracy", "kernel", other, 56)[0] for other in (RBF, POLYNOMIAL, "linear")]
    nll = [[mean_of("nll", head, depth) for head in (RBF, POLYNOMIAL, "kernel")] for depth in (20, 56)]
    over, deep = (
        [differences("accuracy", head, "softmax", depth).mean() for head in ("linear", "kernel", RBF, POLYNOMIAL)]
        for depth in (20, 56)
    )
    in_document(
        f"{below[0]} below the Gaussian, {below[1]} below the polynomial and {below[2]} below the linear",
        f"with ResNet-56 {above[0]:.1f} and {above[1]:.1f} above the first two and {-above[2]:.1f} below",
        "with each seed: {:.3f} and {:.3f} against {:.3f}".format(*nll[0]),
        "with ResNet-56 {:.3f} and {:.3f} against {:.3f}".format(*nll[1]),
        f"{min(over):.1f} to {max(over):.1f} points with ResNet-20, {min(deep):.1f} to {max(deep):.1f} with",
    )
    assert all((differences("nll", "kernel", other) > 0).all() for other in (RBF, POLYNOMIAL))
    for other in (RBF, POLYNOMIAL):
        pairs = zip(held_out("kernel"), held_out(other), strict=True)
        assert all(ours < theirs for ours, theirs in pairs)  # at each rate
        assert np.argmax(held_out(other)) == 3


def test_rectification_is_quoted_as_measured():
    gains = [spread(differences("accuracy", head, f"rectified-{head}")) for head in ("kernel", "softmax")]
    single = [differences("accuracy", head, f"rectified-{head}", 56)[0] for head in ("kernel", "softmax")]
    lead = [
        [differences("accuracy", f"{kind}kernel", f"{kind}softmax", depth) for depth in (20, 56)]
        for kind in ("rectified-", "")
    ]
    usual = mean_of("accuracy", "rectified-softmax", 56)
    softmax = [mean_of("nll", head, depth) for depth in (20, 56) for head in ("rectified-softmax", "softmax")]
    kernel = [mean_of("nll", head, 56) for head in ("rectified-kernel", "kernel")]
    first, last = (
        np.mean([run["alpha"][3:] for run in of_seeds(head).values()], 0) for head in ("rectified-kernel", "kernel")
    )
    in_document(
        f"{gains[0]} and {gains[1]} with ResNet-20, {single[0]:.1f} and {single[1]:.1f} with ResNet-56.",
        f"on rectified features: {spread(lead[0][0])} and, with ResNet-56, {lead[0][1][0]:.1f} (the paper: 0.7)",
        f"on unrectified ones {spread(lead[1][0])} and {lead[1][1][0]:.1f} (2.9)",
        f"softmax on rectified features ({usual:.2f})",
        "with ResNet-56 {:.3f} on rectified and {:.3f} on unrectified features".format(*kernel),
        "with softmax {:.2f} and {:.2f}, {:.2f} and {:.2f}".format(*softmax),
        "a₁, a₂ = {:.1f}, {:.1f} and all others zero".format(*first[:2]),
        "a₁, a₂, a₃ = {:.1f}, {:.1f}, {:.1f}".format(*last[:3]),
    )
    assert not any(any(run["alpha"][5:]) for run in of_seeds("rectified-kernel").values())


def test_activations_are_quoted_as_measured():
    others = {head: differences("accuracy", head, "kernel") for head in (SIGMOID, NONE, SOFTMAX)}
    assert [set(np.sign(values)) for values in others.values()] == [{1}, {1}, {-1}]
    told = [spread(values) for values in others.values()]
    deep = [mean_of("accuracy", head, 56) for head in ("kernel", *others)]
    assert max(deep) - min(deep) < 0.5
    beside = {
        "(Gaussian": RBF,
        "; polynomial": POLYNOMIAL,
        "; linear kernel": "linear",
        "; relu": "kernel",
        "; softmax classifier": "softmax",
    }
    compared = "".join(
        f"{name} {mean_of('nll', head):.3f}, {mean_of('ece', head):.1f} %" for name, head in beside.items()
    )
    nll, ece = ([mean_of(name, SIGMOID, depth) for depth in (20, 56)] for name in ("nll", "ece"))
    free = np.mean([run["alpha"][3:] for run in of_seeds(NONE).values()], 0)
    even = [np.mean([run["alpha"][4] for run in of_seeds(SOFTMAX, depth).values()]) / 0.005 for depth in (20, 56)]
    in_document(
        f"{even[0]:.0f} t² with ResNet-20 and {even[1]:.0f} t² with ResNet-56",
        f"sigmoid is {told[0]} above relu, no activation {told[1]}, and softmax {told[2]} below",
        f"NLL {nll[0]:.3f} and ECE {ece[0]:.1f} % with ResNet-20 {compared}), {nll[1]:.3f} and {ece[1]:.1f} %",
        f"has {mean_of('nll', 'second_order'):.3f} and {mean_of('ece', 'second_order'):.1f} %",
        f"the worst NLL, {mean_of('nll', SOFTMAX):.3f} and {mean_of('nll', SOFTMAX, 56):.3f}, at",
        f"a₁ to a₆ = {', '.join(f'{a:.1f}' for a in free[:6])} with ResNet-20, a₇ = {free[6]:.2f}",
    )
    everything = {*(head for head, _ in SHAPES.values()), "softmax", "rectified-softmax", "rectified-kernel"}
    for depth in (20, 56):
        for name in ("nll", "ece"):
            assert min(everything, key=lambda head, name=name, depth=depth: mean_of(name, head, depth)) == SIGMOID
    assert all(a < b for a, b in zip(held_out(SIGMOID, "nll"), held_out("kernel", "nll"), strict=True))
    for depth in (20, 56):
        for run in of_seeds(NONE, depth).values():
            assert run["diverged_at"] is None
            assert run["alpha"][-1] < 0 < min(run["alpha"][3:8])
        assert all(min(run["alpha"][3:5]) > 0.998 for run in of_seeds(SIGMOID, depth).values())
        assert all(max(run["alpha"][5:]) < 0.002 for run in of_seeds(SIGMOID, depth).values())
    assert held_out(NONE, "diverged_at") == [None] * 4
    assert all(run["alpha"][8] > 0 for run in of_seeds(NONE).values())
    assert not any(any(run["alpha"][6:]) for run in of_seeds("kernel").values())


def test_readme_quotes_the_ablations():
    named = {"Gaussian": RBF, "polynomial": POLYNOMIAL, "linear": "linear", "learned": "kernel"}
    quoted = ", ".join(f"{name} {mean_of('accuracy', head):.2f}" for name, head in named.items())
    words = " ".join(README.split())
    assert f"no fixed kernel is behind the learned one ({quoted})" in words
    assert f"features that keep the last ReLU ({mean_of('accuracy', 'rectified-kernel'):.2f})" in words
    assert f"no training diverged ({mean_of('accuracy', NONE):.2f})" in words
    assert f'`coefficients="sigmoid"` has {mean_of("accuracy", SIGMOID):.2f}' in words


def test_kept_images_are_as_fast_as_the_document_says():
    row = json.loads((ROOT / "results" / "bench" / "streamed.json").read_text())["rows"]["cuda"]
    text = " ".join((ROOT / "docs" / "training.md").read_text().split())
    assert f"decode and prepare {row['streamed']:,.0f} pets a second" in text
    assert f"kept ones come at {row['kept']:,.0f} a second, {row['ratio']:.0f} times as many" in text
    assert f"after {row['decoding_s']:.1f} s in which the {row['images']:,} images" in text


@pytest.mark.parametrize("results", ["frozen", "frozen_rectified"])
def test_frozen_features_are_quoted_as_measured(results):
    rows = json.loads((ROOT / "results" / "bench" / f"{results}.json").read_text())["rows"]
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "frozen.py"))
    assert list(rows) == list(benchmark["HEADS"])
    assert benchmark["markdown"](rows) in (ROOT / "docs" / "beyond.md").read_text()
    for name, row in rows.items():
        head = benchmark["make"](name, 2048, 37, 256)
        assert count_parameters(head) == row["parameters"]


def test_prototypes_are_quoted_as_measured():
    rows = json.loads((ROOT / "results" / "bench" / "prototypes.json").read_text())["rows"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "prototypes.py"))["markdown"](rows)
    assert len(rows) == 6
    assert table in (ROOT / "docs" / "beyond.md").read_text()


def test_readme_shows_the_measured_ratios():
    rows = json.loads((ROOT / "results" / "bench" / "head.json").read_text())["rows"]
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "head.py"))
    assert len(rows) == len(benchmark["SHAPES"]) + 2
    assert benchmark["markdown"](rows) in README


@pytest.mark.parametrize(("table", "results"), [("markdown", "loss"), ("check_markdown", "loss_check")])
def test_the_loss_is_quoted_as_measured(table, results):
    rows = json.loads((ROOT / "results" / "bench" / f"{results}.json").read_text())["rows"]
    assert len(rows) in (4, 12)
    assert runpy.run_path(str(ROOT / "benchmarks" / "loss.py"))[table](rows) in (ROOT / "docs" / "loss.md").read_text()


def test_the_estimator_is_quoted_as_measured():
    rows = json.loads((ROOT / "results" / "bench" / "estimator.json").read_text())["rows"]
    assert len(rows) == 7
    table = runpy.run_path(str(ROOT / "benchmarks" / "estimator.py"))["markdown"](rows)
    assert table in (ROOT / "docs" / "features.md").read_text()


def test_readme_kernelizes():
    example = README.split("```python\n")[2].split("```")[0]
    names: dict[str, object] = {}
    exec(example, names)
    assert "fc" in str(names["changes"](names["model"]))
    assert names["model"].fc.num_classes == 37


def test_readme_example_runs():
    example = README.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(example.replace("224, 224", "64, 64"), names)
    assert names["logits"].shape == (8, 37)
    assert (names["model"].fc.alpha >= 0).all()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in DOCUMENTS)])
def test_links_lead_somewhere(name):
    document = ROOT / name
    targets = [part.split(")")[0] for part in document.read_text().split("](")[1:]]
    for target in targets:
        if not target.startswith("http"):
            file, _, heading = target.partition("#")
            led_to = document.parent / file if file else document
            assert led_to.exists(), target
            titles = re.findall(r"^#+ (.*)$", led_to.read_text(), re.MULTILINE) if heading else []
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in anchors, target


def test_the_study_of_starts_is_quoted_as_measured():
    text = (ROOT / "docs" / "synthetic.md").read_text()
    for row in json.loads((ROOT / "results" / "bench" / "synthetic_starts.json").read_text())["rows"]:
        cells = f"{row['mean_over_starts']:.2f} | {row['best_training_loss']:.2f} | {row['at_zero_percent']:.0f} % |"
        if row["at_zero"]:
            cells += f" {row['at_zero_with_negative_gradient']} of {row['at_zero']} |"
        assert cells in text


def test_training_is_as_fast_as_the_document_says():
    rows = json.loads((ROOT / "results" / "bench" / "train.json").read_text())["rows"]
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "train.py"))
    assert len(rows) == 27
    text = (ROOT / "docs" / "training.md").read_text()
    assert benchmark["markdown"](rows) in text
    steps = json.loads((ROOT / "results" / "bench" / "conv_norm.json").read_text())["network"]
    for way in steps.values():
        times = " | ".join(f"{way[f'us of {runs}']:.0f}" for runs in (1, 8, 16))
        assert f"| {way['kernels']} | {times} |" in text


@pytest.mark.parametrize("head", ["softmax", "kernel"])
def test_the_trained_accuracies_are_quoted_as_measured(head):
    result = load_result(ROOT / "results" / "train" / f"cifar10-resnet20-{head}" / "result.json")
    assert result["config"]["epochs"] == 200
    assert result["config"]["weight_decay"] == 5e-4
    assert f"{result['accuracy']:.2f} %" in (ROOT / "docs" / "training.md").read_text()
