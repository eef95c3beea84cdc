"""CIFAR-10 and CIFAR-100 as one .npz each: uint8 arrays x_train (50000, 32, 32, 3), y_train, x_test, y_test.

Where the file is missing, torchvision downloads the official archive and checks it, and the file is made from it.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelhead.files import needing, plain_file, replacing, temporary_beside

Images = NDArray[np.uint8]
Labels = NDArray[np.uint8]

# In the order of the labels.
NAMES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "cifar100": (
        "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
        "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
        "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard "
        "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
        "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark "
        "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
        "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
    ).split(),
}
CLASSES = {name: len(names) for name, names in NAMES.items()}
IMAGES = {"train": 50000, "test": 10000}
MAX_BYTES = 2**28
# Mean colour of the training images, from 0 to 1: tells the official images from others.
MEANS = {"cifar10": (0.49140, 0.48216, 0.44653), "cifar100": (0.50708, 0.48655, 0.44092)}


@dataclass(frozen=True)
class ImageSet:
    """Images (n, 32, 32, 3) and labels (n,), for training and for testing."""

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels


def vision() -> Any:
    """Import torchvision, with its transforms and data sets."""
    with needing("reading images", "vision"):
        import torchvision.datasets
        import torchvision.transforms.v2
    return torchvision


def data_folder() -> Path:
    """Return where data sets are kept: $KERNELHEAD_DATA, or kernelhead in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kernelhead")
    return Path(os.environ.get("KERNELHEAD_DATA") or cache).expanduser()


def load_cifar(name: str) -> ImageSet:
    """Read and check a data set; download it where it is missing."""
    path = data_folder() / f"{name}.npz"
    if not path.exists():
        _download(name, path)
    try:
        with plain_file(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            unpacked = sum(each.file_size for each in file.zip.infolist())
            if unpacked > MAX_BYTES:
                raise ValueError(f"unpacked, it has {unpacked:,} bytes, and no such file has more than {MAX_BYTES:,}")
            arrays = {field.name: file[field.name] for field in fields(ImageSet)}
    except Exception as error:  # a damaged archive fails in many ways: zlib, zipfile, struct, ..
        raise ValueError(f"{path} is damaged ({error}); delete it and run 'kernelhead data get {name}'") from error
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or x.shape[1:] != (32, 32, 3):
            raise ValueError(f"{path}: x_{part} is {x.dtype} {x.shape}, not uint8 (n, 32, 32, 3)")
        if y.shape != x.shape[:1] or not np.issubdtype(y.dtype, np.integer):
            raise ValueError(f"{path}: y_{part} is {y.dtype} {y.shape}, not one integer per image for {len(x)} images")
        if len(y) and not (y.min() >= 0 and y.max() < CLASSES[name]):
            last = CLASSES[name] - 1
            raise ValueError(f"{path}: y_{part} has labels from {y.min()} to {y.max()}, {name} has 0 to {last}")
        arrays[f"y_{part}"] = y.astype(np.uint8)
    return ImageSet(**arrays)


def _download(name: str, path: Path) -> None:
    """Download the official archive with torchvision, which checks it, and keep it as .npz."""
    source = getattr(vision().datasets, name.upper())
    arrays: dict[str, NDArray[np.uint8]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path.with_suffix(".download")) as temporary:
        temporary.mkdir()
        try:
            for part in ("train", "test"):
                data = source(temporary, train=part == "train", download=True)
                arrays[f"x_{part}"], arrays[f"y_{part}"] = data.data, np.array(data.targets, dtype=np.uint8)
        except (OSError, RuntimeError) as error:  # no network, or a wrong checksum
            raise OSError(f"{name} could not be downloaded ({error}); put {path} there by hand") from error
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
