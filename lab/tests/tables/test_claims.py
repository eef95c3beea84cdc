"""Several processes on one folder of runs: each run is done by one process, whatever becomes of it."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from kernelhead.finetune.results import load_result
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables import EXPERIMENTS, claims, runner
from kernelhead_lab.tables.claims import CLAIMS, TURN, Claims
from kernelhead_lab.tables.groups import PARTIAL
from kernelhead_lab.tables.runner import Settings


def taken(root):
    with Claims(root).turn() as found:
        return found


def files(root):
    """But for the one that all share."""
    return [path for path in (root / CLAIMS).iterdir() if path.name != TURN]


def test_what_is_held_is_taken_until_it_is_given_up(tmp_path):
    root = tmp_path / "new"
    ours, others = Claims(root), Claims(root)
    with ExitStack() as first, ExitStack() as second:
        with ours.turn() as found:
            assert found == set()
            first.enter_context(ours.hold(["a.json", "b.json"]))
        with others.turn() as found:
            assert found == {"a.json", "b.json"}
            second.enter_context(others.hold(["c.json"]))
        assert taken(root) == {"a.json", "b.json", "c.json"}
        with pytest.raises(KeyboardInterrupt), first.pop_all():
            raise KeyboardInterrupt
        assert taken(root) == {"c.json"}
    assert taken(root) == set()
    assert not files(root)
    with ours.hold([]):
        assert not files(root)


def test_one_process_decides_at_a_time(tmp_path):
    entered = threading.Event()

    def decide():
        with Claims(tmp_path).turn():
            entered.set()

    other = threading.Thread(target=decide)
    with Claims(tmp_path).turn():
        other.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    other.join()


HOLD = """
import sys, time
from pathlib import Path
from kernelhead_lab.tables.claims import Claims
ours = Claims(Path(sys.argv[1]))
with ours.turn():
    held = ours.hold(["a.json"])
    held.__enter__()
print("held", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_held_is_free(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        assert taken(tmp_path) == {"a.json"}
    finally:
        process.kill()
        process.communicate()
    assert files(tmp_path)  # its file is still there
    assert taken(tmp_path) == set()
    assert not files(tmp_path)


@pytest.mark.parametrize("error", [BlockingIOError, PermissionError])
def test_held_by_others_also_over_a_network(tmp_path, monkeypatch, error):
    with Claims(tmp_path).turn():
        held = Claims(tmp_path).hold(["a.json"])
        held.__enter__()

    def refuse(descriptor, how):
        if how & fcntl.LOCK_NB:
            raise error

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert taken(tmp_path) == {"a.json"}
    held.__exit__(None, None, None)


def test_without_locks_everything_is_free(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "no locks here")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with Claims(tmp_path).turn(), Claims(tmp_path).hold(["a.json"]):
            assert taken(tmp_path) == set()
    monkeypatch.setattr(claims, "fcntl", None)
    root = tmp_path / "windows"
    with Claims(root).turn(), Claims(root).hold(["a.json"]):
        assert taken(root) == set()
        assert not root.exists()  # a file that is open cannot be removed there


def results_below(folder):
    found = {}
    for path in folder.rglob("*.json"):
        result = load_result(path, LabSpec)
        found[path.relative_to(folder)] = result.accuracy, result.nll, result.curve
    return found


ONLY = ("ResNet-20", "unrectified features")


def run(root, progress=lambda now: None):
    settings = Settings(epochs=1, quick=True, only=ONLY)
    runner.run([EXPERIMENTS["rectification"]], root, settings, progress)


def test_what_others_train_is_waited_for(tmp_path, monkeypatch):
    others = Claims(tmp_path)
    folder = "cifar100/1-epochs"
    names = [
        f"{folder}/resnet20-{head}/choice-lr{rate}-wd0.0001.json"
        for head in ("linear", "kernel")
        for rate in (0.05, 0.1)
    ]
    held, last = ExitStack(), ExitStack()
    with others.turn():
        held.enter_context(others.hold(names[1:]))
        last.enter_context(others.hold(names[:1]))
    said, slept = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            held.close()  # whose process was stopped: nothing was written
        if len(slept) == 4:
            last.close()
        assert len(slept) < 9  # it does not see that all is free

    monkeypatch.setattr(runner.time, "sleep", sleep)
    run(tmp_path, lambda now: said.append(now.what) if now.moment is None else None)
    assert slept == [runner.WAIT_SECONDS] * 4
    assert said[0] == "waiting for 4 runs of other processes"
    assert [what.split(": ")[-1] for what in said[1:5]] == [
        "choosing resnet20-linear",
        "choosing resnet20-kernel",
        "choosing resnet20-kernel",
        "training resnet20-kernel",  # whose choice does not wait
    ]
    assert said[5:] == [
        "waiting for 1 run of other processes",
        "cifar100: choosing resnet20-linear",
        "cifar100: training resnet20-linear",
    ]
    assert len(results_below(tmp_path)) == 6


@pytest.mark.slow
def test_of_two_processes_none_trains_what_the_other_does(tmp_path):
    command = [sys.executable, "-m", "kernelhead_lab", "reproduce", "rectification", "--quick", "--device", "cpu"]
    command += [f"--only={name}" for name in ONLY] + ["--runs", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on it
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    trained = [re.findall(r"(?:choosing|training) resnet\S+", " ".join(text.split())) for text in said]
    assert len(trained[0]) + len(trained[1]) == 6  # none twice: two heads, two rates each and then one training
    run(tmp_path / "alone")
    runs = tmp_path / "quick"
    assert results_below(runs) == results_below(tmp_path / "alone")
    assert not list((runs / PARTIAL).iterdir())
    assert not files(runs)


@pytest.mark.slow
def test_who_waits_goes_on_with_what_another_process_began(tmp_path, monkeypatch):
    """It is killed in the middle of a group, and its checkpoint found."""
    killed, alone = tmp_path / "killed", tmp_path / "alone"

    def stop(now):
        if now.moment is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train", partial(runner.train, checkpoint_seconds=0.0))
    with pytest.raises(KeyboardInterrupt):
        run(killed, stop)
    (note,) = (killed / PARTIAL).glob("*.json")
    names = json.loads(note.read_text())["paths"]
    others, held = Claims(killed), ExitStack()
    with others.turn():
        held.enter_context(others.hold(names))
    begun = []
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: held.close())
    run(killed, lambda now: begun.append(now) if now.moment is None else None)
    assert not files(killed)
    run(alone)
    assert results_below(killed) == results_below(alone)
    assert sum(now.waits for now in begun) == 1
