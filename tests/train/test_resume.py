"""A training that was killed, or whose checkpoints are damaged, ends with the same numbers to the bit.

Processes come from a fork server that has torch loaded already, and run this file.
"""

import functools
import itertools
import multiprocessing
import os
import random
import runpy
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

from kernelhead.data.resident import ResidentImages, channel_statistics
from kernelhead.train import checkpoint as checkpoints
from kernelhead.train import loop
from kernelhead.train.checkpoint import identify, load_checkpoint
from kernelhead.train.feed import Feed
from kernelhead.train.loop import Run, train
from kernelhead.train.member import Member
from kernelhead.train.schedule import Schedule

SCHEDULE = Schedule(epochs=3, batch_size=8, warmup_epochs=1)
PER_EPOCH, STEPS = 4, 12


class DroppedOut(Run):
    """A run whose network draws random numbers of its own."""

    def create(self, num_classes):
        model = super().create(num_classes)
        model.backbone.fc1 = nn.Sequential(nn.Dropout(0.5), model.backbone.fc1)
        return model


RUNS = [
    Run("cifar_resnet8", "softmax", 0.05, seed=1),
    Run("lenet5", "kernel", 0.05, seed=2),
    DroppedOut("lenet5", "linear", 0.05, seed=3, mixup=True),
]
SHARING = [
    Run("lenet5", "kernel", rate, seed=2, head_rate=head_rate) for rate, head_rate in ((0.05, 1.0), (0.01, 10.0))
]


