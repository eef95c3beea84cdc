"""A run from its spec to its files: what it leaves, how it continues, and what goes wrong."""

import copy
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from kernelhead.finetune import trainer as module
from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.data import batches, open_data
from kernelhead.finetune.distributed import World
from kernelhead.finetune.evaluation import evaluate_classifier
from kernelhead.finetune.optimizer import create_optimizer
from kernelhead.finetune.results import load_result
from kernelhead.finetune.saved import create_classifier, head_of, load_classifier
from kernelhead.finetune.schedule import warmup_cosine
from kernelhead.finetune.settings import MODEL_FILE, check_run_folder, make_spec, resolved
from kernelhead.finetune.spec import TrainSpec
from kernelhead.finetune.trainer import DivergedError, MetricsLog, Moment, train

CPU = torch.device("cpu")
EPOCHS, PER_EPOCH = 4, 3
STEPS = EPOCHS * PER_EPOCH


def make(colours, **changes):
    options = {"degree": 3, "coefficients": "relu"}
    given = {"backbone": "tiny_networks:tiny", "head": "kernel", "head_options": options, "device": "cpu"}
    given |= {"epochs": EPOCHS, "batch_size": 16, "evaluate_every": 2, "warmup_epochs": 1, "seed": 3}
    given |= {"report": False, "test": 0.15, "val": 0.05}
    return resolved(TrainSpec(str(colours / "images"), **{**given, **changes}))


@pytest.fixture(scope="module")
def spec(colours):
    return make(colours)


@pytest.fixture(scope="module")
def data(spec):
    return open_data(spec, CPU)


@pytest.fixture(scope="module")
def whole(spec, data, tmp_path_factory):
    """An uninterrupted run: its folder, its result, and what was seen meanwhile."""
    out, seen = tmp_path_factory.mktemp("runs") / "whole", []
    return out, train(spec, data, out, watch=seen.append), seen


