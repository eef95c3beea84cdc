"""Every table from end to end on made-up data, and what reaches training and testing on the way.

CIFAR ResNets of every depth, and the network of the transfer table, are ResNet-8 here: nothing in what is tested
depends on how deep a network is. The tests at the end use those of the tables.
"""

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from typer.testing import CliRunner

from kernelhead.backbones import create_backbone
from kernelhead.cli import app
from kernelhead.paper import EXPERIMENTS, grid, groups, outcome, quick, runner
from kernelhead.paper.quick import open_quick
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Protocol, Recipe
from kernelhead.paper.runner import Settings, adapted
from kernelhead.paper.store import NEEDED, Job, Store
from kernelhead.results import load_result
from kernelhead.train import run as run_module
from kernelhead.train.checkpoint import load_checkpoint, save_checkpoint
from kernelhead.train.config import TrainConfig
from kernelhead.train.loop import predict
from kernelhead.train.saved import load_classifier

CLASSES = 8  # of the quick data
CIFAR_RATES = ("0.05", "0.1")  # of quick runs, but for
TRANSFER_RATES = ("0.003", "0.01")
STUDENT_RATES = ("0.001", "0.003")
WHOLE = {cell.recipe.key for table in EXPERIMENTS.values() for cell in table.cells if cell.recipe.subset is None}
TIMES = ("seconds", "at_once")


def ignore(_):
    pass


@pytest.fixture
def shallow(monkeypatch):
    def create(name, **options):
        small = name if name == "lenet5" else "cifar_resnet8"
        return create_backbone(small, **options)

    monkeypatch.setattr(run_module, "create_backbone", create)


@dataclass
class Recorded:
    """One training: what it was told, the images it saw, those it was tested on, and its result file."""

    run: object
    images: object
    tested: object
    path: object
    result: dict


@pytest.fixture
def spy(monkeypatch):
    """The trainings of a runner, in their order."""
    recorded, told, tested, predicted = [], [], {}, []
    train, save = runner.train, runner.save_result

    def spied_train(runs, images, *rest, **options):
        trained = train(runs, images, *rest, **options)
        told.extend(zip(runs, images, trained, strict=True))
        return trained

    def spied_predict(model, data, **options):
        predicted.append(model)
        tested[id(model)] = data
        return predict(model, data, **options)

    def spied_save(path, result):
        run, images, trained = told.pop(0)
        assert predicted.count(trained.model) == (trained.diverged_at is None)  # once, after the last epoch
        recorded.append(Recorded(run, images, tested.pop(id(trained.model), None), path, result))
        save(path, result)

    monkeypatch.setattr(runner, "train", spied_train)
    monkeypatch.setattr(outcome, "predict", spied_predict)
    monkeypatch.setattr(runner, "save_result", spied_save)
    return recorded


