"""Which images a data set has: CIFAR, Pets and Cars by their names, or any folder of class folders."""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelhead.files import needing, plain_file
from kernelhead.finetune.cifar import CLASSES, IMAGES, NAMES, data_folder, load_cifar, vision
from kernelhead.finetune.distributed import is_first
from kernelhead.finetune.schedule import mix

DATA_SETS = {  # classes, training images, test images
    **{name: (classes, *IMAGES.values()) for name, classes in CLASSES.items()},
    "pets": (37, 3680, 3669),
    "cars": (196, 8144, 8041),
}
FOLDERS = {"pets": "oxford-iiit-pet", "cars": "stanford_cars"}  # where torchvision's data sets keep their files
FILES = {"pets": "images and annotations", "cars": "cars_train, cars_test, devkit and cars_test_annos_withlabels.mat"}
VALIDATION_FOLDERS = ("val", "valid", "validation")
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")  # others may start programs to be read
MAX_BYTES, MAX_RATIO = 2**27, 50  # of a decoded image: in all, or as a multiple of its file
LONGEST = 8  # times the short side; more of an image is cut off

Source = Path | NDArray[np.uint8]
Labelled = tuple[Source, int]


@dataclass(frozen=True)
class Listing:
    """Images with labels for training, validation and testing, and the names of the classes in the order of the labels.

    Files are named by their paths from `root`.
    """

    train: Sequence[Labelled] = ()
    val: Sequence[Labelled] = ()
    test: Sequence[Labelled] = ()
    classes: Sequence[str] = ()
    root: Path = Path()


def list_images(data: str, *, val: float = 0.0, test: float | None = 0.2, skip_empty: bool = False) -> Listing:
    """List the images of a data set, or of a folder of class folders.

    Folders `train`, `test` and `val` (or valid, validation) are the parts; without `test`, `val` takes its part. What
    has no folder is a share of every class, at least one image and not all of them; file names decide which.
    With test=None, all images of a folder without parts are for testing.
    """
    check_data(data)
    root, validation, share = data_root(data), list[Labelled](), val
    train_folder, *test_folders = (root / name for name in ("train", "test", *VALIDATION_FOLDERS))
    test_folders = [folder for folder in test_folders if folder.is_dir()]
    train: Sequence[Labelled]
    others: Sequence[Labelled]
    if data in CLASSES:
        cifar, classes = load_cifar(data), NAMES[data]
        train = list(zip(cifar.x_train, cifar.y_train.tolist(), strict=True))
        others = list(zip(cifar.x_test, cifar.y_test.tolist(), strict=True))
    elif data in FOLDERS:
        train, others, classes = _official(data, root)
    elif test_folders and train_folder.is_dir():
        train, classes = _class_folders(train_folder, skip_empty)
        parts = []
        for folder in test_folders[:2]:
            images, known = _class_folders(folder, skip_empty, fewest=1)
            odd = sorted(set(known) - set(classes) if skip_empty else set(known) ^ set(classes))
            if odd:
                both = f"{train_folder} and {folder}"
                raise ValueError(f"only one of {both} has a class {odd[0]!r}; give both one folder")
            parts.append([(path, classes.index(known[label])) for path, label in images])
        others, *rest = parts
        validation = rest[0] if rest and test_folders[0].name == "test" else validation
    else:
        found, classes = _class_folders(root, skip_empty)
        if test is None:
            return Listing(test=found, classes=classes, root=root)
        train, others = _held_out(found, test, root)
        share = val / (1 - test)
        if not others:
            raise ValueError(f"{root} has one image per class, so none can be held out for testing; add images")
    if share and not validation:
        train, validation = _held_out(train, share, root)
    return Listing(train, validation, others, classes, root)


def _held_out(images: Sequence[Labelled], share: float, root: Path) -> tuple[list[Labelled], list[Labelled]]:
    """Split images in two: the second part has a share of every class, at least one image and not all of them."""
    by_class: dict[int, list[int]] = {}
    for index, (_, label) in enumerate(images):
        by_class.setdefault(label, []).append(index)
    held: set[int] = set()
    for members in by_class.values():
        members.sort(key=lambda index: mix(name_of(images[index][0], index, root)))
        held.update(members[: min(max(1, round(share * len(members))), len(members) - 1)])
    parts = ([each for index, each in enumerate(images) if (index in held) == part] for part in (False, True))
    return next(parts), next(parts)


def name_of(source: Source, index: int, root: Path) -> str:
    """Return the path of a file from `root`, or as it is where it lies elsewhere; the index of an image in memory."""
    if not isinstance(source, Path):
        return str(index)
    return source.relative_to(root).as_posix() if source.is_relative_to(root) else str(source)


def data_path(name: str) -> Path:
    """Return the file or folder of a data set, whether it is there or not."""
    return data_folder() / FOLDERS.get(name, f"{name}.npz")


def data_root(data: str) -> Path:
    """Return the folder that the names of a data set's files start from."""
    return data_path(data) if data in FOLDERS else Path(data).expanduser()