def read_log(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_seconds(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def contents(path):
    """All that a checkpoint holds, as bytes: NaN equals NaN, and 0 is not -0."""
    tensors, state = load_checkpoint(path)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, state


class StoppedError(Exception):
    """What ends a run in the middle."""


def stop_at(step, monkeypatch):
    """Stop before step number `step`, counted from 1."""
    calls = itertools.count(1)

    def seeded(*values, real=module.mix):
        if next(calls) == step:
            raise StoppedError
        return real(*values)

    monkeypatch.setattr(module, "mix", seeded)


# --- what a run leaves ------------------------------------------------------------------------------------------------


def test_the_files(spec, whole):
    names = {"checkpoint.safetensors", "config.yaml", "metrics.jsonl", "model.safetensors", "result.json"}
    assert {path.name for path in whole[0].iterdir()} == names | {"predictions.csv"}
    assert make_spec(whole[0] / "config.yaml", {}) == spec


def test_a_line_per_epoch(spec, whole):
    out, result, seen = whole
    records, tensors = read_log(out), load_checkpoint(out / "checkpoint.safetensors")[0]
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    assert [record["step"] for record in records] == [3, 6, 9, 12]
    for number, record in enumerate(records):
        steps = slice(number * PER_EPOCH, (number + 1) * PER_EPOCH)
        assert record["loss"] == pytest.approx(tensors["losses"][steps].mean().item(), rel=1e-6)
        assert record["accuracy"] == pytest.approx(100 * tensors["accuracies"][steps].mean().item(), rel=1e-6)
        assert record["seconds"] > 0
    expected = [spec.learning_rate * warmup_cosine(step - 1, STEPS, PER_EPOCH) for step in (3, 6, 9, 12)]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected, rel=1e-6)
    # The validation images are looked at after every second epoch, the test images at the end.
    assert [record["val_accuracy"] is None for record in records] == [True, False, True, False]
    assert [record["val_loss"] is None for record in records] == [True, False, True, False]
    assert ["test_accuracy" in record for record in records] == [False, False, False, True]
    assert records[-1]["test_accuracy"] == result.accuracy
    ends = [moment for moment in seen if moment.epoch_done]
    assert [(moment.epoch, moment.epochs, moment.steps) for moment in ends] == [(n, 4, STEPS) for n in (1, 2, 3, 4)]
    assert [moment.val_accuracy for moment in ends] == [record["val_accuracy"] for record in records]
    assert all(moment.images_per_second > 0 for moment in seen)


def test_the_result_is_complete(spec, whole):
    out, result, _ = whole
    written = load_result(out / "result.json")
    assert written.spec.recipe() == replace(spec, amp="none").recipe()
    assert {**vars(written), "extra": {}, "spec": None} == {**vars(result), "spec": None}
    assert written.images == {"train": 48, "val": 3, "test": 9, "left_out": 0}
    assert written.diverged_at is None
    assert written.seconds == pytest.approx(sum(record["seconds"] for record in read_log(out)))
    assert written.curve["loss"] == [record["loss"] for record in read_log(out)]
    assert {"version", "libraries", "hardware"} <= written.extra["environment"].keys()
    saved = load_classifier(out)
    in_head = sum(parameter.numel() for parameter in saved.head.parameters())
    assert written.parameters["head"] == in_head == 3 * 12 + 6
    assert sum(written.parameters.values()) == sum(parameter.numel() for parameter in saved.model.parameters())
    assert written.alpha == pytest.approx(saved.head.alpha.tolist())
    assert len(set(written.alpha)) > 1  # they were trained


def test_the_classifier_that_is_kept_is_the_trained_one(spec, data, whole):
    out, result, _ = whole
    saved = load_classifier(out)
    assert (saved.classes, saved.input, saved.spec) == (["blue", "green", "red"], data.input, spec)
    tensors, _ = load_checkpoint(out / "checkpoint.safetensors")
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(tensor, tensors[f"model.{name}"])
    ((images, labels),) = batches(data.test, data.test.in_order(), data)
    with torch.no_grad():
        logits = saved.model(images)
    assert result.accuracy == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert result.nll == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    own = evaluate_classifier(saved, None, CPU)
    assert own == {
        "images": 9,
        "seen_in_training": [],
        "accuracy": result.accuracy,
        "nll": result.nll,
        "ece": result.ece,
    }


def by_hand(spec, data, steps):
    """The same network after some steps of SGD with momentum and decay, written out."""
    model = create_classifier(spec, 3).train()
    head = set(head_of(model).parameters())
    velocity = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    losses, order = [], None
    for step in range(steps):
        epoch, number = divmod(step, PER_EPOCH)
        generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + epoch)
        order = torch.randperm(48, generator=generator)[number * 16 : (number + 1) * 16].tolist()
        ((images, labels),) = batches(data.train, [[(spec.seed, epoch, index) for index in order]], data)
        loss = F.cross_entropy(model(images), labels)
        model.zero_grad()
        loss.backward()
        rate = spec.learning_rate * warmup_cosine(step, STEPS, PER_EPOCH)
        with torch.no_grad():
            for parameter, moved in velocity.items():
                moved.mul_(spec.momentum).add_(parameter.grad + spec.weight_decay * parameter)
                parameter.sub_(rate * (spec.head_rate if parameter in head else 1) * moved)
        losses.append(loss.item())
    return model, losses


def test_the_steps_are_those_of_sgd_by_hand(colours, data, tmp_path):
    spec = make(colours, head_rate=4.0)
    train(spec, data, tmp_path)
    tensors, _ = load_checkpoint(tmp_path / "checkpoint.safetensors")
    model, losses = by_hand(spec, data, STEPS)
    assert tensors["losses"].tolist() == pytest.approx(losses, rel=1e-4)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(tensors[f"model.{name}"], expected, rtol=1e-3, atol=1e-5)