def reproduce(table, runs, *options):
    done = CliRunner().invoke(app, ["reproduce", table, "--quick", "--device", "cpu", "--runs", str(runs), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def results_below(folder):
    paths = sorted(path for path in folder.rglob("*.json") if path.parent.name != groups.PARTIAL)
    return {str(path.relative_to(folder)): load_result(path, NEEDED) for path in paths}


def numbers_below(folder):
    """Results without what depends on the clock and on the place."""
    numbers = {}
    for path, result in results_below(folder).items():
        result.get("selection", {}).pop("seconds", None)
        text = json.dumps({key: value for key, value in result.items() if key not in TIMES})
        numbers[path] = json.loads(text.replace(str(folder), ""))
    return numbers


def rates_of(recipe):
    if recipe.teacher is not None:
        return STUDENT_RATES
    return TRANSFER_RATES if recipe.data in ("pets", "cars") else CIFAR_RATES


def folder_of(recipe):
    protocol = "-paper" if recipe.teacher or recipe.seed_model else ""
    return f"{recipe.data}/1-epochs/{recipe.key}{protocol}"


def chooser_of(recipe):
    while recipe.chosen_as is not None:
        recipe = recipe.chosen_as
    return recipe


def chosen_rate(results, recipe):
    """The rate of the best held-out accuracy, the first of equals."""
    folder, rates = folder_of(chooser_of(recipe)), rates_of(recipe)
    accuracies = [results[f"{folder}/choice-lr{rate}-wd0.0001.json"]["accuracy"] for rate in rates]
    return rates[int(np.argmax(accuracies))]


def expected_files(table, results):
    """Written out again: the final run of each cell and of what it builds on, and the candidates of each choice.

    {path: recipe}
    """
    found = {}

    def add(recipe):
        chooser = chooser_of(recipe)
        for rate in rates_of(recipe):
            found[f"{folder_of(chooser)}/choice-lr{rate}-wd0.0001.json"] = chooser
        found[f"{folder_of(recipe)}/lr{chosen_rate(results, recipe)}-wd0.0001-seed0.json"] = recipe
        for other in (recipe.teacher, recipe.seed_model):
            if other is not None:
                add(other)

    for cell in EXPERIMENTS[table].cells:
        add(cell.recipe)
    return found


def check_result(result, choosing):
    assert {"experiment", "method", "seed", "config", "seconds", "accuracy", "nll", "ece"} <= set(result)
    assert {"version", "libraries", "hardware"} <= set(result)
    assert {"torch", "numpy", "python"} <= set(result["libraries"])
    assert result["seconds"] > 0
    assert result["parameters"]["backbone"] > 0
    assert result["parameters"]["head"] > 0
    for name in ("backbone", "head", "learning_rate", "weight_decay", "epochs", "batch_size", "seed"):
        assert name in result["config"]
    assert result["config"]["choosing"] == choosing
    assert len(result["curve"]["loss"]) == len(result["curve"]["accuracy"]) == result["config"]["epochs"]
    assert 0 <= result["accuracy"] <= 100
    assert result["diverged_at"] is None
    if result["config"]["head"] in ("kernel", "linear"):
        assert np.isfinite(result["alpha"]).all()
    if result["config"]["head"] == "kernel" and not result["config"]["head_options"]:
        assert len(result["alpha"]) == 10
        assert min(result["alpha"]) >= 0


def check_images(recorded, opened):
    """Held-out images choose and are not trained on; test images do neither; a final run has all that are its own."""
    held = set()
    for each in recorded:
        everything = opened[each.result["experiment"]]
        if each.result["config"]["choosing"]:
            kept, tested = (set(images.chosen.tolist()) for images in (each.images, each.tested))
            assert each.images.padded is each.tested.padded is everything.train.padded
            assert not kept & tested
            assert kept | tested == set(range(len(everything.train)))
            assert sorted(everything.train.labels[sorted(tested)].tolist()) == list(range(CLASSES))
            held.add(frozenset(tested))
            assert each.result["images"] == {"train": len(kept), "test": CLASSES, "left_out": 0}
            continue
        assert each.tested is everything.test
        assert len(each.tested) == each.result["images"]["test"]
        assert each.images.padded is everything.train.padded
        assert len(each.images) == each.result["images"]["train"]
        assert (each.images.chosen is None) == (each.result["method"] in WHOLE)
        assert each.images.chosen is not None or len(each.images) == len(everything.train)
    assert len(held) <= 1


def check_table(table, results, report, output):
    """Every cell has its number, and the difference to softmax that two result files give."""
    with (report / f"{table}-1-epochs.csv").open() as file:
        head, *rows = list(csv.reader(file))
    papers = [] if table in ("landmarks", "saturation", "mixup") else ["paper", "over SM"]
    assert head == ["", "", *papers, "paper's protocol", "over SM"]
    cells = {(cell.row, cell.column): cell.recipe for cell in EXPERIMENTS[table].cells}
    assert [tuple(row[:2]) for row in rows] == list(cells)

    def accuracy_of(recipe):
        return next(
            results[path]["accuracy"]
            for path, other in expected_files(table, results).items()
            if other == recipe and "seed0" in path
        )

    for row, column, *_, ours, over in rows:
        recipe = cells[row, column]
        accuracy = accuracy_of(recipe)
        assert ours == f"{accuracy:.2f}"
        assert ours in output
        if recipe.head == "softmax" and not recipe.backbone_options.get("kervolution"):
            assert over == ""
            continue
        softmax = replace(
            recipe,
            head="softmax",
            head_options={},
            chosen_as=None,
            backbone_options={name: value for name, value in recipe.backbone_options.items() if name != "kervolution"},
        )
        (baseline,) = {
            result["accuracy"] for path, result in results.items() if path.startswith(folder_of(softmax) + "/lr")
        }
        assert over == f"{accuracy - baseline:+.2f}"
    markdown = (report / f"{table}-1-epochs.md").read_text()
    assert "that it ran is all that these numbers show" in markdown
    assert "last epoch of 1;" in markdown
    page = (report / "report.html").read_text()
    assert EXPERIMENTS[table].title.replace("'", "&#x27;") in page


@pytest.mark.parametrize("table", EXPERIMENTS)
def test_a_table_from_end_to_end(table, shallow, spy, tmp_path, monkeypatch):
    opened = {}

    def open_once(name, device):
        return opened.setdefault(name, open_quick(name, device))

    monkeypatch.setattr(runner, "open_quick", open_once)
    if table != "active":  # a tenth of 64 images is one batch
        monkeypatch.setattr(quick, "TRAIN", 3 * CLASSES)
        monkeypatch.setattr(quick, "TEST", 2 * CLASSES)
    softmax = {}
    if table in ("kernels", "activations"):  # they are compared with cells of another table
        reproduce("cifar100", tmp_path, "--only", "ResNet-56", "--only", "ResNet-20", "--only", "SM")
        softmax = results_below(tmp_path / "quick")
    output = reproduce(table, tmp_path)
    runs = tmp_path / "quick"
    results = results_below(runs)
    expected = expected_files(table, results)
    assert set(results) == set(expected) | set(softmax)
    assert len(spy) == len(results)  # none twice
    assert not list((runs / ".partial").iterdir())
    check_images(spy, opened)
    for path, result in results.items():
        check_result(result, "/choice-" in path)
        if path.endswith("seed0.json"):
            assert path.endswith(f"/lr{result['config']['learning_rate']:g}-wd0.0001-seed0.json")
            saved = load_classifier((runs / path).with_suffix(".safetensors"))
            test = opened[result["experiment"]].test
            correct = predict(saved.model, test).argmax(1) == test.labels
            assert result["accuracy"] == pytest.approx(100 * correct.double().mean().item())
            assert saved.settings["data"] == result["experiment"]
            assert TrainConfig(**saved.settings).size == 32  # as `kernelhead evaluate` reads it
    report = runs / "report"
    check_table(table, results, report, output)

    before = {path: path.read_bytes() for path in report.glob(f"{table}-*")}
    monkeypatch.setattr(runner, "train", lambda *_, **__: pytest.fail("trained again"))
    assert reproduce(table, tmp_path) == output
    assert {path: path.read_bytes() for path in report.glob(f"{table}-*")} == before


def image_settings(epochs=1, **options):
    return Settings(epochs=epochs, quick=True, **options)


def run(table, root, progress=ignore, **options):
    runner.run([EXPERIMENTS[table]], root, image_settings(**options), progress)
    return numbers_below(root)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(quick, "TRAIN", 3 * CLASSES)
    monkeypatch.setattr(quick, "TEST", 2 * CLASSES)


def test_several_at_once_and_interruptions_change_no_number(shallow, small, tmp_path):
    plain = run("rectification", tmp_path / "plain")
    assert run("rectification", tmp_path / "four", at_once=4) == plain
    assert {result["at_once"] for result in results_below(tmp_path / "four").values()} >= {4}

    calls = 0

    def stop_now_and_then(now):
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise KeyboardInterrupt

    for _ in range(30):
        try:
            run("rectification", tmp_path / "stopped", stop_now_and_then, at_once=1 + calls % 3)
        except KeyboardInterrupt:
            continue
        break
    assert calls > 15
    assert numbers_below(tmp_path / "stopped") == plain


def run_and_stop(table, root, settings):
    """Send SIGTERM in the second epoch."""

    def stop(now):
        if now.moment is not None and now.moment.epoch == 2:
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        runner.run([EXPERIMENTS[table]], root, settings, stop)


def test_a_training_goes_on_in_its_middle(shallow, small, tmp_path, monkeypatch):
    settings = replace(image_settings(only=("Ours ResNet-20", "rectified features")), epochs=3)
    runner.run([EXPERIMENTS["rectification"]], tmp_path / "plain", settings, ignore)

    run_and_stop("rectification", tmp_path / "stopped", settings)
    assert not results_below(tmp_path / "stopped")
    assert list((tmp_path / "stopped" / ".partial").iterdir())
    steps = []

    def note(now):
        if now.moment is not None and now.done == 0:
            steps.append(now.moment.epoch)

    runner.run([EXPERIMENTS["rectification"]], tmp_path / "stopped", settings, note)
    assert steps == [3]
    assert not list((tmp_path / "stopped" / ".partial").iterdir())
    assert numbers_below(tmp_path / "stopped") == numbers_below(tmp_path / "plain")


def test_a_group_that_was_stopped_goes_on_among_others(shallow, small, tmp_path, monkeypatch):
    """Also with other seeds, other cells and another number at once; and its seconds are those of both parts."""
    settings = replace(image_settings(only=("Ours ResNet-20",)), epochs=3)
    runner.run([EXPERIMENTS["rectification"]], tmp_path / "plain", settings, ignore)
    clock = iter(range(0, 10**9, 10))
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(clock))
    run_and_stop("rectification", tmp_path / "stopped", replace(settings, at_once=4))
    (note,) = (tmp_path / "stopped" / ".partial").glob("*.json")
    told = json.loads(note.read_text())
    assert len(told["paths"]) == 4
    assert told["seconds"] > 0
    seen = []
    other = replace(settings, only=("ResNet-20",), seeds=2, at_once=3)
    runner.run([EXPERIMENTS["rectification"]], tmp_path / "stopped", other, seen.append)
    epochs = [now.moment.epoch for now in seen if now.moment is not None and now.done == 0]
    assert min(epochs) >= 2  # on from where it was
    assert not list((tmp_path / "stopped" / ".partial").iterdir())
    stopped, plain = numbers_below(tmp_path / "stopped"), numbers_below(tmp_path / "plain")
    assert {path: stopped[path] for path in plain} == plain
    first = [load_result(tmp_path / "stopped" / path, NEEDED)["seconds"] for path in told["paths"]]
    assert min(first) > told["seconds"] / 4


def test_what_was_stopped_and_done_otherwise_leaves_nothing(shallow, small, tmp_path):
    settings = replace(image_settings(only=("Ours ResNet-20",), at_once=4), epochs=2)
    run_and_stop("rectification", tmp_path, settings)
    assert list((tmp_path / ".partial").iterdir())
    runner.run(
        [EXPERIMENTS["rectification"]], tmp_path, replace(settings, only=(*settings.only, "rectified features")), ignore
    )
    assert not list((tmp_path / ".partial").iterdir())


def test_stopped_while_it_is_measured_a_group_is_not_trained_again(shallow, small, tmp_path, monkeypatch):
    settings = replace(image_settings(only=("Ours ResNet-20",), at_once=4), epochs=2)
    runner.run([EXPERIMENTS["rectification"]], tmp_path / "plain", settings, ignore)
    measure, calls = runner.measure, []

    def measure_two(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(runner, "measure", measure_two)
    with pytest.raises(KeyboardInterrupt):
        runner.run([EXPERIMENTS["rectification"]], tmp_path / "stopped", settings, ignore)
    assert not results_below(tmp_path / "stopped")
    seen = []
    runner.run([EXPERIMENTS["rectification"]], tmp_path / "stopped", settings, seen.append)
    assert [now.moment for now in seen if now.done == 0] == [None]  # nothing was trained
    assert not list((tmp_path / "stopped" / ".partial").iterdir())
    assert numbers_below(tmp_path / "stopped") == numbers_below(tmp_path / "plain")


def test_stopped_while_it_is_kept_a_group_is_kept_first(shallow, small, tmp_path, monkeypatch):
    settings = replace(image_settings(only=("Ours ResNet-20",), at_once=4), epochs=1)
    save, saved = runner.save_result, []

    def save_and_stop(path, result):
        saved.append(path)
        if len(saved) == 2:
            signal.raise_signal(signal.SIGTERM)
        save(path, result)

    monkeypatch.setattr(runner, "save_result", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        runner.run([EXPERIMENTS["rectification"]], tmp_path, settings, ignore)
    assert len(results_below(tmp_path)) == len(saved) == 4
    assert not list((tmp_path / ".partial").iterdir())


def test_seconds_before_a_sudden_end_are_counted(shallow, small, tmp_path, monkeypatch):
    settings = replace(image_settings(only=("Ours ResNet-20",), at_once=4), epochs=3)
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(clock))

    def fail(now):
        if now.moment is not None and now.moment.epoch == 3:
            raise MemoryError

    with pytest.raises(MemoryError):
        runner.run([EXPERIMENTS["rectification"]], tmp_path, settings, fail)
    (note,) = (tmp_path / ".partial").glob("*.json")
    assert json.loads(note.read_text())["seconds"] >= 300  # three epochs, and the clock ticks more often than that


def test_a_lost_network_is_trained_again_and_its_result_stays(shallow, small, tmp_path):
    only = ("CIFAR-10", "SM")
    first = run("distillation", tmp_path, only=only)
    (teacher,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-softmax").glob("*-seed0.json")
    altered = json.loads(teacher.read_text()) | {"accuracy": 12.345}
    teacher.write_text(json.dumps(altered))
    network = teacher.with_suffix(".safetensors")
    before = load_classifier(network).model.state_dict()
    network.unlink()
    (chosen := network.with_name(f"{network.stem}-margin.safetensors")).touch()
    assert run("distillation", tmp_path, only=only)  # nobody needs it
    assert not network.exists()
    runner.run([EXPERIMENTS["distillation"]], tmp_path, image_settings(only=("CIFAR-10", "Ours")), ignore)
    again = load_classifier(network).model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    assert not chosen.exists()
    assert load_result(teacher, NEEDED)["accuracy"] == 12.345
    assert len(results_below(tmp_path)) == len(first) + 3


def test_a_lost_network_that_cannot_be_trained_again(shallow, small, tmp_path, monkeypatch):
    run("distillation", tmp_path, only=("CIFAR-10", "SM"))
    (network,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-softmax").glob("*-seed0.safetensors")
    network.unlink()
    diverge(monkeypatch, lambda job: job.recipe.teacher is None)
    with pytest.raises(ValueError, match=r"seed0\.json has no network beside it, and training it again diverged"):
        run("distillation", tmp_path, only=("CIFAR-10", "Ours"))


def test_a_damaged_network_that_others_build_on(shallow, small, tmp_path):
    run("distillation", tmp_path, only=("CIFAR-10", "SM"))
    (network,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-softmax").glob("*-seed0.safetensors")
    network.write_bytes(network.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"seed0\.safetensors is not .*; delete it, and it is trained again$"):
        run("distillation", tmp_path, only=("CIFAR-10", "Ours"))
    network.unlink()
    assert run("distillation", tmp_path, only=("CIFAR-10", "Ours"))


def test_progress_counts_trainings(shallow, small, tmp_path):
    seen = []
    run("rectification", tmp_path, seen.append, only=("Ours",))
    starts = [(now.done, now.total) for now in seen if now.moment is None]
    assert starts == [(done, 8) for done in range(8)]  # two choices of two rates, two depths each
    assert all(now.moment.steps in (2, 4) for now in seen if now.moment is not None)


def test_all_choices_come_before_what_depends_on_them(shallow, small, spy, tmp_path):
    """So that final trainings are done in full groups, too, and not a method at a time."""
    run("rectification", tmp_path, at_once=4)
    choosing = [made.path.name.startswith("choice") for made in spy]
    assert choosing == sorted(choosing, reverse=True)
    assert [made.result["at_once"] for made in spy[sum(choosing) :]] == [4] * 8


@pytest.mark.parametrize(
    ("seeds", "at_once", "groups"),
    [
        (1, 8, [[56] * 4, [20] * 4]),
        (1, 9, [[56] * 4 + [20] * 4]),  # four alone would leave more than half of the places empty
        (2, 5, [[56] * 4, [56] * 4, [20] * 4, [20] * 4]),
        (2, 7, [[56] * 4, [56] * 4, [20] * 4, [20] * 4]),
    ],
)
def test_networks_of_one_depth_are_trained_together(shallow, small, tmp_path, monkeypatch, seeds, at_once, groups):
    train, seen = runner.train, []

    def spied(runs, *rest, **options):
        seen.append([int(run.backbone.removeprefix("cifar_resnet")) for run in runs])
        return train(runs, *rest, **options)

    monkeypatch.setattr(runner, "train", spied)
    run("rectification", tmp_path, seeds=seeds, at_once=at_once)
    assert seen[-len(groups) :] == groups


def test_several_tables_are_trained_together(shallow, small, spy, tmp_path, monkeypatch):
    """In groups of all of them, and what they share once; results are those of one table after the other."""
    tables, only = ("kernels", "rectification"), ("ResNet-20",)
    groups = []
    train = runner.train

    def spied(runs, *rest, **options):
        groups.append(len(runs))
        return train(runs, *rest, **options)

    monkeypatch.setattr(runner, "train", spied)
    last = []
    settings = image_settings(only=only, at_once=12)
    runner.run([EXPERIMENTS[table] for table in tables], tmp_path / "together", settings, last.append)
    # RBF, polynomial and learned kernel, rectified softmax and kernel, softmax: two rates each, then one training
    assert groups == [12, 6]
    assert len(spy) == 18
    assert len({made.path for made in spy}) == 18
    assert (last[-1].done, last[-1].total) == (12, 18)
    for table in tables:
        run(table, tmp_path / "in turn", only=only)
    assert numbers_below(tmp_path / "together") == numbers_below(tmp_path / "in turn")


def test_a_data_set_is_done_before_the_next_is_opened(shallow, small, spy, tmp_path, monkeypatch):
    opened = []

    def spied(name, device):
        opened.append(name)
        return open_quick(name, device)

    monkeypatch.setattr(runner, "open_quick", spied)
    run("transfer", tmp_path, only=("SM", "LIN"), at_once=8)
    assert opened == ["pets", "cars"] * 2  # to see whether they are there, then to train
    trained = [made.result["experiment"] for made in spy]
    assert trained == ["pets"] * 6 + ["cars"] * 6  # of each head two rates and one training


def test_both_cifars_are_trained_together(shallow, small, spy, tmp_path, monkeypatch):
    """In common groups; results are those of one after the other, also of what is tested and kept."""
    classes, train = [], runner.train

    def spied(runs, images, num_classes, *rest, **options):
        classes.append(num_classes)
        return train(runs, images, num_classes, *rest, **options)

    monkeypatch.setattr(runner, "train", spied)
    tables, only = ("cifar100", "cifar10"), ("ResNet-20", "SM", "LIN")
    seen = []
    settings = image_settings(only=only, at_once=8, seeds=2)
    runner.run([EXPERIMENTS[table] for table in tables], tmp_path / "together", settings, seen.append)
    assert classes == [[100] * 4 + [10] * 4] * 2  # two heads, two rates each, then two seeds
    assert {now.what for now in seen} == {
        f"cifar100 and cifar10: {doing} resnet20-softmax and 7 more" for doing in ("choosing", "training")
    }
    for table in tables:
        run(table, tmp_path / "in turn", only=only, seeds=2)
    assert numbers_below(tmp_path / "together") == numbers_below(tmp_path / "in turn")
    for path in (tmp_path / "together").rglob("*.safetensors"):
        together, alone = (
            load_classifier(tmp_path / name / path.relative_to(tmp_path / "together"))
            for name in ("together", "in turn")
        )
        assert together.classes == alone.classes
        assert together.input == alone.input
        weights, others = together.model.state_dict(), alone.model.state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_choices_may_be_shorter(shallow, small, spy, tmp_path, monkeypatch):
    experiment = EXPERIMENTS["rectification"]
    short = {name: replace(protocol, choosing_epochs=1) for name, protocol in experiment.protocols.items()}
    monkeypatch.setitem(EXPERIMENTS, "rectification", replace(experiment, protocols=short))
    run("rectification", tmp_path, only=("Ours",), epochs=2, at_once=3)
    lengths = {(made.path.name.split("-")[0] == "choice", made.result["config"]["epochs"]) for made in spy}
    assert lengths == {(True, 1), (False, 2)}
    assert all(len(made.result["curve"]["loss"]) == made.result["config"]["epochs"] for made in spy)
    assert {made.path.parent.parent.name for made in spy} == {"1-epochs", "2-epochs"}


def test_seeds_are_added_to_what_is_there(shallow, small, tmp_path):
    first = run("rectification", tmp_path, only=("Ours",))
    both = run("rectification", tmp_path, only=("Ours",), seeds=2)
    assert both.items() >= first.items()
    new = sorted(set(both) - set(first))
    assert len(new) == 4
    assert all(path.endswith("-seed1.json") for path in new)
    for path in new:
        one, other = both[path], both[path.replace("seed1", "seed0")]
        assert (one["seed"], one["config"]["seed"]) == (1, 1)
        assert one["config"]["learning_rate"] == other["config"]["learning_rate"]
        assert one["curve"] != other["curve"]


def test_a_damaged_result_is_made_again_and_comes_out_the_same(shallow, small, tmp_path):
    before = run("rectification", tmp_path, only=("Ours ResNet-20", "rectified features"))
    assert len(before) == 3
    for name in before:
        (tmp_path / name).write_text("{")
        assert run("rectification", tmp_path, only=("Ours ResNet-20", "rectified features")) == before


def test_the_test_images_choose_nothing(shallow, small, tmp_path, monkeypatch):
    run("rectification", tmp_path / "one", only=("SM",))

    def other_test_images(name, device):
        opened = open_quick(name, device)
        opened.test.padded.random_(generator=torch.Generator().manual_seed(1))
        opened.test.labels = opened.test.labels.flip(0)
        return opened

    monkeypatch.setattr(runner, "open_quick", other_test_images)
    run("rectification", tmp_path / "other", only=("SM",))
    one, other = (numbers_below(tmp_path / name) for name in ("one", "other"))
    different = {path for path in one if one[path] != other[path]}
    assert different == {path for path in one if path.endswith("seed0.json")}  # their accuracy, and no more
    for path in one:
        for key in one[path]:
            assert key in ("accuracy", "top5", "nll", "ece") or one[path][key] == other[path][key]
    for path in (tmp_path / "one").rglob("*.safetensors"):
        weights, others = (
            load_classifier(tmp_path / name / path.relative_to(tmp_path / "one")).model.state_dict()
            for name in ("one", "other")
        )
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_students_learn_from_the_teacher_of_their_seed(shallow, small, spy, tmp_path):
    run("distillation", tmp_path, seeds=2, only=("CIFAR-10",))
    students = [each for each in spy if each.run.backbone == "lenet5"]
    assert len(students) == 4 * (2 + 2)  # of each head two candidates and two seeds
    for each in students:
        (place,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-softmax").glob(f"*-seed{each.run.seed}.safetensors")
        assert each.run.teacher == str(place)
        assert each.run.temperature == each.result["config"]["temperature"] == 20
        assert load_classifier(place).run.head == "softmax"
        assert load_classifier(place).run.seed == each.run.seed
    assert all(each.run.teacher is None for each in spy if each.run.backbone != "lenet5")


def diverge(monkeypatch, which):
    """Have the runs that `which` says diverge, by a learning rate that no number survives."""
    real = runner._run

    def altered(job, store, settings):
        made = real(job, store, settings)
        return replace(made, learning_rate=1e38) if which(job) else made

    monkeypatch.setattr(runner, "_run", altered)


def test_a_cell_that_diverges_says_so(shallow, small, tmp_path, monkeypatch):
    diverge(monkeypatch, lambda job: job.recipe.head_options.get("coefficients") == "none")
    reproduce("cifar100", tmp_path, "--only", "ResNet-20", "--only", "SM")
    output = reproduce("activations", tmp_path, "--only", "ResNet-20")
    with (tmp_path / "quick" / "report" / "activations-1-epochs.csv").open() as file:
        rows = {row[0]: row for row in csv.reader(file) if row[1] == "ResNet-20"}
    assert rows["none"][4:] == ["diverged", ""]
    assert float(rows["relu"][4]) >= 0
    assert rows["relu"][5]
    assert "diverged" in output
    folder = next((tmp_path / "quick").rglob("*coefficients_none"))
    assert not list(folder.glob("*.safetensors"))
    results = [load_result(path, NEEDED) for path in folder.glob("*.json")]
    assert len(results) == 3
    for result in results:
        assert result["accuracy"] is None
        assert 0 <= result["diverged_at"] < 4
        assert result["curve"]["loss"] == [None]
    monkeypatch.setattr(runner, "train", lambda *_, **__: pytest.fail("trained again"))
    assert reproduce("activations", tmp_path, "--only", "ResNet-20") == output


def test_a_network_whose_last_step_broke_it_has_diverged(shallow, small, tmp_path, monkeypatch):
    """Its losses are finite, as that of each step is taken before its update."""
    train = runner.train

    def broken(*arguments, **options):
        trained = train(*arguments, **options)
        for result in trained:
            torch.nn.init.constant_(next(result.model.parameters()), torch.nan)
        return trained

    monkeypatch.setattr(runner, "train", broken)
    results = run("rectification", tmp_path, only=("SM ResNet-20", "rectified features"))
    assert len(results) == 3
    for result in results.values():
        assert result["accuracy"] is None
        assert result["diverged_at"] == result["images"]["train"] // result["config"]["batch_size"]  # all its steps
        assert "nll" not in result
    assert not list(tmp_path.rglob("*seed0.safetensors"))


def test_a_candidate_that_diverges_is_not_chosen(shallow, small, tmp_path, monkeypatch):
    diverge(monkeypatch, lambda job: job.choosing and job.learning_rate == 0.05)
    results = run("rectification", tmp_path, only=("SM ResNet-20", "rectified features"))
    (final,) = [result for path, result in results.items() if path.endswith("seed0.json")]
    assert final["config"]["learning_rate"] == 0.1
    (diverged,) = [result for path, result in results.items() if "choice-lr0.05" in path]
    assert diverged["accuracy"] is None


def test_students_of_a_teacher_that_diverged_are_not_run(shallow, small, tmp_path, monkeypatch):
    diverge(monkeypatch, lambda job: job.recipe.data == "cifar10" and not job.choosing and job.recipe.teacher is None)
    reproduce("distillation", tmp_path)
    with (tmp_path / "quick" / "report" / "distillation-1-epochs.csv").open() as file:
        rows = {tuple(row[:2]): row[4] for row in csv.reader(file)}
    assert rows["CIFAR-10", "SM"] == rows["CIFAR-10", "Ours"] == "not run"
    assert float(rows["CIFAR-100", "SM"]) >= 0
    assert float(rows["CIFAR-100", "Ours"]) >= 0


# Active learning


def trained_on(recorded, column_words):
    """{(head, strategy, percent): images} of the final runs on subsets."""
    found = {}
    for each in recorded:
        if each.images.chosen is not None and not each.result["config"]["choosing"]:
            word = each.result["method"].rsplit("-", 1)[1]
            strategy = next(name for name in column_words if word.startswith(name))
            found[each.run.head, strategy, int(word.removeprefix(strategy))] = each.images.chosen.tolist()
    return found


def test_subsets_of_active_learning(shallow, spy, tmp_path):
    only = ("30 %", "50 %", "90 %", "ResNet-56")
    run("active", tmp_path, only=only)
    subsets = trained_on(spy, ("random", "margin", "kcenter"))
    first = subsets.pop(("softmax", "random", 10))
    assert len(subsets) == 18
    for (_, strategy, percent), chosen in subsets.items():
        assert len(set(chosen)) == len(chosen) == 64 * percent // 100
        assert chosen[:6] == first
        assert chosen == subsets["softmax", strategy, 90][: len(chosen)]
    assert len({tuple(subsets["softmax", strategy, 30]) for strategy in ("random", "margin", "kcenter")}) == 3
    selections = {each.result["method"]: each.result.get("selection") for each in spy}
    told = [selections[f"resnet56-{head}-kcenter{percent}"] for head in ("softmax", "kernel") for percent in (30, 90)]
    assert all(selection == told[0] for selection in told)  # chosen once, for all budgets and both heads
    assert told[0]["strategy"] == "k-center"
    assert told[0]["images"] == 51
    assert told[0]["seconds"] > 0
    assert selections["resnet56-softmax-margin30"]["strategy"] == "margin"
    assert selections["resnet56-softmax-random30"] is None

    # Once more from the network left behind, one image at a time in double precision.
    seed_model = tmp_path / "cifar100" / "1-epochs" / "resnet56-softmax-random10"
    saved = load_classifier(next(seed_model.glob("lr*-seed0.safetensors")))
    assert saved.run.head == "softmax"
    images = open_quick("cifar100", torch.device("cpu")).train
    logits = predict(saved.model, images).double().numpy()
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = np.sort(exponentials / exponentials.sum(1, keepdims=True), axis=1)
    margin = probabilities[:, -1] - probabilities[:, -2]
    chosen = subsets["softmax", "margin", 50]
    others = sorted(set(range(64)) - set(chosen))
    assert margin[chosen[6:]].max() <= margin[others].min() + 1e-6
    assert (np.diff(margin[subsets["softmax", "margin", 90][6:]]) >= -1e-6).all()

    features = predict(saved.model.backbone, images).double().numpy()
    assert features.shape == (64, 64)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T
    order = subsets["softmax", "kcenter", 90]
    for place in range(6, len(order)):
        left = sorted(set(range(64)) - set(order[:place]))
        nearest = {image: min(distance[image, center] for center in order[:place]) for image in left}
        assert nearest[order[place]] >= max(nearest.values()) - 1e-6


def test_nobody_looks_at_labels_that_were_not_paid_for(shallow, tmp_path):
    run("active", tmp_path, only=("30 %", "SM", "ResNet-56"))
    store = Store(tmp_path, 1)
    protocol = adapted(CIFAR_PROTOCOLS["paper"], True)
    opened = open_quick("cifar100", torch.device("cpu"))
    for cell in EXPERIMENTS["active"].cells:
        if cell.row == "30 %" and cell.recipe.head == "softmax" and cell.recipe.backbone == "cifar_resnet56":
            job = Job(cell.recipe, protocol, 1, 0, 0.1, 1e-4, False, tmp_path / "unused")
            kept, _ = runner._subset(job, opened, store)
            for path in tmp_path.rglob("*-seed0-*.safetensors"):
                path.unlink()
            bought = set(kept[:6].tolist())
            labels = opened.train.labels.clone()
            hidden = [index for index in range(64) if index not in bought]
            opened.train.labels[hidden] = labels[hidden].flip(0)
            assert not torch.equal(opened.train.labels, labels)
            assert runner._subset(job, opened, store)[0].tolist() == kept.tolist()
            opened.train.labels.copy_(labels)


def test_what_was_selected_before_its_time_was_measured_is_used(shallow, tmp_path):
    only = ("30 %", "SM", "k-center", "ResNet-20")
    run("active", tmp_path, only=only)
    (place,) = tmp_path.rglob("*-k-center.safetensors")
    tensors, state = load_checkpoint(place)
    assert state["images"] == 51
    save_checkpoint(place, tensors, {"strategy": "k-center", "seed": 0})
    (path,) = tmp_path.rglob("resnet20-softmax-kcenter30-paper/lr*.json")
    before = load_result(path, NEEDED)
    path.unlink()
    run("active", tmp_path, only=only)
    after = load_result(path, NEEDED)
    assert "selection" in before
    assert "selection" not in after
    assert after["accuracy"] == before["accuracy"]
    grid.table(EXPERIMENTS["active"], Store(tmp_path, 1), [adapted(CIFAR_PROTOCOLS["paper"], True)])


def test_each_seed_has_its_own_tenth_and_several_at_once_change_nothing(shallow, spy, tmp_path, monkeypatch):
    options = {"only": ("30 %", "50 %", "Ours", "random", "margin", "ResNet-20"), "seeds": 2}
    plain = run("active", tmp_path / "plain", **options)
    tenths = {each.run.seed: each.images.chosen.tolist() for each in spy if each.result["method"].endswith("random10")}
    assert set(tenths) == {0, 1}
    assert tenths[0] != tenths[1]
    groups, train = [], runner.train

    def noted(runs, images, *rest, **more):
        groups.append({(each.seed, id(seen)) for each, seen in zip(runs, images, strict=True)})
        return train(runs, images, *rest, **more)

    monkeypatch.setattr(runner, "train", noted)
    assert run("active", tmp_path / "three", at_once=3, **options) == plain
    # Candidates, two tenths, and then two seeds of two strategies, whose subsets differ.
    assert [len(seen) for seen in groups] == [1] * (len(groups) - 5) + [2, 2, 2, 2, 2]


# With the networks of the tables


def test_the_network_of_the_transfer_table(small, tmp_path):
    reproduce("transfer", tmp_path, "--only", "Oxford-IIIT Pets", "--only", "Ours")
    results = results_below(tmp_path / "quick")
    assert len(results) == 3
    for result in results.values():
        assert result["config"]["backbone"] == "resnet18"
        assert result["parameters"]["head"] == 512 * 8 + 10


def test_a_rate_of_the_heads_own_goes_into_the_training_and_its_files(shallow, small, tmp_path, monkeypatch):
    monkeypatch.setitem(
        EXPERIMENTS["distillation"].protocols, "tuned", Protocol("tuned", (0.1,), (1e-4,), 6, 1, head_rates=(10.0,))
    )
    run("distillation", tmp_path, only=("CIFAR-10", "SM"), protocols=("tuned",))
    (path,) = tmp_path.rglob("lenet5-*/lr*.json")
    assert path.name == "lr0.1-wd0.0001-head10-seed0.json"
    assert load_result(path, NEEDED)["config"]["head_rate"] == 10
    saved = load_classifier(path.with_suffix(".safetensors"))
    assert (saved.run.head_rate, saved.settings["head_rate"]) == (10, 10)


def test_weights_of_the_users_own(tmp_path):
    job = Job(
        EXPERIMENTS["transfer"].cells[0].recipe, CIFAR_PROTOCOLS["paper"], 1, 0, 0.1, 1e-4, False, tmp_path / "a.json"
    )
    store = Store(tmp_path, 1)
    assert runner._run(job, store, Settings(1)).backbone_options == {"pretrained": True}
    assert runner._run(job, store, Settings(1, weights="w.safetensors")).backbone_options == {
        "pretrained": False,
        "weights": "w.safetensors",
    }


def test_results_tell_which_weights_networks_began_with(monkeypatch, tmp_path):
    """And runs that began with others are not taken for the same."""
    source, others = tmp_path / "r.safetensors", tmp_path / "others.safetensors"
    for path in (source, others):
        save_file(torchvision.models.resnet18().state_dict(), path)
    monkeypatch.setattr(runner, "_open", open_quick)
    recipe = Recipe("pets", "resnet18", "softmax", {"pretrained": True})
    protocol = Protocol("paper", (0.1,), (1e-4,), 32, 0)
    table = Experiment("transfer", "", (Cell("Pets", "SM", recipe),), {protocol.name: protocol})

    def go(weights):
        runner.run([table], tmp_path / "runs", Settings(1, weights=weights), lambda _: None)

    go(str(source))
    (result,) = results_below(tmp_path / "runs").values()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert result["config"]["backbone_options"]["weights"] == {"file": "r.safetensors", "sha256": digest}
    notes = grid.table(table, Store(tmp_path / "runs", 1), [protocol]).notes
    assert f"Networks began with the weights of r.safetensors (sha256 {digest[:12]})." in notes

    go(str(source.rename(tmp_path / "elsewhere.safetensors")))  # the same
    for other in (str(others), None):
        with pytest.raises(ValueError, match=rf"began with r.safetensors \({digest[:12]}\): go on with them, or give"):
            go(other)


def test_stopped_and_killed_it_ends_with_the_same_numbers(tmp_path):
    options = ["--only", "CIFAR-10", "--only", "SM"]
    reproduce("distillation", tmp_path / "plain", *options)
    command = [sys.executable, "-m", "kernelhead", "reproduce", "distillation", "--quick", "--device", "cpu", *options]
    chooser = tmp_path / "runs" / "quick" / "cifar10" / "1-epochs" / "resnet20-softmax"  # of the teacher
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the number of threads changes the last bits
    for sent, code, awaited in (
        (signal.SIGTERM, 130, "choice-lr0.05-wd0.0001.json"),
        (signal.SIGKILL, -signal.SIGKILL, "choice-lr0.1-wd0.0001.json"),
        (None, 0, None),
    ):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
        while sent is not None and not (chooser / awaited).exists():
            assert process.poll() is None
            time.sleep(0.02)
        if sent is not None:
            process.send_signal(sent)
        _, messages = process.communicate(timeout=120)
        assert process.returncode == code, messages
        assert "Traceback" not in messages
        if sent == signal.SIGTERM:
            assert "the same command goes on from there" in messages
            assert not list(chooser.parent.rglob("*-seed0.json"))
    stopped, plain = numbers_below(tmp_path / "runs" / "quick"), numbers_below(tmp_path / "plain" / "quick")
    assert len(plain) == 6
    for path in plain:
        teacher = plain[path]["config"]["teacher"]  # wherever the folder of runs is
        assert teacher.replace(".safetensors", ".json") in plain if "lenet5" in path else teacher is None
        assert stopped[path] == plain[path]
    report = "quick/report/distillation-1-epochs.csv"
    assert (tmp_path / "runs" / report).read_text() == (tmp_path / "plain" / report).read_text()
