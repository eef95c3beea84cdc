"""Image files through a classifier, as many as there are: batches come and go, and memory does not grow."""

import csv
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kernelhead.files import replacing
from kernelhead.finetune.checkpoint import digest
from kernelhead.finetune.data import Progress, batch_share, fingerprint, kept_short_side, normalised, worker_count
from kernelhead.finetune.evaluation import features_and_logits, finite, precision
from kernelhead.finetune.images import read_image
from kernelhead.finetune.interrupt import ignore_interrupts
from kernelhead.finetune.saved import SavedClassifier
from kernelhead.finetune.views import View, cut_out, resample, stack, test_view

ROWS = 50_000  # of a group in parquet
COLUMNS = ("image", "class", "probability")

Row = tuple[str, str | None, float | None]


class Seen(NamedTuple):
    """A batch of image files, their fingerprints, and a sentence for each that cannot be read.

    Features and logits (n, C) are of those that can be read, in their order.
    """

    paths: list[Path]
    marks: list[str]
    broken: dict[Path, str]
    features: Tensor
    logits: Tensor


class _Files(Dataset[tuple[Path, str, tuple[Tensor, View] | str]]):
    """What a classifier looks at of image files, which are their own keys."""

    def __init__(self, saved: SavedClassifier) -> None:
        self.short_side = kept_short_side(saved.spec, saved.input)
        self.size, self.augment, self.resize = saved.input.size, saved.spec.augment, saved.spec.resize

    def __getitem__(self, path: Path) -> tuple[Path, str, tuple[Tensor, View] | str]:
        try:
            pixels = read_image(path, self.short_side)
            view = test_view(pixels.shape[1], pixels.shape[2], self.size, self.augment, self.resize)
            return path, fingerprint(path), cut_out(pixels, view, self.size)
        except ValueError as error:
            return path, "", str(error)


def _collate(items: Sequence[tuple[Path, str, Any]]) -> tuple[list[Path], list[str], dict[Path, str], Any]:
    broken = {path: found for path, _, found in items if isinstance(found, str)}
    readable = [(path, mark, found) for path, mark, found in items if path not in broken]
    images = stack(*zip(*(found for _, _, found in readable), strict=True)) if readable else None
    return [path for path, *_ in items], [mark for _, mark, _ in readable], broken, images


def classify_files(
    saved: SavedClassifier,
    paths: Iterable[Path],
    device: torch.device,
    *,
    workers: int | None = None,
    done: int = 0,
    total: int = 0,
    progress: Progress | None = None,
) -> Iterator[Seen]:
    """Yield what a classifier makes of image files, in their order, a batch at a time.

    Worker processes read where there are more files than one batch has. For `progress`, `done` of `total` files were
    done before.
    """
    model, size, rest = saved.model.to(device).eval(), batch_share(saved.input.size), iter(paths)
    first = list(itertools.islice(rest, size + 1))
    files, dtype = itertools.chain(first, rest), precision(saved.spec.amp, device)
    loader: Any = DataLoader(
        _Files(saved),
        batch_sampler=iter(lambda: list(itertools.islice(files, size)), []),
        collate_fn=_collate,
        num_workers=(worker_count(saved.spec) if workers is None else workers) if len(first) > size else 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_interrupts,
        generator=torch.Generator(),
    )
    for group, marks, broken, images in loader:
        features = logits = torch.empty(0, len(saved.classes), device=device)
        if images is not None:
            pixels, about = (each.to(device, non_blocking=True) for each in images)
            batch = normalised(resample(pixels, about, size=saved.input.size), saved.input)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                features, logits = features_and_logits(model, batch)
        done += len(group)
        if progress is not None:
            progress("classifying images", done, total)
        yield Seen(group, marks, broken, features, finite(logits.float()))


def predictions(saved: SavedClassifier, batches: Iterable[Seen], top: int = 1) -> Iterator[tuple[str, list[Row]]]:
    """Yield what is wrong with each file, or "", and a row for each of its `top` most probable classes."""
    for seen in batches:
        best = seen.logits.double().softmax(1).topk(min(top, len(saved.classes)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for path in seen.paths:
            if path in seen.broken:
                yield seen.broken[path], [(str(path), None, None)]
            else:
                pairs = zip(*next(found), strict=True)
                yield "", [(str(path), saved.classes[label], round(value, 6)) for label, value in pairs]


def predict_into(
    out: Path,
    saved: SavedClassifier,
    paths: Iterable[Path],
    device: torch.device,
    total: int,
    top: int = 1,
    progress: Progress | None = None,
) -> list[str]:
    """Write predictions as CSV or parquet, and return the files that cannot be read; these have a row without a class.

    What is done lies in a hidden file beside `out`, one line per image. The same classifier goes on from there, as far
    as the names of the images are the same.
    """
    if out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"predictions are written as .csv or .parquet; got {out.name}")
    arrow = _parquet() if out.suffix == ".parquet" else None
    mark = digest(saved.model.cpu().state_dict(), json.dumps([top, saved.classes]))[:12]
    journal, files, done, size = out.with_name(f".{out.name}.{mark}"), iter(paths), 0, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a+b") as kept:
        kept.seek(0)
        for line in kept:
            path = next(files, None)
            if path is None or _image_of(line) != str(path):
                files = itertools.chain([] if path is None else [path], files)
                break
            done, size = done + 1, size + len(line)
        kept.truncate(size)
        batches = classify_files(saved, files, device, done=done, total=total, progress=progress)
        for _, rows in predictions(saved, batches, top):
            kept.write(json.dumps(rows).encode() + b"\n")
        kept.seek(0)
        found = (row for line in kept for row in json.loads(line))
        broken = _write(out, iter(lambda: list(itertools.islice(found, ROWS)), []), arrow)
    journal.unlink()
    return broken


def _image_of(line: bytes) -> str | None:
    """Return the image of a line that was written whole."""
    try:
        return str(json.loads(line)[0][0]) if line.endswith(b"\n") else None
    except (ValueError, LookupError, TypeError):  # what a machine leaves that lost its power
        return None


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        sentence = "parquet needs pyarrow; install it with pip install pyarrow, or write a .csv file"
        raise ModuleNotFoundError(sentence, name=error.name) from error
    return pyarrow


def _write(out: Path, groups: Iterable[list[Row]], arrow: Any) -> list[str]:
    """Write groups of rows as one file, and return the images without a class."""
    broken = list[str]()
    with replacing(out) as file, ExitStack() as closing:
        if arrow is None:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            closing.callback(text.detach)
            table: Any = csv.writer(text, lineterminator="\n")
            table.writerow(COLUMNS)
        else:
            kinds = zip(COLUMNS, (arrow.string(), arrow.string(), arrow.float64()), strict=True)
            table = closing.enter_context(arrow.parquet.ParquetWriter(file, arrow.schema(list(kinds))))
        for group in groups:
            broken += [image for image, name, _ in group if name is None]
            images, *rest = zip(*group, strict=True)
            columns = [[os.fsencode(image).decode(errors="replace") for image in images], *rest]
            if arrow is None:
                table.writerows(zip(*columns, strict=True))
            else:
                table.write_table(arrow.table(columns, table.schema))
    return broken
