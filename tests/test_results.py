import json

import pytest

from kernelhead import __version__
from kernelhead.results import BrokenResultError, find_results, load_result, save_result, write_bytes

RUN = dict.fromkeys(("experiment", "protocol", "method", "accuracy", "seconds"), 1.0) | {"seed": 1, "config": {}}


def test_round_trip_carries_the_environment(tmp_path):
    path = tmp_path / "new" / "folder" / "run.json"
    save_result(path, {**RUN, "accuracy": 91.25, "alpha": [0.0, 1.5]})
    result = load_result(path)
    assert result["accuracy"] == 91.25
    assert result["alpha"] == [0.0, 1.5]
    assert result["version"] == __version__
    assert set(result["libraries"]) == {"python", "torch", "numpy"}
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path):
    path, link = tmp_path / "plain.md", tmp_path / "link.md"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_bytes(link, b"new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("key", "value"), [("accuracy", "37.5"), ("seconds", None), ("config", 3), ("seed", "a")])
def test_a_field_of_another_kind_is_named(tmp_path, key, value):
    save_result(tmp_path / "run.json", {**RUN, key: value})
    with pytest.raises(BrokenResultError, match=rf"run\.json has no usable {key}; delete it and run again"):
        load_result(tmp_path / "run.json")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_bytes(path, b"old")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_not_a_number_is_refused_rather_than_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        save_result(tmp_path / "run.json", {"nll": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b'{"format": 1', b"[]", b'{"format": 99}', b'{"format": 1}', b"\xff\xfe"])
def test_broken_files_are_named_and_the_others_read(tmp_path, content):
    save_result(tmp_path / "good.json", RUN)
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(BrokenResultError, match=r"bad\.json"):
        load_result(tmp_path / "bad.json")
    broken: list[str] = []
    assert [result["accuracy"] for result in find_results(tmp_path, broken)] == [1.0]
    assert len(broken) == 1
    assert "bad.json" in broken[0]
    assert "\n" not in broken[0]


def test_files_are_plain_json(tmp_path):
    save_result(tmp_path / "run.json", {"seed": 3})
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 3
