"""Hostile files: seeded changes of every format that a command reads, and what a command may answer.

`Corpus(folder)` makes one good file of each format. `corpus.change(kind, seed)` writes a changed one, and
`corpus.answer(kind, path)` gives it to the command that reads the format and returns what is wrong with the answer:
nothing, where the command refused in one sentence that names the file, or gave a result that may be right.
"""

import contextlib
import gzip
import io
import json
import math
import os
import shutil
import signal
import sys
import time
import warnings
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import torch
import typer
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import kernelhead
from kernelhead.cli import app
from kernelhead.cli._console import printable, run_app
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.checkpoint import digest, load_checkpoint
from kernelhead.finetune.results import load_result, save_result
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of, save_classifier
from kernelhead.finetune.settings import load_yaml, make_spec, resolved, to_yaml
from kernelhead.finetune.spec import TrainResult

NETWORK = """
from torch import nn


class Small(nn.Module):
    expected_input = (16, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, images):
        return self.fc(self.pool(self.features(images)).flatten(1))


def small():
    return Small()
"""
IMAGES, TABLES = ("png", "jpeg", "webp"), ("npz", "csv", "csv.gz", "parquet")
QUICK = ("safetensors", "state", "yaml", "json", *TABLES, *IMAGES, "config")
KINDS = (*QUICK, "onnx")  # an export takes seconds
MAX_SENTENCE, MAX_SECONDS = 300, 20
ESCAPE = "\x1b[31m\x1b]0;title\x07"
VALUES = (
    None, True, -1, 0, 1, 2**31 - 1, 10**9, 10**18, 10**400, 1e308, -1e-300, math.nan, math.inf, "", "nan", ESCAPE,
    "../..", "/dev/zero", "os:getcwd", "antigravity:fly", "torchvision/vit_h_14", "x" * 100_000,
    [], {}, [[]], [0] * 10_000,
)  # fmt: skip


