"""Tables from result files that are written by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernelhead_lab.tables import EXPERIMENTS
from kernelhead_lab.tables.experiment import Candidate, Protocol
from kernelhead_lab.tables.grid import accuracies, choices, details, files_of, overview, sizes, table, whole
from kernelhead_lab.tables.store import Store

PAPER = EXPERIMENTS["cifar10"].protocols["paper"]
TUNED = EXPERIMENTS["cifar10"].protocols["tuned"]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, 200)


def cell_of(name, row, column):
    (cell,) = [cell for cell in EXPERIMENTS[name].cells if (cell.row, cell.column) == (row, column)]
    return cell


@pytest.fixture
def write(write_runs):
    return write_runs


def alter(path, **change):
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def row_of(made, row, column):
    (found,) = [cells for cells in made.rows if cells[:2] == [row, column]]
    return found[2:]


def by_hand(ours, theirs):
    """Mean difference over shared seeds, and how many of all sign patterns reach as far."""
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    n, reached = len(differences), 0
    for pattern in range(2**n):
        total = sum(d if pattern >> place & 1 else -d for place, d in enumerate(differences))
        reached += abs(total) >= abs(sum(differences)) - 1e-9
    return f"{sum(differences) / n:+.2f} (p {reached / 2**n:.3f})"


def test_nothing_was_run(store):
    for name, experiment in EXPERIMENTS.items():
        assert not files_of(experiment, store, list(experiment.protocols.values()))
        made = table(experiment, store, [next(iter(experiment.protocols.values()))])
        assert (made.name, made.title) == (name, experiment.title)
        assert len(made.rows) == len(experiment.cells)
        assert {tuple(row[-2:]) for row in made.rows} == {("not run", "")}
        columns = 4 if name in ("landmarks", "saturation", "mixup") else 6  # the paper has nothing of them
        assert all(len(row) == len(made.columns) == columns for row in made.rows)


def test_the_papers_side(store):
    made = table(EXPERIMENTS["cifar10"], store, [PAPER])
    assert row_of(made, "ResNet-8", "SM")[:2] == ["83.73", ""]
    assert row_of(made, "ResNet-8", "LIN")[:2] == ["82.45", "-1.28"]
    assert row_of(made, "ResNet-56", "Ours")[:2] == ["94.15", "+1.14"]
    assert row_of(made, "ResNet-44", "KER")[:2] == ["92.87", "+0.77"]
    made = table(EXPERIMENTS["activations"], store, [PAPER])
    assert row_of(made, "none", "ResNet-56")[:2] == ["unstable", ""]
    assert row_of(made, "sigmoid", "ResNet-56")[:2] == ["74.96", "+3.73"]
    made = table(EXPERIMENTS["active"], store, [PAPER])
    assert row_of(made, "60 %", "Ours margin ResNet-56")[:2] == ["70.61", "+3.58"]


def test_one_seed(store, write):
    write(store, cell_of("cifar10", "ResNet-8", "SM"), PAPER, {0: 80.126})
    write(store, cell_of("cifar10", "ResNet-8", "Ours"), PAPER, {0: 84.0})
    made = table(EXPERIMENTS["cifar10"], store, [PAPER])
    assert row_of(made, "ResNet-8", "SM")[2:] == ["80.13", ""]
    assert row_of(made, "ResNet-8", "Ours")[2:] == ["84.00", "+3.87"]
    assert row_of(made, "ResNet-8", "LIN")[2:] == ["not run", ""]
    assert row_of(made, "ResNet-14", "SM")[2:] == ["not run", ""]


def test_several_seeds_by_hand(store, write):
    softmax = {0: 80.0, 1: 81.5, 2: 79.25, 3: 80.0}
    ours = {0: 82.0, 1: 81.0, 2: 83.25, 3: 82.5, 4: 99.0}  # nothing to pair the last one with
    write(store, cell_of("cifar10", "ResNet-20", "SM"), PAPER, softmax)
    write(store, cell_of("cifar10", "ResNet-20", "Ours"), PAPER, ours)
    made = table(EXPERIMENTS["cifar10"], store, [PAPER])
    assert row_of(made, "ResNet-20", "SM")[2:] == [f"80.19 ± {np.std(list(softmax.values()), ddof=1):.2f} (4)", ""]
    mean, deviation = np.mean(list(ours.values())), np.std(list(ours.values()), ddof=1)
    assert row_of(made, "ResNet-20", "Ours")[2:] == [f"{mean:.2f} ± {deviation:.2f} (5)", by_hand(ours, softmax)]
    assert by_hand(ours, softmax) == "+2.00 (p 0.250)"


def test_diverged(store, write):
    softmax = cell_of("cifar10", "ResNet-8", "SM")
    write(store, softmax, PAPER, {0: 80.0, 1: 82.0, 2: None})
    write(store, cell_of("cifar10", "ResNet-8", "Ours"), PAPER, {0: None, 1: None})
    write(store, cell_of("cifar10", "ResNet-8", "LIN"), PAPER, {0: None, 1: 85.0, 2: 99.0})
    made = table(EXPERIMENTS["cifar10"], store, [PAPER])
    assert row_of(made, "ResNet-8", "SM")[2:] == ["81.00 ± 1.41 (2), 1 diverged", ""]
    assert row_of(made, "ResNet-8", "Ours")[2:] == ["diverged", ""]
    assert row_of(made, "ResNet-8", "LIN")[2:] == ["92.00 ± 9.90 (2), 1 diverged", "+3.00"]
    assert accuracies(softmax, store, PAPER) == {0: 80.0, 1: 82.0}


def test_protocols_side_by_side(store, write):
    softmax, ours = cell_of("cifar10", "ResNet-8", "SM"), cell_of("cifar10", "ResNet-8", "Ours")
    write(store, softmax, PAPER, {0: 80.0})
    write(store, softmax, TUNED, {0: 90.0})
    write(store, ours, TUNED, {0: 92.5})
    made = table(EXPERIMENTS["cifar10"], store, [PAPER, TUNED])
    assert made.columns == ["", "", "paper", "over SM", "paper's protocol", "over SM", "tuned", "over SM"]
    assert row_of(made, "ResNet-8", "SM")[2:] == ["80.00", "", "90.00", ""]
    assert row_of(made, "ResNet-8", "Ours")[2:] == ["not run", "", "92.50", "+2.50"]
    assert files_of(EXPERIMENTS["cifar10"], store, [TUNED])
    assert not files_of(EXPERIMENTS["cifar100"], store, [PAPER, TUNED])
    notes = "\n".join(made.notes)
    assert "paper: learning rate from 0.05, 0.1, 0.3, 1, weight decay from 0.0001, chosen" in notes
    assert "tuned: learning rate from 0.05, 0.1, 0.3, 1, weight decay from 0.0001, 0.0005, chosen" in notes
    assert "last epoch of 200" in notes


def test_ablations_are_compared_with_the_baseline_of_another_table(store, write):
    write(store, cell_of("cifar100", "ResNet-56", "SM"), PAPER, {0: 70.0, 1: 71.0})
    write(store, cell_of("cifar100", "ResNet-56", "Ours"), PAPER, {0: 73.0, 1: 75.0})
    write(store, cell_of("kernels", "Gaussian RBF kernel", "ResNet-56"), PAPER, {0: 69.0, 1: 71.5})
    made = table(EXPERIMENTS["kernels"], store, [PAPER])
    assert row_of(made, "Learned kernel", "ResNet-56")[2:] == ["74.00 ± 1.41 (2)", "+3.50 (p 0.500)"]
    assert row_of(made, "Gaussian RBF kernel", "ResNet-56")[2:] == ["70.25 ± 1.77 (2)", "-0.25 (p 1.000)"]
    assert row_of(table(EXPERIMENTS["activations"], store, [PAPER]), "relu", "ResNet-56")[3] == "+3.50 (p 0.500)"


def test_active_learning_pairs_strategies(store, write):
    for number, strategy in enumerate(("random", "margin", "k-center")):
        write(store, cell_of("active", "40 %", f"SM {strategy} ResNet-56"), PAPER, {0: 50.0 + 10 * number})
        write(store, cell_of("active", "40 %", f"Ours {strategy} ResNet-56"), PAPER, {0: 51.0 + 11 * number})
    made = table(EXPERIMENTS["active"], store, [PAPER])
    assert [row_of(made, "40 %", f"Ours {strategy} ResNet-56")[3] for strategy in ("random", "margin", "k-center")] == [
        "+1.00",
        "+2.00",
        "+3.00",
    ]


def test_the_time_of_selections_is_told(store, write):
    for strategy, seconds in (("margin", 0.25), ("k-center", 3.14)):
        selection = {"strategy": strategy, "images": 40_000, "seconds": seconds}
        for column in ("SM", "Ours"):
            cell = cell_of("active", "40 %", f"{column} {strategy} ResNet-20")
            write(store, cell, PAPER, {0: 50.0}, extra={"selection": selection})
    notes = table(EXPERIMENTS["active"], store, [PAPER]).notes
    told = [note for note in notes if "once for all budgets" in note]
    assert told == ["k-center put 40,000 images in order by the features of resnet20 in 3.1 s, once for all budgets."]


def test_images_left_out_and_hardware_are_told(store, write):
    protocol = EXPERIMENTS["transfer"].protocols["paper"]
    write(
        store,
        cell_of("transfer", "Oxford-IIIT Pets", "SM"),
        protocol,
        {0: 90.0},
        images={"train": 9, "test": 9, "left_out": 3},
    )
    notes = table(EXPERIMENTS["transfer"], store, [protocol]).notes
    assert "3 images of pets were missing or could not be read." in notes
    assert any(note.startswith("Run on ") for note in notes)


def test_a_damaged_file_is_left_out_and_named(store, write):
    cell = cell_of("cifar10", "ResNet-8", "SM")
    write(store, cell, PAPER, {0: 80.0, 1: 90.0})
    store.result_path(cell, PAPER, 1).write_text('{"format": 2')
    made = table(EXPERIMENTS["cifar10"], store, [PAPER])
    assert row_of(made, "ResNet-8", "SM")[2:] == ["80.00", ""]
    (sentence,) = store.broken
    assert "lr0.05-wd0.0001-seed1.json" in sentence


def test_a_table_may_be_part_of_another():
    one, two, three = (Path(name) for name in "abc")
    files = {"kernels": {two}, "first": {one, two}, "same": {one, two}, "more": {one, two, three}, "other": {three}}
    found = {name: whole(name, files) for name in files}
    assert found == {"kernels": None, "first": "more", "same": "more", "more": None, "other": "more"}
    del files["more"]
    assert {name: whole(name, files) for name in files} == {**dict.fromkeys(files), "same": "first"}


def test_other_epochs_are_another_table(store, write, tmp_path):
    write(store, cell_of("cifar10", "ResNet-8", "SM"), PAPER, {0: 80.0})
    other = Store(tmp_path, 450)
    assert not files_of(EXPERIMENTS["cifar10"], other, [PAPER, Protocol("x", (0.1,), (0.1,), 1)])


def test_the_papers_arrangement(store, write):
    write(store, cell_of("cifar10", "ResNet-8", "SM"), PAPER, {0: 80.0, 1: 82.0})
    write(store, cell_of("cifar10", "ResNet-8", "LIN"), PAPER, {0: None})
    made = overview(EXPERIMENTS["cifar10"], store, PAPER)
    assert made.columns == ["", "SM", "LIN", "SOP", "KER", "Ours"]
    assert [row[0] for row in made.rows] == [f"ResNet-{depth}" for depth in (8, 14, 20, 32, 44, 56)]
    assert made.rows[0][1:4] == ["81.00 ± 1.41 (2) [83.73]", "diverged [82.45]", "not run [84.03]"]
    made = overview(EXPERIMENTS["beyond"], store, TUNED)
    assert made.columns[1:6] == [f"{head} CIFAR-100" for head in ("SM", "SOP", "EXP", "Kernel", "Best")]
    assert made.rows[5][1:6] == ["not run [71.23]", "not run [73.12]", "not run", "not run [74.10]", "not run"]
    assert made.rows[0][6:] == ["not run [83.73]", "not run [84.03]", "not run", "not run [86.93]", "not run"]


def test_details_by_hand(store, write):
    ours = cell_of("cifar10", "ResNet-14", "Ours")
    write(store, cell_of("cifar10", "ResNet-8", "SM"), PAPER, {0: 80.0, 1: 82.0, 2: None})
    write(store, ours, PAPER, {0: 90.0}, seconds=30.4, alpha=[0.0, 1.0, 1.0, 2.0, 0.0, 0.5, 0.0])
    write(store, ours, TUNED, {0: 91.0}, alpha=[0.0, 0.0, 1.0, 2.0, 0.0, 0.5, 0.1])
    made = details(EXPERIMENTS["cifar10"], store, [PAPER, TUNED])
    assert made.rows == [
        ["ResNet-8", "SM", "paper", "2", "81.00", "1.190", "12.30", "0.05", "0.0001", "6,500", "1"],
        ["ResNet-14", "Ours", "paper", "1", "90.00", "1.100", "12.30", "0.05", "0.0001", "6,500", "30"],
        ["ResNet-14", "Ours", "tuned", "1", "91.00", "1.090", "12.30", "0.05", "0.0005", "6,500", "1"],
    ]
    assert len(made.columns) == len(made.rows[0])
    assert made.notes[1].endswith("of 2 runs: a_2 in 2, a_4 in 1.")


def test_dead_coefficients_are_those_of_relu(store, write):
    write(store, cell_of("activations", "sigmoid", "ResNet-56"), PAPER, {0: 70.0}, alpha=[0.0] * 10)
    write(store, cell_of("kernels", "Gaussian RBF kernel", "ResNet-56"), PAPER, {0: 70.0}, alpha=[0.0] * 10)
    assert len(details(EXPERIMENTS["activations"], store, [PAPER]).notes) == 1
    _, *notes = details(EXPERIMENTS["kernels"], store, [PAPER]).notes
    assert notes == ["The whole kernel ended at zero: Gaussian RBF kernel, ResNet-56, paper, seed 0."]


def test_runs_that_protocols_share_count_once(store, write):
    """Where the tuned protocol chooses what the paper's chose, its runs are the same files."""
    cell = cell_of("cifar10", "ResNet-8", "Ours")
    same = replace(TUNED, weight_decays=PAPER.weight_decays)
    write(store, cell, PAPER, {0: 80.0, 1: 81.0}, alpha=[0.0] * 9 + [1.0])
    made = details(EXPERIMENTS["cifar10"], store, [PAPER, same])
    assert "of 2 runs: a_1 in 2" in made.notes[1]
    assert [row[:5] for row in made.rows] == [["ResNet-8", "Ours", "paper, tuned", "2", "80.50"]]