def check_data(data: str) -> None:
    """Refuse what is neither the name of a data set nor a folder."""
    if data not in DATA_SETS and not Path(data).expanduser().is_dir():
        raise ValueError(f"there is no data set or folder {data!r}; the data sets are {', '.join(DATA_SETS)}")


def find_images(folder: Path) -> Iterator[Path]:
    """Yield the image files in a folder and its subfolders, sorted. Names that begin with a dot are left out."""
    with os.scandir(folder) as inside:  # one folder at a time: there may be a million files
        names = sorted((each.name, each.is_dir(follow_symlinks=False)) for each in inside if each.name[0] != ".")
    for name, is_folder in names:
        if is_folder:
            yield from find_images(folder / name)
        elif (folder / name).suffix.lower() in SUFFIXES:
            yield folder / name


def expand(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files as they are named, and the images in folders."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        inside = find_images(path) if path.is_dir() else iter([path])
        first = next(inside, None)
        if first is None:
            raise ValueError(f"{path} has no images ({', '.join(sorted(SUFFIXES))})")
        yield first
        yield from inside


def read_image(source: Source, short_side: int | None = None) -> Tensor:
    """Read an image as uint8 (3, H, W): upright, in RGB on white, its short side no longer than `short_side`."""
    if isinstance(source, np.ndarray):
        return torch.from_numpy(source).permute(2, 0, 1)
    with needing("reading images", "vision"):
        from PIL import Image, ImageOps
    try:
        with Image.open(plain_file(source), formats=FORMATS) as opened:
            image: Image.Image = opened
            if short_side is not None and min(image.size) > short_side:
                # A JPEG decoder can shrink an image while it decodes; twice the wanted size keeps the detail.
                width, height = (2 * side * short_side // min(image.size) + 1 for side in image.size)
                image.draft(None, (width, height))
            size = image.width * image.height * max(3, len(image.getbands()))
            if size > max(MAX_BYTES, MAX_RATIO * source.stat().st_size):
                raise ValueError(f"it would take {size / 1e6:,.0f} MB; make it smaller")
            deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))  # 16 bits
            if image.mode[0] in "IF" and not deep:
                raise ValueError(f"its pixels have the mode {image.mode}, and nothing says which value is white")
            ImageOps.exif_transpose(image, in_place=True)
            if deep:  # some versions of Pillow cut these at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if "transparency" in image.info or image.mode[-1] in "Aa":  # what it hides may have any colour
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            image = image.convert("RGB")
            width, height = image.size
            long = LONGEST * min(width, height)
            if max(width, height) > long:
                image = ImageOps.fit(image, (min(width, long), min(height, long)))
            if short_side is not None and min(image.size) > short_side:
                width, height = (max(1, round(side * short_side / min(image.size))) for side in image.size)
                image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
            pixels = np.array(image)
    except Exception as error:  # damaged files fail in many ways: OSError, SyntaxError, struct.error, ..
        raise ValueError(f"{source} is not a readable image ({error})") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _class_folders(folder: Path, skip_empty: bool, fewest: int = 2) -> tuple[list[Labelled], list[str]]:
    """List the images in a folder of class folders, and the names of the classes."""
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    images = {name: list(find_images(folder / name)) for name in names}
    classes = [name for name in names if images[name]]
    if not classes:
        raise ValueError(f"{folder} has no images in class folders; it should look like {folder}/cat/1.jpg")
    empty = [name for name in names if not images[name]]
    if empty and not skip_empty:
        raise ValueError(f"{folder / empty[0]} has no images; add some, or leave such classes out with --skip-empty")
    if empty and is_first():
        warnings.warn(f"class folders without images are skipped in {folder}: {', '.join(empty)}", stacklevel=3)
    if len(classes) < fewest:
        raise ValueError(f"{folder} has the class folder {classes[0]!r} alone; a classifier needs two or more")
    return [(path, label) for label, name in enumerate(classes) for path in images[name]], classes


def _official(data: str, folder: Path) -> tuple[list[Labelled], list[Labelled], list[str]]:
    """List the images of Pets or Cars as torchvision does, whose items are decoded images without their files."""
    datasets = vision().datasets
    try:
        if data == "pets":
            sets = [datasets.OxfordIIITPet(folder.parent, split, download=True) for split in ("trainval", "test")]
            train, test = (list(zip(each._images, each._labels, strict=True)) for each in sets)
        else:
            sets = [datasets.StanfordCars(folder.parent, split) for split in ("train", "test")]
            train, test = ([(Path(path), int(label)) for path, label in each._samples] for each in sets)
    except (OSError, RuntimeError) as error:  # no network, a wrong checksum, a missing file
        raise OSError(f"{data} could not be opened or downloaded ({error}); put {FILES[data]} into {folder}") from error
    except Exception as error:  # text and .mat files that are cut or are something else fail in many ways
        raise ValueError(f"the annotations of {data} in {folder} are damaged ({error})") from error
    return train, test, sets[0].classes
