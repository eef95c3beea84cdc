"""Oxford-IIIT Pets and Stanford Cars, each split packed into one file.

The raw pictures are read where `torchvision.datasets` keeps them, below the data folder. Pets are downloaded where they
are missing; Stanford Cars is no longer offered by its authors, and has to be put there.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelhead.data.cifar import data_folder
from kernelhead.data.packed import PackedImages, Progress, Source, pack, progress_of, started_ahead

# The augmentation resizes the short side to 480 pixels at most (see `streamed`): packing to fewer would blur some of
# its crops, and more would hardly be seen. Nearly all pets are smaller than that and keep their bytes.
SHORT_SIDE = 480
SPLITS = ("train", "test")
NAMED = 3  # of the images left out, so many are named in a sentence


@dataclass(frozen=True)
class LargeSet:
    """A data set of large images: its size, and the folder of the raw pictures with the files that must be there."""

    num_classes: int
    images: dict[str, int]
    folder: str
    files: tuple[str, ...]


SETS = {
    "pets": LargeSet(
        37,
        {"train": 3680, "test": 3669},
        "oxford-iiit-pet",
        ("images", "annotations/trainval.txt", "annotations/test.txt"),
    ),
    "cars": LargeSet(
        196,
        {"train": 8144, "test": 8041},
        "stanford_cars",
        (
            "cars_train",
            "cars_test",
            "devkit/cars_meta.mat",
            "devkit/cars_train_annos.mat",
            "cars_test_annos_withlabels.mat",
        ),
    ),
}


def packed_path(name: str, split: str, short_side: int = SHORT_SIDE) -> Path:
    """The packed file of a split, whether it is there or not."""
    _known(name)
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    return data_folder() / f"{name}-{split}-{short_side}.safetensors"


def packed_files(name: str, split: str) -> list[Path]:
    """The packed files of a split that are there, of whatever short side; where there is none, the usual one."""
    usual = packed_path(name, split)
    return sorted(usual.parent.glob(f"{name}-{split}-*.safetensors")) or [usual]


def load(name: str, split: str, short_side: int = SHORT_SIDE) -> PackedImages:
    """Open a packed split."""
    path = packed_path(name, split, short_side)
    if not path.exists():
        option = "" if short_side == SHORT_SIDE else f" --short-side {short_side}"
        raise FileNotFoundError(f"there is no {path}; 'kernelhead data get {name}{option}' makes it")
    return PackedImages(path)


def get(name: str, short_side: int = SHORT_SIDE, progress: Progress | None = None) -> dict[str, PackedImages]:
    """Pack the splits of a data set that are not packed yet, after downloading it where it is missing."""
    result = {}
    for split in SPLITS:
        path = packed_path(name, split, short_side)
        if path.exists():
            result[split] = PackedImages(path)
            continue
        _find_raw(name)
        sources, classes = read_raw(name, split)
        report = progress_of(f"packing {name} {split}", progress)
        result[split] = pack(sources, classes, path, short_side=short_side, progress=report)
    return result


def read_raw(name: str, split: str) -> tuple[list[Source], list[str]]:
    """The pictures of a split in the official order, and the names of all classes in the order of their labels."""
    folder = data_folder() / SETS[name].folder
    try:
        return _read_pets(folder, split) if name == "pets" else _read_cars(folder, split)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # text and .mat files that are cut or are something else fail in many ways
        raise ValueError(f"the annotations in {folder} cannot be read ({error}); get them again") from error


def problems(
    name: str, short_side: int = SHORT_SIDE, *, decode: bool = False, progress: Progress | None = None
) -> list[str]:
    """What distinguishes a packed data set from the official one, a sentence each; nothing for a complete one.

    `decode` looks at every image too: whether it can be decoded.
    """
    official, found = _known(name), []
    for split in SPLITS:
        packed = load(name, split, short_side)
        if len(packed) != official.images[split]:
            found.append(f"{len(packed)} {split} images instead of {official.images[split]}")
        present = len(np.unique(packed.labels))
        if not present == len(packed.classes) == official.num_classes:
            found.append(
                f"{split} images of {present} classes, {len(packed.classes)} names of classes, "
                f"instead of {official.num_classes}"
            )
        if packed.left_out:
            names = [Path(path).name for path in packed.left_out]
            found.append(f"{len(names)} {split} images were left out, {_some(names)}")
        if decode:
            broken = _broken(packed, progress_of(f"decoding {name} {split}", progress))
            if broken:
                found.append(f"{len(broken)} {split} images cannot be decoded, {_some(broken)}")
    return found


def _known(name: str) -> LargeSet:
    if name not in SETS:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(SETS)}")
    return SETS[name]


def _find_raw(name: str) -> None:
    """See that the raw pictures are there, downloading them where that is possible."""
    official, root = SETS[name], data_folder()
    missing = [file for file in official.files if not (root / official.folder / file).exists()]
    if not missing:
        return
    layout = f"{root / official.folder} needs {', '.join(official.files)}, and has no {', '.join(missing)}"
    if name == "cars":
        raise FileNotFoundError(f"Stanford Cars is not offered for download any more: {layout}")
    try:
        from torchvision.datasets import OxfordIIITPet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"downloading {name} needs torchvision; pip install 'kernelhead[vision]' brings it", name=error.name
        ) from error
    try:
        root.mkdir(parents=True, exist_ok=True)
        OxfordIIITPet(root, download=True)
    except (OSError, RuntimeError) as error:  # no network, or a wrong checksum
        raise OSError(f"{name} could not be downloaded ({error}): {layout}") from error


def _read_pets(folder: Path, split: str) -> tuple[list[Source], list[str]]:
    listed = {}
    for part, file in (("train", "trainval.txt"), ("test", "test.txt")):
        lines = (folder / "annotations" / file).read_text().splitlines()
        listed[part] = [(line.split()[0], int(line.split()[1]) - 1) for line in lines if line.strip()]
    names = {label: picture.rsplit("_", 1)[0] for rows in listed.values() for picture, label in rows}
    classes = [names[label].replace("_", " ").title() for label in range(len(names))]
    return [Source(folder / "images" / f"{picture}.jpg", label) for picture, label in listed[split]], classes


def _read_cars(folder: Path, split: str) -> tuple[list[Source], list[str]]:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading Stanford Cars needs scipy; pip install 'kernelhead[vision]' brings it", name=error.name
        ) from error
    file = "devkit/cars_train_annos.mat" if split == "train" else "cars_test_annos_withlabels.mat"
    rows = loadmat(folder / file, squeeze_me=True)["annotations"]
    classes = loadmat(folder / "devkit" / "cars_meta.mat", squeeze_me=True)["class_names"]
    pictures = folder / f"cars_{split}"
    return [Source(pictures / str(row["fname"]), int(row["class"]) - 1) for row in rows], [str(c) for c in classes]


def _broken(packed: PackedImages, progress: Callable[[int, int], None] | None) -> list[str]:
    """The numbers of the images that cannot be decoded."""

    def readable(index: int) -> bool:
        try:
            packed.image(index)
        except ValueError:
            return False
        return True

    found = []
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        tasks = started_ahead(lambda index: pool.submit(readable, index), range(len(packed)), 4 * workers)
        for index, task in enumerate(tasks):
            if not task.result():
                found.append(f"number {index}")
            if progress is not None:
                progress(index + 1, len(packed))
    return found


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:NAMED])}{', ..' if len(names) > NAMED else ''}"
