"""SIGINT and SIGTERM: the step is finished, the training saved, and continued to the bit."""

import functools
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch

from kernelhead.data.resident import ResidentImages, channel_statistics
from kernelhead.train import interrupt
from kernelhead.train.checkpoint import load_checkpoint
from kernelhead.train.feed import Feed
from kernelhead.train.interrupt import SIGNALS, deferred_interrupts
from kernelhead.train.loop import Run, train
from kernelhead.train.member import Member
from kernelhead.train.schedule import Schedule

SCHEDULE = Schedule(epochs=2, batch_size=8, warmup_epochs=1)
STEPS = 8
RUNS = [Run("cifar_resnet8", "softmax", 0.05, seed=1), Run("lenet5", "kernel", 0.05, seed=2)]
INTERRUPTED = 130


@functools.cache
def make_data():
    labels = np.arange(35) % 3
    images = np.random.default_rng(0).integers(256, size=(35, 32, 32, 3), dtype=np.uint8)
    mean, std = channel_statistics(images)
    return ResidentImages(images, labels, mean=mean, std=std, device=torch.device("cpu"))


def go_on(path, **options):
    """Nothing is saved but at the end, and before leaving."""
    return train(RUNS, make_data(), 3, SCHEDULE, checkpoint=path, checkpoint_seconds=1e9, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "c.safetensors"
    return go_on(path), load_checkpoint(path)


def assert_same(whole, results, path):
    for result, other in zip(results, whole[0], strict=True):
        assert torch.equal(result.losses, other.losses)
    tensors, state = load_checkpoint(path)
    assert state == whole[1][1]
    assert tensors.keys() == whole[1][0].keys()
    for name, tensor in whole[1][0].items():
        assert torch.equal(tensors[name], tensor), name


@pytest.fixture
def handlers():
    """Handlers of our own, put back after the test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = {number: lambda *_: None for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, mine[number])
    yield mine
    for number in SIGNALS:
        signal.signal(number, before[number])


def installed():
    return {number: signal.getsignal(number) for number in SIGNALS}


# The context alone


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted(handlers, number):
    with deferred_interrupts() as interruption:
        assert not interruption.requested
        signal.raise_signal(number)
        assert interruption.requested
    assert installed() == handlers


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_later_signal_leaves_at_once(handlers, monkeypatch, first, second):
    monkeypatch.setattr(interrupt, "SAME_REQUEST", -1.0)
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(first)
        signal.raise_signal(second)
        pytest.fail("the second signal was ignored")
    assert installed() == handlers


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_signal_right_after_the_first_is_the_same_request(handlers, first, second):
    """As `timeout` sends them, to the process and to its group."""
    with deferred_interrupts() as interruption:
        signal.raise_signal(first)
        signal.raise_signal(second)
        assert interruption.requested
    assert installed() == handlers


def test_handlers_are_put_back_after_an_error(handlers):
    with pytest.raises(ZeroDivisionError), deferred_interrupts():
        1 / 0  # noqa: B018
    assert installed() == handlers


def test_what_is_ignored_stays_ignored(handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert not interruption.requested
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_is_not_of_python_is_left_alone(handlers, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", {signal.SIGINT: None, signal.SIGTERM: signal.SIG_DFL}.get)
    with deferred_interrupts():
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def in_thread(function):
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(function()))
    thread.start()
    thread.join(60)
    return outcome[0]


def test_in_another_thread_nothing_is_installed(handlers, whole):
    def look():
        with deferred_interrupts() as interruption:
            return interruption.requested, installed()

    assert in_thread(look) == (False, handlers)
    seen = []
    results = in_thread(lambda: go_on(None, progress=lambda moment: seen.append(installed())))
    assert seen == [handlers] * len(seen)
    assert torch.equal(results[0].losses, whole[0][0].losses)


# Training


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("call", [1, 4, 8, 2 * STEPS - 1, 2 * STEPS])  # of 2 runs; 8 ends an epoch, the last training
def test_a_signal_in_a_step_waits_for_its_end(tmp_path, monkeypatch, handlers, whole, number, call):
    path, calls = tmp_path / "c.safetensors", []

    def step(self, real=Member.step):
        calls.append(self)
        if len(calls) == call:
            signal.raise_signal(number)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Member, "step", step)
        with pytest.raises(KeyboardInterrupt):
            go_on(path)
    done = (call + 1) // 2
    assert len(calls) == 2 * done
    assert installed() == handlers
    tensors, state = load_checkpoint(path)
    assert state["step"] == done
    assert tensors["0.step_index"] == tensors["1.step_index"] == done
    assert_same(whole, go_on(path), path)


def test_a_signal_without_a_checkpoint(handlers, monkeypatch):
    monkeypatch.setattr(Feed, "fetch", lambda self: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        go_on(None)


# Processes


def child(path, started, pause):
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it

    def tell_when_seen():
        handler = signal.getsignal(signal.SIGTERM)

        def seen(number, frame):
            handler(number, frame)
            started.with_name("seen").touch()

        signal.signal(signal.SIGTERM, seen)

    def fetch(self):
        if self.step_index == 3:
            tell_when_seen()
            started.touch()
        if self.step_index >= 3:
            time.sleep(pause)

    Feed.fetch = fetch
    try:
        go_on(path)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def start(folder, pause):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kernelhead.train.loop", "torch.nn.parallel", "pytest"])
    arguments = {"path": folder / "c.safetensors", "started": folder / "started", "pause": pause}
    process = context.Process(target=runpy.run_path, args=(__file__, {"arguments": arguments}, "__main__"))
    process.start()
    while not arguments["started"].exists():
        assert process.is_alive()
        time.sleep(0.001)
    return process


def finish(process, seconds):
    process.join(seconds)
    code = process.exitcode
    process.kill()
    process.join()
    process.close()
    return code


@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_saves_before_it_leaves(tmp_path, whole, number):
    process = start(tmp_path, pause=0.5)
    os.kill(process.pid, number)
    assert finish(process, 60) == INTERRUPTED
    path = tmp_path / "c.safetensors"
    assert 4 <= load_checkpoint(path)[1]["step"] < STEPS
    assert_same(whole, go_on(path), path)


def test_a_process_leaves_at_once_at_a_later_signal(tmp_path):
    process = start(tmp_path, pause=600)
    os.kill(process.pid, signal.SIGTERM)
    while not (tmp_path / "seen").exists():  # a busy machine may see it late
        assert process.is_alive()
        time.sleep(0.01)
    (tmp_path / "seen").unlink()
    time.sleep(interrupt.SAME_REQUEST + 0.5)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, 60) == INTERRUPTED
    assert [file.name for file in tmp_path.iterdir()] == ["started"]


if __name__ == "__main__":
    child(**globals()["arguments"])
