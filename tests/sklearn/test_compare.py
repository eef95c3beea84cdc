import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import make_circles
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kernelhead.cli import main
from kernelhead.sklearn import compare as comparing
from kernelhead.sklearn.compare import check_features, compare
from kernelhead.sklearn.comparison import Comparison, Result, difference
from kernelhead.sklearn.samples import shuffled_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "compare_features.py"


@pytest.fixture(scope="module")
def compared(circles):
    return compare(*circles, heads=["estimator"], baselines=["logistic", "svm"], folds=4, seed=3)


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
    found = Comparison(150, 5, 2, 3, 0, [result("estimator", ours), result("knn", theirs)])
    assert found.verdict().startswith("No difference in accuracy that 3 folds can show")
    assert found.to_dict()["results"][0]["accuracy_difference"]["low"] == pytest.approx(2 - half)
    assert found.table().rows[0][-1] == f"+2.00 ({2 - half:+.2f} to {2 + half:+.2f})"
    assert "probabilities" not in verdict(result("estimator", ours, [0.1] * 3), result("knn", theirs, [0.2] * 3))


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
    label, _ = {**comparing.HEADS, **comparing.BASELINES}[name]
    return Result(name, label, heads, accuracy, nll, None, [0.1] * len(accuracy), [0.1] * len(accuracy))


def verdict(*results):
    return Comparison(100, 5, 2, 4, 0, list(results)).verdict()


def test_the_verdict_is_about_the_best_baseline():
    worse = result("knn", [60.0, 61.0, 62.0, 61.0])
    best = result("svm", [80.0, 80.5, 81.0, 80.0])
    found = verdict(result("estimator", [90.0, 90.0, 91.0, 90.5]), best, worse)
    assert found.startswith("The kernel head helps: KernelHeadClassifier gains 10.00 points of accuracy over SVM (RBF)")
    found = verdict(result("estimator", [70.0, 70.0, 71.0, 70.5]), best, worse)
    assert found.startswith("The kernel head does not help: KernelHeadClassifier loses 10.00 points")


def test_the_verdict_is_honest_where_nothing_differs():
    kernel = result("estimator", [80.0, 84.0, 79.0, 82.0], [0.5, 0.51, 0.49, 0.5])
    found = verdict(kernel, result("logistic", [81.0, 82.0, 80.0, 81.0], [0.5, 0.5, 0.5, 0.51]))
    assert found.startswith("No difference in accuracy that 4 folds can show: KernelHeadClassifier is at +0.25 points")
    assert "and ties with logistic regression (95 %" in found
    assert "probabilities" not in found
    found = verdict(kernel, result("logistic", [81.0, 82.0, 80.0, 81.0], [0.7, 0.71, 0.7, 0.69]))
    assert found.endswith("its probabilities are better, by 0.200 nats per sample.")
    found = verdict(kernel, result("logistic", [81.0, 82.0, 80.0, 81.0], [0.3, 0.31, 0.3, 0.29]))
    assert found.endswith("its probabilities are worse, by 0.200 nats per sample.")
    assert verdict(kernel) == "A head and a baseline are needed for a verdict."


def test_the_kernel_head_helps_on_circles(compared):
    assert compared.baseline.name == "svm"
    against_lines = difference(compared.results[0].accuracy, compared.results[1].accuracy)
    assert against_lines.low > 10


def test_it_prints_well(compared):
    lines = str(compared).splitlines()
    assert lines[0].rstrip() == "120 samples, 2 features, 2 classes; 4 folds"
    labels = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert labels == ["KernelHeadClassifier", "logistic regression", "SVM (RBF)"]
    assert lines[-1] == compared.verdict()
    again = json.loads(json.dumps(compared.to_dict()))
    assert (again["format"], again["baseline"]) == (2, "svm")
    assert again["results"][0]["accuracy"] == compared.results[0].accuracy
    assert again["results"][2]["accuracy_difference"] is None


def test_ranks_count_the_samples_of_each_class():
    labels = np.array([0] * 7 + [1] * 2 + [2] + [3] * 6)
    ranks = shuffled_ranks(labels, seed=0)
    for own in range(4):
        assert sorted(ranks[labels == own]) == list(range((labels == own).sum()))
    assert not np.array_equal(ranks, shuffled_ranks(labels, seed=1))


