import gzip
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_iris, make_circles
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

from kernelhead import compare as comparing
from kernelhead import layer_training
from kernelhead.cli import app
from kernelhead.compare import check_features, compare, plot_kernel
from kernelhead.comparison import Comparison, Result, difference
from kernelhead.data.features import load_features
from kernelhead.layer_training import LayerClassifier

EXAMPLE = Path(__file__).parent.parent / "examples" / "compare_features.py"


def kernelhead(*arguments, cwd):
    command = [sys.executable, "-m", "kernelhead", "compare", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def circles():
    return make_circles(120, noise=0.15, factor=0.5, random_state=0)


@pytest.fixture(scope="module")
def compared(circles):
    return compare(*circles, heads=["kernel"], baselines=["logistic", "svm"], folds=4, seed=3)


# The numbers.


def test_a_baseline_is_what_scikit_learn_makes_of_the_same_folds(circles, compared):
    x, y = circles
    accuracies, losses = [], []
    for train, test in StratifiedKFold(4, shuffle=True, random_state=3).split(x, y):
        model = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[train], y[train])
        accuracies.append(100 * model.score(x[test], y[test]))
        losses.append(log_loss(y[test], model.predict_proba(x[test])))
    found = compared.results[1]
    assert found.name == "logistic"
    np.testing.assert_allclose(found.accuracy, accuracies)
    np.testing.assert_allclose(found.nll, losses, rtol=1e-6)
    assert len(found.fit_seconds) == 4


def test_an_svm_has_no_probabilities(compared):
    found = compared.results[2]
    assert found.name == "svm"
    assert (found.nll, found.ece) == (None, None)


def test_intervals_are_those_of_the_corrected_t_test():
    ours, theirs = [91.0, 92.0, 90.0, 95.0, 93.0], [90.0, 90.5, 91.0, 92.0, 91.0]
    d = np.subtract(ours, theirs)
    error = np.sqrt(d.var(ddof=1) * (1 / 5 + 0.2 / 0.8))
    low, high = stats.t.interval(0.95, 4, loc=d.mean(), scale=error)
    found = difference(ours, theirs)
    assert (found.mean, found.low, found.high) == pytest.approx((d.mean(), low, high))
    assert str(found) == f"+1.30 ({low:+.2f} to {high:+.2f})"


def test_equal_differences_are_no_certainty():
    """By hand: three folds of 50, one sample more in each; t with two degrees of freedom, deviation of one sample."""
    ours, theirs = [98.0, 96.0, 99.0 + 1e-13], [96.0, 94.0, 97.0]
    assert str(difference(ours, theirs)) == "+2.00 (-inf to +inf)"
    half = stats.t.ppf(0.975, 2) * np.sqrt(1 / 3 + 1 / 2) * 2
    found = difference(ours, theirs, grain=2.0)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    spread = [98.0, 80.0, 99.0]
    assert difference(spread, theirs, grain=2.0) == difference(spread, theirs)
    found = Comparison(150, 5, 2, 3, 0, [result("kernel", ours), result("knn", theirs)])
    assert found.verdict().startswith("No difference in accuracy that 3 folds can show")
    assert found.to_dict()["results"][0]["accuracy_difference"]["low"] == pytest.approx(2 - half)
    assert found.table().rows[0][-1] == f"+2.00 ({2 - half:+.2f} to {2 + half:+.2f})"
    assert "probabilities" not in verdict(result("kernel", ours, [0.1] * 3), result("knn", theirs, [0.2] * 3))


