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

from kernelhead.finetune.results import load_result
from kernelhead_lab import networks
from kernelhead_lab.cli import app
from kernelhead_lab.engine.loop import predict
from kernelhead_lab.spec import LabSpec, head
from kernelhead_lab.tables import EXPERIMENTS, grid, groups, outcome, quick, runner
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment, Protocol, adapted
from kernelhead_lab.tables.outcome import load_network
from kernelhead_lab.tables.quick import open_quick
from kernelhead_lab.tables.runner import Settings
from kernelhead_lab.tables.store import Store

CLASSES = 8  # of the quick data
CIFAR_RATES = ("0.05", "0.1")  # of quick runs, but for
TRANSFER_RATES = ("0.003", "0.01")
STUDENT_RATES = ("0.001", "0.003")
WHOLE = {cell.spec.key for table in EXPERIMENTS.values() for cell in table.cells if cell.spec.subset is None}
QUICK_TABLES = ("rectification",)  # by `make test`; the others by `make test-all`


def ignore(_):
    pass


@pytest.fixture
def shallow(monkeypatch):
    create = networks.create_backbone

    def small(spec):
        lenet = spec.backbone.endswith("lenet5")
        return create(
            spec if lenet else replace(spec, backbone="kernelhead_lab.networks:cifar_resnet8", backbone_options={})
        )

    monkeypatch.setattr(networks, "create_backbone", small)


@dataclass
class Recorded:
    """One run: its spec, the images it saw, those it was tested on, its teacher, and its result file."""

    spec: object
    images: object
    teacher: object
    tested: object
    path: object
    result: object


@pytest.fixture
def spy(monkeypatch):
    """The runs of a runner, in their order."""
    recorded, told, tested, predicted = [], [], {}, []
    train, save = runner.train, runner.save_result

    def spied_train(specs, images, classes, **options):
        trained = train(specs, images, classes, **options)
        told.extend(zip(specs, images, options["teachers"], trained, strict=True))
        return trained

    def spied_predict(model, data, **options):
        predicted.append(model)
        tested[id(model)] = data
        return predict(model, data, **options)

    def spied_save(path, result):
        spec, images, teacher, trained = told.pop(0)
        assert predicted.count(trained.model) == (trained.diverged_at is None)  # once, after the last epoch
        recorded.append(Recorded(spec, images, teacher, tested.pop(id(trained.model), None), path, result))
        save(path, result)

    monkeypatch.setattr(runner, "train", spied_train)
    monkeypatch.setattr(outcome, "predict", spied_predict)
    monkeypatch.setattr(runner, "save_result", spied_save)
    return recorded