def test_the_first_call_of_a_process_is_no_method_s_time(circles, monkeypatch):
    fitted = []

    class Counting(LogisticRegression):
        def fit(self, x, y):
            fitted.append(np.bincount(y).tolist())
            return super().fit(x, y)

    monkeypatch.setitem(comparing.BASELINES, "logistic", ("counting", lambda seed: Counting()))
    found = compare(*circles, heads=[], baselines=["logistic"], folds=2)
    assert fitted == [[8, 8], [30, 30], [30, 30]]
    assert len(found.results[0].fit_seconds) == 2


def test_what_is_known_so_far_is_told(circles):
    seen, told = [], []
    compare(
        *circles,
        heads=["estimator"],
        baselines=["mlp", "knn"],
        folds=2,
        progress=lambda what, done, total: seen.append((what, done, total)),
        done=lambda so_far: told.append(len(so_far.results)),
    )
    assert seen[:4] == [*(("KernelHeadClassifier", done, 2) for done in range(3)), ("MLP", 0, 2)]
    assert told == [1, 2, 3]


def test_a_classifier_that_did_not_converge_is_named(circles, monkeypatch):
    few = ("hasty", lambda seed: LogisticRegression(max_iter=1, tol=1e-9))
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
    broken = ("broken", lambda seed: Broken())
    monkeypatch.setitem(comparing.BASELINES, "logistic", broken)
    monkeypatch.setitem(comparing.BASELINES, "svm", ("vague", lambda seed: Broken(random_state=0)))
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
    x, y = circles
    chosen = {"baselines": ["logistic", "svm", "knn"], "folds": 2}
    usual, extreme = compare(x, y, **chosen), compare(x * 2.0**exponent, y, **chosen)
    assert extreme.notes == []
    assert [each.accuracy for each in extreme.results] == [each.accuracy for each in usual.results]


def test_of_many_samples_a_part_is_compared(monkeypatch, circles):
    monkeypatch.setattr(comparing, "MAX_SAMPLES", 100)
    found = compare(*circles, heads=[], baselines=["logistic", "boosting"], folds=2)
    assert found.samples == 100
    assert found.notes == ["100 of 120 samples were compared, chosen at random by class."]
    assert [result.label for result in found.results] == ["logistic regression", "HistGradientBoosting"]


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
            "1 samples are not finite, the first in row 8",
        ),
        (lambda x, y: (x[:, :, None], y), "Found array with dim 3"),
        (lambda x, y: (x, y[:-1]), r"inconsistent numbers of samples: \[20, 19\]"),
        (lambda x, y: (x, np.zeros(20)), "all 20 samples are of class 0"),
        (lambda x, y: (np.ones((20, 3)), y), "all features are constant"),
        (lambda x, y: (x, np.r_[np.zeros(17), np.ones(3)]), r"class 1.0 has 3 samples, too few for 5 folds"),
        (lambda x, y: (x, y + 0.5), "Unknown label type: continuous"),
        (lambda x, y: (np.full((20, 2), "cat"), y), "could not convert string to float: .*cat"),
        (lambda x, y: (x + 1j, y), "Complex data not supported"),
        (lambda x, y: (x[:, :0], y), "0 feature"),
        (lambda x, y: (x, np.where(y == 1, np.nan, 0.0)), "10 labels are missing, the first in row 2"),
        (lambda x, y: (x, ["cat", None] * 10), "10 labels are missing, the first in row 2"),
    ],
)
def test_bad_features_are_refused(rng, change, sentence):
    x, y = rng.normal(size=(20, 2)), np.arange(20) % 2
    with pytest.raises(ValueError, match=sentence):
        check_features(*change(x, y), 5)


def test_a_few_samples_are_enough(rng, monkeypatch):
    assert len(compare(rng.normal(size=(10, 2)), np.arange(10) % 2, folds=2).results) >= 6


def test_labels_may_be_a_column(rng):
    labels = check_features(rng.normal(size=(20, 2)), np.arange(20)[:, None] % 2, 5)[1]
    np.testing.assert_array_equal(labels, np.arange(20) % 2)


def test_a_constant_feature_among_others_is_told(rng):
    x = np.hstack([rng.normal(size=(20, 2)), np.ones((20, 1))])
    assert check_features(x, np.arange(20) % 2, 5)[2] == ["1 of 3 features are constant."]


