"""Kill commands at random moments and let them end: `python tests/safety/kills.py KIND[,KIND] KILLS [SEED]`.

So many kills of each kind, and the totals as JSON. A trial starts a command in a child of this process, which has
imported everything, kills it up to three times with SIGKILL, and then lets it end. After every kill each file that is
there must be whole. In the end, results must be those of a command that was not killed, to the bit, and no temporary
file may be left.
"""

import contextlib
import csv
import faulthandler
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from hostile import Corpus, run
from PIL import Image

import kernelhead
from kernelhead.finetune.checkpoint import load_checkpoint

KILLS, EPOCHS, MOST_TRIALS = 3, 6, 10
KINDS = ("train", "predict", "data", "compare", "save", "export", "reproduce")
PRELOADED = (  # what children would import each, or be killed importing
    "kernelhead.sklearn.compare", "kernelhead.sklearn.features", "kernelhead.inspection.plot", "kernelhead.export",
    "kernelhead.finetune.trainer", "kernelhead_lab.tables.synthetic", "kernelhead_lab.cli", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "onnx", "onnxruntime", "onnxscript", "scipy.stats", "torchvision.datasets",
    "torchvision.transforms.v2", "kernelhead_lab.report.collect",
)  # fmt: skip
VARIES = ("seconds", "environment", "fit_seconds", "predict_seconds")  # from run to run


