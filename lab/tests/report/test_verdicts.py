"""The page of claims, over result files written by hand and by the paper's numbers typed in again."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kernelhead_lab.report.verdicts import CLAIMS, divergence, table, verdict
from kernelhead_lab.tables import EXPERIMENTS
from kernelhead_lab.tables.queue import chosen_cells
from kernelhead_lab.tables.store import Store
from kernelhead_lab.tables.synthetic import find_results

DEPTHS = (8, 14, 20, 32, 44, 56)
# The paper's tables 2, 3 and 6: the figures of its own layer, and of what that is compared with.
OURS = {"cifar10": [86.93, 91.48, 92.88, 93.70, 94.05, 94.15], "cifar100": [58.27, 66.67, 69.33, 71.30, 73.20, 74.10]}
SOP = {"cifar10": [84.03, 90.47, 91.75, 92.31, 92.42, 93.33], "cifar100": [55.80, 63.53, 67.97, 70.39, 71.13, 73.12]}
KER = {"cifar10": [85.15, 90.41, 91.34, 92.41, 92.87, 93.09], "cifar100": [56.86, 64.14, 67.31, 69.40, 71.09, 72.39]}
LABELS = """
    58.03 58.88 58.41 61.66 61.80 63.08   61.05 61.81 62.02 65.25 66.28 66.35   64.81 65.36 65.47 67.17 68.14 69.41
    66.26 67.03 68.25 69.17 70.61 70.10   67.47 69.16 69.84 70.06 70.90 71.50   69.59 69.47 71.25 71.66 72.21 72.64
    70.25 71.41 71.11 72.60 73.90 73.14"""


def cell_of(name, row, column):
    (cell,) = [cell for cell in EXPERIMENTS[name].cells if (cell.row, cell.column) == (row, column)]
    return cell


def row_of(made, number):
    (row,) = [row for row in made.rows if row[0].startswith(f"{number}. ")]
    return dict(zip(made.columns[1:], row[1:], strict=True))


def write_gains(write_runs, store, name, gains, protocol="paper", column="SM"):
    """Write runs of a CIFAR table: those of `column` at 80 and more, those of the paper's layer so far above them."""
    for depth, by_seed in gains.items():
        theirs = {seed: 80 + depth / 10 + seed for seed in range(len(by_seed))}
        ours = {seed: theirs[seed] + gain for seed, gain in enumerate(by_seed)}
        for own, accuracies in ((column, theirs), ("Ours", ours)):
            cell = cell_of(name, f"ResNet-{depth}", own)
            write_runs(store, cell, EXPERIMENTS[name].protocols[protocol], accuracies)


def test_there_are_twelve_claims_with_the_papers_figures():
    made = table({}, {})
    assert [row[0].split(".")[0] for row in made.rows] == [str(number) for number in range(1, 13)]
    assert {re.search(r"\((Tables? [\d, ]+)\)$", row[0])[1] for row in made.rows} == {
        *(f"Table {number}" for number in range(1, 10)),
        "Tables 2, 3",
    }
    labels = np.array(LABELS.split(), dtype=float).reshape(7, 2, 3)
    figures = {
        1: 94.20 - 85.51,
        2: np.mean(np.subtract(OURS["cifar10"], [83.73, 89.87, 91.14, 92.22, 92.10, 93.01])),
        3: np.mean(np.subtract(OURS["cifar100"], [53.82, 63.85, 65.99, 68.96, 70.16, 71.23])),
        5: np.mean([np.subtract(OURS[name], SOP[name]) for name in OURS]),
        6: np.mean([np.subtract(OURS[name], KER[name]) for name in OURS]),
        7: (93.56 - 92.06 + 92.60 - 90.78) / 2,
        8: (79.85 - 76.06 + 46.48 - 44.38) / 2,
        9: (labels[:, 1] - labels[:, 0]).mean(),
        10: 74.10 - (73.21 + 73.16) / 2,
        11: 74.10 - 71.61,
    }
    for number, figure in figures.items():
        assert float(row_of(made, number)["paper"]) == pytest.approx(figure, abs=0.0051), number
    assert row_of(made, 12)["paper"] == "often"
    assert {row[6] for row in made.rows} == {""}
    for row in made.rows:
        assert (row[2], row[5], row[9]) == ("not run", "open", "all")


