"""Commands that are killed at random moments: what they leave, and what comes of them when they are started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kills import KINDS

from kernelhead.files import LOCK_FILE, BusyFolderError, remove_leftovers, write_bytes, writing


def harness(kinds, kills):
    """Fork from a process of its own: threads of others would not survive."""
    path = Path(__file__).with_name("kills.py")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path, ",".join(kinds), str(kills)], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trainings_that_are_killed_end_like_others():
    found = harness(["train"], 2)
    assert found["train"]["wrong"] == []
    assert found["train"]["kills"] >= 2


@pytest.mark.slow
def test_every_command_that_is_killed_ends_like_others():
    found = harness(KINDS, 3)
    assert {kind: each["wrong"] for kind, each in found.items() if each["wrong"]} == {}
    assert sum(each["kills"] for each in found.values()) >= 20


# --- one writer -------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from kernelhead.files import writing

with writing(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes into the folder `run`."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_is_told_of_the_first(holder, tmp_path):
    with (
        pytest.raises(BusyFolderError, match=rf"^process {holder.pid} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d writes"),
        writing(tmp_path / "run"),
    ):
        raise AssertionError("both write")


def test_a_lock_of_a_dead_process_is_taken_over(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    with writing(tmp_path / "run"), writing(tmp_path / "run"):  # this process may enter again
        assert (tmp_path / "run" / LOCK_FILE).read_text().startswith(f"process {os.getpid()} since ")
        (tmp_path / "run" / "kept").touch()
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["kept"]


def test_a_folder_in_which_nothing_was_written_is_gone(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path / "run"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_dead_processes_are_removed(holder, tmp_path):
    import platform

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host, mine = platform.node(), tmp_path / ".a.json.x.tmp"
    names = {
        "dead": f".a.json.{dead.pid}@{host}.tmp",
        "alive": f".a.json.{holder.pid}@{host}.tmp",
        "elsewhere": f".a.json.{dead.pid}@elsewhere.tmp",
        "untouched": f".a.json.{holder.pid}@elsewhere-too.tmp",
        "other": f".b.json.{dead.pid}@{host}.tmp",
    }
    paths = {what: tmp_path / name for what, name in names.items()}
    for path in (*paths.values(), mine):
        path.touch()
    os.utime(paths["untouched"], (0, 0))
    write_bytes(tmp_path / "a.json", b"{}")
    assert {what for what, path in paths.items() if not path.exists()} == {"dead", "untouched"}
    remove_leftovers(tmp_path)
    assert {what for what, path in paths.items() if path.exists()} == {"alive", "elsewhere"}
    assert mine.exists()


TWICE = ["--epochs", "3", "--batch-size", "12", "--val", "0.2", "--no-report", "--device", "cpu"]


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_of_two_trainings_into_one_folder_one_leaves(colours, tmp_path, number):
    command = [
        sys.executable, "-m", "kernelhead", "train", "--data", str(colours / "images"),
        "--backbone", "tiny_networks:tiny", "--head-option", "landmarks=16", *TWICE,
    ]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    out = tmp_path / str(number)
    both = []
    for wait in (0.1, 0):
        given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": variables}
        both.append(subprocess.Popen([*command, "--out", str(out)], cwd=colours, **given))
        time.sleep(wait)
    said = {process.communicate()[1]: process.returncode for process in both}
    assert sorted(said.values()) == [0, 1], said
    (sentence,) = (text for text, code in said.items() if code)
    winner = next(process for process in both if not process.returncode)
    # The loser may come when the winner is done.
    assert f"error: process {winner.pid} since " in sentence or "already holds a run" in sentence
    assert sentence.count("\n") == 1
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3]
    assert not [each for each in out.iterdir() if each.name.startswith(".")]
