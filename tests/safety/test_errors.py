"""What errors say: the user's own path, the tensor that had no room, and nothing that a terminal would obey."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import kernelhead
from kernelhead.cli._console import LONGEST_ERROR, about, printable, sentence_of
from kernelhead.files import plain_file, replacing, write_bytes, writing
from kernelhead.finetune.checkpoint import misfit, save_checkpoint

FULL = """
import resource, sys
from pathlib import Path
import torch
from kernelhead.finetune.checkpoint import save_checkpoint

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save_checkpoint(Path(sys.argv[1]), {"x": torch.zeros(1000)}, {})
except OSError as error:
    print(error)
"""


def test_a_file_that_has_no_room_is_named_and_the_old_one_stays(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert done.stdout == f"{path} cannot be written (File too large)\n"
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "run" / "result.json"
    with pytest.raises(OSError, match=r"^\S+run/result\.json cannot be written \(No space left on device\)$"):
        write_bytes(path, b"{}")
    assert list(path.parent.iterdir()) == []
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written \(No space left on device\)$"):
        kernelhead.save(kernelhead.KernelHead(3, 2), tmp_path / "head")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
def test_a_folder_that_may_not_be_written_is_named():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "closed")
        folder.mkdir()
        folder.chmod(0o555)
        Path(made).chmod(0o755)
        user = os.geteuid()
        if user == 0:  # who may do anything
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=rf"^{folder}/a\.json cannot be written \(Permission denied\)$"):
                write_bytes(folder / "a.json", b"{}")
            with pytest.raises(PermissionError, match=rf"^{folder} cannot be written \(Permission denied\)$"):
                writing(folder).__enter__()
            with pytest.raises(PermissionError, match=rf"^{folder}/new cannot be written \(Permission denied\)$"):
                writing(folder / "new").__enter__()
        finally:
            os.seteuid(user)


def test_devices_are_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "link"):
        with pytest.raises(ValueError, match="is a pipe or a device"):
            write_bytes(path, b"x")
    with pytest.raises(ValueError, match="is a folder"), replacing(tmp_path):
        raise AssertionError("it is a folder")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a.json").write_bytes(bytes(11))
    with pytest.raises(ValueError, match=r"a\.json has 11 bytes, and such files have 10 at most"):
        plain_file(tmp_path / "a.json", 10)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*b\.json"):
        plain_file(tmp_path / "b.json")


def said_of(act):
    with pytest.raises(Exception) as caught:
        act()
    return sentence_of(caught.value)


def test_a_tensor_that_has_no_room_is_named_with_what_to_lower():
    said = said_of(lambda: kernelhead.LandmarkHead(2**20, 10, landmarks=2**30))
    assert said.startswith("there is no memory left for a tensor of 4,503,599.6 GB in LandmarkHead; lower the batch")
    said = said_of(lambda: torch.nn.Linear(4, 4)(torch.zeros(1, 4).expand(2**48, 4)))
    assert said.startswith("there is no memory left for a tensor of 4,503,599.6 GB in Linear; lower the batch size")
    assert "such as" not in said_of(lambda: (_ for _ in ()).throw(MemoryError()))
    cuda = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139 GiB"
    )
    assert sentence_of(cuda).startswith("there is no memory left for a tensor of 20.50 GiB; lower the batch size")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("seconds"), "unexpected KeyError 'seconds'; please report it, with what --debug shows"),
        (ValueError(), "unexpected ValueError; please report it, with what --debug shows"),
        (OSError(28, "No space left on device"), "the output cannot be used: No space left on device"),
        (OSError(20, "Not a directory", "a/b"), "a/b cannot be used: Not a directory"),
        (ValueError("one\n two"), "one two"),
    ],
)
def test_no_error_is_empty_or_a_number(error, sentence):
    assert sentence_of(error) == sentence


def test_a_long_error_keeps_its_file_and_its_advice():
    said = sentence_of(ValueError(f"a/b.json has wrong keys ({', '.join(map(str, range(9999)))}); delete it"))
    assert len(said) <= LONGEST_ERROR
    assert said.startswith("a/b.json has wrong keys")
    assert said.endswith("; delete it")
    assert len(printable(sentence_of(ValueError("\x1b" * 280)))) <= LONGEST_ERROR


def test_errors_name_the_file_that_they_come_from():
    for file, sentence in (("a.yaml", "a.yaml: epochs is 0"), (None, "epochs is 0")):
        with pytest.raises(ValueError, match=f"^{sentence}$"), about(file and Path(file)):
            raise ValueError("epochs is 0")


def test_a_terminal_obeys_no_name():
    assert printable("a\x1b[31m\x9b\u202e\udcff\tä 名\n") == "a\\x1b[31m\\x9b\\u202e\\udcff\tä 名\n"


def test_tensors_that_do_not_fit_are_counted_and_three_are_named():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    state = {f"other.{i}": torch.zeros(1) for i in range(4)} | {"0.weight": torch.zeros(3)}
    assert misfit(model, model.state_dict()) == ""
    assert misfit(model, state) == (
        "tensors do not fit: 9 missing (0.bias, 1.weight, 1.bias); 4 unknown (other.0, other.1, other.2); "
        "1 of another shape (0.weight (3,) instead of (2, 2))"
    )


def test_a_checkpoint_names_its_own_path_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match=r"link cannot be written \(Input/output error\)"):
        save_checkpoint(tmp_path / "link", {}, {})
