"""Examples that search settings, or predict, over processes: run as they are on a small folder of images."""

import csv
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from kernelhead.finetune import TrainSpec, train

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PATIENCE = 600
TRIALS, EPOCHS = 4, 30  # seconds each: time enough to interrupt some

pytestmark = pytest.mark.slow


def start(work, name, *arguments):
    """Begin an example in a session of its own, so that a signal reaches all of its processes."""
    path = os.pathsep.join([str(work), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": str(work)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "TUNE_GLOBAL_CHECKPOINT_S": "0", "RAY_ADDRESS": "local"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    with (work / f"{name}.txt").open("a") as kept:
        return subprocess.Popen(command, env=environment, stdout=kept, stderr=kept, cwd=work, start_new_session=True)


def finish(work, name, *arguments):
    started = start(work, name, *arguments)
    try:
        started.wait(PATIENCE)
    finally:
        started.kill()
    text = (work / f"{name}.txt").read_text()
    assert started.returncode == 0, text
    return text


def interrupt_after_the_first(started, ended):
    """Interrupt a search when it has noted the end of a trial; return the trial's folder."""
    deadline, first = time.monotonic() + PATIENCE, None
    while started.poll() is None and first is None and time.monotonic() < deadline:
        time.sleep(0.05)
        first = ended()
    assert first is not None
    started.send_signal(signal.SIGINT)
    try:
        started.wait(PATIENCE)
    finally:
        started.kill()
    return first


def seconds(folder):
    """The time of each epoch: another one if it is trained again."""
    return [json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(folder, value, trials=TRIALS):
    with (folder / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= trials
    values = [float(row[value]) for row in rows if row[value]]
    assert values == sorted(values, reverse=True)
    assert values[0] > 60  # three colours that anything can tell apart
    with Image.open(folder / "trials.png") as image:
        assert image.size == (1200, 340)
        assert len(image.convert("RGB").getcolors(1_000_000)) > 10
    return rows


@pytest.fixture
def work(colours, tmp_path):
    shutil.copy(colours / "tiny_networks.py", tmp_path)
    shutil.copytree(colours / "images", tmp_path / "images")
    return tmp_path


def test_a_search_by_optuna_goes_on_where_it_was_interrupted(work):
    arguments = ("images", "out", "tiny_networks:tiny", TRIALS, EPOCHS)

    def ended():
        try:
            with closing(sqlite3.connect(work / "out" / "study.db")) as study:
                count = study.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0]
        except sqlite3.OperationalError:  # it is not there yet
            return None
        results = sorted((work / "out").glob("*/result.json"), key=lambda path: path.stat().st_mtime_ns)
        return results[0].parent if count else None

    first = interrupt_after_the_first(start(work, "tune_with_optuna.py", *arguments), ended)
    before = seconds(first)
    assert len(list((work / "out").glob("*/config.yaml"))) < TRIALS
    said = finish(work, "tune_with_optuna.py", *arguments)
    states = [row["state"] for row in check(work / "out", "value")]
    assert states.count("COMPLETE") + states.count("PRUNED") == TRIALS
    assert "RUNNING" not in states
    assert "params_head_rate" in said
    assert seconds(first) == before
    assert len(before) == EPOCHS


def test_a_search_by_ray_goes_on_where_it_was_interrupted(work):
    arguments = ("images", "out", "tiny_networks:tiny", TRIALS, EPOCHS)

    def ended():
        for path in (work / "out" / "search").glob("trial_*/result.json"):
            lines = path.read_text().splitlines()
            if len(lines) == EPOCHS and lines[-1].endswith("}"):
                return work / "out" / json.loads(lines[-1])["trial_id"]
        return None

    first = interrupt_after_the_first(start(work, "tune_with_ray.py", *arguments), ended)
    before = seconds(first)
    said = finish(work, "tune_with_ray.py", *arguments)
    rows = check(work / "out", "val_accuracy")
    assert len(rows) == TRIALS
    assert len({row["trial_id"] for row in rows}) == TRIALS
    assert first.name in {row["trial_id"] for row in rows}
    assert "config/learning_rate" in said
    assert seconds(first) == before
    assert len(before) == EPOCHS


def test_ray_predicts_what_the_command_line_predicts(work):
    spec = TrainSpec(str(work / "images"), "tiny_networks:tiny", "linear", epochs=2, device="cpu", report=False)
    sys.path.insert(0, str(work))
    train(spec, checkpoint=work / "run")
    sys.path.remove(str(work))
    (work / "images" / "red" / "broken.png").write_text("no image")
    said = finish(work, "predict_with_ray.py", "run", "images", "found", 2)
    assert "Written 61 predictions to found" in said
    found = pyarrow.parquet.read_table(work / "found").to_pylist()
    code = "import sys; sys.argv[0] = 'kernelhead'; from kernelhead.cli import main; main()"
    command = [sys.executable, "-c", code, "predict", "run", str(work / "images"), "--out", "own.parquet"]
    path = os.pathsep.join([str(work), *sys.path])
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=work, check=False, timeout=PATIENCE)
    own = pyarrow.parquet.read_table(work / "own.parquet").to_pylist()
    assert sorted(found, key=lambda row: row["image"]) == own