def test_it_learns(colours, tmp_path):
    spec = make(colours, head="landmarks", head_options={"landmarks": 16}, epochs=12, evaluate_every=0)
    assert train(spec, open_data(spec, CPU), tmp_path).accuracy > 90


@pytest.mark.parametrize(("every", "looks"), [(0, 0), (1, EPOCHS), (3, 2), (EPOCHS, 1), (100, 1)])
def test_images_are_looked_at_as_often_as_asked(whole, spec, data, tmp_path, monkeypatch, every, looks):
    """Those of the test once, and that changes nothing."""
    calls = []

    def counted(model, data, images, real=module.logits_of, **options):
        calls.append(images)
        return real(model, data, images, **options)

    monkeypatch.setattr(module, "logits_of", counted)
    train(replace(spec, evaluate_every=every), data, tmp_path)
    assert [images is data.test for images in calls] == [False] * looks + [True]
    assert all(images in (data.val, data.test) for images in calls)
    assert contents(tmp_path / MODEL_FILE)[0] == contents(whole[0] / MODEL_FILE)[0]


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_mixed_precision(spec, data, whole, tmp_path, amp):
    result = train(replace(spec, amp=amp), data, tmp_path)
    assert result.spec.amp == amp
    mixed, full = (load_checkpoint(out / "checkpoint.safetensors")[0] for out in (tmp_path, whole[0]))
    assert {name: tensor.dtype for name, tensor in mixed.items()} == {name: x.dtype for name, x in full.items()}
    assert mixed["losses"].tolist() == pytest.approx(full["losses"].tolist(), rel=0.1)
    assert not torch.equal(mixed["losses"], full["losses"])


def test_mixup_mixes_in_pairs(colours, data, tmp_path):
    """The loss of the first step, by hand."""
    spec = make(colours, mixup=True, epochs=1)
    train(spec, data, tmp_path)
    model = create_classifier(spec, 3).train()
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3 * 1_000_003))[:16].tolist()
    ((images, labels),) = batches(data.train, [[(3, 0, index) for index in order]], data)
    logits = model(images)
    torch.manual_seed(module.mix(3, 0, 0))
    shares = torch.rand(16)[:, None]
    scores = torch.log_softmax(shares * logits + (1 - shares) * logits.flip(0), 1)
    own, other = (scores.gather(1, each[:, None]) for each in (labels, labels.flip(0)))
    expected = -(shares * own + (1 - shares) * other).mean()
    first = load_checkpoint(tmp_path / "checkpoint.safetensors")[0]["losses"][0]
    assert first.item() == pytest.approx(expected.item(), rel=1e-5)


