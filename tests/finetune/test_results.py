"""Result files: what is written is read back, and what cannot be read is refused in one sentence."""

import dataclasses
import json
import platform

import pytest
import torch

from kernelhead.files import write_bytes
from kernelhead.finetune.results import FORMAT, BrokenResultError, load_result, save_result
from kernelhead.finetune.spec import TrainResult, TrainSpec

RUN = TrainResult(
    spec=TrainSpec(data="pets", head="prototypes", head_options={"prototypes": 3}, epochs=2, device="cpu"),
    images={"train": 80, "test": 20, "left_out": 0},
    parameters={"backbone": 10, "head": 5},
    seconds=1.5,
    curve={"loss": [2.0, None], "accuracy": [10.0, 20.0]},
    accuracy=91.25,
    alpha=[0.0, 1.5],
)


def test_what_is_written_is_read_back_with_its_environment_and_without_the_machine_s_settings(tmp_path):
    save_result(tmp_path / "run.json", RUN)
    found = load_result(tmp_path / "run.json")
    made_in = found.extra.pop("environment")
    assert found == dataclasses.replace(RUN, spec=dataclasses.replace(RUN.spec, device="auto"))
    assert made_in["libraries"]["torch"] == torch.__version__
    assert made_in["hardware"]["machine"] == platform.machine()
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["format"] == FORMAT
    assert "device" not in stored["spec"]


def test_an_environment_that_is_given_stays(tmp_path):
    save_result(tmp_path / "run.json", dataclasses.replace(RUN, extra={"environment": {"version": "0"}}))
    assert load_result(tmp_path / "run.json").extra == {"environment": {"version": "0"}}


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff", '{"format": 1, "accuracy": 90.0}', '{"format": 3}'])
def test_files_that_are_broken_or_of_another_format_are_refused(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(BrokenResultError, match=str(path)):
        load_result(path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seconds": None}, "seconds"),
        ({"accuracy": "90"}, "accuracy"),
        ({"accuracy": True}, "accuracy"),
        ({"choosing": 1}, "choosing"),
        ({"spec": {"data": "pets", "kernle": 1}}, "spec"),
        ({"spec": {}}, "spec"),
    ],
)
def test_fields_that_are_missing_or_of_another_kind_are_named(tmp_path, change, name):
    path = tmp_path / "run.json"
    save_result(path, RUN)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BrokenResultError, match=f"no usable {name}"):
        load_result(path)


def test_numbers_that_json_does_not_know_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        save_result(tmp_path / "run.json", dataclasses.replace(RUN, nll=float("nan")))
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path):
    path, link = tmp_path / "plain.md", tmp_path / "link.md"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_bytes(link, b"new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_bytes(path, b"old")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