@functools.cache
def make_data(seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(35) % 3
    images = rng.integers(100, size=(35, 32, 32, 3))
    images[np.arange(35), :, :, labels] += 120
    images = images.astype(np.uint8)
    mean, std = channel_statistics(images)
    return ResidentImages(images, labels, mean=mean, std=std, device=torch.device("cpu"))


def go_on(path, runs=RUNS, *, data=None, classes=3, schedule=SCHEDULE, seconds=0.0):
    return train(runs, data or make_data(), classes, schedule, checkpoint=path, checkpoint_seconds=seconds)


def contents(path):
    """All that a checkpoint holds, as bytes: NaN equals NaN, and 0 is not -0."""
    tensors, state = load_checkpoint(path)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, state


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same training, uninterrupted: results, and the only checkpoint, of its end."""
    path = tmp_path_factory.mktemp("whole") / "c.safetensors"
    return go_on(path, seconds=1e9), contents(path)


def assert_same(whole, results, path):
    expected, saved = whole
    assert contents(path) == saved  # weights, velocities, losses, accuracies, steps
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.losses, other.losses)
        assert torch.equal(result.accuracies, other.accuracies)
        for name, tensor in other.model.state_dict().items():
            assert torch.equal(result.model.state_dict()[name], tensor), name


def on_call(number, owner, name, action, set_attribute=setattr):
    """Do something just before a function is called for the `number`-th time, with what it is given."""
    real, calls = getattr(owner, name), itertools.count(1)

    def counted(*arguments, **options):
        if next(calls) == number:
            action(*arguments)
        return real(*arguments, **options)

    set_attribute(owner, name, counted)


class StoppedError(Exception):
    """What ends a training in the middle, without a process of its own."""


def stop(*_):
    raise StoppedError


def stop_at(step, path, monkeypatch, runs=RUNS):
    """Train up to `step`; the newest checkpoint is of that step, the one before it of the last."""
    with monkeypatch.context() as patch:
        on_call(step * len(runs) + 1, Member, "step", stop, patch.setattr)
        with pytest.raises(StoppedError):
            go_on(path, runs)
    assert load_checkpoint(path)[1]["step"] == step


# Processes that are killed


def kill_oneself(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_oneself_half_written(file):
    os.ftruncate(file, 1000)
    kill_oneself()


MOMENTS = {
    "step": (Member, "step", kill_oneself),  # when some of the runs have taken it
    "write": (os, "fsync", kill_oneself_half_written),
    "rotate": (checkpoints, "save_checkpoint", kill_oneself),  # the last one was put aside, the new one is not there
}


def child(path, moment=None, number=0):
    """Train in this process, which is killed at a moment, or, slowed down, somewhere before the last step."""
    torch.set_num_threads(1)
    if moment is None:
        Feed.fetch = lambda self: time.sleep(0.02 if self.step_index < STEPS - 1 else 60)
    else:
        on_call(number, *MOMENTS[moment])
    go_on(path)


def start(**arguments):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kernelhead.train.loop", "torch.nn.parallel", "pytest"])
    process = context.Process(target=runpy.run_path, args=(__file__, {"arguments": arguments}, "__main__"))
    process.start()
    return process


def finish(process, exit_code):
    process.join(60)
    code = process.exitcode
    process.kill()
    process.join()
    process.close()
    assert code == exit_code


@pytest.mark.parametrize(
    ("moment", "first", "second"),
    [
        ("step", 2, 11),  # in the first step, with no checkpoint yet; in the middle of an epoch
        ("step", PER_EPOCH * len(RUNS) + 1, PER_EPOCH * len(RUNS) + 1),  # between two epochs, twice
        ("write", 1, 7),
        ("rotate", 3, STEPS - 2),  # the last is that after the last step
    ],
)
def test_killed_twice_at_a_bad_moment(tmp_path, whole, moment, first, second):
    path = tmp_path / "c.safetensors"
    for number in (first, second):
        finish(start(path=path, moment=moment, number=number), -signal.SIGKILL)
    assert path.exists() or path.with_suffix(".previous.safetensors").exists()
    assert_same(whole, go_on(path), path)


def written(path):
    """When a checkpoint was written; None while there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_a_random_time(tmp_path, whole, seed):
    path = tmp_path / "c.safetensors"
    rng = random.Random(seed)
    for kills in (1, 2):
        before = written(path)
        process = start(path=path)
        while written(path) in (None, before):
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        finish(process, -signal.SIGKILL)
        newest = path if path.exists() else path.with_suffix(".previous.safetensors")
        assert kills <= load_checkpoint(newest)[1]["step"] < STEPS
    assert_same(whole, go_on(path), path)


@pytest.mark.parametrize("step", [1, PER_EPOCH - 1, PER_EPOCH, STEPS - 1])
def test_goes_on_from_any_step(tmp_path, monkeypatch, whole, step):
    path = tmp_path / "c.safetensors"
    stop_at(step, path, monkeypatch)
    assert_same(whole, go_on(path), path)


def test_runs_that_share_their_batches_go_on(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    stop_at(PER_EPOCH + 2, path, monkeypatch, SHARING)
    alone = tmp_path / "whole.safetensors"
    assert_same((go_on(alone, SHARING, seconds=1e9), contents(alone)), go_on(path, SHARING), path)


def test_a_finished_training_is_not_trained_again(tmp_path, monkeypatch, whole):
    path = tmp_path / "c.safetensors"
    go_on(path)
    on_call(1, Member, "step", stop, monkeypatch.setattr)
    assert_same(whole, go_on(path), path)


@pytest.mark.parametrize(
    ("seconds", "takes", "expected"),
    [
        (2.5, 0.0, [3, 6, 9, 12]),
        (2.5, 0.1, [3, 6, 9, 12]),  # 20 * 0.1 is less than 2.5
        (2.5, 0.2, [3, 8, 12]),
        (0.0, 9.0, list(range(1, 13))),  # after each step, however long it takes
    ],
)
def test_checkpoints_that_take_long_are_written_less_often(tmp_path, monkeypatch, seconds, takes, expected):
    now, saved = 0.0, []

    def step(member, real=Member.step):
        nonlocal now
        now += 1.0 / len(RUNS)
        real(member)

    def save(history, step, *_):
        nonlocal now
        now += takes
        saved.append(step)

    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    monkeypatch.setattr(Member, "step", step)
    monkeypatch.setattr(checkpoints.History, "save", save)
    go_on(tmp_path / "c.safetensors", seconds=seconds)
    assert sorted(set(saved)) == expected


def test_random_numbers_around_a_training_are_their_own(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    go_on(None)
    assert torch.equal(torch.rand(3), expected)


# Damaged checkpoints


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def assert_one_sentence_each(caught, *paths):
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(paths), messages
    for message, path in zip(messages, paths, strict=True):
        assert message.startswith(str(path))
        assert "\n" not in message


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, empty])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(tmp_path, monkeypatch, whole, damage):
    path = tmp_path / "c.safetensors"
    stop_at(6, path, monkeypatch)
    damage(path)
    on_call(7 * len(RUNS) + 1, Member, "step", stop, monkeypatch.setattr)  # seven steps remain, not more
    with pytest.warns(UserWarning, match="the one before it is tried") as caught:
        results = go_on(path)
    assert_one_sentence_each(caught, path)
    assert_same(whole, results, path)


def test_when_both_are_damaged_it_starts_anew(tmp_path, monkeypatch, whole):
    path, previous = tmp_path / "c.safetensors", tmp_path / "c.previous.safetensors"
    stop_at(6, path, monkeypatch)
    flip_a_bit(path)
    cut_short(previous)
    with pytest.warns(UserWarning, match="checkpoint|checksum") as caught:
        results = go_on(path)
    assert_one_sentence_each(caught, path, previous)
    assert str(caught[1].message).endswith("training starts anew")
    assert_same(whole, results, path)


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one(tmp_path, monkeypatch, whole):
    path = tmp_path / "c.safetensors"
    stop_at(6, path, monkeypatch)
    flip_a_bit(path)
    with monkeypatch.context() as patch:
        on_call(1, checkpoints, "save_checkpoint", stop, patch.setattr)
        with pytest.warns(UserWarning, match="checksum"), pytest.raises(StoppedError):
            go_on(path)
    assert load_checkpoint(tmp_path / "c.previous.safetensors")[1]["step"] == 5
    with pytest.warns(UserWarning, match="checksum"):
        assert_same(whole, go_on(path), path)


# Other trainings


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"runs": [Run("cifar_resnet8", "softmax", 0.06, seed=1), *RUNS[1:]]}, "runs"),
        ({"runs": RUNS[:2]}, "runs, labels"),
        ({"data": make_data(seed=1)}, "labels"),
        ({"schedule": Schedule(epochs=4, batch_size=8, warmup_epochs=1)}, "schedule"),
        ({"classes": 4}, "classes"),
    ],
)
@pytest.mark.parametrize("newest", [True, False])
def test_the_checkpoint_of_another_training_is_left_alone(tmp_path, monkeypatch, changed, named, newest):
    path, previous = tmp_path / "c.safetensors", tmp_path / "c.previous.safetensors"
    stop_at(3, path, monkeypatch)
    if not newest:
        path.unlink()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"belongs to another training: its {named} differ") as caught:
        go_on(path, **changed)
    assert str(caught.value).startswith(str(path if newest else previous))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# Runs that diverge

