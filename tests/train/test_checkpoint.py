import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kernelhead.train.checkpoint import DTYPES, BrokenCheckpointError, History, load_checkpoint, save_checkpoint


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_others_read_it(tmp_path, dtype):
    """safetensors itself, which looks at names of types and places, without gaps; and where tensors may be mapped."""
    path = tmp_path / "a.safetensors"
    tensors = {"odd": torch.arange(3).to(torch.uint8), "typed": torch.arange(5).to(dtype), **example()}
    save_checkpoint(path, tensors, {"umlaut": "ä"})
    found = safetensors.torch.load_file(path)
    assert {name: (x.dtype, x.tolist()) for name, x in found.items()} == {
        name: (x.dtype, x.tolist()) for name, x in tensors.items()
    }
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_it_is_on_the_disk_and_a_file_like_others(tmp_path, monkeypatch):
    path, plain, synced = tmp_path / "a.safetensors", tmp_path / "plain", []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    save_checkpoint(path, example(), {})
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert [(told.st_ino, told.st_size) for told in synced] == [(path.stat().st_ino, path.stat().st_size)]


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
    with pytest.raises(BrokenCheckpointError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_a_history_keeps_the_newest_and_the_one_before_it(tmp_path):
    history = History(tmp_path / "a.safetensors", {})
    assert history.load([], []) == 0
    for step in (1, 2, 3):
        history.save(step, [], [])
    assert [load_checkpoint(path)[1]["step"] for path in (history.path, history.previous)] == [3, 2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.previous.safetensors", "a.safetensors"]
    assert history.load([], []) == 3
    history.path.unlink()
    assert history.load([], []) == 2


def test_a_history_without_a_path_keeps_nothing():
    history = History(None, {})
    history.save(1, [], [])
    assert history.load([], []) == 0


def test_an_identity_may_hold_paths_and_tuples(tmp_path):
    identity = {"weights": Path("a") / "b", "sizes": (1, 2)}
    History(tmp_path / "a.safetensors", identity).save(5, [], [])
    assert History(tmp_path / "a.safetensors", identity).load([], []) == 5
    with pytest.raises(ValueError, match="its weights differ"):
        History(tmp_path / "a.safetensors", {**identity, "weights": Path("c")}).load([], [])


def test_a_full_disk_leaves_the_old_one(tmp_path):
    """A limit on the size of files stands in for the disk, in a process of its own."""
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {"epoch": 3})
    program = f"""
import resource, signal, sys, torch
from pathlib import Path
from kernelhead.train.checkpoint import save_checkpoint
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