def reproduce(table, runs, *options):
    done = CliRunner().invoke(app, ["reproduce", table, "--quick", "--device", "cpu", "--runs", str(runs), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def read(path):
    return load_result(path, LabSpec)


def alter(path, **change):
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def results_below(folder):
    paths = sorted(path for path in folder.rglob("*.json") if path.parent.name != groups.PARTIAL)
    return {str(path.relative_to(folder)): read(path) for path in paths}


def numbers_below(folder):
    """Results without what depends on the clock."""
    numbers = {}
    for path, result in results_below(folder).items():
        extra = {name: value for name, value in result.extra.items() if name != "environment"}
        if "selection" in extra:
            extra["selection"] = {**extra["selection"], "seconds": None}
        numbers[path] = replace(result, seconds=0.0, at_once=0, extra=extra)
    return numbers


def rates_of(cell):
    if cell.spec.teacher is not None:
        return STUDENT_RATES
    return TRANSFER_RATES if cell.spec.data in ("pets", "cars") else CIFAR_RATES


def folder_of(cell):
    protocol = "-paper" if cell.builds_on else ""
    return f"{cell.spec.data}/1-epochs/{cell.spec.key}{protocol}"


def chooser_of(cell):
    while cell.chosen_as is not None:
        cell = cell.chosen_as
    return cell


def chosen_rate(results, cell):
    """The rate of the best held-out accuracy, the first of equals."""
    folder, rates = folder_of(chooser_of(cell)), rates_of(cell)
    accuracies = [results[f"{folder}/choice-lr{rate}-wd0.0001.json"].accuracy for rate in rates]
    return rates[int(np.argmax(accuracies))]


def expected_files(table, results):
    """Written out again: the final run of each cell and of what it builds on, and the candidates of each choice.

    {path: spec}
    """
    found = {}

    def add(cell):
        chooser = chooser_of(cell)
        for rate in rates_of(cell):
            found[f"{folder_of(chooser)}/choice-lr{rate}-wd0.0001.json"] = chooser.spec
        found[f"{folder_of(cell)}/lr{chosen_rate(results, cell)}-wd0.0001-seed0.json"] = cell.spec
        if cell.builds_on is not None:
            add(cell.builds_on)

    for cell in EXPERIMENTS[table].cells:
        add(cell)
    return found


def check_result(result, spec, choosing):
    assert {"torch", "numpy", "python"} <= set(result.extra["environment"]["libraries"])
    assert {"version", "hardware"} <= set(result.extra["environment"])
    assert result.seconds > 0
    assert result.parameters["backbone"] > 0
    assert result.parameters["head"] > 0
    assert None not in (result.spec.learning_rate, result.spec.weight_decay, result.spec.head_rate)
    assert (result.spec.batch_size, result.spec.warmup_epochs, result.spec.amp) == (6, 1, "none")
    assert result.choosing == choosing
    assert len(result.curve["loss"]) == len(result.curve["accuracy"]) == result.spec.epochs == 1
    assert 0 <= result.accuracy <= 100
    assert result.diverged_at is None
    names = ("head", "head_options", "rectified", "mixup", "subset", "backbone_options", "temperature")
    assert all(getattr(result.spec, name) == getattr(spec, name) for name in names)
    for below in ("teacher", "seed_model"):
        network = getattr(result.spec, below)
        assert (network and network.key) == (getattr(spec, below) and getattr(spec, below).key)
        assert network is None or network.seed == result.spec.seed
    if "kernel" in spec.head_options or spec.head == "cosine":
        assert np.isfinite(result.alpha).all()
    if spec.head == "kernel" and spec.head_options["kernel"] == "learned":
        assert len(result.alpha) == 10
        assert spec.head_options["coefficients"] == "none" or min(result.alpha) >= 0


def check_images(recorded, opened):
    """Held-out images choose and are not trained on; test images do neither; a final run has all that are its own."""
    held = set()
    for each in recorded:
        everything = opened[each.result.spec.data]
        if each.result.choosing:
            kept, tested = (set(images.chosen.tolist()) for images in (each.images, each.tested))
            assert each.images.padded is each.tested.padded is everything.train.padded
            assert not kept & tested
            assert kept | tested == set(range(len(everything.train)))
            assert sorted(everything.train.labels[sorted(tested)].tolist()) == list(range(CLASSES))
            held.add(frozenset(tested))
            assert each.result.images == {"train": len(kept), "test": CLASSES, "left_out": 0}
            continue
        assert each.tested is everything.test
        assert len(each.tested) == each.result.images["test"]
        assert each.images.padded is everything.train.padded
        assert len(each.images) == each.result.images["train"]
        assert (each.images.chosen is None) == (each.result.spec.subset is None)
        assert each.images.chosen is not None or len(each.images) == len(everything.train)
    assert len(held) <= 1


def check_table(table, results, report, output):
    """Every cell has its number, and the difference to softmax that two result files give."""
    with (report / f"{table}-1-epochs.csv").open() as file:
        heading, *rows = list(csv.reader(file))
    papers = [] if table in ("landmarks", "saturation", "mixup") else ["paper", "over SM"]
    assert heading == ["", "", *papers, "paper's protocol", "over SM"]
    cells = {(cell.row, cell.column): cell for cell in EXPERIMENTS[table].cells}
    assert [tuple(row[:2]) for row in rows] == list(cells)
    expected = expected_files(table, results)

    def accuracy_of(spec):
        return next(results[path].accuracy for path, other in expected.items() if other == spec and "seed0" in path)

    for row, column, *_, ours, over in rows:
        cell = cells[row, column]
        accuracy = accuracy_of(cell.spec)
        assert ours == f"{accuracy:.2f}"
        assert ours in output
        baseline = replace(cell.spec, **head("linear"), backbone_options={})
        if cell.spec == baseline:
            assert over == ""
            continue
        folder = folder_of(replace(cell, spec=baseline))
        (theirs,) = {result.accuracy for path, result in results.items() if path.startswith(folder + "/lr")}
        assert over == f"{accuracy - theirs:+.2f}"
    markdown = (report / f"{table}-1-epochs.md").read_text()
    assert "that it ran is all that these numbers show" in markdown
    assert "last epoch of 1;" in markdown
    page = (report / "report.html").read_text()
    assert EXPERIMENTS[table].title.replace("'", "&#x27;") in page


WITH_PAPERS = [name for name, experiment in EXPERIMENTS.items() if "paper" in experiment.protocols]


@pytest.mark.parametrize(
    "table", [name if name in QUICK_TABLES else pytest.param(name, marks=pytest.mark.slow) for name in WITH_PAPERS]
)
def test_a_table_from_end_to_end(table, shallow, spy, tmp_path, monkeypatch):
    opened = {}

    def open_once(name, device):
        return opened.setdefault(name, open_quick(name, device))

    monkeypatch.setattr(runner, "open_quick", open_once)
    if table != "active":  # a tenth of 64 images is one batch
        monkeypatch.setattr(quick, "TRAIN", 3 * CLASSES)
        monkeypatch.setattr(quick, "TEST", 2 * CLASSES)
    baseline = {}
    if table in ("kernels", "activations"):  # they are compared with cells of another table
        reproduce("cifar100", tmp_path, "--only", "ResNet-56", "--only", "ResNet-20", "--only", "SM")
        baseline = results_below(tmp_path / "quick")
    output = reproduce(table, tmp_path)
    runs = tmp_path / "quick"
    results = results_below(runs)
    expected = expected_files(table, results)
    assert set(results) == set(expected) | set(baseline)
    assert len(spy) == len(results)  # none twice
    assert not list((runs / ".partial").iterdir())
    check_images(spy, opened)
    for path, result in results.items():
        if path in expected:
            check_result(result, expected[path], "/choice-" in path)
        if path.endswith("seed0.json"):
            assert path.endswith(f"/lr{result.spec.learning_rate:g}-wd0.0001-seed0.json")
            model = load_network((runs / path).with_suffix(".safetensors"))
            test = opened[result.spec.data].test
            correct = predict(model, test).argmax(1) == test.labels
            assert result.accuracy == pytest.approx(100 * correct.double().mean().item())
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


@pytest.mark.slow
def test_the_other_decay_is_tried_with_the_best_rate(shallow, small, tmp_path):
    numbers = run("transfer-long", tmp_path, only=("Oxford-IIIT Pets", "ATT"))  # which has no protocol named paper
    accuracies = {path.rpartition("/")[2]: result.accuracy for path, result in numbers.items()}
    names = set(accuracies)
    tried = {name for name in names if name.startswith("choice-") and name.endswith("-wd0.0005.json")}
    assert tried == {"choice-lr0.003-wd0.0005.json", "choice-lr0.01-wd0.0005.json"}
    best = max(sorted(tried), key=lambda name: accuracies[name])
    (other,) = {name for name in names if name.startswith("choice-")} - tried
    assert other == best.replace("0.0005", "0.0001")
    assert len(names) == 4


@pytest.mark.slow
def test_several_at_once_and_interruptions_change_no_number(shallow, small, tmp_path):
    plain = run("rectification", tmp_path / "plain")
    assert run("rectification", tmp_path / "four", at_once=4) == plain
    assert {result.at_once for result in results_below(tmp_path / "four").values()} >= {4}

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


@pytest.mark.slow
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
    first = [read(tmp_path / "stopped" / path).seconds for path in told["paths"]]
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

    def measure_two(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

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
    (teacher,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-linear").glob("*-seed0.json")
    alter(teacher, accuracy=12.345)
    network = teacher.with_suffix(".safetensors")
    before = load_network(network).state_dict()
    network.unlink()
    (chosen := network.with_name(f"{network.stem}-margin.safetensors")).touch()
    assert run("distillation", tmp_path, only=only)  # nobody needs it
    assert not network.exists()
    runner.run([EXPERIMENTS["distillation"]], tmp_path, image_settings(only=("CIFAR-10", "Ours")), ignore)
    again = load_network(network).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    assert not chosen.exists()
    assert read(teacher).accuracy == 12.345
    assert len(results_below(tmp_path)) == len(first) + 3


def test_a_lost_network_that_cannot_be_trained_again(shallow, small, tmp_path, monkeypatch):
    run("distillation", tmp_path, only=("CIFAR-10", "SM"))
    (network,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-linear").glob("*-seed0.safetensors")
    network.unlink()
    diverge(monkeypatch, lambda spec: spec.teacher is None)
    with pytest.raises(ValueError, match=r"seed0\.json has no network beside it, and training it again diverged"):
        run("distillation", tmp_path, only=("CIFAR-10", "Ours"))


def test_a_damaged_network_that_others_build_on(shallow, small, tmp_path):
    run("distillation", tmp_path, only=("CIFAR-10", "SM"))
    (network,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-linear").glob("*-seed0.safetensors")
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
    assert [made.result.at_once for made in spy[sum(choosing) :]] == [4] * 8


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
        seen.append([int(spec.backbone.rpartition("resnet")[2]) for spec in runs])
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
    trained = [made.result.spec.data for made in spy]
    assert trained == ["pets"] * 6 + ["cars"] * 6  # of each head two rates and one run


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
        f"cifar100 and cifar10: {doing} resnet20-linear and 7 more" for doing in ("choosing", "training")
    }
    for table in tables:
        run(table, tmp_path / "in turn", only=only, seeds=2)
    assert numbers_below(tmp_path / "together") == numbers_below(tmp_path / "in turn")
    for path in (tmp_path / "together").rglob("*.safetensors"):
        together, alone = (
            load_network(tmp_path / name / path.relative_to(tmp_path / "together")) for name in ("together", "in turn")
        )
        assert together.head.num_classes == alone.head.num_classes
        weights, others = together.state_dict(), alone.state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_choices_may_be_shorter(shallow, small, spy, tmp_path, monkeypatch):
    experiment = EXPERIMENTS["rectification"]
    short = {name: replace(protocol, choosing_epochs=1) for name, protocol in experiment.protocols.items()}
    monkeypatch.setitem(EXPERIMENTS, "rectification", replace(experiment, protocols=short))
    run("rectification", tmp_path, only=("Ours",), epochs=2, at_once=3)
    lengths = {(made.path.name.split("-")[0] == "choice", made.result.spec.epochs) for made in spy}
    assert lengths == {(True, 1), (False, 2)}
    assert all(len(made.result.curve["loss"]) == made.result.spec.epochs for made in spy)
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
        assert one.spec == replace(other.spec, seed=1)
        assert one.curve != other.curve


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
        measured = {"accuracy": None, "top5": None, "nll": None, "ece": None}
        assert replace(one[path], **measured) == replace(other[path], **measured)
    for path in (tmp_path / "one").rglob("*.safetensors"):
        weights, others = (
            load_network(tmp_path / name / path.relative_to(tmp_path / "one")).state_dict() for name in ("one", "other")
        )
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_students_learn_from_the_teacher_of_their_seed(shallow, small, spy, tmp_path):
    run("distillation", tmp_path, seeds=2, only=("CIFAR-10",))
    students = [each for each in spy if each.spec.backbone.endswith("lenet5")]
    assert len(students) == 4 * (2 + 2)  # of each head two candidates and two seeds
    for each in students:
        (path,) = (tmp_path / "cifar10" / "1-epochs" / "resnet56-linear").glob(f"*-seed{each.spec.seed}.safetensors")
        weights, others = each.teacher.state_dict(), load_network(path).state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert each.result.spec.temperature == 20
        assert (each.result.spec.teacher.head, each.result.spec.teacher.seed) == ("linear", each.spec.seed)
        assert f"lr{each.result.spec.teacher.learning_rate:g}-" in path.name
    assert all(each.teacher is None for each in spy if not each.spec.backbone.endswith("lenet5"))


def diverge(monkeypatch, which):
    """Have the runs that `which` says diverge, by a learning rate that no number survives."""
    real = runner.train

    def altered(specs, *rest, **options):
        trained = real([replace(spec, learning_rate=1e38) if which(spec) else spec for spec in specs], *rest, **options)
        for spec, found in zip(specs, trained, strict=True):
            found.spec = spec
        return trained

    monkeypatch.setattr(runner, "train", altered)


def test_a_cell_that_diverges_says_so(shallow, small, tmp_path, monkeypatch):
    diverge(monkeypatch, lambda spec: spec.head_options.get("coefficients") == "none")
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
    results = [read(path) for path in folder.glob("*.json")]
    assert len(results) == 3
    for result in results:
        assert result.accuracy is None
        assert 0 <= result.diverged_at < 4
        assert result.curve["loss"] == [None]
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
        assert result.accuracy is None
        assert result.diverged_at == result.images["train"] // result.spec.batch_size - 1  # the last of its steps
        assert result.nll is None
    assert not list(tmp_path.rglob("*seed0.safetensors"))


def test_a_candidate_that_diverges_is_not_chosen(shallow, small, tmp_path, monkeypatch):
    diverge(monkeypatch, lambda spec: spec.learning_rate == 0.05)
    results = run("rectification", tmp_path, only=("SM ResNet-20", "rectified features"))
    (final,) = [result for path, result in results.items() if path.endswith("seed0.json")]
    assert final.spec.learning_rate == 0.1
    (diverged,) = [result for path, result in results.items() if "choice-lr0.05" in path]
    assert diverged.accuracy is None


def test_students_of_a_teacher_that_diverged_are_not_run(shallow, small, tmp_path, monkeypatch):
    diverge(monkeypatch, lambda spec: spec.data == "cifar10" and spec.backbone.endswith("resnet56"))
    reproduce("distillation", tmp_path)
    with (tmp_path / "quick" / "report" / "distillation-1-epochs.csv").open() as file:
        rows = {tuple(row[:2]): row[4] for row in csv.reader(file)}
    assert rows["CIFAR-10", "SM"] == rows["CIFAR-10", "Ours"] == "not run"
    assert float(rows["CIFAR-100", "SM"]) >= 0
    assert float(rows["CIFAR-100", "Ours"]) >= 0


# Active learning


def trained_on(recorded):
    """{(head, strategy, percent): images} of the final runs on subsets."""
    return {
        (each.spec.head, each.spec.subset.strategy, each.spec.subset.percent): each.images.chosen.tolist()
        for each in recorded
        if each.spec.subset is not None
    }


def test_subsets_of_active_learning(shallow, spy, tmp_path):
    only = ("30 %", "50 %", "90 %", "ResNet-56")
    run("active", tmp_path, only=only)
    subsets = trained_on(spy)
    first = subsets.pop(("linear", "random", 10))
    assert len(subsets) == 18
    for (_, strategy, percent), chosen in subsets.items():
        assert len(set(chosen)) == len(chosen) == 64 * percent // 100
        assert chosen[:6] == first
        assert chosen == subsets["linear", strategy, 90][: len(chosen)]
    assert len({tuple(subsets["linear", strategy, 30]) for strategy in ("random", "margin", "k-center")}) == 3
    selections = {each.result.spec.key: each.result.extra.get("selection") for each in spy}
    told = [selections[f"resnet56-{head}-kcenter{percent}"] for head in ("linear", "kernel") for percent in (30, 90)]
    assert all(selection == told[0] for selection in told)  # chosen once, for all budgets and both heads
    assert told[0]["strategy"] == "k-center"
    assert told[0]["images"] == 51
    assert told[0]["seconds"] > 0
    assert selections["resnet56-linear-margin30"]["strategy"] == "margin"
    assert selections["resnet56-linear-random30"] is None

    # Once more from the network left behind, one image at a time in double precision.
    seed_model = tmp_path / "cifar100" / "1-epochs" / "resnet56-linear-random10"
    model = load_network(next(seed_model.glob("lr*-seed0.safetensors")))
    assert model.head.name == "linear"
    images = open_quick("cifar100", torch.device("cpu")).train
    logits = predict(model, images).double().numpy()
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = np.sort(exponentials / exponentials.sum(1, keepdims=True), axis=1)
    margin = probabilities[:, -1] - probabilities[:, -2]
    chosen = subsets["linear", "margin", 50]
    others = sorted(set(range(64)) - set(chosen))
    assert margin[chosen[6:]].max() <= margin[others].min() + 1e-6
    assert (np.diff(margin[subsets["linear", "margin", 90][6:]]) >= -1e-6).all()

    features = predict(model.backbone, images).double().numpy()
    assert features.shape == (64, 64)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T
    order = subsets["linear", "k-center", 90]
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
        if cell.row == "30 %" and cell.column.startswith("SM") and cell.column.endswith("ResNet-56"):
            spec = store.resolved(cell, protocol, store.choice(cell, protocol), 1, 0)
            kept, _ = runner._subset(spec, opened, store)
            for path in tmp_path.rglob("*-seed0-*.safetensors"):
                path.unlink()
            bought = set(kept[:6].tolist())
            labels = opened.train.labels.clone()
            hidden = [index for index in range(64) if index not in bought]
            opened.train.labels[hidden] = labels[hidden].flip(0)
            assert not torch.equal(opened.train.labels, labels)
            assert runner._subset(spec, opened, store)[0].tolist() == kept.tolist()
            opened.train.labels.copy_(labels)


@pytest.mark.slow
def test_each_seed_has_its_own_tenth_and_several_at_once_change_nothing(shallow, spy, tmp_path, monkeypatch):
    options = {"only": ("30 %", "50 %", "Ours", "random", "margin", "ResNet-20"), "seeds": 2}
    plain = run("active", tmp_path / "plain", **options)
    tenths = {each.spec.seed: each.images.chosen.tolist() for each in spy if each.spec.key.endswith("random10")}
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


@pytest.mark.slow
def test_the_network_of_the_transfer_table(small, tmp_path):
    reproduce("transfer", tmp_path, "--only", "Oxford-IIIT Pets", "--only", "Ours")
    results = results_below(tmp_path / "quick")
    assert len(results) == 3
    for result in results.values():
        assert (result.spec.backbone, result.spec.pretrained) == ("torchvision/resnet18", False)
        assert result.parameters["head"] == 512 * 8 + 10


def test_a_rate_of_the_heads_own_goes_into_the_training_and_its_files(shallow, small, tmp_path, monkeypatch):
    monkeypatch.setitem(
        EXPERIMENTS["distillation"].protocols, "tuned", Protocol("tuned", (0.1,), (1e-4,), 6, 1, head_rates=(10.0,))
    )
    run("distillation", tmp_path, only=("CIFAR-10", "SM"), protocols=("tuned",))
    (path,) = tmp_path.rglob("lenet5-*/lr*.json")
    assert path.name == "lr0.1-wd0.0001-head10-seed0.json"
    assert read(path).spec.head_rate == 10


def test_weights_of_the_users_own():
    spec = EXPERIMENTS["transfer"].cells[0].spec
    assert runner._on_machine(spec, Settings(1)) == replace(spec, amp="none")
    own = runner._on_machine(spec, Settings(1, weights="there/w.safetensors"))
    assert own == replace(spec, amp="none", pretrained=False, weights="there/w.safetensors")
    assert outcome.portable(own).weights == "w.safetensors"
    assert own.key == spec.key


@pytest.mark.slow
def test_results_tell_which_weights_networks_began_with(monkeypatch, tmp_path):
    """And runs that began with others are not taken for the same."""
    source, others = tmp_path / "r.safetensors", tmp_path / "others.safetensors"
    for path in (source, others):
        save_file(torchvision.models.resnet18().state_dict(), path)
    monkeypatch.setattr(runner, "_open", lambda spec, device: open_quick(spec.data, device))
    spec = LabSpec("pets", "torchvision/resnet18", **head("linear"), pretrained=True)
    protocol = Protocol("paper", (0.1,), (1e-4,), 32, 0)
    table = Experiment("transfer", "", (Cell(spec, "Pets", "SM"),), {protocol.name: protocol})

    def go(weights):
        runner.run([table], tmp_path / "runs", Settings(1, weights=weights), lambda _: None)

    go(str(source))
    (result,) = results_below(tmp_path / "runs").values()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert result.spec.weights == "r.safetensors"
    assert result.extra["weights"] == {"file": "r.safetensors", "sha256": digest}
    notes = grid.table(table, Store(tmp_path / "runs", 1), [protocol]).notes
    assert f"Networks began with the weights of r.safetensors (sha256 {digest[:12]})." in notes

    go(str(source.rename(tmp_path / "elsewhere.safetensors")))  # the same
    for other in (str(others), None):
        with pytest.raises(ValueError, match=rf"began with r.safetensors \({digest[:12]}\): go on with them, or give"):
            go(other)


@pytest.mark.slow
def test_stopped_and_killed_it_ends_with_the_same_numbers(tmp_path):
    options = ["--only", "CIFAR-10", "--only", "SM"]
    reproduce("distillation", tmp_path / "plain", *options)
    command = [
        sys.executable,
        "-m",
        "kernelhead_lab",
        "reproduce",
        "distillation",
        "--quick",
        "--device",
        "cpu",
        *options,
    ]
    chooser = tmp_path / "runs" / "quick" / "cifar10" / "1-epochs" / "resnet20-linear"  # of the teacher
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
            assert "interrupted; " in messages
            assert not list(chooser.parent.rglob("*-seed0.json"))
    stopped, plain = numbers_below(tmp_path / "runs" / "quick"), numbers_below(tmp_path / "plain" / "quick")
    assert len(plain) == 6
    for path in plain:
        assert (plain[path].spec.teacher is not None) == ("lenet5" in path)
        assert stopped[path] == plain[path]
    report = "quick/report/distillation-1-epochs.csv"
    assert (tmp_path / "runs" / report).read_text() == (tmp_path / "plain" / report).read_text()
