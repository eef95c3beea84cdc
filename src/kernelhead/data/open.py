"""Data sets by name, or folders of pictures, ready for training and testing on a device."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernelhead.backbones import Input
from kernelhead.data import large
from kernelhead.data.cifar import CLASSES, NAMES, load_cifar
from kernelhead.data.folder import Split, open_folder
from kernelhead.data.images import Images
from kernelhead.data.resident import ResidentImages, channel_statistics
from kernelhead.data.streamed import StreamedImages


@dataclass(frozen=True)
class Opened:
    """Images for training and for testing, the names of the classes, and how pictures become input of a network."""

    train: Images
    test: Images
    classes: list[str]
    input: Input
    left_out: list[str]

    def keep_decoded(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Decode large images once, as far as the device has room for them: for who sees them many times."""
        for images in (self.train, self.test):
            if isinstance(images, StreamedImages):
                images.keep_decoded(progress=progress)


def open_data(
    data: str,
    expected: Input,
    device: torch.device,
    *,
    short_side: int = large.SHORT_SIDE,
    holdout: float = 0.2,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Opened:
    """Open a data set by its name, a folder of class folders, or a packed file.

    `expected` says what the network expects of large images. CIFAR brings its own mean and deviation.
    """
    if data in CLASSES:
        return _open_cifar(data, device)
    if data in large.SETS:
        packed = large.get(data, short_side, progress)
        train, test = (Split(packed[part], torch.arange(len(packed[part]))) for part in large.SPLITS)
        classes = packed["train"].classes
    else:
        train, test, classes = open_folder(
            _existing(data), short_side=short_side, holdout=holdout, seed=seed, progress=progress
        )
        _need_every_class(data, train, classes)
    return Opened(
        stream(train, expected, device, workers),
        stream(test, expected, device, workers),
        classes,
        expected,
        sorted({*train.images.left_out, *test.images.left_out}),
    )


def open_for_testing(
    data: str,
    expected: Input,
    device: torch.device,
    *,
    short_side: int = large.SHORT_SIDE,
    margin: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Images, list[str], list[str]]:
    """The test images of a data set, the names of its classes, and of pictures left out.

    A folder without a part for testing, or a packed file, counts as a whole. `margin`: see `StreamedImages`.
    """
    if data in CLASSES:
        if expected.size != 32:
            size = f"{expected.size}x{expected.size}"
            raise ValueError(f"the images of {data} are 32x32, and the classifier takes {size}")
        return _open_cifar(data, device, expected).test, NAMES[data], []
    if data in large.SETS:
        packed = large.get(data, short_side, progress)["test"]
        test, classes = Split(packed, torch.arange(len(packed))), packed.classes
    else:
        train, test, classes = open_folder(_existing(data), short_side=short_side, progress=progress)
        if train.images is test.images:
            test = Split(test.images, torch.arange(len(test.images)))
    return stream(test, expected, device, margin=margin), classes, test.images.left_out


def stream(
    split: Split, expected: Input, device: torch.device, workers: int | None = None, margin: float | None = None
) -> StreamedImages:
    """Images of a split as a network expects them."""
    return StreamedImages(
        split.images,
        size=expected.size,
        mean=tuple(255 * value for value in expected.mean),
        std=tuple(255 * value for value in expected.std),
        device=device,
        workers=workers,
        subset=split.index,
        margin=margin,
    )


def _open_cifar(name: str, device: torch.device, expected: Input | None = None) -> Opened:
    images = load_cifar(name)
    if expected is None:
        mean, std = channel_statistics(images.x_train)
    else:
        mean, std = 255 * torch.tensor(expected.mean), 255 * torch.tensor(expected.std)
    train = ResidentImages(images.x_train, images.y_train, mean=mean, std=std, device=device)
    test = ResidentImages(images.x_test, images.y_test, mean=mean, std=std, device=device)
    own = Input(32, tuple((mean / 255).tolist()), tuple((std / 255).tolist()))
    return Opened(train, test, NAMES[name], own, [])


def _need_every_class(data: str, train: Split, classes: list[str]) -> None:
    """A packed file may name a class of which it has no image, which a folder cannot."""
    missing = set(range(len(classes))) - set(train.images.labels[train.index.numpy()].tolist())
    if missing:
        raise ValueError(f"{data} has no image of class {classes[min(missing)]!r} to train on; every class needs some")


def _existing(data: str) -> Path:
    path = Path(data).expanduser()
    if not path.exists():
        known = ", ".join([*CLASSES, *large.SETS])
        raise FileNotFoundError(f"there is no data set, folder or file {data!r}; the data sets are {known}")
    return path
