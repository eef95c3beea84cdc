"""Predictions of many files: the same as of all at once, in bounded memory, and continued where they stopped."""

import csv
import itertools
import sys

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from kernelhead.finetune import prediction as module
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.data import batch_share
from kernelhead.finetune.images import expand
from kernelhead.finetune.prediction import classify_files, predict_into
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec

CPU = torch.device("cpu")
COUNT = 23
BROKEN = ("b/04.png", "c/02.png")


@pytest.fixture
def saved(colours):
    return make(0)


def make(seed):
    spec = TrainSpec("nowhere", "tiny_networks:tiny", "linear", pretrained=False, seed=seed)
    model = create_classifier(resolved(spec), 3).eval()
    return SavedClassifier(
        model, head_of(model), ["ant", "bée", "cow"], resolved(spec), Input(16, (0.5,) * 3, (0.25,) * 3)
    )


@pytest.fixture
def images(tmp_path):
    """23 files in three folders, two of which are no images; names that a table has to quote."""
    rng, folder = np.random.default_rng(0), tmp_path / "images"
    for index in range(COUNT):
        path = folder / "abc"[index // 8] / f"{index % 8:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(18 + index, 20, 3), dtype=np.uint8)).save(path)
    for name in BROKEN:
        (folder / name).write_text("no image")
    (folder / "a" / "07.png").rename(folder / "a" / 'x, "y"\n.png')
    return list(expand([folder]))


def read(path):
    """The rows of a file, an empty cell as None."""
    if path.suffix == ".parquet":
        return [tuple(row.values()) for row in pyarrow.parquet.read_table(path).to_pylist()]
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", "class", "probability"]
    return [(image, name or None, float(value) if value else None) for image, name, value in rows]


def expected(saved, images, top):
    """One image at a time, by the network itself."""
    rows = []
    for path in images:
        (seen,) = classify_files(saved, [path], CPU)
        order = seen.logits.softmax(1)[0].sort(descending=True) if len(seen.logits) else None
        if order is None:
            rows.append((str(path), None, None))
        else:
            pairs = list(zip(order.indices.tolist(), order.values.tolist(), strict=True))[:top]
            rows += [(str(path), saved.classes[label], pytest.approx(value, abs=2e-6)) for label, value in pairs]
    return rows


@pytest.mark.parametrize("rows", [4, 1000])
@pytest.mark.parametrize(("suffix", "top"), [(".csv", 1), (".parquet", 3), (".csv", 9)])
def test_a_file_has_what_each_image_gives(saved, images, tmp_path, monkeypatch, rows, suffix, top):
    monkeypatch.setattr(module, "ROWS", rows)
    out, said = tmp_path / f"found{suffix}", []
    broken = predict_into(out, saved, images, CPU, COUNT, top, lambda *each: said.append(each))
    assert [name.split("images/")[1] for name in broken] == list(BROKEN)
    assert read(out) == expected(saved, images, top)
    assert said[-1] == ("classifying images", COUNT, COUNT)
    assert {path.name for path in tmp_path.iterdir()} == {"images", out.name}


class StoppedError(Exception):
    """What ends a prediction in the middle."""


@pytest.mark.parametrize("torn", ["", "cut", "zeros"])
def test_it_goes_on_where_it_stopped(torn, saved, images, tmp_path, monkeypatch):
    predict_into(tmp_path / "whole.csv", saved, images, CPU, COUNT)
    monkeypatch.setattr(module, "batch_share", lambda size: 2)
    monkeypatch.setattr(module, "worker_count", lambda spec: 0)  # what a test counts is of this process
    seen, out, real = [], tmp_path / "found.csv", module.read_image

    def stopping(path, *rest):
        seen.append(path)
        if len(seen) == 15:
            raise StoppedError
        return real(path, *rest)

    monkeypatch.setattr(module, "read_image", stopping)
    with pytest.raises(StoppedError):
        predict_into(out, saved, images, CPU, COUNT, progress=None)
    assert not out.exists()
    (journal,) = tmp_path.glob(".found.csv.*")
    kept = journal.read_bytes()
    assert kept.count(b"\n") == 14
    lost = {"": kept, "cut": kept[:-9], "zeros": kept[: kept[:-1].rindex(b"\n") + 1] + bytes(20) + b"\n"}
    journal.write_bytes(lost[torn])
    said = []
    predict_into(out, saved, images, CPU, COUNT, 1, lambda *each: said.append(each[1]))
    assert seen[15:] == images[14 - bool(torn) :]
    assert said[0] == 16 - bool(torn)
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob(".found.csv.*"))


@pytest.mark.parametrize("change", ["classifier", "top", "images", "nothing"])
def test_it_starts_anew_where_something_else_is_asked_for(saved, images, tmp_path, monkeypatch, change):
    def stop(*_):
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", stop)
        with pytest.raises(StoppedError):
            predict_into(tmp_path / "found.csv", saved, images, CPU, COUNT)
    seen, real = [], module.read_image
    monkeypatch.setattr(module, "read_image", lambda *given: seen.append(given[0]) or real(*given))
    saved, top = make(1) if change == "classifier" else saved, 2 if change == "top" else 1
    if change == "images":
        images = images[:7] + images[9:]
    predict_into(tmp_path / "found.csv", saved, images, CPU, len(images), top)
    assert seen == {"images": images[7:], "nothing": []}.get(change, images)
    assert read(tmp_path / "found.csv") == expected(saved, images, top)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_taken_as_they_are_needed(saved, images, workers):
    """So that a million take as much memory as a thousand. Workers are given two batches each, and one is made up."""
    share, drawn = batch_share(16), itertools.count()
    endless = (images[next(drawn) % 3] for _ in itertools.count())
    done = 0
    for seen in itertools.islice(classify_files(saved, endless, CPU, workers=workers), 3 if workers else 6):
        done += len(seen.paths)
        assert len(seen.paths) == share
        assert next(drawn) - done <= (2 * workers + 3) * share


def test_mistakes_are_said_before_the_work(saved, images, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "read_image", lambda *_: pytest.fail("an image was read"))
    with pytest.raises(ValueError, match=r"predictions are written as \.csv or \.parquet; got found\.xlsx"):
        predict_into(tmp_path / "found.xlsx", saved, images, CPU, COUNT)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"parquet needs pyarrow; install it with pip install pyarrow, or"):
        predict_into(tmp_path / "found.parquet", saved, images, CPU, COUNT)