class Corpus:
    """A good file of each format in a folder, and a place for changed ones beside it."""

    def __init__(self, folder: Path) -> None:
        self.good, self.work = folder / "good", folder / "work"
        self.refused: str | None = None  # what the last answer said, where it was a refusal
        self.good.mkdir(parents=True)
        (self.good / "hostile_networks.py").write_text(NETWORK)
        sys.path.insert(0, str(self.good))
        random = np.random.default_rng(0)
        spec = make_spec(
            None, {"data": "cifar10", "backbone": "hostile_networks:small", "head_options": {"landmarks": 6}}
        )
        spec = resolved(spec, images=100)
        model = create_classifier(spec, 3).eval()
        self.classes = ["blue", "green", "red"]
        files = {"train": [("blue/1.png", 0, "ab")], "test": [("red/2.png", 2, "cd")]}
        expected = Input(16, (0.5,) * 3, (0.25,) * 3)
        made = SavedClassifier(model, head_of(model), self.classes, spec, expected, files)
        save_classifier(self.good / "model.safetensors", made)
        (self.good / "settings.yaml").write_text(to_yaml(spec))
        told = TrainResult(spec, {"train": 9, "test": 9}, {"head": 9}, 1.0, {"loss": [1.0]}, accuracy=50.0)
        save_result(self.good / "result.json", told)
        for kind in IMAGES:
            pixels = random.integers(0, 255, (40, 36, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(self.good / f"image.{kind}")
        x, y = random.normal(size=(40, 3)), np.arange(40) % 2
        np.savez_compressed(self.good / "table.npz", x=x, y=y)
        table = pd.DataFrame(x, columns=["a", "b", "c"]).assign(label=np.array(["cat", "dog"])[y])
        table.to_csv(self.good / "table.csv", index=False)
        table.to_csv(self.good / "table.csv.gz", index=False)
        table.to_parquet(self.good / "table.parquet")
        head = kernelhead.LandmarkHead(6, 4, landmarks=5)
        head(torch.randn(9, 6))
        kernelhead.save(head.eval(), self.good / "hub")
        self.inputs = torch.randn(5, 6)
        self.logits = kernelhead.load(self.good / "hub")(self.inputs)

    def close(self) -> None:
        """Forget the network."""
        sys.path.remove(str(self.good))

    # --- changes ------------------------------------------------------------------------------------------------------

    def change(self, kind: str, seed: int) -> Path:
        """Write a changed file of a kind, alone in the folder `work`, and return its path."""
        random = Random(f"{kind} {seed}")
        stem = random.choice(["file", "file", "file", f"f{ESCAPE}\n\u202ee", "f" * 120])
        path = self.good_copy(kind, stem)
        if kind in ("state", "onnx"):
            self._signed(path, random)
        elif kind == "config":
            path = path.parent / random.choice(["config.json", "config.json", "model.safetensors"])
            self._write(path, path.read_bytes(), path.suffix[1:], random)
        else:
            self._write(path, path.read_bytes(), kind, random)
        return path

    def good_copy(self, kind: str, stem: str = "file") -> Path:
        """Copy the good file of a kind, alone, into the folder `work`."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        if kind == "config":
            return Path(shutil.copytree(self.good / "hub", self.work / "hub"), "config.json")
        suffix = "safetensors" if kind in ("state", "onnx") else kind
        stems = {"safetensors": "model", "yaml": "settings", "json": "result", **dict.fromkeys(IMAGES, "image")}
        good = self.good / f"{stems.get(suffix, 'table')}.{suffix}"
        return Path(shutil.copyfile(good, self.work / f"{stem}.{suffix}"))

    def no_file(self, kind: str, what: str) -> Path:
        """Put what is no file in the place of one."""
        path = self.good_copy(kind)
        path.unlink()
        if what == "folder":
            path.mkdir()
        elif what == "device":
            path.symlink_to("/dev/zero")
        else:
            pipe = path if what == "pipe" else path.with_name("pipe")
            os.mkfifo(pipe)
            if pipe != path:
                path.symlink_to(pipe)
        return path

    def bomb(self, kind: str) -> Path:
        """Write a small file that wants to be large."""
        path = self.good_copy(kind)
        BOMBS[kind](path)
        return path

    def _write(self, path: Path, content: bytes, kind: str, random: Random) -> None:
        """Write a changed content; now and then what is no file at all, or a small file that wants to be large."""
        what = random.random()
        path.unlink(missing_ok=True)
        if what < 0.03:
            os.mkfifo(path)
        elif what < 0.05:
            path.symlink_to("/dev/zero")
        elif what < 0.07:
            path.mkdir()
        elif what < 0.10 and kind in BOMBS:
            BOMBS[kind](path)
        elif kind in ("yaml", "json", "csv", "csv.gz") and what < 0.7:
            text = (gzip.decompress(content) if kind == "csv.gz" else content).decode()
            changed = {"yaml": _changed_yaml, "json": _changed_json}.get(kind, _changed_csv)(text, random)
            made = changed.encode(errors="surrogatepass")
            path.write_bytes(gzip.compress(made) if kind == "csv.gz" else made)
        else:
            path.write_bytes(changed_bytes(content, random))

    def _signed(self, path: Path, random: Random) -> None:
        """Write the classifier with a changed state, or a changed tensor, and a checksum that is right."""
        tensors, state = load_checkpoint(self.good / "model.safetensors")
        name = random.choice(sorted(tensors))
        if random.random() < 0.8:
            text = json.dumps(_replace(state, random))
        else:
            text = json.dumps(state)
            tensors[name] = random.choice([lambda x: x.reshape(-1)[:0], lambda x: x.double(), lambda x: x * math.nan])(
                tensors[name]
            )
        save_file(tensors, path, {"state": text, "sha256": digest(tensors, text)})

    # --- answers ------------------------------------------------------------------------------------------------------

    def answer(self, kind: str, path: Path) -> str | None:
        """Give a file to what reads it. Return what is wrong with the answer."""
        before, began, self.refused = self._listing(), time.process_time(), None
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            wrong = (self._of_python if kind in ("json", "config") else self._of_command)(kind, path)
        if time.process_time() - began > MAX_SECONDS:  # of this process: others may share the machine
            return f"took {time.process_time() - began:.1f} s"
        if wrong is None and self._listing() != before:
            return f"left {set(self._listing()) ^ set(before)}"
        return wrong

    def _listing(self) -> dict[str, int]:
        return {str(each): each.lstat().st_size for each in self.work.rglob("*") if each.suffix != ".onnx"}

    def _of_python(self, kind: str, path: Path) -> str | None:
        try:
            if kind == "json":
                load_result(path)
            else:
                found = kernelhead.load(path.parent)(self.inputs)
                return None if torch.equal(found, self.logits) else "gives other logits"
        except (ValueError, FileNotFoundError) as error:
            text = self.refused = str(error)
            named = path.name in text or path.parent.name in text
            return None if named and "\n" not in text.replace(str(path), "") else f"says {text[:400]!r}"
        return None

    def _of_command(self, kind: str, path: Path) -> str | None:
        image, model, device = self.good / "image.png", self.good / "model.safetensors", ("--device", "cpu")
        out = self.work / "out.onnx"
        command: dict[str, list[object]] = {
            "yaml": ["train", "--config", path, "--show-config"],
            "onnx": ["export", path, "--part", "head", "--out", out],
            **{each: ["predict", path, image, "--format", "json", *device] for each in ("safetensors", "state")},
            **{each: ["compare", path, "--with", "knn", "--folds", 2, "--json"] for each in TABLES},
            **{each: ["predict", model, path, "--format", "json", *device] for each in IMAGES},
        }
        code, said, printed = run(command[kind])
        if "\x1b" in said + printed or "\x07" in said + printed:
            return f"obeys names: {said!r}"
        if code == 0:
            return self._is_right(kind, printed, out)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if "Traceback" in said or len(errors) != 1 or code != 1:
            return f"leaves with {code} and says {said[-2000:]!r}"
        sentence = self.refused = errors[0].removeprefix("error: ")
        name = " ".join(printable(path.name).split())[:20]  # names may be long
        if len(sentence) > MAX_SENTENCE or name not in sentence or "unexpected" in sentence:
            return f"says {sentence!r}"
        return None

    def _is_right(self, kind: str, printed: str, out: Path) -> str | None:
        if kind == "yaml":
            return None if isinstance(load_yaml(printed), dict) else f"prints {printed[:200]!r}"
        if kind == "onnx":
            import onnx

            metadata = {each.key: each.value for each in onnx.load(out).metadata_props}
            return None if len(json.loads(metadata["classes"])) == 3 else "exports other classes"
        found = json.loads(printed)
        if kind in TABLES:
            accuracies = [value for each in found["results"] for value in each["accuracy"]]
            return None if accuracies and all(0 <= value <= 100 for value in accuracies) else f"finds {accuracies}"
        (one,) = found
        return None if 0 <= one["probability"] <= 1 and isinstance(one["class"], str) else f"predicts {one}"


def run(command: list[object], application: typer.Typer = app) -> tuple[int, str, str]:
    """Run a command line in this process: its exit status, what it said and what it printed."""
    said, printed = io.StringIO(), io.StringIO()
    before, code = (sys.argv, warnings.showwarning, signal.getsignal(signal.SIGTERM)), 0
    sys.argv = ["kernelhead", *map(str, command)]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            run_app(application, "kernelhead")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    finally:
        sys.argv, warnings.showwarning, handler = before
        signal.signal(signal.SIGTERM, handler)
    return code, said.getvalue(), printed.getvalue()


def changed_bytes(content: bytes, random: Random) -> bytes:
    """Change bytes as damage and malice do."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        at = random.randrange(len(data) + 1)
        size = min(random.choice([1, 2, 4, 8, 64]), max(1, len(data) - at))
        what = random.randrange(7)
        if what == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif what == 1:
            del data[at:]
        elif what == 2:
            data[at:at] = random.randbytes(size)
        elif what == 3:
            data[at : at + size] = bytes(size)
        elif what == 4:
            data[at : at + size] = b"\xff" * size
        elif what == 5:
            data[at : at + 8] = random.choice([2**31 - 1, 2**63 - 1, 2**40, 1]).to_bytes(8, "little")
        else:
            data[at : at + size] = data[:size]
    return bytes(data)


def _replace(tree: object, random: Random) -> object:
    """Replace, drop or repeat one node of a tree of lists and dictionaries."""
    if random.random() < 0.08 or not isinstance(tree, dict | list) or not tree:
        return random.choice(VALUES)
    if isinstance(tree, list):
        at = random.randrange(len(tree))
        return [*tree[:at], _replace(tree[at], random), *tree[at + 1 :]]
    key = random.choice(sorted(tree))
    what = random.random()
    if what < 0.1:
        return {name: value for name, value in tree.items() if name != key}
    if what < 0.2:
        return {**tree, random.choice([ESCAPE, "degree", "x" * 10_000, ""]): random.choice(VALUES)}
    return {**tree, key: _replace(tree[key], random)}


def _changed_json(text: str, random: Random) -> str:
    if random.random() < 0.1:
        return random.choice(["[" * 100_000, '{"a":' * 50_000, "1" * 10_000, "NaN", '"\\ud800"', "\ufeff{}", "{}"])
    return json.dumps(_replace(json.loads(text), random))


def _changed_yaml(text: str, random: Random) -> str:
    if random.random() < 0.15:
        laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
        )
        return random.choice(
            [laughs, "[" * 5000, "!!python/object/apply:os.system ['true']", "a: b: c", "\x00", "- 1\n", "&a [*a]",
             "head_options: {degree: 1000000000}", "image_size: 1000000000", "epochs: 1000000000000000000"]
        )  # fmt: skip
    return yaml.safe_dump(_replace(load_yaml(text), random), allow_unicode=True)


def _changed_csv(text: str, random: Random) -> str:
    lines = text.split("\n")
    at = random.randrange(len(lines))
    cells = lines[at].split(",")
    cells[random.randrange(len(cells))] = random.choice(
        ["", "nan", "inf", "1e400", "-1e-400", ESCAPE, '"', "\x00", "x" * 5000, "9" * 400, "1,2", "\ud800", "True"]
    )
    lines[at] = ",".join(cells)
    if random.random() < 0.3:
        lines = random.choice([lines[:1], lines[:3], [], lines * 3, ["".join(lines)], lines[1:]])
    return "\n".join(lines)


# --- small files that want to be large --------------------------------------------------------------------------------


def _gzip_bomb(path: Path) -> None:
    path.write_bytes(gzip.compress(b"a,b,label\n" + b"0,0,1\n0,1,0\n" * 10_000_000, 1))


def _npz_bomb(path: Path) -> None:
    np.savez_compressed(path, x=np.zeros((2**20, 200), np.uint8), y=np.zeros(2**20, np.uint8))


def _parquet_bomb(path: Path) -> None:
    pd.DataFrame({"a": np.zeros(20_000_000), "label": np.zeros(20_000_000)}).to_parquet(path)


def _png_bomb(path: Path) -> None:
    side = 18_000

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(1 + side * 4)) for _ in range(side // 2)) + packer.flush()
    header = side.to_bytes(4, "big") + (side // 2).to_bytes(4, "big") + b"\x08\x06\x00\x00\x00"
    signature = b"\x89PNG\r\n\x1a\n"
    path.write_bytes(signature + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def _webp_bomb(path: Path) -> None:
    Image.new("RGBA", (9_000, 9_000)).save(path, lossless=True, method=0, quality=0)


def _header_bomb(path: Path) -> None:
    """A header that promises a hundred gigabytes."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**35], "data_offsets": [0, 2**37]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


BOMBS = {
    "csv.gz": _gzip_bomb, "npz": _npz_bomb, "parquet": _parquet_bomb, "png": _png_bomb, "webp": _webp_bomb,
    "safetensors": _header_bomb,
}  # fmt: skip


def read_state(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, to look at a case by hand."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}
