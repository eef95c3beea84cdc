"""The command line as a person uses it: in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from kernelhead import __version__


def kernelhead(*arguments, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "kernelhead", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    done = kernelhead("reproduce", "synthetic", "--quick", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_help_and_version(tmp_path):
    assert kernelhead("--version", cwd=tmp_path).stdout.strip() == f"kernelhead {__version__}"
    text = kernelhead("--help", cwd=tmp_path).stdout
    assert "reproduce" in text
    assert "report" in text
    assert "--epochs" in kernelhead("reproduce", "--help", cwd=tmp_path).stdout


def test_list_before_anything_ran(tmp_path):
    done = kernelhead("reproduce", "list", cwd=tmp_path)
    assert done.returncode == 0
    assert re.search(r"synthetic.*0 of 80", done.stdout)


def test_reproduce_prints_the_table_and_writes_files(reproduced):
    folder, done = reproduced
    for cell in ("85.51", "94.20", "95.06", "n = 2 draws, 4 epochs"):
        assert cell in done.stdout
    assert "few samples and epochs: that it ran is all" in done.stdout
    assert "Kernel, 20 landmarks, tuned protocol: training" in done.stderr.splitlines()
    report = folder / "runs" / "quick" / "report"
    assert sorted(path.suffix for path in report.iterdir()) == [".csv", ".html", ".html", ".md", ".png"]
    assert "Two classes on the sphere" in (report / "report.html").read_text()


def test_report_gives_the_same_table_without_training(reproduced):
    folder, done = reproduced
    before = (folder / "runs" / "quick" / "report" / "synthetic-4-epochs-1000-samples.md").read_text()
    again = kernelhead("report", "--runs", "runs/quick", "--out", "elsewhere", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert (folder / "elsewhere" / "synthetic-4-epochs-1000-samples.md").read_text() == before
    assert done.stdout.split("Written")[0] == again.stdout.split("Written")[0]


def test_report_names_a_broken_file_and_goes_on(reproduced):
    folder, _ = reproduced
    broken = folder / "runs" / "quick" / "synthetic" / "4-epochs-1000-samples" / "tuned" / "kernel-draw77.json"
    broken.write_text("{")
    done = kernelhead("report", "--runs", "runs/quick", cwd=folder)
    broken.unlink()
    assert done.returncode == 0
    assert "kernel-draw77.json" in done.stderr
    assert "94.20" in done.stdout


def test_report_goes_on_without_figures(reproduced):
    folder, _ = reproduced
    weights = folder / "runs" / "quick" / "synthetic" / "4-epochs-1000-samples" / "tuned" / "kernel-draw00.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"junk")
    done = kernelhead("report", "--runs", "runs/quick", "--out", "a[b]", cwd=folder)
    weights.write_bytes(content)
    assert done.returncode == 0
    assert "no figures" in done.stderr
    assert "kernel-draw00.safetensors" in done.stderr
    assert "Written: a[b]/synthetic-4-epochs-1000-samples.md" in done.stdout


def test_list_counts_runs_of_the_settings_asked_for(reproduced):
    assert re.search(r"synthetic.*16 of 16.*none", kernelhead("reproduce", "list", "--quick", cwd=reproduced[0]).stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reproduce", "synthetic", "--quick", "--draws", "3"], "--quick has its own epochs, draws and seeds"),
        (["reproduce", "imagenet"], "unknown table 'imagenet'; choose one of synthetic"),
        (["reproduce", "synthetic", "--protocol", "mine"], "unknown protocol 'mine'; choose one of paper, tuned, both"),
        (["report", "--runs", "nowhere"], "no results in nowhere"),
    ],
)
def test_errors_are_one_sentence(tmp_path, arguments, sentence):
    done = kernelhead(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    debugged = kernelhead(*arguments, "--debug", cwd=tmp_path)
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr


def test_data_sets_are_listed_and_checked(tmp_path):
    environment = {**os.environ, "KERNELHEAD_DATA": str(tmp_path / "data")}
    listed = kernelhead("data", "list", cwd=tmp_path, env=environment)
    assert listed.returncode == 0
    assert re.search(r"cifar100.*no", listed.stdout)
    missing = kernelhead("data", "verify", "cifar10", cwd=tmp_path, env=environment)
    assert missing.returncode == 1
    assert "kernelhead data get cifar10" in missing.stderr
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.npz").write_bytes(b"PK")
    damaged = kernelhead("data", "verify", "cifar10", cwd=tmp_path, env=environment)
    assert damaged.returncode == 1
    assert "is damaged" in damaged.stderr
    assert "Traceback" not in damaged.stderr
    assert "unknown data set" in kernelhead("data", "get", "mnist", cwd=tmp_path, env=environment).stderr


def test_a_folder_of_pictures_is_packed(tmp_path):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), "red").save(tmp_path / "pictures" / name / "1.jpg")
    (tmp_path / "pictures" / "dog" / "2.jpg").write_text("no image")
    done = kernelhead("data", "pack", "pictures", "--out", "p.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "p.safetensors: 2 images of 2 classes, 1 left out" in done.stdout
    assert "dog/2.jpg" in done.stderr
    missing = kernelhead("data", "pack", "nowhere", "--out", "p.safetensors", cwd=tmp_path)
    assert missing.returncode == 1
    assert "there is no folder nowhere" in missing.stderr


def test_wrong_usage_is_refused(tmp_path):
    for arguments in (["reproduce"], ["reproduce", "synthetic", "--epochs", "0"], ["fly"]):
        assert kernelhead(*arguments, cwd=tmp_path).returncode == 2


def test_a_results_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = kernelhead("reproduce", "synthetic", "--quick", "--runs", "file", cwd=tmp_path)
    assert done.returncode == 1
    assert "Not a directory: 'file/" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_says_so_and_goes_on(tmp_path, reproduced, sent):
    command = [sys.executable, "-m", "kernelhead", "reproduce", "synthetic", "--quick"]
    # A shell that runs the tests in the background has them ignore SIGINT, and a child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    signal.signal(signal.SIGINT, before)
    results = tmp_path / "runs" / "quick" / "synthetic"
    while not list(results.rglob("softmax-draw01.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from there" in messages
    assert "Traceback" not in messages
    first = next(results.rglob("softmax-draw01.json"))
    written = first.stat().st_mtime_ns
    done = kernelhead("reproduce", "synthetic", "--quick", cwd=tmp_path)
    assert done.returncode == 0
    assert first.stat().st_mtime_ns == written
    assert done.stdout.split("Written")[0] == reproduced[1].stdout.split("Written")[0]