def test_features_without_anything_to_learn_seldom_show_a_difference():
    """Under the null hypothesis a 95 % interval should miss zero no more than once in twenty."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        data = rng.normal(size=(100, 2))  # two rules that guess, on the same five folds of twenty samples
        gap = difference(*(100 * (data > 0).reshape(5, 20, 2).mean(1)).T)
        missed += not gap.low <= 0 <= gap.high
    assert missed / 400 < 0.05


# The verdict.


def result(name, accuracy, nll=None):
    heads = name in comparing.HEADS
    method = {**comparing.HEADS, **comparing.BASELINES}[name]
    return Result(name, method.label, heads, accuracy, nll, None, [0.1] * len(accuracy), [0.1] * len(accuracy))


def verdict(*results):
    return Comparison(100, 5, 2, 4, 0, list(results)).verdict()


def test_the_verdict_is_about_the_best_baseline_and_the_first_head():
    worse = result("knn", [60.0, 61.0, 62.0, 61.0])
    best = result("svm", [80.0, 80.5, 81.0, 80.0])
    found = verdict(result("kernel", [90.0, 90.0, 91.0, 90.5]), result("layer", [99.0, 99.0, 99.0, 99.0]), best, worse)
    assert found.startswith("The kernel head helps: KernelHeadClassifier gains 10.00 points of accuracy over SVM (RBF)")
    found = verdict(result("kernel", [70.0, 70.0, 71.0, 70.5]), best, worse)
    assert found.startswith("The kernel head does not help: KernelHeadClassifier loses 10.00 points")


def test_the_verdict_is_honest_where_nothing_differs():
    kernel = result("kernel", [80.0, 84.0, 79.0, 82.0], [0.5, 0.51, 0.49, 0.5])
    found = verdict(kernel, result("logistic", [81.0, 82.0, 80.0, 81.0], [0.5, 0.5, 0.5, 0.51]))
    assert found.startswith("No difference in accuracy that 4 folds can show: KernelHeadClassifier is at +0.25 points")
    assert "probabilities" not in found
    found = verdict(kernel, result("logistic", [81.0, 82.0, 80.0, 81.0], [0.7, 0.71, 0.7, 0.69]))
    assert found.endswith("its probabilities are better, by 0.200 nats a sample.")
    found = verdict(kernel, result("logistic", [81.0, 82.0, 80.0, 81.0], [0.3, 0.31, 0.3, 0.29]))
    assert found.endswith("its probabilities are worse, by 0.200 nats a sample.")
    assert verdict(kernel) == "A head and a baseline are needed for a verdict."


def test_the_kernel_head_helps_on_circles(compared):
    assert compared.baseline.name == "svm"
    against_lines = difference(compared.results[0].accuracy, compared.results[1].accuracy)
    assert against_lines.low > 10


def test_it_prints_well(compared):
    lines = str(compared).splitlines()
    assert lines[0] == "120 samples, 2 features, 2 classes; 4 folds"
    assert [line.split("  ")[0] for line in lines[2:5]] == ["KernelHeadClassifier", "logistic regression", "SVM (RBF)"]
    assert lines[-1] == compared.verdict()
    again = json.loads(json.dumps(compared.to_dict()))
    assert again["baseline"] == "svm"
    assert again["results"][0]["accuracy"] == compared.results[0].accuracy
    assert again["results"][2]["accuracy_difference"] is None


@pytest.mark.parametrize("prototypes", [1, 4])
def test_the_layer_learns(circles, prototypes):
    x, y = load_iris(return_X_y=True)
    model = make_pipeline(StandardScaler(), LayerClassifier(prototypes=prototypes))
    probabilities = model.fit(x[::2], y[::2]).predict_proba(x[1::2])
    assert np.mean(probabilities.argmax(1) == y[1::2]) > 0.9
    np.testing.assert_allclose(probabilities.sum(1), 1)
    np.testing.assert_array_equal(model.fit(x[::2], y[::2]).predict_proba(x[1::2]), probabilities)


@pytest.mark.parametrize("prototypes", [1, 8])
def test_the_layer_is_as_sure_as_it_is_right(prototypes):
    """Ten classes in 128 dimensions, where cosines are small and the layer's logits with them."""
    rng = np.random.default_rng(0)
    means, y = rng.normal(size=(10, 128)), rng.integers(0, 10, 1500)
    x = 0.35 * means[y] + rng.normal(size=(1500, 128))
    probabilities = LayerClassifier(prototypes).fit(x[:900], y[:900]).predict_proba(x[900:])
    right = np.mean(probabilities.argmax(1) == y[900:])
    assert right > 0.9
    assert abs(probabilities.max(1).mean() - right) < 0.03
    assert log_loss(y[900:], probabilities) < 0.3


