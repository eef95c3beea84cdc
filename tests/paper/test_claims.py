"""Several processes on one folder of runs: each training is one process's, whatever becomes of it."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch

from kernelhead.paper import EXPERIMENTS, claims, runner
from kernelhead.paper.claims import Claims
from kernelhead.paper.groups import PARTIAL
from kernelhead.paper.runner import Settings
from kernelhead.paper.store import NEEDED
from kernelhead.results import load_result


def taken(folder):
    with Claims(folder).turn() as found:
        return found


def test_what_is_held_is_taken_until_it_is_given_up(tmp_path):
    folder = tmp_path / "new"
    ours, others = Claims(folder), Claims(folder)
    with ours.turn() as found:
        assert found == set()
        first = ours.hold(["a.json", "b.json"])
    with others.turn() as found:
        assert found == {"a.json", "b.json"}
        second = others.hold(["c.json"])
    assert taken(folder) == {"a.json", "b.json", "c.json"}
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    assert taken(folder) == {"c.json"}
    second.close()
    assert taken(folder) == set()
    assert not list(folder.iterdir())
    ours.hold([]).close()
    assert not list(folder.iterdir())


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
from kernelhead.paper.claims import Claims
ours = Claims(Path(sys.argv[1]))
with ours.turn():
    held = ours.hold(["a.json"])
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_held_is_free(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert taken(tmp_path) == {"a.json"}
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.iterdir())  # its file is still there
    assert taken(tmp_path) == set()
    assert not list(tmp_path.iterdir())


def test_without_locks_everything_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "fcntl", None)
    with Claims(tmp_path).turn() as found:
        assert found == set()
        held = Claims(tmp_path).hold(["a.json"])
    assert taken(tmp_path) == set()
    held.close()


def results_below(folder):
    found = {}
    for path in folder.rglob("*.json"):
        result = load_result(path, NEEDED)
        found[path.relative_to(folder)] = result["accuracy"], result["nll"], result["curve"]
    return found


ONLY = ("ResNet-20", "unrectified features")


def run(root, progress=lambda now: None):
    settings = Settings(epochs=1, quick=True, only=ONLY)
    runner.run([EXPERIMENTS["rectification"]], root, settings, progress)


def test_what_others_train_is_waited_for(tmp_path, monkeypatch):
    others = Claims(tmp_path / PARTIAL)
    folder = "cifar100/1-epochs"
    names = [
        f"{folder}/resnet20-{head}/choice-lr{rate}-wd0.0001.json"
        for head in ("softmax", "kernel")
        for rate in (0.05, 0.1)
    ]
    with others.turn():
        held, last = others.hold(names[1:]), others.hold(names[:1])
    said, slept = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            held.close()  # whose process was stopped: nothing was written
        if len(slept) == 4:
            last.close()

    monkeypatch.setattr(runner.time, "sleep", sleep)
    run(tmp_path, lambda now: said.append(now.what) if now.moment is None else None)
    assert slept == [runner.WAIT_SECONDS] * 4
    assert said[0] == "waiting for 4 trainings of other processes"
    assert [what.split(": ")[-1] for what in said[1:5]] == [
        "choosing resnet20-softmax",
        "choosing resnet20-kernel",
        "choosing resnet20-kernel",
        "training resnet20-kernel",  # whose choice does not wait
    ]
    assert said[5:] == [
        "waiting for 1 training of other processes",
        "cifar100: choosing resnet20-softmax",
        "cifar100: training resnet20-softmax",
    ]
    assert len(results_below(tmp_path)) == 6


def test_two_processes_share_the_work(tmp_path):
    command = [sys.executable, "-m", "kernelhead", "reproduce", "rectification", "--quick", "--device", "cpu"]
    command += [f"--only={name}" for name in ONLY] + ["--runs", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on it
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    trained = [re.findall(r"(?:choosing|training) resnet\S+", " ".join(text.split())) for text in said]
    assert len(trained[0]) + len(trained[1]) == 6  # none twice: two heads, two rates each and then one training
    run(tmp_path / "alone")
    runs = tmp_path / "quick"
    assert results_below(runs) == results_below(tmp_path / "alone")
    assert not list((runs / PARTIAL).iterdir())