def test_unknown_names_are_refused(circles):
    with pytest.raises(ValueError, match="unknown head 'magic'; choose from estimator"):
        compare(*circles, heads=["magic"])
    with pytest.raises(ValueError, match="unknown baseline 'kernel'"):
        compare(*circles, baselines=["kernel"])
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(*circles, heads=[], baselines=[])
    with pytest.raises(ValueError, match="two folds or more, got 1"):
        compare(*circles, folds=1)


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory, circles):
    folder = tmp_path_factory.mktemp("compare")
    np.savez(folder / "circles.npz", x=circles[0], y=circles[1])
    return folder


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Run `kernelhead compare` in the folder, and return the exit code and what it printed."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.chdir(folder)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kernelhead", "compare", *arguments])
        with pytest.raises(SystemExit) as leaving:
            main()
        return leaving.value.code or 0, *capsys.readouterr()

    return run


def test_the_command_prints_a_table_and_writes_a_plot(folder, command, monkeypatch):
    options = ["--with", "logistic", "--folds", "3", "--out", "found"]
    code, printed, messages = command("circles.npz", *options)
    assert code == 0, messages
    assert "120 samples, 2 features, 2 classes; 3 folds" in printed
    assert "The kernel head helps: KernelHeadClassifier gains" in printed
    labels = [line.split(":")[0] for line in messages.splitlines()]
    assert labels == ["KernelHeadClassifier", "logistic regression"]
    assert "Plotly.newPlot" in (folder / "found" / "kernel.html").read_text()
    found = json.loads((folder / "found" / "compare.json").read_text())
    assert (found["format"], found["folds"]) == (2, 3)


def test_json_alone_goes_to_standard_output(command):
    options = ["--with", "knn", "--folds", "2", "--json", "--seed", "5"]
    found = json.loads(command("circles.npz", *options)[1])
    assert [result["name"] for result in found["results"]] == ["estimator", "knn"]
    assert found["seed"] == 5


@pytest.mark.parametrize("error", [ValueError("features are too large"), ModuleNotFoundError("it needs matplotlib")])
def test_without_a_plot_there_is_the_rest(folder, command, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("kernelhead.inspection.plot.write_plot", fail)
    options = ["--with", "knn", "--folds", "2", "--out", "no-plot"]
    code, _, messages = command("circles.npz", *options)
    assert code == 0, messages
    assert f"no plot of the kernel: {error}" in messages
    assert [path.name for path in (folder / "no-plot").iterdir()] == ["compare.json"]


def test_an_error_is_one_sentence(command):
    assert command("nowhere.npz") == (1, "", "error: there is no file nowhere.npz\n")


def test_a_file_is_no_folder_for_results(command):
    for place in ("circles.npz", "circles.npz/new"):
        code, _, messages = command("nowhere.npz", "--out", place)  # found before the features are read
        assert code == 1
        assert "nowhere" not in messages
        assert "circles.npz" in messages


def test_what_was_done_to_a_file_is_said(folder, circles, command):
    rows = [f"{index},{a},{b},{y}" for index, ((a, b), y) in enumerate(zip(*circles, strict=True))]
    (folder / "circles.csv").write_text("\n".join([",a,b,y", *rows]) + "\n")
    _, printed, messages = command("circles.csv", "--with", "knn", "--folds", "2")
    assert "120 samples, 2 features, 2 classes" in printed
    assert messages.startswith("Column 1 of circles.csv has no name, as an index that pandas writes; it is left")


@pytest.mark.slow
def test_interrupted_it_shows_what_it_has(tmp_path):
    x, y = make_circles(4000, noise=0.15, factor=0.5, random_state=0)
    np.savez(tmp_path / "large.npz", x=np.hstack([x, np.random.default_rng(0).normal(size=(4000, 60))]), y=y)
    command = [sys.executable, "-m", "kernelhead", "compare", "large.npz", "--with", "mlp"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    signal.signal(signal.SIGINT, before)
    first = process.stderr.readline()
    assert first.startswith("KernelHeadClassifier: ")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    printed, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; what was measured until then is shown" in messages
    assert "KernelHeadClassifier" in printed
    assert "MLP" not in printed
    assert "Traceback" not in messages


def test_help_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['sklearn'] = None; sys.argv = ['kernelhead', 'compare', '-h']\n"
        "from kernelhead.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--with" in done.stdout


@pytest.mark.slow
def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "Classes told apart by a plane:" in printed
    assert "The kernel head helps: KernelHeadClassifier gains" in printed.split("a product:")[1]