def test_compiled_it_is_the_same(spec, data, whole, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    train(replace(spec, compile=True), data, tmp_path)
    assert graphs
    own, other = (load_checkpoint(out / "checkpoint.safetensors")[0]["losses"] for out in (tmp_path, whole[0]))
    torch.testing.assert_close(own, other, rtol=1e-4, atol=0)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backbone", "mixup"), [("tiny", False), ("dropped", True)])
@pytest.mark.parametrize("step", [1, 4, 7, STEPS])
def test_an_interrupted_run_ends_with_the_same_files(colours, data, tmp_path, monkeypatch, backbone, mixup, step):
    """After a crash in a step, with dropout and mixup too: equal to the bit."""
    spec = make(colours, backbone=f"tiny_networks:{backbone}", mixup=mixup, checkpoint_seconds=0.0)
    expected = train(spec, data, tmp_path / "whole")
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(step, patch)
        with pytest.raises(StoppedError):
            train(spec, data, out)
    done = (step - 1) // PER_EPOCH
    assert [record["epoch"] for record in (read_log(out) if done else [])] == list(range(1, done + 1))
    # Lines of epochs that a process had finished, and a crash then took back to an older checkpoint.
    stale = [{"epoch": epoch, "seconds": 1e9, "val_accuracy": 1e9} for epoch in range(done + 1, EPOCHS + 1)]
    with (out / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in stale)
    result = train(spec, data, out)
    assert replace(result, seconds=0) == replace(expected, seconds=0)
    assert result.seconds < 1e8
    assert without_seconds(read_log(out)) == without_seconds(read_log(tmp_path / "whole"))
    for name in ("checkpoint.safetensors", MODEL_FILE):
        assert contents(out / name) == contents(tmp_path / "whole" / name)


def test_a_finished_run_is_not_trained_again(spec, data, whole, tmp_path, monkeypatch):
    first = train(spec, data, tmp_path)
    names = ("metrics.jsonl", "result.json", "config.yaml")
    before, model = {name: (tmp_path / name).read_bytes() for name in names}, contents(tmp_path / MODEL_FILE)
    stop_at(1, monkeypatch)
    assert train(spec, data, tmp_path) == first
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    assert contents(tmp_path / MODEL_FILE) == model
    (tmp_path / "metrics.jsonl").unlink()
    assert train(spec, data, tmp_path).accuracy == first.accuracy


@pytest.mark.parametrize("changes", [{"epochs": 5}, {"head_options": {"degree": 4}}, {"seed": 4}, {"test": 0.3}])
def test_another_run_is_refused(colours, data, whole, changes):
    spec, (name,) = make(colours, **changes), changes
    with pytest.raises(ValueError, match=f"belongs to another run: {name} is .* here and .* there; leave {name}"):
        train(spec, open_data(spec, CPU) if name == "test" else data, whole[0])


def test_settings_of_the_machine_may_change(spec, data, whole, tmp_path):
    for name in ("checkpoint.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_bytes((whole[0] / name).read_bytes())
    changed = replace(spec, workers=1, checkpoint_seconds=1.0, evaluate_every=0, compile=True, data="moved")
    assert train(changed, data, tmp_path).accuracy == whole[1].accuracy


def test_a_folder_is_not_harmed(whole, tmp_path):
    check_run_folder(tmp_path / "run", resume=False)
    check_run_folder(tmp_path / "run", resume=True)
    with pytest.raises(FileExistsError, match="already holds a run; continue it with --resume, or choose another"):
        check_run_folder(whole[0], resume=False)
    check_run_folder(whole[0], resume=True)
    (tmp_path / "checkpoint.previous.safetensors").touch()  # a crash may leave the previous checkpoint alone
    with pytest.raises(FileExistsError, match="already holds a run"):
        check_run_folder(tmp_path, resume=False)
    (tmp_path / "checkpoint.previous.safetensors").rename(tmp_path / MODEL_FILE)
    with pytest.raises(FileExistsError, match="holds a run without a checkpoint; choose another folder"):
        check_run_folder(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("seconds", "takes", "expected"),
    [
        (2.5, 0.0, [3, 6, 9, 12]),
        (2.5, 0.1, [3, 6, 9, 12]),  # 20 * 0.1 is less than 2.5
        (2.5, 0.2, [3, 8, 12]),
        (0.0, 9.0, list(range(1, 13))),  # after each step, however long it takes
    ],
)
def test_checkpoints_that_take_long_are_written_less_often(spec, data, tmp_path, monkeypatch, seconds, takes, expected):
    now, saved = 0.0, []

    def seeded(*values, real=module.mix):
        nonlocal now
        now += 1.0
        return real(*values)

    def save(history, step, *_):
        nonlocal now
        now += takes
        saved.append(step)

    monkeypatch.setattr(module, "mix", seeded)
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.History, "save", save)
    train(replace(spec, checkpoint_seconds=seconds), data, tmp_path)
    assert sorted(set(saved)) == expected


def test_random_numbers_around_a_run_are_their_own(spec, data, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(replace(spec, epochs=1), data, tmp_path)
    assert torch.equal(torch.rand(3), expected)


# --- signals and kills ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, PER_EPOCH, STEPS])
def test_a_signal_in_a_step_waits_for_its_end(spec, data, whole, tmp_path, monkeypatch, number, step):
    calls = itertools.count(1)

    def seeded(*values, real=module.mix):
        if next(calls) == step:
            signal.raise_signal(number)
        return real(*values)

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(module, "mix", seeded)
        with pytest.raises(KeyboardInterrupt):
            train(spec, data, tmp_path)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert load_checkpoint(tmp_path / "checkpoint.safetensors")[1]["step"] == step
    assert not (tmp_path / MODEL_FILE).exists()
    train(spec, data, tmp_path)
    assert contents(tmp_path / "checkpoint.safetensors") == contents(whole[0] / "checkpoint.safetensors")


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from kernelhead.finetune import checkpoint, trainer
from kernelhead.finetune.data import open_data
from kernelhead.finetune.settings import make_spec
config, out, moment, number = sys.argv[1:]
calls = itertools.count(1)

def dying(real, before=lambda *given: None):
    def called(*given, **options):
        if next(calls) == int(number):
            before(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **options)
    return called

if moment == "step":
    trainer.mix = dying(trainer.mix)
elif moment == "write":
    os.fsync = dying(os.fsync, lambda file: os.ftruncate(file, 1000))
else:
    checkpoint.save_checkpoint = dying(checkpoint.save_checkpoint)
spec = make_spec(Path(config), {})
trainer.train(spec, open_data(spec, torch.device("cpu")), Path(out))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "first", "second"),
    [
        ("step", 1, 6),  # before there is a checkpoint; in the middle of an epoch
        ("write", 1, 9),  # a file is half written
        ("rotate", 3, 6),  # the last checkpoint was put aside, the new one is not there
    ],
)
def test_killed_twice_at_a_bad_moment(colours, spec, data, whole, tmp_path, moment, first, second):
    config = tmp_path / "settings.yaml"
    config.write_text(
        (whole[0] / "config.yaml").read_text().replace("checkpoint_seconds: 60.0", "checkpoint_seconds: 0")
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(colours)]), "OMP_NUM_THREADS": "1"}
    for number in (first, second):
        command = [sys.executable, "-c", KILLED, str(config), str(tmp_path / "out"), moment, str(number)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    train(spec, data, tmp_path / "out")
    assert contents(tmp_path / "out" / "checkpoint.safetensors") == contents(whole[0] / "checkpoint.safetensors")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_is_recorded(colours, data, tmp_path):
    spec = make(colours, head="linear", head_options={}, learning_rate=1e30, weight_decay=1e10, evaluate_every=1)
    seen = []
    for _ in range(2):  # trained, and continued
        with pytest.raises(
            DivergedError, match=r"the loss was not finite after step \d; choose a smaller --learning-rat"
        ):
            train(spec, data, tmp_path, watch=seen.append)
        result = load_result(tmp_path / "result.json")
        losses = load_checkpoint(tmp_path / "checkpoint.safetensors")[0]["losses"]
        assert result.diverged_at == int((~losses.isfinite()).nonzero()[0])
        assert result.accuracy is None
        assert math.isnan(seen[-1].loss)
        assert read_log(tmp_path)[-1]["loss"] is None
        assert "test_accuracy" not in read_log(tmp_path)[-1]
        assert not (tmp_path / MODEL_FILE).exists()
    with pytest.raises(FileNotFoundError, match="diverged and left no classifier"):
        load_classifier(tmp_path)


def test_a_network_that_its_last_step_broke_is_not_kept(colours, data, tmp_path):
    """Every loss was finite: only the network itself says that it is of no use."""
    spec = make(colours, head="linear", head_options={}, learning_rate=1e38, batch_size=48, epochs=1, momentum=0.0)
    with pytest.raises(DivergedError, match="all losses were finite, but the network was not finite after step 0"):
        train(spec, data, tmp_path)
    result = load_result(tmp_path / "result.json")
    assert (result.diverged_at, result.accuracy, result.nll) == (0, None, None)
    assert not (tmp_path / MODEL_FILE).exists()
    assert "test_accuracy" not in read_log(tmp_path)[-1]


def test_an_accuracy_of_logits_that_are_not_finite_is_not_shown(spec, data, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "logits_of", lambda model, data, images, **_: torch.full((len(images), 3), math.nan))
    seen = []
    with pytest.raises(DivergedError, match="all losses were finite, but the network was not finite after step 5"):
        train(replace(spec, epochs=2, evaluate_every=1), data, tmp_path, watch=seen.append)
    assert [moment.val_accuracy for moment in seen if moment.epoch_done] == [None, None]


def test_batches_that_cannot_be_leave_nothing_behind(spec, data, tmp_path):
    with pytest.raises(ValueError, match="has 48 training images, fewer than a batch of 49; choose a smaller --batch"):
        train(replace(spec, batch_size=49), data, tmp_path / "run")
    with pytest.raises(ValueError, match="3 processes cannot share a batch of 16 equally; choose a multiple"):
        train(spec, data, tmp_path / "run", world=World(0, 3))
    assert not (tmp_path / "run").exists()


# --- the log ----------------------------------------------------------------------------------------------------------


def test_a_damaged_log_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(ValueError, match=r"metrics.jsonl is not lines of JSON .*; repair it, or move it away"):
        MetricsLog(tmp_path)


def test_without_tensorboard_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    MetricsLog(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="--tensorboard needs tensorboard; install it with pip install"):
        MetricsLog(tmp_path, tensorboard=True)


def test_tensorboard_is_told_every_figure_once(tmp_path, monkeypatch):
    told = []
    writer = types.SimpleNamespace(add_scalar=lambda *figure: told.append(figure), flush=lambda: None)
    module_of_torch = types.SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module_of_torch)
    log = MetricsLog(tmp_path, tensorboard=True)
    log.write(Moment(3, 9, 1, 3, True, math.nan, 0.25, 0.5, 99.0), 2.0)
    log.add({"test_accuracy": 90.0})
    assert told == [("accuracy", 25.0, 1), ("learning_rate", 0.5, 1), ("seconds", 2.0, 1), ("test_accuracy", 90.0, 1)]


