"""Oxford-IIIT Pets and Stanford Cars, each split packed into one file.

The raw images are read where `torchvision.datasets` keeps them, below the data folder. Pets are downloaded where they
are missing; Stanford Cars is no longer offered by its authors, and has to be put there. torchvision's classes decode an
image per call and hide the paths of files, which packing needs.
"""

from dataclasses import dataclass
from pathlib import Path

from kernelhead.finetune.cifar import data_folder
from kernelhead_lab.data.packed import PackedImages, Progress, Source, pack, progress_of

# "he" resizes the short side to 480 pixels at most (see `streamed`): fewer would blur some of its crops. "imagenet"
# takes boxes of a quarter of an image or more, and tests at up to 320 pixels.
SHORT_SIDES = {"he": 480, "imagenet": 320}
QUALITIES = {"he": 95, "imagenet": 86}
SPLITS = ("train", "test")


@dataclass(frozen=True)
class LargeSet:
    """The folder of a data set's raw images, and the files that must be there."""

    folder: str
    files: tuple[str, ...]


SETS = {
    "pets": LargeSet("oxford-iiit-pet", ("images", "annotations/trainval.txt", "annotations/test.txt")),
    "cars": LargeSet(
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


def packed_path(name: str, split: str, augment: str = "he") -> Path:
    """Return the packed file of a split for an augmentation, whether it is there or not."""
    return data_folder() / f"{name}-{split}-{SHORT_SIDES[augment]}.safetensors"


def get(name: str, progress: Progress | None = None, *, augment: str = "he") -> dict[str, PackedImages]:
    """Return both splits of a data set, packed, and downloaded where they are missing."""
    result = {}
    for split in SPLITS:
        path = packed_path(name, split, augment)
        if path.exists():
            result[split] = PackedImages(path)
            continue
        _find_raw(name)
        sources, classes = read_raw(name, split)
        report = progress_of(f"packing {name} {split}", progress)
        result[split] = pack(
            sources, classes, path, short_side=SHORT_SIDES[augment], quality=QUALITIES[augment], progress=report
        )
    return result


def read_raw(name: str, split: str) -> tuple[list[Source], list[str]]:
    """Return the images of a split in the official order, and the names of all classes in the order of their labels."""
    folder = data_folder() / SETS[name].folder
    try:
        return _read_pets(folder, split) if name == "pets" else _read_cars(folder, split)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # text and .mat files that are cut or are something else fail in many ways
        raise ValueError(f"the annotations in {folder} cannot be read ({error}); get them again") from error


def _find_raw(name: str) -> None:
    """See that the raw images are there, downloading them where that is possible."""
    official, root = SETS[name], data_folder()
    missing = [file for file in official.files if not (root / official.folder / file).exists()]
    if not missing:
        return
    layout = f"{root / official.folder} needs {', '.join(official.files)}, and has no {', '.join(missing)}"
    if name == "cars":
        raise FileNotFoundError(f"Stanford Cars is no longer offered for download; put it there: {layout}")
    try:
        from torchvision.datasets import OxfordIIITPet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"downloading {name} needs torchvision; install it with pip install 'kernelhead[vision]'", name=error.name
        ) from error
    try:
        root.mkdir(parents=True, exist_ok=True)
        OxfordIIITPet(root, download=True)
    except (OSError, RuntimeError) as error:  # no network, or a wrong checksum
        raise OSError(f"{name} could not be downloaded ({error}); put it there: {layout}") from error


def _read_pets(folder: Path, split: str) -> tuple[list[Source], list[str]]:
    listed = {}
    for part, file in (("train", "trainval.txt"), ("test", "test.txt")):
        lines = (folder / "annotations" / file).read_text().splitlines()
        listed[part] = [(line.split()[0], int(line.split()[1]) - 1) for line in lines if line.strip()]
    names = {label: image.rsplit("_", 1)[0] for rows in listed.values() for image, label in rows}
    classes = [names[label].replace("_", " ").title() for label in range(len(names))]
    return [Source(folder / "images" / f"{image}.jpg", label) for image, label in listed[split]], classes


def _read_cars(folder: Path, split: str) -> tuple[list[Source], list[str]]:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading Stanford Cars needs scipy; install it with pip install 'kernelhead[vision]'", name=error.name
        ) from error
    file = "devkit/cars_train_annos.mat" if split == "train" else "cars_test_annos_withlabels.mat"
    rows = loadmat(folder / file, squeeze_me=True)["annotations"]
    classes = loadmat(folder / "devkit" / "cars_meta.mat", squeeze_me=True)["class_names"]
    images = folder / f"cars_{split}"
    return [Source(images / str(row["fname"]), int(row["class"]) - 1) for row in rows], [str(c) for c in classes]