@pytest.mark.parametrize(
    ("ours", "p", "p_enough", "complete", "word"),
    [
        (2.5, 0.01, 0.4, True, "holds"),
        (2.0, 0.01, 0.99, True, "holds"),  # two thirds, and no less
        (1.9, 0.01, 0.01, True, "smaller"),
        (-0.1, 0.01, 0.01, True, "differs"),
        (0.3, 0.20, 0.01, True, "absent"),
        (-0.3, 0.05, 0.01, True, "absent"),
        (0.3, 0.20, 0.05, True, "open"),  # neither nothing nor enough is ruled out
        (2.5, 0.20, 0.01, True, "open"),
        (2.5, 0.01, 0.4, False, "open"),
    ],
)
def test_a_verdict_is_a_function_of_figures(ours, p, p_enough, complete, word):
    assert verdict(3.0, ours, p, p_enough, complete=complete) == word


def test_runs_that_diverge_are_counted_against_half_of_all():
    for diverged, runs, word in ((0, 8, "absent"), (1, 12, "smaller"), (0, 4, "open"), (4, 8, "holds"), (3, 8, "open")):
        p, found = divergence(diverged, runs)
        assert found == word
        assert p == pytest.approx(stats.binomtest(diverged, runs, 0.5, alternative="less").pvalue)


def test_a_claim_is_tested_over_depths_and_seeds(tmp_path, write_runs):
    store = Store(tmp_path, 200)
    gains = {depth: [0.5, 0.7, 0.3] if depth in (8, 20) else [0.6] for depth in DEPTHS}
    write_gains(write_runs, store, "cifar100", gains)
    row = row_of(table({}, {200: store}), 3)
    assert row["ours"] == f"{np.mean([np.mean(each) for each in gains.values()]):+.2f}" == "+0.57"
    assert (row["n"], row["p"], row["verdict"], row["epochs"]) == ("10", "0.002", "smaller", "200")  # 2 / 2^10
    assert (row["tuned"], row["missing"], row["other epochs"]) == ("not run", "", "")


def test_claims_on_the_same_runs_share_holms_correction(tmp_path, write_runs):
    store = Store(tmp_path, 200)
    write_gains(write_runs, store, "cifar100", {depth: [3.0, 4.0] for depth in DEPTHS})
    alone = row_of(table({}, {200: store}), 3)
    assert (alone["p"], alone["verdict"]) == ("< 0.001", "holds")  # 2 / 2^12
    write_gains(write_runs, store, "cifar10", {depth: [1.5] for depth in DEPTHS})
    made = table({}, {200: Store(tmp_path, 200)})
    assert (row_of(made, 3)["p"], row_of(made, 3)["verdict"]) == ("< 0.001", "holds")
    assert (row_of(made, 2)["p"], row_of(made, 2)["verdict"]) == ("0.031", "holds")  # 2 / 2^6, the last of two


def test_what_is_missing_is_said_and_leaves_a_claim_open(tmp_path, write_runs):
    store = Store(tmp_path, 200)
    write_gains(write_runs, store, "cifar10", {depth: [2.0, 2.1, 2.2] for depth in DEPTHS if depth not in (14, 44)})
    row = row_of(table({}, {200: store}), 2)
    assert (row["verdict"], row["missing"], row["n"]) == ("open", "ResNet-14, ResNet-44", "12")
    up_and_down = {depth: [-3.0] if depth in (14, 44) else [3.0] for depth in DEPTHS}
    write_gains(write_runs, Store(tmp_path, 200), "cifar100", up_and_down)
    row = row_of(table({}, {200: Store(tmp_path, 200)}), 3)
    assert (row["verdict"], row["missing"]) == ("open", "seeds")


