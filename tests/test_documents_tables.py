"""Sentences of docs/tables.md, and of what quotes it, against what was measured. Its tables are filled in."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from kernelhead.paper import EXPERIMENTS
from kernelhead.paper.recipe import paper_number
from kernelhead.paper.store import Store
from kernelhead.paper.table import sign_flip_p

ROOT = Path(__file__).parent.parent


def words_of(name):
    return " ".join((ROOT / name).read_text().split())


def said(*sentences, document="docs/tables.md"):
    text = words_of(document)
    for sentence in sentences:
        assert sentence in text, sentence


def spread(values, digits=1):
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def of_table(name, epochs, protocol="paper"):
    """Results by seed, by the row and the words of the column; only what was run."""
    experiment, store = EXPERIMENTS[name], Store(ROOT / "results", epochs)
    found = {
        (cell.row, *cell.column.split()): store.results(cell.recipe, experiment.protocols[protocol])
        for cell in experiment.cells
    }
    return {place: runs for place, runs in found.items() if runs}


def of_paper(name):
    cells = EXPERIMENTS[name].cells
    return {(cell.row, *cell.column.split()): paper_number(name, cell) for cell in cells}


def mean(name, runs):
    return np.mean([run[name] for run in runs.values()])


def over(name, ours, theirs):
    """Of the seeds that both have."""
    return np.array([ours[seed][name] - theirs[seed][name] for seed in sorted(ours.keys() & theirs.keys())])


def share(runs, *orders):
    """Percent of a₁ .. a₇ that these terms have, in the mean of the seeds."""
    powers = np.array([run["alpha"][3:] for run in runs.values()])
    parts = powers / powers.sum(1, keepdims=True)
    return 100 * parts[:, [order - 1 for order in orders]].sum(1).mean()


# --- fine-tuning ------------------------------------------------------------------------------------------------------

PETS, CARS = "Oxford-IIIT Pets", "Stanford Cars"


def fine_tuned(protocol, epochs=30):
    """Accuracy by head, on Pets and on Cars."""
    found = of_table("transfer", epochs, protocol)
    return [{head: runs[0]["accuracy"] for (row, head), runs in found.items() if row == data} for data in (PETS, CARS)]


def test_fine_tuning_is_quoted_as_measured():
    pets, cars = fine_tuned("paper")
    assert len(pets) == len(cars) == 6
    gain = {head: (pets[head] - pets["SM"], cars[head] - cars["SM"]) for head in pets}
    papers = of_paper("transfer")
    short = [papers[CARS, head] - cars[head] for head in ("SM", "LIN", "SOP", "Ours")]
    runs = of_table("transfer", 30)
    parameters = [f"{runs[data, 'SOP'][0]['parameters']['head'] / 1e6:.0f}" for data in (PETS, CARS)]
    images = runs[CARS, "SM"][0]["images"]
    lost = 8144 - images["train"], 8041 - images["test"]
    said(
        f"its layer is {-gain['Ours'][0]:.1f} points behind softmax on Pets and {-gain['Ours'][1]:.1f} on Cars",
        f"no bias, is {-gain['LIN'][0]:.1f} behind and level.",
        f"ahead of softmax by {gain['SOP'][0]:.1f} and {gain['SOP'][1]:.1f} points",
        f"for {parameters[0]} and {parameters[1]} million parameters",
        f"level with softmax and {gain['Best'][1]:.1f} ahead",
        f"its control without a kernel {gain['EXP'][0]:.1f} and {gain['EXP'][1]:.1f} ahead",
        f"{papers[PETS, 'Ours'] - pets['Best']:.1f} points short of the paper's {papers[PETS, 'Ours']} on Pets",
        f"on Pets and {papers[CARS, 'Ours'] - cars['Best']:.1f} of its {papers[CARS, 'Ours']:.2f} on Cars",
        f"{lost[0]} pictures to train on and {lost[1]} to test on were missing",
        f"are {min(short):.1f} to {max(short):.1f} points below its numbers on Cars",
        f"on Pets softmax is {papers[PETS, 'SM'] - pets['SM']:.1f} below",
        f"pooling {pets['SOP'] - papers[PETS, 'SOP']:.1f} above",
    )
    assert max(abs(gain["LIN"][1]), abs(gain["Best"][0])) < 0.1  # level
    assert max(*pets.values()) < papers[PETS, "Ours"]
    assert max(*cars.values()) < papers[CARS, "Ours"]
    variances = [
        [heads[head] * (100 - heads[head]) / images for head in ("SM", "Ours")]
        for heads, images in ((pets, 3669), (cars, 8033))
    ]
    said("standard error of {:.1f} and {:.1f}, and".format(*(one[0] ** 0.5 for one in variances)))
    said("of {:.1f} and {:.1f} for a difference".format(*(sum(both) ** 0.5 for both in variances)))
    ends = {head: runs[CARS, head][0]["curve"]["accuracy"][-1] for head in cars}
    assert {head for head, end in ends.items() if f"{end:.0f}" in ("91", "92")} == {"LIN", "Ours"}
    assert all(94.5 < end < 97.5 for head, end in ends.items() if head not in ("LIN", "Ours"))


def test_rates_of_fine_tuning_are_quoted_as_measured():
    one, own, longer = fine_tuned("paper"), fine_tuned("tuned"), fine_tuned("tuned", 60)[1]
    gains = [own[data]["Ours"] - one[data]["Ours"] for data in (0, 1)]
    to_softmax = [own[data]["Ours"] - own[data]["SM"] for data in (0, 1)]
    best = [cells[1]["Best"] - cells[1]["SM"] for cells in (one, own)]
    said(
        f"the paper's layer gains {gains[0]:.1f} points on Pets and {gains[1]:.1f} on Cars, the linear kernel "
        f"{own[0]['LIN'] - one[0]['LIN']:.1f} on Pets",
        f"({to_softmax[0]:+.1f} and {to_softmax[1]:+.1f} for the layer, "
        f"{own[0]['LIN'] - own[0]['SM']:+.1f} for the linear kernel)",
        f"costs {one[1]['Best'] - own[1]['Best']:.1f} points of the test images: it is {best[0]:.1f} ahead of softmax "
        f"under `paper` and {-best[1]:.1f} behind under `tuned`",
        f"rises by {longer['SM'] - own[1]['SM']:.1f} with softmax and {longer['EXP'] - own[1]['EXP']:.1f} with the "
        f"control, and falls by {own[1]['Best'] - longer['Best']:.1f} with the best head",
    )
    before, after = (of_table("transfer", epochs, "tuned") for epochs in (30, 60))
    assert set(after) == {(CARS, "SM"), (CARS, "EXP"), (CARS, "Best")}
    assert all((over("nll", runs, before[place]) > 0).all() for place, runs in after.items())
    said(
        f"On Oxford-IIIT Pets the layer gains {gains[0]:.1f} points",
        f"with 0.3 and 0.03, {gains[1]:.1f}.",
        document="docs/training.md",
    )
    quoted = [f"{heads[head]:.2f}" for heads in one for head in ("Ours", "SM", "Best")]
    said(
        "{} % with the paper's layer, {} with softmax and {} with".format(*quoted[:3]),
        "on Stanford Cars {}, {} and {};".format(*quoted[3:]),
        f'the layer has {own[0]["Ours"]:.2f} and {own[1]["Ours"]:.2f}, and `head="best"` {own[1]["Best"]:.2f} on Cars',
        document="README.md",
    )
    said(
        f"{one[0]['Best']:.1f} % on Pets, where softmax has {one[0]['SM']:.1f}, its control {one[0]['EXP']:.1f} and "
        f"second-order pooling {one[0]['SOP']:.1f}, and {one[1]['Best']:.1f} on Cars, or {own[1]['Best']:.1f} at "
        f"another choice of rates, where these have {one[1]['SM']:.1f}, {one[1]['EXP']:.1f} and {one[1]['SOP']:.1f}",
        document="docs/beyond.md",
    )


def test_held_out_accuracies_of_fine_tuning_are_quoted_as_measured():
    def held_out(data, head, setting):
        (folder,) = (ROOT / "results" / data / "10-epochs").glob(f"resnet50-pretrained-{head}")
        return json.loads((folder / f"choice-{setting}.json").read_text())

    def percent(data, head, setting):
        return f"{held_out(data, head, setting)['accuracy']:.0f}"

    at_softmaxs_rate = (("pets", "0.003"), ("cars", "0.01"))
    plain = [
        percent(data, head, f"lr{rate}-wd0.0001") for data, rate in at_softmaxs_rate for head in ("kernel", "softmax")
    ]
    tenfold = [percent(data, "softmax", f"lr{rate}-wd0.0001-head10") for data, rate in at_softmaxs_rate]
    own, on_cars = (
        [percent(data, "kernel", f"lr{setting}") for setting in ("0.003-wd0.0001-head10", "0.03-wd0.0001")]
        for data in ("pets", "cars")
    )
    said(
        f"has {plain[0]} % on Pets after ten epochs, where softmax has {plain[1]}, and {plain[2]} % on Cars, where "
        f"softmax has {plain[3]}",
        f"the layer has {own[0]} % of the held-out images, not {own[1]}",
        f"the network at 0.003 has {on_cars[0]} %, and at 0.03 {on_cars[1]}",
        f"leaves {tenfold[0]} of {plain[1]} % of the held-out images on Pets and {tenfold[1]} of {plain[3]} on Cars",
    )
    best = held_out("pets", "kernel-coef*landmarks*", "lr0.03-wd0.0001")["curve"]["accuracy"]
    softmax = held_out("pets", "softmax", "lr0.03-wd0.0001")["curve"]["accuracy"]
    top = int(np.argmax(best[:5]))
    said(
        f"rises to {best[top]:.0f} % with the best head, falls to {min(best[top:]):.0f} while",
        f"it falls from {max(softmax):.0f} to {min(softmax):.0f}",
    )


# --- distillation -----------------------------------------------------------------------------------------------------


def test_distillation_is_quoted_as_measured():
    found, papers, rows = of_table("distillation", 200), of_paper("distillation"), ("CIFAR-10", "CIFAR-100")
    assert all(set(runs) == {0, 1, 2} for runs in found.values())
    assert len(found) == 8
    gain, lead, control = (
        [over("accuracy", found[row, one], found[row, other]) for row in rows]
        for one, other in (("Ours", "SM"), ("Best", "SM"), ("Best", "EXP"))
    )
    assert all((values > 0).all() for values in [*gain, *lead, *control])
    best = [mean("accuracy", found[row, "Best"]) for row in rows]
    below = [papers[row, "SM"] - mean("accuracy", found[row, "SM"]) for row in rows]
    nll = [mean("nll", found[row, head]) for row in rows for head in ("Ours", "SM")]
    said(
        f"it is {spread(gain[0])} above softmax on CIFAR-10 and {spread(gain[1])} on CIFAR-100",
        f"softmax by {below[0]:.1f} points on CIFAR-10 and by {below[1]:.1f} on CIFAR-100",
        f"The best head has {best[0]:.2f} and {best[1]:.2f} %: {lead[0].mean():.1f} and {lead[1].mean():.1f} points",
        f"and {spread(control[0])} and {spread(control[1])} above its control, with every seed",
        f"{best[1] - papers['CIFAR-100', 'Ours']:.1f} points more than the paper's {papers['CIFAR-100', 'Ours']}",
        f"on CIFAR-10 it is {papers['CIFAR-10', 'Ours'] - best[0]:.1f} short of its {papers['CIFAR-10', 'Ours']}",
        "({:.2f} and {:.2f}, {:.2f} and {:.2f})".format(*nll),
        f"with the best head on CIFAR-10 ({mean('nll', found['CIFAR-10', 'Best']):.2f})",
        f"the best head has {mean('nll', found['CIFAR-100', 'Best']):.2f} and its control "
        f"{mean('nll', found['CIFAR-100', 'EXP']):.2f}",
        f"a₆ alone is {share(found['CIFAR-100', 'Best'], 6):.0f}.",
        f"a₁ is {share(found['CIFAR-100', 'Ours'], 1):.0f} % on CIFAR-100, and "
        f"{share(found['CIFAR-10', 'Ours'], 1):.0f} on CIFAR-10",
    )
    assert share(found["CIFAR-100", "Best"], 1, 2, 3, 4) < 1
    assert share(found["CIFAR-10", "Ours"], 1, 2, 3) == pytest.approx(100)
    said(
        f"it is {spread(control[0])} points ahead of its control on CIFAR-10 and {spread(control[1])} on CIFAR-100, "
        f"and {lead[0].mean():.1f} and {lead[1].mean():.1f} ahead of softmax (three seeds)",
        document="docs/beyond.md",
    )


def test_what_students_learn_from_is_quoted_as_measured():
    rows = json.loads((ROOT / "results" / "bench" / "students.json").read_text())["rows"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "students.py"))["markdown"](rows)
    assert table in (ROOT / "docs" / "tables.md").read_text()
    best = {name: row["held_out"][row["rate"]] for name, row in rows.items()}
    hard = {head: best[f"{head}, scores at 20"] for head in ("softmax", "linear", "kernel")}
    found = of_table("distillation", 200)
    parts = [
        over("accuracy", found[row, head], found[row, "SM"]).mean()
        for row in ("CIFAR-100", "CIFAR-10")
        for head in ("EXP", "Best")
    ]
    more = [
        f"{(found[row, 'EXP'][0]['parameters']['head'] - found[row, 'SM'][0]['parameters']['head']) / 1000:.0f}"
        for row in ("CIFAR-10", "CIFAR-100")
    ]
    said(
        f"softmax has {best['softmax, scores at 20, 3 times as wide'] - hard['softmax']:.1f} points more",
        f"they cost softmax {best['softmax, labels'] - hard['softmax']:.0f} points",
        f"gains, {hard['kernel'] - hard['softmax']:.1f} points here, of which the linear kernel has "
        f"{hard['linear'] - hard['softmax']:.1f}",
        "has {:.1f} of the best head's {:.1f} points on CIFAR-100 and {:.1f} of {:.1f} on CIFAR-10".format(*parts),
        f"an expansion of {more[0]} and {more[1]} thousand parameters more",
    )
    for learned in ("scores at 4", "labels"):
        level = [best[f"{head}, {learned}"] for head in ("softmax", "linear", "kernel")]
        assert max(level) - min(level) < 0.5
    teacher = of_table("active", 200)["70 %", "SM", "random", "ResNet-56"][0]
    said(f"trained on 70 % of the images ({teacher['accuracy']:.2f} % of the test images)")
    for row, ends in (("CIFAR-100", (34, 35)), ("CIFAR-10", (72, 73))):
        training = [run["curve"]["accuracy"][-1] for run in found[row, "SM"].values()]
        assert (round(min(training)), round(max(training))) == ends
        assert max(training) < mean("accuracy", found[row, "SM"])


# --- active learning --------------------------------------------------------------------------------------------------


def gains(found, depth, percent=None):
    """Of the learned kernel over softmax, cell by cell."""
    return np.array(
        [
            mean("accuracy", runs) - mean("accuracy", found[row, "SM", strategy, network])
            for (row, head, strategy, network), runs in found.items()
            if head == "Ours" and network == f"ResNet-{depth}" and percent in (None, row)
        ]
    )


def over_random(found, depth):
    """Of each head and strategy, in the mean of the budgets."""
    cells = {}
    for (row, head, strategy, network), runs in found.items():
        if network == f"ResNet-{depth}" and strategy != "random":
            difference = mean("accuracy", runs) - mean("accuracy", found[row, head, "random", network])
            cells.setdefault((head, strategy), []).append(difference)
    means = [np.mean(values) for values in cells.values()]
    return f"by {min(means):.1f} to {max(means):.1f}"


def test_active_learning_is_quoted_as_measured():
    found = of_table("active", 200)
    ours = {place: runs for place, runs in found.items() if place[1] == "Ours"}
    assert len(ours) == 21 + 15
    for name in ("nll", "ece"):
        assert all((over(name, runs, found[row, "SM", *of]) < 0).all() for (row, _, *of), runs in ours.items())
    deep, shallow = gains(found, 56), gains(found, 20)
    by_percent = {
        depth: {percent: gains(found, depth, f"{percent} %").mean() for percent in percents}
        for depth, percents in ((56, (30, 40, 70, 80, 90)), (20, (30, 80, 90)))
    }
    late = [by_percent[56][percent] for percent in (70, 80, 90)]
    papers = of_paper("active")
    to_paper = {
        head: np.mean([mean("accuracy", found[at]) - papers[at] for at in found if at[1] == head and papers[at]])
        for head in ("SM", "Ours")
    }
    took = {"margin": set(), "k-center": set()}  # budgets share what a process chose
    for (_, _, strategy, network), runs in found.items():
        if network == "ResNet-56" and strategy in took:
            took[strategy].add(runs[0]["selection"]["seconds"])
    seconds = {strategy: np.mean(list(each)) for strategy, each in took.items()}
    said(
        f"in {(deep > 0).sum()} of {len(deep)} cells, by {deep.min():.1f} to {deep.max():.1f} points",
        f"{deep.mean():.1f} in the mean: {by_percent[56][30]:.1f} with 30 %",
        f"of the images, {by_percent[56][40]:.1f} with 40 %, and {min(late):.1f} to {max(late):.1f} with 70 to 90 %",
        f"softmax is {to_paper['SM']:.1f} above its numbers in the mean, and the",
        f"learned kernel {-to_paper['Ours']:.1f} below them",
        f"all {len(shallow)} cells, by {shallow.min():.2f} to {shallow.max():.1f} points, {shallow.mean():.1f} in the",
        "mean: {:.1f} with 30 % of the images, falling to {:.1f} with 80 %, and {:.1f} with 90 %".format(
            *by_percent[20].values()
        ),
        f"{over_random(found, 56)} with ResNet-56 and {over_random(found, 20)} with ResNet-20",
        f"took {seconds['k-center']:.1f} and {seconds['margin']:.1f} s each",
    )
    assert (shallow > 0).all()
    for depth in (20, 56):
        shares = [share({0: runs[0]}, 1) for at, runs in ours.items() if at[3] == f"ResNet-{depth}"]
        said(f"{min(shares):.0f} to {max(shares):.0f} %")


def test_the_linear_kernel_on_few_images_is_quoted_as_measured():
    found = of_table("active", 200)
    softmax, linear, kernel = (found["30 %", head, "random", "ResNet-20"] for head in ("SM", "LIN", "Ours"))
    assert set(softmax) == set(linear) == set(kernel) == set(range(8))
    told = [spread(np.array([run["accuracy"] for run in runs.values()]), 2) for runs in (softmax, kernel, linear)]
    pairs = [(kernel, softmax), (linear, softmax), (kernel, linear)]
    every = [over("accuracy", *pair) for pair in pairs]
    others = [values[1:] for values in every]
    own = over("nll", linear, kernel)
    nll = [mean("nll", runs) for runs in (softmax, kernel, linear)]
    said(
        f"softmax has {told[0]}, the learned kernel {told[1]} and the linear one {told[2]}.",
        f"The learned kernel is {spread(every[0])} above softmax (p {sign_flip_p(every[0]):.3f}), the linear one "
        f"{spread(every[1])} (p {sign_flip_p(every[1]):.3f}), and the learned one {spread(every[2])} above the linear "
        f"one (p {sign_flip_p(every[2]):.2f})",
        "these are {:.1f}, {:.1f} and {:.1f}".format(*(values.mean() for values in others)),
        "(p {:.2f}, {:.2f} and {:.2f})".format(*map(sign_flip_p, others)),
        f"{nll[0]:.3f} to {nll[1]:.3f}, nine tenths do: the linear kernel has {nll[2]:.3f}",
        f"{spread(own, 2)} (p {sign_flip_p(own):.3f}, and {sign_flip_p(own[1:]):.2f} without seed 0)",
        f"its largest gain of that network, {every[0][0]:.1f}",
    )
    assert 0.9 < (nll[0] - nll[2]) / (nll[0] - nll[1]) < 0.95