def test_the_layer_says_where_it_stopped_too_early(circles, monkeypatch):
    monkeypatch.setattr(layer_training, "STEPS", 5)
    monkeypatch.setattr(layer_training, "EPOCHS", 1)
    monkeypatch.setattr(layer_training, "DOUBLINGS", 1)
    with pytest.warns(ConvergenceWarning, match="the last doubling of its training still gained more than 0.005 nats"):
        LayerClassifier(prototypes=4).fit(*circles)


def test_the_layer_holds_out_every_sample_once_but_the_only_one_of_a_class():
    labels = torch.tensor([0] * 7 + [1] * 2 + [2] + [3] * 6)
    part = layer_training._parts(labels, torch.Generator().manual_seed(0))
    assert part[9] == -1
    assert [sorted(np.bincount(part[labels == own], minlength=3)) for own in (0, 1, 3)] == [
        [2, 2, 3],
        [0, 1, 1],
        [2, 2, 2],
    ]
    model = LayerClassifier().fit(np.eye(3), np.arange(3))
    assert model.head_.temperature == 1
    assert model.predict_proba(np.eye(3)).argmax(1).tolist() == [0, 1, 2]


def test_the_first_call_of_a_process_is_no_method_s_time(circles, monkeypatch):
    fitted = []

    class Counting(LogisticRegression):
        def fit(self, x, y):
            fitted.append(np.bincount(y).tolist())
            return super().fit(x, y)

    monkeypatch.setitem(comparing.BASELINES, "logistic", comparing.Method("counting", lambda seed: Counting()))
    found = compare(*circles, heads=[], baselines=["logistic"], folds=2)
    assert fitted == [[8, 8], [30, 30], [30, 30]]
    assert len(found.results[0].fit_seconds) == 2


def test_what_is_known_so_far_is_told(circles):
    seen, told = [], []
    compare(
        *circles,
        heads=["layer"],
        baselines=["mlp", "knn"],
        folds=2,
        progress=lambda what, done, total: seen.append((what, done, total)),
        done=lambda so_far: told.append(len(so_far.results)),
    )
    assert seen[:4] == [("kernel layer", 0, 2), ("kernel layer", 1, 2), ("kernel layer", 2, 2), ("MLP", 0, 2)]
    assert told == [1, 2, 3]


def test_a_classifier_that_did_not_converge_is_named(circles, monkeypatch):
    few = comparing.Method("hasty", lambda seed: LogisticRegression(max_iter=1, tol=1e-9))
    monkeypatch.setitem(comparing.BASELINES, "logistic", few)
    found = compare(*circles, heads=[], baselines=["logistic"], folds=2)
    assert "hasty stopped before it converged." in found.table().notes


class Broken(LogisticRegression):
    """Fails on all samples, not on the few of the warm-up, as it is told to."""

    def fit(self, x, y):
        if len(y) > 16 and self.random_state is None:
            raise RuntimeError("it broke\nat a place that nobody knows")
        return super().fit(x, y)

    def predict_proba(self, x):
        return super().predict_proba(x) * (np.nan if len(x) > 16 else 1.0)


def test_a_classifier_that_fails_leaves_the_others_their_results(circles, monkeypatch):
    broken = comparing.Method("broken", lambda seed: Broken())
    monkeypatch.setitem(comparing.BASELINES, "logistic", broken)
    monkeypatch.setitem(comparing.BASELINES, "svm", comparing.Method("vague", lambda seed: Broken(random_state=0)))
    told = []
    found = compare(
        *circles,
        heads=[],
        baselines=["logistic", "svm", "knn"],
        folds=2,
        done=lambda so_far: told.append(so_far.results[-1].name),
    )
    assert [result.name for result in found.results] == told == ["knn"]
    assert found.table().notes[1:] == [
        "broken failed: it broke",
        "vague failed: its probabilities are not finite numbers",
    ]
    with pytest.raises(ValueError, match=r"broken failed: it broke$"):
        compare(*circles, heads=[], baselines=["logistic"], folds=2)


