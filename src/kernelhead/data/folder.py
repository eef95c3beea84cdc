"""Any folder of class folders of pictures as data for training and testing."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelhead.data.cifar import data_folder
from kernelhead.data.packed import PackedImages, Progress, Source, find_images, pack, progress_of

TEST_FOLDERS = ("test", "val", "valid", "validation")
READING = 2  # how pictures are read: another number packs all folders again


@dataclass(frozen=True)
class Split:
    """Images for training or for testing: those of a packed file at `index` (n,)."""

    images: PackedImages
    index: Tensor


def open_folder(
    folder: Path, *, short_side: int, holdout: float = 0.2, seed: int = 0, progress: Progress | None = None
) -> tuple[Split, Split, list[str]]:
    """The training images, the test images and the names of the classes of a folder, or of a packed file.

    Folders `train` and `test` (or val, valid, validation, the first that is there) with the same classes are the two
    splits. Otherwise the share `holdout` of every class, chosen by `seed`, is for testing: at least one image, and
    not the last one.

    A folder is packed once, into the data folder, and again when its files change. Pictures that cannot be read are
    named in `left_out` of the packed images.
    """
    if folder.is_file():
        try:
            packed = PackedImages(folder)
        except ValueError as error:
            expected = "a folder of class folders of pictures, or a file that 'kernelhead data pack' made of one"
            raise ValueError(f"{error}; expected is {expected}") from error
        return _hold_out(packed, holdout, seed)
    test = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        return _hold_out(_pack_once(folder, folder.resolve().name, short_side, progress), holdout, seed)
    parts = [folder / "train", test]
    classes, others = (find_images(part)[1] for part in parts)
    if classes != others:
        odd = sorted(set(classes) ^ set(others))[0]
        place, other = parts if odd in classes else parts[::-1]
        raise ValueError(f"{place} has a class {odd!r} and {other} has not; both need the same class folders")
    splits = []
    for part in parts:
        packed = _pack_once(part, f"{folder.resolve().name}-{part.name}", short_side, progress)
        splits.append(Split(packed, torch.arange(len(packed))))
    return splits[0], splits[1], classes


def hold_out(labels: NDArray[np.int64], holdout: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices, ascending, of those to keep and those to hold out, a share `holdout` of every class."""
    if not 0 < holdout < 1:
        raise ValueError(f"the share to hold out is {holdout}; it has to lie between 0 and 1")
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(holdout * len(members))), len(members) - 1)
        held[members[:count]] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def _hold_out(packed: PackedImages, holdout: float, seed: int) -> tuple[Split, Split, list[str]]:
    kept, held = hold_out(packed.labels, holdout, seed)
    if not len(held):
        raise ValueError(f"{packed.path} has no class of two images or more, so none can be held out for testing")
    return Split(packed, kept), Split(packed, held), packed.classes


def _pack_once(folder: Path, name: str, short_side: int, progress: Progress | None) -> PackedImages:
    sources, classes = find_images(folder)
    if len(classes) < 2:
        raise ValueError(f"{folder} has one class folder only, {classes[0]!r}; a classifier needs two or more")
    plain_name = re.sub(r"[^\w.-]+", "-", name)
    path = data_folder() / "packed" / f"{plain_name}-{digest_of(folder, sources, short_side)}.safetensors"
    if path.exists():
        return PackedImages(path)
    report = progress_of(f"packing {folder}", progress)
    return pack(sources, classes, path, short_side=short_side, every_class=True, progress=report)


def digest_of(folder: Path, sources: list[Source], short_side: int) -> str:
    """Changes with the names, sizes or times of the files, with the short side, and with how pictures are read."""
    digest = hashlib.sha256(f"{READING} {short_side}\n".encode())
    for source in sources:
        stat = source.path.stat() if source.path.exists() else source.path.lstat()  # a link may lead nowhere
        digest.update(os.fsencode(f"{source.path.relative_to(folder)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]