def test_choices(store, write):
    """All candidates of a network in a row, also before all are there."""
    softmax, ours = (cell_of("cifar10", "ResNet-20", column) for column in ("SM", "Ours"))
    for cell in (softmax, ours):
        write(store, cell, PAPER, {})
    diverged = store.choice_path(softmax, PAPER, Candidate(1.0, 1e-4))
    alter(diverged, accuracy=None)
    for rate in (0.05, 0.3, 1.0):
        store.choice_path(ours, PAPER, Candidate(rate, 1e-4)).unlink()
    made = choices(EXPERIMENTS["cifar10"], store, [PAPER])
    assert made.columns == ["", "0.05, 0.0001", "0.1, 0.0001", "0.3, 0.0001", "1, 0.0001", "chosen"]
    assert made.rows == [
        ["resnet20-linear", "50.95", "50.90", "50.70", "diverged", "0.05, 0.0001"],
        ["resnet20-kernel", "", "50.90", "", "", ""],
    ]
    write(store, softmax, TUNED, {})
    made = choices(EXPERIMENTS["cifar10"], store, [PAPER, TUNED])
    assert made.rows[0][-5:] == ["54.95", "54.90", "54.70", "54.00", "paper: 0.05, 0.0001; tuned: 0.05, 0.0005"]
    made = choices(EXPERIMENTS["beyond"], store, [PAPER])  # which has two data sets
    assert [row[0] for row in made.rows] == ["cifar10, resnet20-linear", "cifar10, resnet20-kernel"]


