"""The command line as a person uses it: in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from kernelhead import __version__

VERBS = ("train", "evaluate", "predict", "select", "compare", "bench", "inspect", "export", "data")


def kernelhead(*arguments, cwd, **variables):
    return subprocess.run(
        [sys.executable, "-m", "kernelhead", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables},
    )


def test_version(tmp_path):
    assert kernelhead("--version", cwd=tmp_path).stdout.strip() == f"kernelhead {__version__}"


def test_help_names_the_verbs_without_torch(tmp_path):
    program = "import sys; from kernelhead.cli import main; sys.argv[1:] = ['--help']\ntry: main()\n"
    program += "finally: print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert [verb for verb in VERBS if not re.search(rf"^\W*{verb} ", done.stdout, re.MULTILINE)] == []
    assert done.stderr.split() == ["False", "False"]


def test_an_error_is_one_sentence_and_debug_shows_its_traceback(tmp_path):
    arguments = ["predict", "m", "x"]
    done = kernelhead(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: there is no trained classifier in m\n"
    debugged = kernelhead(*arguments, "--debug", cwd=tmp_path)
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr


@pytest.mark.slow
def test_data_sets_are_listed_and_checked(tmp_path):
    variables = {"KERNELHEAD_DATA": str(tmp_path / "data")}
    listed = kernelhead("data", "list", cwd=tmp_path, **variables)
    assert listed.returncode == 0
    for name in ("cifar10", "cifar100", "pets", "cars"):
        assert re.search(rf"{name} .* no ", listed.stdout)
    missing = kernelhead("data", "verify", "cifar10", cwd=tmp_path, **variables)
    assert missing.returncode == 1
    assert "kernelhead data get cifar10" in missing.stderr
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.npz").write_bytes(b"PK")
    damaged = kernelhead("data", "verify", "cifar10", cwd=tmp_path, **variables)
    assert damaged.returncode == 1
    assert "is damaged" in damaged.stderr
    unknown = kernelhead("data", "get", "mnist", cwd=tmp_path, **variables)
    assert unknown.returncode == 2
    assert "'mnist' is not one of 'cifar10'" in unknown.stderr


def test_wrong_usage_is_refused(tmp_path):
    assert kernelhead("fly", cwd=tmp_path).returncode == 2