@pytest.mark.slow
def test_tensorboard_itself(spec, data, tmp_path):
    pytest.importorskip("tensorboard")
    train(replace(spec, tensorboard=True, epochs=1), data, tmp_path)
    assert [path.name.startswith("events.out.tfevents") for path in (tmp_path / "tensorboard").iterdir()] == [True]


# --- what else may be set ---------------------------------------------------------------------------------------------


def test_pieces_of_a_batch_are_the_batch(colours, data, tmp_path):
    """In a network without BatchNorm: the same gradients, up to rounding."""
    for pieces in (1, 4):
        spec = make(colours, backbone="tiny_networks:grouped", accumulate=pieces)
        train(spec, data, tmp_path / str(pieces))
    own, other = (load_checkpoint(tmp_path / name / "checkpoint.safetensors")[0] for name in "14")
    for name, tensor in own.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    with pytest.raises(
        ValueError, match="--accumulate 3 cannot split 16 images equally; choose a multiple for --batch"
    ):
        train(replace(spec, accumulate=3), data, tmp_path / "3")


def test_adamw_with_clipping_is_that_of_torch(colours, data, tmp_path):
    spec = make(colours, optimizer="adamw", clip=0.05, label_smoothing=0.1, class_weight="balanced")
    train(spec, data, tmp_path)
    tensors, _ = load_checkpoint(tmp_path / "checkpoint.safetensors")
    model = create_classifier(spec, 3).train()
    head = {id(parameter) for parameter in head_of(model).parameters()}
    groups = [
        {"params": [each for each in model.parameters() if (id(each) in head) == own], "lr": 1e-3}
        for own in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    for step in range(STEPS):
        epoch, number = divmod(step, PER_EPOCH)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        keys = [(3, epoch, index) for index in order[number * 16 : (number + 1) * 16].tolist()]
        ((images, labels),) = batches(data.train, [keys], data)
        smooth = 0.9 * F.one_hot(labels, 3) + 0.1 / 3
        loss = -(smooth * torch.log_softmax(model(images), 1)).sum(1).mean()  # the classes are balanced as they are
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([each.grad.square().sum() for each in model.parameters()]).sum().sqrt()
        assert norm > 0.05
        for parameter in model.parameters():
            parameter.grad *= 0.05 / norm
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmup_cosine(step, STEPS, PER_EPOCH)
        optimizer.step()
        assert tensors["losses"][step] == pytest.approx(loss.item(), rel=1e-3)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(tensors[f"model.{name}"], expected, rtol=1e-2, atol=1e-4)


def test_rare_classes_weigh_more(colours, data, tmp_path, monkeypatch):
    """The loss of the first step, by hand, where one class has a quarter of its images."""
    few = copy.copy(data.train)
    kept = [index for index, label in enumerate(few.labels.tolist()) if label or index % 4 == 0]
    few.sources, few.named = ([each[index] for index in kept] for each in (few.sources, few.named))
    few.labels = few.labels[kept]
    spec = make(colours, class_weight="balanced", epochs=1)
    train(spec, replace(data, train=few), tmp_path)
    counts = torch.bincount(few.labels).double()
    assert counts.tolist() == [4, 16, 16]
    order = torch.randperm(36, generator=torch.Generator().manual_seed(3 * 1_000_003))[:16].tolist()
    ((images, labels),) = batches(few, [[(3, 0, index) for index in order]], data)
    weight = (1 / counts)[labels]
    own = -torch.log_softmax(create_classifier(spec, 3).train()(images).double(), 1)[torch.arange(16), labels]
    first = load_checkpoint(tmp_path / "checkpoint.safetensors")[0]["losses"][0]
    assert first.item() == pytest.approx(((own * weight).sum() / weight.sum()).item(), rel=1e-4)


def test_averaged_weights_are_what_is_kept(colours, data, tmp_path, monkeypatch):
    spec, seen = make(colours, ema=0.5, evaluate_every=0), []

    def seeded(*values, real=module.mix):
        if len(values) == 3 and values[2] == 0:  # before every step
            tensors = {name: each.clone() for name, each in models[0].state_dict().items()}
            seen.append(tensors)
        return real(*values)

    models = []
    monkeypatch.setattr(
        module, "create_classifier", lambda *g, real=create_classifier: models.append(real(*g)) or models[0]
    )
    monkeypatch.setattr(module, "mix", seeded)
    train(spec, data, tmp_path)
    seen.append(models[0].state_dict())
    assert len(seen) == STEPS + 1
    expected = seen[0]["fc.weight"].double()
    for step, each in enumerate(seen[1:], 1):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * each["fc.weight"].double()
    kept = load_checkpoint(tmp_path / MODEL_FILE)[0]["fc.weight"]
    torch.testing.assert_close(kept.double(), expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(kept, seen[-1]["fc.weight"], rtol=1e-3)


def test_a_frozen_backbone_stays_as_it_was(colours, data, tmp_path):
    spec = make(colours, backbone="tiny_networks:dropped", freeze_backbone=True, weight_decay=0.1)
    result = train(spec, data, tmp_path)
    before, after = create_classifier(spec, 3).state_dict(), load_checkpoint(tmp_path / MODEL_FILE)[0]
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"fc.weight", "fc.kernel.raw_alpha"}
    assert result.parameters == {"backbone": 0, "head": 3 * 12 + 6}


def test_rates_fall_from_layer_to_layer(colours):
    spec = resolved(TrainSpec("x", "timm/test_vit", "kernel", pretrained=False, layer_decay=0.5, learning_rate=0.1))
    model = create_classifier(spec, 3)
    rates = {id(p): group["lr"] for group in create_optimizer(model, spec).param_groups for p in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    last = max(int(name.split(".")[1]) for name in found if name.startswith("blocks."))
    assert found["head.weight"] == 0.1 * spec.head_rate
    assert found["norm.weight"] == 0.1
    for block in range(last + 1):
        (own,) = {rate for name, rate in found.items() if name.startswith(f"blocks.{block}.")}
        assert own == pytest.approx(0.1 * 0.5 ** (last + 1 - block))
    assert found["patch_embed.proj.weight"] < found["blocks.0.norm1.weight"]
    assert len({id(p) for p in model.parameters()} - set(rates)) == 0


def watched_accuracies(monkeypatch, data, values):
    """Let validation say these accuracies (in thirds), epoch after epoch."""
    given = iter(values)
    wrong = (data.val.labels + 1) % 3

    def logits(model, data, images, real=module.logits_of, **options):
        if images is not data.val:
            return real(model, data, images, **options)
        right, made = next(given), torch.zeros(3, 3)
        made[torch.arange(3), torch.where(torch.arange(3) < right, data.val.labels, wrong)] = 1.0
        return made

    monkeypatch.setattr(module, "logits_of", logits)


def test_the_best_epoch_is_kept_and_the_run_ends_early(colours, data, tmp_path, monkeypatch):
    spec = make(colours, epochs=8, keep="best", patience=3, evaluate_every=1)
    watched_accuracies(monkeypatch, data, [1, 2, 2, 1, 1, 3, 3, 3])
    seen = []
    result = train(spec, data, tmp_path, watch=seen.append)
    assert result.extra == {"kept_epoch": 2}
    assert [record["epoch"] for record in read_log(tmp_path)] == [1, 2, 3, 4, 5]
    assert result.curve["val_accuracy"] == pytest.approx([100 / 3, 200 / 3, 200 / 3, 100 / 3, 100 / 3])
    tensors, state = load_checkpoint(tmp_path / "checkpoint.safetensors")
    assert (state["step"], state["stopped"]) == (5 * PER_EPOCH, True)
    kept = load_checkpoint(tmp_path / MODEL_FILE)[0]
    for name, tensor in kept.items():
        assert torch.equal(tensor, tensors[f"best.{name}"])
    assert not torch.equal(kept["fc.weight"], tensors["model.fc.weight"])
    monkeypatch.undo()
    stop_at(1, monkeypatch)
    assert train(spec, data, tmp_path).accuracy == result.accuracy  # continued, it trains no more


def test_choosing_needs_validation_images(colours, tmp_path):
    for changes in ({"keep": "best"}, {"patience": 2}):
        spec = make(colours, val=0.0, **changes)
        with pytest.raises(ValueError, match="need validation images, and looks at them; give --val"):
            train(spec, open_data(spec, CPU), tmp_path / "run")
    assert not (tmp_path / "run").exists()


MANY = {"optimizer": "adamw", "ema": 0.9, "accumulate": 2, "clip": 1.0, "layer_decay": 0.7, "label_smoothing": 0.1}


@pytest.mark.parametrize("changes", [{"amp": "none"}, {"amp": "float16", "freeze_backbone": True}])
def test_interrupted_with_many_settings_it_ends_with_the_same_files(colours, data, tmp_path, monkeypatch, changes):
    settings = {"backbone": "tiny_networks:dropped", "class_weight": "balanced", "keep": "best", "evaluate_every": 1}
    spec = make(colours, **MANY, **settings, **changes, checkpoint_seconds=0.0)
    expected = train(spec, data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        with pytest.raises(StoppedError):
            train(spec, data, tmp_path / "stopped")
    assert replace(train(spec, data, tmp_path / "stopped"), seconds=0) == replace(expected, seconds=0)
    for name in ("checkpoint.safetensors", MODEL_FILE):
        assert contents(tmp_path / "stopped" / name) == contents(tmp_path / "whole" / name)