@pytest.mark.parametrize("exponent", [1000, -1000])
def test_extreme_features_give_the_same_comparison(circles, monkeypatch, exponent):
    monkeypatch.setattr(layer_training, "STEPS", 5)
    monkeypatch.setattr(layer_training, "DOUBLINGS", 0)
    x, y = circles
    chosen = {"heads": ["kernel", "layer"], "baselines": ["logistic", "svm", "knn"], "folds": 2}
    usual, extreme = compare(x, y, **chosen), compare(x * 2.0**exponent, y, **chosen)
    assert extreme.notes == []
    assert [each.accuracy for each in extreme.results] == [each.accuracy for each in usual.results]


def test_with_many_samples_the_svm_waits_to_be_asked(monkeypatch, circles):
    monkeypatch.setattr(comparing, "MANY", 100)
    monkeypatch.setattr(comparing, "BASELINES", {name: comparing.BASELINES[name] for name in ("logistic", "svm")})
    found = compare(*circles, heads=[], folds=2)
    assert [result.name for result in found.results] == ["logistic"]
    assert "The SVM was left out" in found.notes[0]
    asked = compare(*circles, heads=[], baselines=["svm"], folds=2)
    assert [result.name for result in asked.results] == ["svm"]
    assert asked.notes == []


# What is refused.


def spoiled(x, place, value):
    x = x.copy()
    x[place] = value
    return x


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda x, y: (spoiled(x, (7, 1), np.nan), y),
            "1 values of features are not finite numbers, the first in row 8, column 2",
        ),
        (lambda x, y: (x[:, :, None], y), r"shape \(samples, features\) are expected, got \(20, 2, 1\)"),
        (lambda x, y: (x, y[:-1]), "one label for each of 20 samples is expected"),
        (lambda x, y: (x, np.zeros(20)), "all 20 samples are of class 0"),
        (lambda x, y: (np.ones((20, 3)), y), "all features are constant"),
        (lambda x, y: (x, np.r_[np.zeros(17), np.ones(3)]), r"class 1.0 has 3 samples, too few for 5 folds"),
        (lambda x, y: (x, y + 0.5), "labels have to be classes"),
        (lambda x, y: (x.astype(str), y), "features have to be real numbers"),
        (lambda x, y: (x[:, :0], y), "shape"),
        (lambda x, y: (x, np.where(y == 1, np.nan, 0.0)), "10 labels are missing, the first in row 2"),
        (lambda x, y: (x, ["cat", None] * 10), "10 labels are missing, the first in row 2"),
    ],
)
def test_bad_features_are_refused(rng, change, sentence):
    x, y = rng.normal(size=(20, 2)), np.arange(20) % 2
    with pytest.raises((ValueError, TypeError), match=sentence):
        check_features(*change(x, y), 5)


def test_too_few_samples_are_refused(rng):
    with pytest.raises(ValueError, match="4 samples are too few: with 2 folds 2 are left to train on, and 5 are the"):
        check_features(rng.normal(size=(4, 2)), [0, 1, 0, 1], 2)
    x, y = rng.normal(size=(10, 2)), np.arange(10) % 2
    assert len(compare(x, y, folds=2).results) == 7


def test_labels_may_be_a_column(rng):
    labels = check_features(rng.normal(size=(20, 2)), np.arange(20)[:, None] % 2, 5)[1]
    np.testing.assert_array_equal(labels, np.arange(20) % 2)


def test_a_constant_feature_among_others_is_told(rng):
    x = np.hstack([rng.normal(size=(20, 2)), np.ones((20, 1))])
    assert check_features(x, np.arange(20) % 2, 5)[2] == ["1 of 3 features are constant and say nothing."]


def test_unknown_names_are_refused(circles):
    with pytest.raises(ValueError, match="unknown head 'magic'; choose from kernel, layer, prototypes"):
        compare(*circles, heads=["magic"])
    with pytest.raises(ValueError, match="unknown baseline 'kernel'"):
        compare(*circles, baselines=["kernel"])
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(*circles, heads=[], baselines=[])
    with pytest.raises(ValueError, match="two folds or more, got 1"):
        compare(*circles, folds=1)


# Files.