class Harness:
    """Commands, the folder of each trial, and what each leaves when nobody kills it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.corpus = folder, Corpus(folder / "corpus")
        random = np.random.default_rng(0)
        for name, colour in {"blue": (60, 60, 170), "red": (170, 60, 60)}.items():
            (folder / "images" / name).mkdir(parents=True)
            for index in range(30):
                pixels = np.array(colour) + random.integers(-60, 60, (20, 20, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / name / f"{index}.png")
        self.heads = [kernelhead.LandmarkHead(64, 10, landmarks=512) for _ in range(2)]

    def command(self, kind: str, out: Path) -> Callable[[], object]:
        """Return what a child of this kind does; `out` is the folder that it writes."""
        good = self.corpus.good
        lines: dict[str, list[object]] = {
            "train": [
                "train", "--data", self.folder / "images", "--backbone", "hostile_networks:small", "--device", "cpu",
                "--head-option", "landmarks=6", "--epochs", EPOCHS, "--batch-size", 8, "--checkpoint-seconds", 0,
                "--val", 0.2, "--keep", "best", "--no-report", "--resume", "--out", out,
            ],
            "predict": ["predict", good / "model.safetensors", self.folder / "images", "--format", "csv"],
            "compare": [
                "compare", good / "table.csv", "--with", "knn,logistic", "--folds", 2, "--out", out,
            ],
            "export": ["export", good / "model.safetensors", "--part", "head", "--out", out / "head.onnx"],
        }  # fmt: skip
        if kind in lines:
            return lambda: self._printed(out, run(lines[kind]))
        return {"data": self._data, "save": self._save, "reproduce": self._reproduce}[kind](out)

    def _printed(self, out: Path, answer: tuple[int, str, str]) -> None:
        code, said, printed = answer
        assert code == 0, said
        if out.parent.name == "predict":
            (out / "printed.csv").write_text(printed)

    def _data(self, out: Path) -> Callable[[], object]:
        import torchvision.datasets

        class Fake:  # instead of the official archive
            def __init__(self, root: str, train: bool, download: bool) -> None:
                Path(root, "archive").write_bytes(bytes(2**20))
                time.sleep(0.05)
                self.data = np.full((5000 if train else 1000, 32, 32, 3), 7, np.uint8)
                self.targets = [0, 1] * (len(self.data) // 2)

        def get() -> None:
            os.environ["KERNELHEAD_DATA"] = str(out)
            torchvision.datasets.CIFAR10 = Fake
            self._printed(out, run(["data", "get", "cifar10"]))

        return get

    def _save(self, out: Path) -> Callable[[], object]:
        def save() -> None:
            for number in range(20):
                kernelhead.save(self.heads[number % 2], out)

        return save

    def _reproduce(self, out: Path) -> Callable[[], object]:
        from kernelhead_lab.cli._app import app

        words = ["reproduce", "synthetic", "--quick", "--runs", out]
        return lambda: self._printed(out, run(words, app))

    # --- trials -------------------------------------------------------------------------------------------------------

    def whole(self, kind: str) -> tuple[Any, float]:
        """Return what a command leaves that nobody kills, and its seconds."""
        out, again = (self.folder / kind / name for name in ("whole", "again"))
        self.end(self.start(kind, out), out)
        began = time.monotonic()
        self.end(self.start(kind, again), again)
        assert results(again) == results(out), f"{kind} does not repeat itself"
        return results(out), time.monotonic() - began

    def start(self, kind: str, out: Path) -> int:
        """Begin a command in a child."""
        out.mkdir(parents=True, exist_ok=True)
        act = self.command(kind, out)
        child = os.fork()
        if child:
            return child
        code = 1
        faulthandler.enable((out.parent / f"{out.name}.fault").open("w"))  # what aborts says where
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                act()
            code = 0
        except BaseException as error:
            (out.parent / f"{out.name}.said").write_text(f"{said.getvalue()}{error!r}")
        finally:
            os._exit(code)

    def end(self, child: int, out: Path) -> None:
        """Wait for a child that is to end well."""
        _, status = os.waitpid(child, 0)
        if status:
            said = [out.parent / f"{out.name}.{name}" for name in ("said", "fault")]
            told = " ".join(each.read_text() for each in said if each.exists())
            raise AssertionError(f"it failed with {status}: {told[:1000]}")

    def trial(self, kind: str, out: Path, expected: Any, seconds: float, random: Random) -> tuple[int, list[str]]:
        """Kill a command, let it end, and return the kills and all that is wrong."""
        kills, wrong = 0, []
        for _ in range(KILLS):
            child = self.start(kind, out)
            time.sleep(random.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                break  # it was quicker
            kills += 1
            wrong += broken_files(out)
        try:
            self.end(self.start(kind, out), out)
        except AssertionError as error:
            return kills, [*wrong, str(error)]
        if results(out) != expected:
            wrong.append("its results differ")
        left = [each.name for each in out.rglob(".*") if each.is_file() or each.name.endswith(".tmp")]
        return kills, [*wrong, *(f"left {name}" for name in left)]


def broken_files(out: Path) -> list[str]:
    """Return the files that are there under their own names and are not whole."""
    wrong = []
    for path in out.rglob("*"):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(out).parts):
            continue
        try:
            content(path)
        except Exception as error:
            wrong.append(f"{path.name} is not whole: {error}"[:300])
    return wrong


def content(path: Path) -> Any:
    """Return what a file holds, without times."""
    if path.suffix == ".safetensors":
        tensors, state = load_checkpoint(path)
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, without_times(state)
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [without_times(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        return list(csv.reader(path.open(newline="")))
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name].tobytes() for name in file}
    if path.suffix == ".png":
        Image.open(path).load()
    if path.suffix == ".onnx":
        import onnx

        onnx.checker.check_model(onnx.load(path))
    assert path.stat().st_size
    return None  # its bytes may hold times


def without_times(tree: Any) -> Any:
    """Drop what varies from run to run."""
    if isinstance(tree, dict):
        return {name: without_times(value) for name, value in tree.items() if name not in VARIES}
    return [without_times(value) for value in tree] if isinstance(tree, list) else tree


def results(out: Path) -> dict[str, Any]:
    """Return the contents of all files of a folder."""
    skipped = ("checkpoint.previous.safetensors",)  # of an earlier moment
    files = [each for each in sorted(out.rglob("*")) if each.is_file() and each.name not in skipped]
    return {str(each.relative_to(out)): content(each) for each in files if not each.name.startswith(".")}


def main(kinds: list[str], wanted: int, seed: int = 0) -> dict[str, Any]:
    """Go through trials of each kind until it was killed so often."""
    assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1: a pool of threads does not survive a fork"
    for name in PRELOADED:
        import_module(name)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        harness = Harness(Path(made))
        for kind in kinds:
            random, trials, kills, wrong = Random(f"{kind} {seed}"), 0, 0, list[str]()
            expected, seconds = harness.whole(kind)
            while kills < wanted and trials < MOST_TRIALS * wanted:
                number, trials = trials, trials + 1
                out = Path(made, kind, str(number))
                own, problems = harness.trial(kind, out, expected, seconds, random)
                kills += own
                wrong += [f"trial {number}: {each}" for each in problems]
                shutil.rmtree(out, ignore_errors=True)
            found[kind] = {"trials": trials, "kills": kills, "wrong": wrong}
            print(json.dumps({kind: found[kind]}), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    chosen = [*KINDS] if sys.argv[1] == "all" else sys.argv[1].split(",")
    print(json.dumps(main(chosen, *map(int, sys.argv[2:4]))))