def test_longer_runs_decide_once_they_have_as_many_cells(tmp_path, write_runs):
    short, long = Store(tmp_path, 200), Store(tmp_path, 450)
    write_gains(write_runs, short, "cifar10", {depth: [0.1, 0.2] for depth in DEPTHS})
    write_gains(write_runs, long, "cifar10", {depth: [2.5, 2.6] for depth in DEPTHS[:5]})
    row = row_of(table({}, {200: short, 450: long}), 2)
    assert (row["epochs"], row["verdict"], row["other epochs"]) == ("200", "smaller", "450: +2.55 (n 10, p 0.002)")
    write_gains(write_runs, long, "cifar10", {56: [2.5, 2.6]})
    write_gains(write_runs, long, "cifar10", {depth: [0.5] for depth in DEPTHS}, "tuned")
    row = row_of(table({}, {200: Store(tmp_path, 200), 450: Store(tmp_path, 450)}), 2)
    assert (row["epochs"], row["verdict"], row["ours"]) == ("450", "holds", "+2.55")
    assert row["tuned"] == "+0.50 (n 6, p 0.031)"
    assert row["other epochs"] == "200: +0.15 (n 12, p < 0.001)"
    assert row["command"].endswith('--epochs 450 --seeds 2 --protocol both"')


def test_coefficients_without_activation_are_counted_with_the_runs_that_chose(tmp_path, write_runs):
    store, paper = Store(tmp_path, 200), EXPERIMENTS["activations"].protocols["paper"]
    write_runs(store, cell_of("activations", "none", "ResNet-20"), paper, {0: 69.0, 1: 69.5, 2: None})
    row = row_of(table({}, {200: store}), 12)
    assert (row["ours"], row["n"], row["verdict"]) == ("1 diverged", "7", "open")
    assert row["p"] == f"{stats.binom.cdf(1, 7, 0.5):.3f}"


def test_the_sphere_is_paired_by_draw():
    folder = Path(__file__).parents[2] / "results" / "synthetic" / "450-epochs-10000-samples"
    read = {
        path.stem: json.loads(path.read_text())["accuracy"] for path in sorted((folder / "paper").glob("*-draw*.json"))
    }
    gains = [read[f"kernel-draw{number:02d}"] - read[f"linear-draw{number:02d}"] for number in range(10)]
    p = stats.permutation_test((gains,), sum, permutation_type="samples", n_resamples=np.inf).pvalue
    row = row_of(table({450: list(find_results(folder, []))}, {}), 1)
    assert (row["ours"], row["n"], row["p"]) == (f"{np.mean(gains):+.2f}", "10", f"{p:.3f}")
    assert "synthetic --epochs 450 --draws 10" in row["command"]


@pytest.mark.parametrize("claim", CLAIMS[1:], ids=lambda claim: claim.words)
def test_a_command_runs_what_its_claim_rests_on_and_no_other_columns(tmp_path, claim):
    (row,) = [row for row in table({}, {}).rows if row[0] == claim.words]
    given = re.fullmatch(r'make reproduce TABLE="(.*)"', row[-1])[1]
    words = shlex.split(given)
    tables = [word for word in words if word in EXPERIMENTS]
    only = [words[place + 1] for place, word in enumerate(words) if word == "--only"]
    chosen = {(name, cell.row, cell.column) for name in tables for cell in chosen_cells(EXPERIMENTS[name], only)}
    (needed,) = claim.evidence(({}, {200: Store(tmp_path, 200)}), "paper").values()
    assert set(needed) <= chosen
    columns = {column for _, _, column in chosen}
    assert len(columns) <= 2 * len({column for _, _, column in needed})