def test_every_kind_of_file_gives_the_same(tmp_path, rng):
    import pyarrow
    from pyarrow import parquet

    x, y = rng.normal(size=(6, 2)), np.array([3, 1, 3, 1, 3, 1])
    np.savez(tmp_path / "a.npz", features=x, labels=y)
    np.savez(tmp_path / "b.npz", embedding=x, kind=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    rows = [f"{a!r},{label},{b!r}" for (a, b), label in zip(x.tolist(), y, strict=True)]
    (tmp_path / "c.csv").write_text("\n".join(["p,label,q", *rows]) + "\n")
    parquet.write_table(pyarrow.table({"p": x[:, 0], "q": x[:, 1], "kind": y}), tmp_path / "d.parquet")
    loaded = [
        load_features(tmp_path / "a.npz"),
        load_features(tmp_path / "b.npz", features="embedding", label="kind"),
        load_features(tmp_path / "x.npy", tmp_path / "y.npy"),
        load_features(tmp_path / "c.csv"),
        load_features(tmp_path / "d.parquet"),
    ]
    for features, labels, notes in loaded:
        assert notes == []
        np.testing.assert_array_equal(features, x)
        np.testing.assert_array_equal(labels, y)


def test_labels_of_a_table_may_be_words(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffa,b,name\n1,2,cat\n3,4,dog\n")
    features, labels, _ = load_features(tmp_path / "a.csv")
    assert features.tolist() == [[1, 2], [3, 4]]
    assert labels.tolist() == ["cat", "dog"]
    features, labels, _ = load_features(tmp_path / "a.csv", label="name")
    assert labels.tolist() == ["cat", "dog"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "a;b;name\n1;2;cat\n3;4;dog, small\n"),
        ("a.tsv", "a\tb\tname\n1\t2\tcat\n3\t4\tdog, small\n"),
        ("a.CSV", 'a, b, name\r\n1, 2, cat\r\n3, 4, "dog, small"\r\n'),
        ("a.csv.gz", 'a,b,name\n1,2,cat\n3,4,"dog, small"\n'),
    ],
)
def test_a_table_as_text_may_be_cut_in_any_way(tmp_path, name, text):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    features, labels, notes = load_features(tmp_path / name)
    assert features.tolist() == [[1, 2], [3, 4]]
    assert labels.tolist() == ["cat", "dog, small"]
    assert notes == []


def test_a_long_line_is_cut_as_well(tmp_path):
    numbers = ",".join(["0.123456789"] * 20_000)  # longer than the longest value that csv takes
    (tmp_path / "a.csv").write_text(f"{','.join(f'f{i}' for i in range(20_000))},y\n{numbers},0\n{numbers},1\n")
    assert load_features(tmp_path / "a.csv")[0].shape == (2, 20_000)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_an_index_without_a_name_is_no_feature(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},a,b,kind\n0,5,6,0\n1,7,8,1\n")
    features, labels, notes = load_features(tmp_path / "a.csv")
    assert features.tolist() == [[5, 6], [7, 8]]
    assert labels.tolist() == [0, 1]
    assert len(notes) == 1
    assert notes[0].startswith("Column 1 of ")
    assert notes[0].endswith("has no name, as an index that pandas writes: it was left out.")
    (tmp_path / "b.csv").write_text("a,b,kind,\n5,6,0,\n7,8,1,\n")  # each line ends in a comma
    assert load_features(tmp_path / "b.csv")[1].tolist() == [0, 1]