def test_a_rate_of_the_heads_own_is_told(store, write):
    cell, protocol = cell_of("transfer", "Oxford-IIIT Pets", "Ours"), EXPERIMENTS["transfer"].protocols["tuned"]
    preferred = Candidate(0.003, 1e-4, 10.0)
    write(store, cell, protocol, {})
    path = store.choice_path(cell, protocol, preferred)
    alter(path, accuracy=99.0)
    store = Store(store.root, 200)
    write(store, cell, protocol, {0: 90.0})
    told = [note for note in table(EXPERIMENTS["transfer"], store, [protocol]).notes if note.startswith("tuned: ")]
    rates = (
        "learning rate from 0.001, 0.003, 0.01, 0.03, that of the head from 1, 10 times it, weight decay from 0.0001"
    )
    assert told[0].startswith(f"tuned: {rates}, chosen on a tenth of the training images")
    assert details(EXPERIMENTS["transfer"], store, [protocol]).rows[0][7:9] == ["0.003, head 0.03", "0.0001"]
    made = choices(EXPERIMENTS["transfer"], store, [protocol])
    assert made.columns[5] == "0.001, 0.0001, head x10"
    assert made.rows[0][-1] == "0.003, 0.0001, head x10"


def test_accuracy_by_the_size_of_test_images(store, write):
    experiment = EXPERIMENTS["transfer-long"]
    protocol = experiment.protocols["tuned"]
    cell = cell_of("transfer-long", "Stanford Cars", "Best")
    assert sizes(experiment, store, [protocol]) is None
    crops = {"288": {"accuracy": 91.0, "nll": 0.4}, "288, own statistics": {"accuracy": 91.5, "nll": 0.3}}
    write(store, cell, protocol, {})
    alter(store.choice_path(cell, protocol, store.choice(cell, protocol)), extra={"environment": {}, "crops": crops})
    store = Store(store.root, 200)
    write(store, cell, protocol, {0: 90.0, 1: 92.0})
    for seed in (0, 1):
        theirs = {size: {**found, "accuracy": found["accuracy"] + seed} for size, found in crops.items()}
        alter(store.result_path(cell, protocol, seed), extra={"environment": {}, "crops": theirs})
    made = sizes(experiment, Store(store.root, 200), [protocol])
    assert made.columns == ["", "", "n", "224", "288", "288, own statistics", "chosen", "accuracy there"]
    shown = ["91.00 / 1.090", "91.50 / 0.400", "92.00 / 0.300", "288, own statistics", "92.00"]
    assert made.rows == [["Stanford Cars", "Best", "2", *shown]]


def test_the_note_on_what_is_compared(store):
    notes = {name: " ".join(table(EXPERIMENTS[name], store, [PAPER]).notes) for name in ("landmarks", "activations")}
    assert "Over SM: linear, runs of the table landmarks." in notes["landmarks"]
    assert "Over SM: ResNet-56 or ResNet-20 with the linear head, runs of the table cifar100." in notes["activations"]
