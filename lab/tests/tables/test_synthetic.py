import numpy as np
import pytest
import torch

from kernelhead.finetune.results import load_result
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables import synthetic
from kernelhead_lab.tables.synthetic_data import bayes_posterior, draw

SETTINGS = synthetic.Settings(epochs=8, draws=2, per_class=640)


def ignore(*_):
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    synthetic.run(folder, synthetic.PROTOCOLS, SETTINGS, ignore)
    return folder


def load(runs, protocol, method, seed):
    return load_result(synthetic.result_path(runs / SETTINGS.folder, protocol, method, seed), LabSpec)


def all_results(runs):
    broken = []
    results = list(synthetic.find_results(runs / SETTINGS.folder, broken))
    assert not broken
    return results


def test_every_run_leaves_a_complete_result(runs):
    results = all_results(runs)
    assert len(results) == 2 * (len(synthetic.PROTOCOLS) * len(synthetic.METHODS) + 1)
    assert all(result.accuracy is not None and result.nll is not None for result in results)
    kernel = load(runs, "tuned", "kernel", 0)
    assert kernel.parameters == {"backbone": 0, "head": 2 * 3 + 10}
    assert len(kernel.alpha) == 10
    assert min(kernel.alpha) >= 0
    assert kernel.spec.head_options["coefficients"] == "softplus"
    assert load(runs, "paper", "kernel", 0).spec.head_options["coefficients"] == "relu"
    assert load(runs, "paper", "prototypes5", 0).spec.head_options["aggregate"] == "logsumexp"
    assert load(runs, "paper", "linear", 0).alpha is None
    assert not list((runs / SETTINGS.folder).rglob(".*"))


def test_the_choice_is_the_best_on_held_out_data_and_recorded(runs):
    for protocol, method in (("paper", "kernel"), ("tuned", "prototypes5")):
        result = load(runs, protocol, method, 1)
        best = max(result.extra["choice"], key=lambda c: (c["held_out_accuracy"], -c["held_out_nll"]))
        for name in ("learning_rate", "weight_decay"):
            assert getattr(result.spec, name) == best[name]
        losses = result.extra["training_loss_by_start"]
        assert len(losses) == (1 if protocol == "paper" else 4)
        assert losses[result.extra["start"]] == min(losses)
    choice = load(runs, "paper", "kernel", 0).extra["choice"]
    assert [c["learning_rate"] for c in choice] == [0.05, 0.1, 0.3, 1.0]
    assert {c["weight_decay"] for c in choice} == {1e-4}


def test_accuracy_is_that_of_the_weights_left_behind(runs):
    data = draw(1, per_class=SETTINGS.per_class)
    for protocol in synthetic.PROTOCOLS:
        for method in synthetic.METHODS:
            head = synthetic.trained_head(runs / SETTINGS.folder, protocol, method, 1)
            predicted = head(torch.tensor(data.x_test, dtype=torch.float32)).argmax(1).numpy()
            assert load(runs, protocol, method.name, 1).accuracy == pytest.approx(
                100 * (predicted == data.y_test).mean()
            )


def test_classifiers_learn_and_none_beats_bayes_by_more_than_chance(runs):
    for seed in range(2):
        bayes = load(runs, "exact", "bayes", seed)
        data = draw(seed, per_class=SETTINGS.per_class)
        by_hand = 100 * (bayes_posterior(data.x_test, data.centers).argmax(1) == data.y_test).mean()
        assert bayes.accuracy == pytest.approx(by_hand)
        for method in synthetic.METHODS:
            for protocol in synthetic.PROTOCOLS:
                accuracy = load(runs, protocol, method.name, seed).accuracy
                assert 65 < accuracy < bayes.accuracy + 2
    landmarks = np.mean([load(runs, "tuned", "landmarks20", seed).accuracy for seed in range(2)])
    softmax = np.mean([load(runs, "tuned", "linear", seed).accuracy for seed in range(2)])
    assert landmarks > softmax + 3


def test_a_finished_run_is_never_repeated(runs):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*.json")}
    synthetic.run(runs, synthetic.PROTOCOLS, SETTINGS, ignore)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*.json")} == before
    assert synthetic.status(runs, SETTINGS) == (16, 16, "none")


@pytest.mark.slow
def test_interrupted_it_ends_with_the_same_results(runs, tmp_path):
    class Interruption(BaseException):
        pass

    calls = 0

    def stop_now_and_then(what, done, total):
        nonlocal calls
        calls += 1
        if calls % 13 == 0:
            raise Interruption

    for _ in range(100):
        try:
            synthetic.run(tmp_path, ["tuned"], SETTINGS, stop_now_and_then)
        except Interruption:
            continue
        break
    else:
        pytest.fail("did not finish")
    assert calls > 13
    for method in synthetic.METHODS:
        for seed in range(2):
            one, other = (load(folder, "tuned", method.name, seed) for folder in (runs, tmp_path))
            for name in ("accuracy", "nll", "alpha", "spec"):
                assert getattr(one, name) == getattr(other, name)
            assert one.extra["choice"] == other.extra["choice"]


@pytest.mark.parametrize("content", ['{"format": 2, "accu', '{"format": 1, "accuracy": 9.0}'])
def test_a_broken_result_is_made_again(runs, content):
    path = synthetic.result_path(runs / SETTINGS.folder, "exact", "bayes", 1)
    expected = load(runs, "exact", "bayes", 1).accuracy
    path.write_text(content)
    broken = []
    assert len(list(synthetic.find_results(runs / SETTINGS.folder, broken))) == 17
    assert len(broken) == 1
    synthetic.run(runs, [], SETTINGS, ignore)
    assert load(runs, "exact", "bayes", 1).accuracy == expected


def test_table_by_hand(runs):
    table = synthetic.table(all_results(runs))
    assert [row[0] for row in table.rows] == [
        "Softmax classifier",
        "Kernel",
        "Kernel, 5 prototypes per class",
        "Kernel, 20 landmarks",
        "Bayes optimal classifier",
    ]
    assert [row[1] for row in table.rows] == ["85.51", "94.20", "", "", "95.06"]
    kernel = [load(runs, "tuned", "kernel", seed).accuracy for seed in range(2)]
    softmax = [load(runs, "tuned", "linear", seed).accuracy for seed in range(2)]
    bayes = [load(runs, "exact", "bayes", seed).accuracy for seed in range(2)]
    row = dict(zip(["name", "paper", "a", "b", "accuracy", "over softmax", "over Bayes"], table.rows[1], strict=True))
    assert row["accuracy"] == f"{np.mean(kernel):.2f} ± {np.std(kernel, ddof=1):.2f}"
    assert row["over softmax"].startswith(f"{np.mean(kernel) - np.mean(softmax):+.2f} (p ")
    assert row["over Bayes"] == f"{np.mean(kernel) - np.mean(bayes):+.2f}"
    assert any("n = 2 draws, 8 epochs" in note for note in table.notes)


def test_cells_not_run_say_so():
    table = synthetic.table([])
    assert {row[2] for row in table.rows} == {"not run"}
