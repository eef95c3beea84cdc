"""CIFAR-10 and CIFAR-100 as one .npz each: uint8 arrays x_train (50000, 32, 32, 3), y_train, x_test, y_test.

Where the file is missing, torchvision downloads the official archive, checks it, and the file is made from it.
"""

import io
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernelhead.results import write_bytes

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
# Mean of the training images, of 1: tells a complete and unharmed file from another (see `problems`).
MEANS = {"cifar10": (0.49140, 0.48216, 0.44653), "cifar100": (0.50708, 0.48655, 0.44092)}
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class ImageSet:
    """Images (n, 32, 32, 3) and labels (n,), for training and for testing."""

    name: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels

    @property
    def num_classes(self) -> int:
        return CLASSES[self.name]


def data_folder() -> Path:
    """Where data sets are kept: $KERNELHEAD_DATA, or kernelhead in the user's cache folder."""
    chosen = os.environ.get("KERNELHEAD_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kernelhead"


def cifar_path(name: str) -> Path:
    """The file of a data set, whether it is there or not."""
    if name not in CLASSES:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(CLASSES)}")
    return data_folder() / f"{name}.npz"


def load_cifar(name: str) -> ImageSet:
    """Read a data set, after downloading it where it is missing."""
    path = cifar_path(name)
    if not path.exists():
        download_cifar(name)
    return read_cifar(name, path)


def read_cifar(name: str, path: Path) -> ImageSet:
    """Read and check a .npz file of one data set."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ARRAYS}
    except KeyError as error:
        raise ValueError(f"{path} has no array {error.args[0].split()[0]}; it needs {', '.join(ARRAYS)}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no {path}; 'kernelhead data get {name}' makes it") from error
    except Exception as error:  # a damaged archive fails in many ways: zlib, zipfile, struct, ..
        raise ValueError(f"{path} is damaged ({error}); delete it and run 'kernelhead data get {name}'") from error
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (32, 32, 3):
            raise ValueError(f"{path}: x_{part} is {x.dtype} {x.shape}, not uint8 (n, 32, 32, 3)")
        if y.shape != x.shape[:1] or not np.issubdtype(y.dtype, np.integer):
            raise ValueError(f"{path}: y_{part} is {y.dtype} {y.shape}, not one integer for each of {len(x)} images")
        if len(y) and not (y.min() >= 0 and y.max() < CLASSES[name]):
            raise ValueError(
                f"{path}: y_{part} has labels from {y.min()} to {y.max()}, {name} has 0 to {CLASSES[name] - 1}"
            )
        arrays[f"y_{part}"] = y.astype(np.uint8)
    return ImageSet(name, **arrays)


def download_cifar(name: str) -> Path:
    """Download the official archive through torchvision, with its checksum, and keep it as .npz."""
    path = cifar_path(name)
    try:
        from torchvision import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"downloading {name} needs torchvision; pip install 'kernelhead[vision]' brings it", name=error.name
        ) from error
    source = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    arrays: dict[str, NDArray[np.uint8]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        for part in ("train", "test"):
            try:
                data = source(temporary, train=part == "train", download=True)
            except (OSError, RuntimeError) as error:  # no network, or a wrong checksum
                raise OSError(f"{name} could not be downloaded ({error}); {path} can be put there by hand") from error
            arrays[f"x_{part}"], arrays[f"y_{part}"] = data.data, np.array(data.targets, dtype=np.uint8)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_bytes(path, content.getvalue())
    return path


def problems(images: ImageSet) -> list[str]:
    """What distinguishes a data set from the official one, a sentence each; nothing for a complete, unharmed one."""
    found = []
    for part, expected in IMAGES.items():
        labels = images.y_train if part == "train" else images.y_test
        if len(labels) != expected:
            found.append(f"{len(labels)} {part} images instead of {expected}")
        each = expected // images.num_classes
        counts = np.bincount(labels, minlength=images.num_classes)
        if (counts != each).any():
            found.append(f"{counts.min()} to {counts.max()} {part} images a class instead of {each}")
    mean = images.x_train.mean((0, 1, 2)) / 255 if len(images.x_train) else np.full(3, np.nan)
    if not np.allclose(mean, MEANS[images.name], atol=1e-4):
        found.append(
            f"the mean colour of the training images is {mean.round(4).tolist()}, not {list(MEANS[images.name])}"
        )
    return found
