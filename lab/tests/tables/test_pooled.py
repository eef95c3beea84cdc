"""Tests of methods over networks and seeds together, and the table of lengths, over result files written by hand."""

import pytest
from scipy import stats

from kernelhead_lab.tables import EXPERIMENTS, epochs
from kernelhead_lab.tables.beyond import LANDMARKS
from kernelhead_lab.tables.pooled import methods_of
from kernelhead_lab.tables.pooled import tests as table_of_tests
from kernelhead_lab.tables.store import Store


def cell_of(table, row, column):
    (cell,) = [cell for cell in EXPERIMENTS[table].cells if (cell.row, cell.column) == (row, column)]
    return cell


def row_of(made, *labels):
    (row,) = [row for row in made.rows if tuple(row[: len(labels)]) == labels]
    return row[len(labels) :]


@pytest.mark.parametrize(
    ("table", "methods", "cells"),
    [
        ("cifar100", ["LIN", "SOP", "KER", "Ours"], 6),
        (
            "beyond",
            [f"{head} {data}" for data in ("CIFAR-100", "CIFAR-10") for head in ("SOP", "EXP", "Kernel", "Best")],
            6,
        ),
        ("kernels", ["Gaussian RBF kernel", "Polynomial kernel", "Learned kernel"], 2),
        ("rectification", ["rectified features, Ours", "unrectified features, Ours"], 2),
        ("activations", ["sigmoid", "softmax", "relu", "none"], 2),
    ],
)
def test_methods_are_labels_without_networks(table, methods, cells):
    found = methods_of(EXPERIMENTS[table])
    assert list(found) == methods
    assert all(len(each) == cells for each in found.values())


def test_a_method_is_tested_over_depths_and_seeds(tmp_path, write_runs):
    experiment, store = EXPERIMENTS["cifar10"], Store(tmp_path, 200)
    paper, tuned = experiment.protocols.values()
    gains = {"SOP": [[1.0, 2.0, 0.5], [0.25]], "Ours": [[-1.0, 0.5, 2.0], [3.0]]}
    for depth, size in ((8, 3), (14, 1)):
        for column in ("SM", *gains):
            own = gains[column][depth == 14] if column != "SM" else [0.0] * size
            cell = cell_of("cifar10", f"ResNet-{depth}", column)
            write_runs(store, cell, paper, {seed: 80.0 + seed + own[seed] for seed in range(size)})
    made = table_of_tests(experiment, store, [paper, tuned])
    expected = {}
    for column, (deep, shallow) in gains.items():
        weighted = [gain / 6 for gain in deep] + [gain / 2 for gain in shallow]
        p = stats.permutation_test((weighted,), sum, permutation_type="samples", n_resamples=float("inf")).pvalue
        expected[column] = sum(weighted), p
    assert row_of(made, "SOP") == [f"{expected['SOP'][0]:+.2f}", "4", "0.125", "0.250", "not run", "", "", ""]
    assert expected["SOP"][1] == 2 / 16
    mean, p = expected["Ours"]
    assert row_of(made, "Ours")[:4] == [f"{mean:+.2f}", "4", f"{p:.3f}", f"{max(p, 0.25):.3f}"]
    assert row_of(made, "KER") == ["not run", "", "", "", "not run", "", "", ""]
    assert made.columns[1::4] == ["over SM, paper's protocol", "over SM, tuned"]


def test_lengths_stand_side_by_side_with_what_a_gain_grew_by(tmp_path, write_runs):
    paper = epochs.EPOCHS.protocols["paper"]
    stores = {length: Store(tmp_path, length) for length in (200, 450)}
    sm, ours = (cell_of("epochs", "ResNet-8", f"{head} CIFAR-100") for head in ("SM", "Kernel"))
    for length, gains in ((200, {0: 1.0, 1: 2.0}), (450, {0: 1.5, 1: 4.5, 2: 9.0})):
        write_runs(stores[length], sm, paper, dict.fromkeys(gains, 60.0))
        write_runs(stores[length], ours, paper, {seed: 60.0 + gain for seed, gain in gains.items()})
    made = epochs.table(stores, paper)
    assert made.name == "epochs"
    shown = ["+4.45", "not run", "", "61.50 ± 0.71", "+1.50 (p 0.500)"]
    shown += ["65.00 ± 3.77", "+5.00 (p 0.250)", "+1.50 (p 0.500)"]
    assert row_of(made, "ResNet-8", "Kernel CIFAR-100") == shown
    assert row_of(made, "ResNet-56", "Kernel CIFAR-100") == ["+2.87", *["not run", ""] * 3, ""]
    together = ["+3.55", "", "not run", "", "+1.50 (n 2, p 0.500)", "", "+5.00 (n 3, p 0.250)", "+1.50 (n 2, p 0.500)"]
    assert row_of(made, "ResNet-8, 20, 56", "Kernel CIFAR-100") == together
    assert len(made.rows) == 36 + 10
    assert epochs.table({}, epochs.EPOCHS.protocols["tuned"]).name == "epochs-tuned"


def test_a_length_without_runs_of_its_rates_has_those_of_the_table_of_landmarks(tmp_path, write_runs):
    store, shorter = Store(tmp_path, 100), LANDMARKS.protocols["paper"]
    for row, accuracy in (("linear", 60.0), ("learned kernel, softplus, 2048", 72.25)):
        write_runs(store, cell_of("landmarks", row, "ResNet-20"), shorter, {0: accuracy})
    made = epochs.table({100: store}, epochs.EPOCHS.protocols["paper"])
    assert row_of(made, "ResNet-20", "Best CIFAR-100")[1:3] == ["72.25", "+12.25"]
    write_runs(store, cell_of("epochs", "ResNet-20", "SM CIFAR-100"), epochs.EPOCHS.protocols["paper"], {0: 61.0})
    made = epochs.table({100: Store(tmp_path, 100)}, epochs.EPOCHS.protocols["paper"])
    assert row_of(made, "ResNet-20", "SM CIFAR-100")[1] == "61.00"
    assert row_of(made, "ResNet-20", "Best CIFAR-100")[1:3] == ["not run", ""]