DIVERGING = [Run("cifar_resnet8", "softmax", 1e30, seed=1), *RUNS[1:]]


@pytest.fixture(scope="module")
def diverged():
    results = go_on(None, DIVERGING)
    assert not torch.isfinite(results[0].losses[results[0].diverged_at])
    assert torch.isfinite(results[0].losses[: results[0].diverged_at]).all()
    return results


def assert_diverged_as(diverged, whole, results):
    assert [result.diverged_at for result in results] == [diverged[0].diverged_at, None, None]
    assert torch.equal(results[0].losses[:PER_EPOCH].isnan(), diverged[0].losses[:PER_EPOCH].isnan())
    assert results[0].losses[PER_EPOCH:].isnan().all()  # it stopped at the end of that epoch
    assert results[0].accuracies[PER_EPOCH:].isnan().all()
    for result, alone in zip(results[1:], whole[0][1:], strict=True):
        assert torch.equal(result.losses, alone.losses)
        for name, tensor in alone.model.state_dict().items():
            assert torch.equal(result.model.state_dict()[name], tensor)


def test_the_runs_beside_a_diverged_one_are_as_if_alone(diverged, whole):
    assert 0 < diverged[0].diverged_at < PER_EPOCH
    assert_diverged_as(diverged, whole, diverged)


@pytest.mark.parametrize("step", [1, 3, PER_EPOCH + 2])
def test_a_diverged_run_is_remembered(tmp_path, monkeypatch, diverged, whole, step):
    path = tmp_path / "c.safetensors"
    with monkeypatch.context() as patch:
        taken = step * 3 if step <= PER_EPOCH else PER_EPOCH * 3 + (step - PER_EPOCH) * 2
        on_call(taken + 1, Member, "step", stop, patch.setattr)
        with pytest.raises(StoppedError):
            go_on(path, DIVERGING)
    assert load_checkpoint(path)[1]["step"] == step
    assert_diverged_as(diverged, whole, go_on(path, DIVERGING))


def stop_after_epoch(epoch, path, runs, monkeypatch):
    """Stop when the last step of an epoch is saved, before anything else is done."""

    def prepare(self, wanted, real=Feed.prepare_epoch):
        if wanted == epoch:
            raise StoppedError
        return real(self, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "prepare_epoch", prepare)
        with pytest.raises(StoppedError):
            go_on(path, runs)
    assert load_checkpoint(path)[1]["step"] == epoch * PER_EPOCH


