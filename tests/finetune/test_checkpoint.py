import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kernelhead.finetune.checkpoint import BrokenCheckpointError, History, load_checkpoint, save_checkpoint


def example():
    return {
        "weight": torch.randn(3, 4).t(),
        "half": torch.randn(5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "byte": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 2),
    }


def test_round_trip_to_the_bit(tmp_path):
    tensors = example()
    save_checkpoint(tmp_path / "a.safetensors", tensors, {"epoch": 3, "nested": {"x": [1.5]}})
    loaded, state = load_checkpoint(tmp_path / "a.safetensors")
    assert state == {"epoch": 3, "nested": {"x": [1.5]}}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_others_read_it(tmp_path):
    tensors = example()
    save_checkpoint(tmp_path / "a.safetensors", tensors, {"umlaut": "ä"})
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert {name: (x.dtype, x.tolist()) for name, x in found.items()} == {
        name: (x.dtype, x.tolist()) for name, x in tensors.items()
    }


def test_tied_weights_and_views(tmp_path):
    whole = torch.arange(6.0)
    save_checkpoint(tmp_path / "a.safetensors", {"a": whole, "b": whole, "half": whole[3:]}, {})
    found, _ = load_checkpoint(tmp_path / "a.safetensors")
    assert torch.equal(found["a"], whole)
    assert torch.equal(found["b"], whole)
    assert torch.equal(found["half"], whole[3:])


def test_it_is_on_the_disk_and_a_file_like_others(tmp_path, monkeypatch):
    path, plain, synced = tmp_path / "a.safetensors", tmp_path / "plain", []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    save_checkpoint(path, example(), {})
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert [(told.st_ino, told.st_size) for told in synced] == [(path.stat().st_ino, path.stat().st_size)]


def test_weights_of_somebody_else_are_not_called_damaged(tmp_path):
    safetensors.torch.save_file({"x": torch.zeros(3)}, tmp_path / "own.safetensors")
    with pytest.raises(
        BrokenCheckpointError, match=r"own\.safetensors was not written by kernelhead; it holds weights"
    ):
        load_checkpoint(tmp_path / "own.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_cut_short_is_refused(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenCheckpointError, match=r"a\.safetensors"):
        load_checkpoint(path)


def test_one_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {"epoch": 3})
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match="checksum"):
        load_checkpoint(path)


def test_a_changed_state_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {"epoch": 3})
    path.write_bytes(path.read_bytes().replace(b'\\"epoch\\": 3', b'\\"epoch\\": 4'))
    with pytest.raises(BrokenCheckpointError, match="checksum"):
        load_checkpoint(path)


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(BrokenCheckpointError, match="not a readable safetensors file"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_a_history_keeps_the_newest_and_the_one_before_it(tmp_path):
    history = History(tmp_path / "a.safetensors", {})
    assert history.load() is None
    for step in (1, 2, 3):
        history.save(step, {"x": torch.tensor(step)}, {"more": step})
    assert [load_checkpoint(path)[1]["step"] for path in (history.path, history.previous)] == [3, 2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.previous.safetensors", "a.safetensors"]
    tensors, state = history.load()
    assert (tensors["x"], state["step"], state["more"]) == (3, 3, 3)
    history.path.unlink()
    assert history.load()[1]["step"] == 2


def damage(path, how):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flipped": content, "cut": content[:-3], "empty": b""}[how])


@pytest.fixture
def history(tmp_path):
    """Steps 1 and 2."""
    history = History(tmp_path / "a.safetensors", {"epochs": 3})
    for step in (1, 2):
        history.save(step, {"x": torch.full((99,), float(step))}, {})
    return history


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(history, how):
    damage(history.path, how)
    with pytest.warns(UserWarning, match=r"a\.safetensors .*; the one before it is tried") as caught:
        tensors, state = history.load()
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert (tensors["x"][0], state["step"]) == (1, 1)
    history.save(5, {"x": torch.zeros(1)}, {})  # the damaged one does not take the place of the good one
    assert [load_checkpoint(path)[1]["step"] for path in (history.path, history.previous)] == [5, 1]


def test_when_both_are_damaged_it_starts_anew(history):
    damage(history.path, "flipped")
    damage(history.previous, "cut")
    with pytest.warns(UserWarning, match="readable|checksum") as caught:
        assert history.load() is None
    assert [str(each.message).rpartition("; ")[2] for each in caught] == [
        "the one before it is tried",
        "the run starts anew",
    ]


@pytest.mark.parametrize("newest", [True, False])
def test_the_checkpoint_of_another_run_is_left_alone(history, newest):
    if not newest:
        history.path.unlink()
    before = {file.name: file.read_bytes() for file in history.path.parent.iterdir()}
    for identity, sentence in (
        ({"epochs": 4}, "belongs to another run: epochs is 4 here and 3 there; leave epochs as it was, or choose"),
        ({"epochs": 3, "more": 1}, "belongs to another run: more is 1 here and None there"),
        ({}, "belongs to another run: epochs is None here and 3 there"),
    ):
        with pytest.raises(ValueError, match=sentence):
            History(history.path, identity).load()
    assert {file.name: file.read_bytes() for file in history.path.parent.iterdir()} == before


def test_an_identity_may_hold_paths_and_tuples(tmp_path):
    identity = {"weights": Path("a") / "b", "sizes": (1, 2)}
    History(tmp_path / "a.safetensors", identity).save(5, {}, {})
    assert History(tmp_path / "a.safetensors", identity).load()[1]["step"] == 5
    with pytest.raises(ValueError, match="weights is c here and a/b there"):
        History(tmp_path / "a.safetensors", {**identity, "weights": Path("c")}).load()


def test_a_full_disk_leaves_the_old_one(tmp_path):
    """A limit on the size of files stands in for the disk, in a process of its own."""
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {"epoch": 3})
    program = f"""
import resource, signal, sys, torch
from pathlib import Path
from kernelhead.finetune.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(Path({str(path)!r}), {{"large": torch.zeros(100_000)}}, {{"epoch": 4}})
except OSError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path} cannot be written (")
    assert load_checkpoint(path)[1] == {"epoch": 3}
    assert list(tmp_path.iterdir()) == [path]