def test_an_index_in_a_parquet_file_is_no_feature(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"a": [5.0, 6.0], "kind": ["cat", "dog"], "__index_level_0__": [0, 1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    features, labels, notes = load_features(tmp_path / "a.parquet")
    assert features.tolist() == [[5], [6]]
    assert labels.tolist() == ["cat", "dog"]
    assert notes[0].startswith("Column 3 of ")
    parquet.write_table(pyarrow.table({"a": [5.0] * 4, "kind": [0, None, 1, None]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="2 labels are missing in column 'kind', the first in row 2"):
        load_features(tmp_path / "b.parquet")


@pytest.mark.parametrize("lines", [["5.1,3.5,0", "4.9,3.0,1"], ["5.1,3.5,cat", "4.9,3.0,dog", "4.7,3.2,cat"]])
def test_a_first_line_of_values_is_a_sample(tmp_path, lines):
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    features, labels, notes = load_features(tmp_path / "a.csv")
    assert features[0].tolist() == [5.1, 3.5]
    assert len(features) == len(labels) == len(lines)
    assert "has no line of names: its first line counts as a sample" in notes[0]


@pytest.mark.parametrize("names", ["0,1,2", "0,1,label", "1,2,3", "2020,2021,kind"])
def test_names_may_be_numbers(tmp_path, names):
    (tmp_path / "a.csv").write_text(f"{names}\n5.1,3.5,0\n4.9,3.0,1\n")
    features, labels, notes = load_features(tmp_path / "a.csv")
    assert features.tolist() == [[5.1, 3.5], [4.9, 3.0]]
    assert labels.tolist() == [0, 1]
    assert notes == []


@pytest.mark.parametrize(
    ("name", "content", "options", "sentence"),
    [
        ("a.npz", None, {}, "there is no file"),
        ("a.npz", b"PK nothing", {}, "not a readable .npz file"),
        ("a.npz", b"junk of some kind", {}, r"a\.npz is not a readable \.npz file$"),
        ("a.npy", b"", {}, "labels come in a file of their own"),
        ("a.txt", b"1", {}, "none of the known kinds of files, .npz, .npy, .csv, .tsv"),
        ("a.parquet", b"PAR1", {}, "not a readable parquet file"),
        ("a.csv", b"a,label\n", {}, "has no rows"),
        ("a.csv", b"a,label\n1,0\n1,2,3\n", {}, "row 2 has 3 values, and the first line has 2"),
        ("a.csv", b"a,b,label\n1,one,0\n", {}, "column 'b' is no number in every row, in row 1 it is 'one'"),
        ("a.csv", b"a,b,label\n1,2,0\n1,,0\n", {}, "column 'b' is no number in every row, in row 2 it is ''"),
        ("a.csv", b"a,kind\n1,cat\n2,\n3,nan\n", {}, "2 labels are missing in column 'kind', the first in row 2"),
        ("a.csv", b"a,kind\n1,0\n2,NA\n3,1\n", {}, "1 labels are missing in column 'kind', the first in row 2"),
        ("a.csv.gz", b"a,kind\n1,0\n", {}, "not a readable CSV file"),
        ("a.csv", b"a,b\n1,0\n", {"label": "c"}, "has no column 'c'; it has a, b: choose one by --label COLUMN"),
        ("a.csv", b"a\n1\n", {}, "one column alone"),
        ("a.csv", b"\xff\xfea", {}, "not a readable CSV file"),
        ("a.csv", b"a,b\n1,0\n", {"features": "a"}, "--features names an array of an .npz file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, options, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        load_features(tmp_path / name, **options)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; a file of features is expected"):
        load_features(tmp_path)


def test_text_as_objects_is_to_be_saved_as_text(tmp_path):
    words = np.array(["cat", "dog"], dtype=object)
    np.savez(tmp_path / "a.npz", x=np.eye(2), y=words)
    np.save(tmp_path / "x.npy", np.eye(2))
    np.save(tmp_path / "y.npy", words)
    for files in (["a.npz"], ["x.npy", "y.npy"]):
        with pytest.raises(ValueError, match=r"holds Python objects, .* save text with \.astype\(str\)$"):
            load_features(*(tmp_path / file for file in files))
    np.savez(tmp_path / "b.npz", x=np.eye(2), y=words.astype(str), other=words)  # what is not needed is not read
    assert load_features(tmp_path / "b.npz")[1].tolist() == ["cat", "dog"]


def test_arrays_that_are_not_found_are_named(tmp_path, rng):
    np.savez(tmp_path / "a.npz", data=np.zeros((3, 2)), y=np.zeros(3))
    with pytest.raises(ValueError, match=r"no array x or X or features; it has data \(3, 2\), y \(3,\): .*--features"):
        load_features(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="choose one by --label NAME"):
        load_features(tmp_path / "b.npz")
    for path in ("x.npy", "y.npy"):
        (tmp_path / path).write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"x\.npy is not a readable \.npy file of a plain array$"):
        load_features(tmp_path / "x.npy", tmp_path / "y.npy")


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory, circles):
    folder = tmp_path_factory.mktemp("compare")
    np.savez(folder / "circles.npz", x=circles[0], y=circles[1])
    return folder


def test_the_command_prints_a_table_and_writes_a_picture(folder):
    options = ["--heads", "kernel,layer", "--baselines", "logistic", "--folds", "3", "--out", "found"]
    done = kernelhead("circles.npz", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "120 samples, 2 features, 2 classes; 3 folds" in done.stdout
    assert "The kernel head helps: KernelHeadClassifier gains" in done.stdout
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "KernelHeadClassifier",
        "kernel layer",
        "logistic regression",
    ]
    assert (folder / "found" / "kernel.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "found" / "compare.json").read_text())["folds"] == 3


def test_json_alone_goes_to_standard_output(folder):
    options = ["--heads", "layer", "--baselines", "knn", "--folds", "2", "--json", "--seed", "5"]
    done = kernelhead("circles.npz", *options, cwd=folder)
    found = json.loads(done.stdout)
    assert [result["name"] for result in found["results"]] == ["layer", "knn"]
    assert found["seed"] == 5


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("features are too large"), "no picture of the kernel: features are too large"),
        (ModuleNotFoundError(name="matplotlib"), "no picture of the kernel, since matplotlib is missing"),
    ],
)
def test_without_a_picture_there_is_the_rest(folder, monkeypatch, error, sentence):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("kernelhead.compare.plot_kernel", fail)
    out = folder / "no-picture"
    options = ["--heads", "kernel", "--baselines", "knn", "--folds", "2", "--out", str(out)]
    done = CliRunner().invoke(app, ["compare", str(folder / "circles.npz"), *options])
    assert done.exit_code == 0, done.output
    assert sentence in " ".join(done.output.split())
    assert [path.name for path in out.iterdir()] == ["compare.json"]


def test_an_error_is_one_sentence(folder):
    done = kernelhead("nowhere.npz", cwd=folder)
    assert done.returncode == 1
    assert done.stderr == "error: there is no file nowhere.npz\n"


def test_a_file_is_no_folder_for_results(folder):
    for place in ("circles.npz", "circles.npz/new"):
        done = kernelhead("nowhere.npz", "--out", place, cwd=folder)  # found before the features are read
        assert done.stderr == f"error: --out {place}: a folder is expected, and circles.npz is a file\n"


def test_what_was_done_to_a_file_is_said(folder, circles):
    rows = [f"{index},{a},{b},{y}" for index, ((a, b), y) in enumerate(zip(*circles, strict=True))]
    (folder / "circles.csv").write_text("\n".join([",a,b,y", *rows]) + "\n")
    done = kernelhead("circles.csv", "--heads", "", "--baselines", "knn", "--folds", "2", cwd=folder)
    assert "120 samples, 2 features, 2 classes" in done.stdout
    assert done.stderr.startswith("Column 1 of circles.csv has no name, as an index that pandas writes: it was left")


def test_interrupted_it_shows_what_it_has(tmp_path):
    x, y = make_circles(4000, noise=0.15, factor=0.5, random_state=0)
    np.savez(tmp_path / "large.npz", x=np.hstack([x, np.random.default_rng(0).normal(size=(4000, 60))]), y=y)
    command = [sys.executable, "-m", "kernelhead", "compare", "large.npz", "--heads", "layer", "--folds", "3"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    signal.signal(signal.SIGINT, before)
    first = process.stderr.readline()
    assert first.startswith("kernel layer: ")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    printed, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; what was measured until then is shown" in messages
    assert "kernel layer" in printed
    assert "k nearest neighbours" not in printed
    assert "Traceback" not in messages


def test_help_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['sklearn'] = None; sys.argv = ['kernelhead', 'compare', '-h']\n"
        "from kernelhead.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--baselines" in done.stdout


def test_the_picture_shows_the_learned_kernel(tmp_path, circles):
    plot_kernel(*circles, tmp_path / "new" / "kernel.png")
    from matplotlib.image import imread

    picture = imread(tmp_path / "new" / "kernel.png")[..., :3]
    assert picture.std() > 0.05  # not an empty page


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "Classes told apart by a plane:" in printed
    assert "The kernel head helps: KernelHeadClassifier gains" in printed.split("a product:")[1]