def test_a_run_that_diverged_just_before_the_end_of_an_epoch(tmp_path, monkeypatch, diverged, whole):
    path = tmp_path / "c.safetensors"
    stop_after_epoch(1, path, DIVERGING, monkeypatch)
    assert_diverged_as(diverged, whole, go_on(path, DIVERGING))


def test_a_run_that_diverged_just_before_the_end(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    real = Member.step

    def step(self):
        real(self)
        if self.step_index == STEPS:
            self.losses[-1] = torch.nan

    monkeypatch.setattr(Member, "step", step)
    stop_after_epoch(SCHEDULE.epochs, path, RUNS[:1], monkeypatch)
    assert go_on(path, RUNS[:1])[0].diverged_at == STEPS - 1


def test_when_all_have_diverged_training_ends(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    first = go_on(path, DIVERGING[:1])[0]
    assert load_checkpoint(path)[1]["step"] == PER_EPOCH
    on_call(1, Member, "step", stop, monkeypatch.setattr)
    assert go_on(path, DIVERGING[:1])[0].diverged_at == first.diverged_at


# Compiled steps

KINDS = [
    ("softmax", {}),
    ("linear", {}),
    ("expansion", {"width": 8}),
    ("kernel", {}),
    ("kernel", {"degree": 3}),
    ("kernel", {"degree": 4}),
    ("kernel", {"coefficients": "sigmoid"}),
    ("kernel", {"kernel": "rbf"}),
    ("kernel", {"prototypes": 2}),
    ("kernel", {"landmarks": 8, "pool": "rkhs"}),
]


def test_members_share_compilations_and_there_may_be_many_kinds(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        assert all(isinstance(value, torch.Tensor) for value in inputs)  # no sizes that are left open
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    runs = [
        Run("lenet5", head, 0.01 * (seed + 1), seed=seed, head_options=options)
        for seed in (0, 1)
        for head, options in KINDS
    ]
    schedule = Schedule(epochs=1, batch_size=16, warmup_epochs=0)
    compiled = train(runs, make_data(), 3, schedule, compiled=True)
    assert len(graphs) == len(KINDS) + 1  # and one of the feeds, which differ in values alone
    for result, eager in zip(compiled, train(runs, make_data(), 3, schedule), strict=True):
        torch.testing.assert_close(result.losses, eager.losses, rtol=1e-5, atol=1e-6)
    train(runs[:1], make_data(), 3, SCHEDULE, compiled=True)  # another batch size: one more of either, and none dynamic
    assert len(graphs) == len(KINDS) + 3
    torch.compiler.reset()


def test_compiled_losses_are_those_of_eager_steps():
    torch.compiler.reset()
    runs = [Run("lenet5", "kernel", 0.05, seed=seed) for seed in (1, 2)]
    compiled = train(runs, make_data(), 3, SCHEDULE, compiled=True)
    for result, eager in zip(compiled, train(runs, make_data(), 3, SCHEDULE), strict=True):
        torch.testing.assert_close(result.losses, eager.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.accuracies, eager.accuracies)
    torch.compiler.reset()


if __name__ == "__main__":
    child(**globals()["arguments"])


@pytest.mark.parametrize(("name", "value"), [("mixup", True), ("head_rate", 10.0)])
def test_a_training_from_before_there_was_an_option_goes_on(name, value):
    (plain,), (changed,) = (
        identify([Run("lenet5", "softmax", 0.1, **options)], [make_data()], [3], SCHEDULE)["runs"]
        for options in ({}, {name: value})
    )
    assert changed == {**plain, name: value}
    assert name not in plain


def test_classes_are_one_number_in_checkpoints_unless_they_differ():
    def classes(*numbers):
        runs = [Run("lenet5", "softmax", 0.1)] * len(numbers)
        return identify(runs, [make_data()] * len(numbers), numbers, SCHEDULE)["classes"]

    assert classes(3) == classes(3, 3) == 3  # as before there could be several
    assert classes(3, 5) == [3, 5]


def test_a_teacher_may_move_and_may_not_change(tmp_path):
    """What it is decides whether a training goes on, and not where it is."""
    data, schedule = make_data(), Schedule(epochs=1, batch_size=8)

    def identity(path):
        return identify([Run("lenet5", "softmax", 0.1, teacher=str(path))], [data], [3], schedule)

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"a network")
    first = identity(tmp_path / "one")
    assert identity(tmp_path / "one" / "model.safetensors") == first
    (tmp_path / "one").rename(tmp_path / "two")
    assert identity(tmp_path / "two") == first
    (tmp_path / "two" / "model.safetensors").write_bytes(b"another")
    assert identity(tmp_path / "two") != first
