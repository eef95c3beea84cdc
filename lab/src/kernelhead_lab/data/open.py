"""Data sets by name, ready for training and testing on a device."""

from dataclasses import dataclass

import torch

from kernelhead.finetune.backbones import Input
from kernelhead.finetune.cifar import CLASSES, NAMES, load_cifar
from kernelhead_lab.data import large
from kernelhead_lab.data.images import Images
from kernelhead_lab.data.packed import Progress
from kernelhead_lab.data.resident import ResidentImages, channel_statistics
from kernelhead_lab.data.streamed import IMAGENET, StreamedImages


@dataclass(frozen=True)
class Opened:
    """Images for training and for testing, the names of the classes, and how images become input of a network."""

    train: Images
    test: Images
    classes: list[str]
    input: Input
    left_out: list[str]

    def keep_decoded(self, progress: Progress | None = None) -> None:
        """Decode large images once, as far as the device has room for them."""
        for images in (self.train, self.test):
            if isinstance(images, StreamedImages):
                images.keep_decoded(progress=progress)


def open_data(data: str, device: torch.device, *, augment: str = "he", progress: Progress | None = None) -> Opened:
    """Open cifar10, cifar100, pets or cars.

    CIFAR brings its own mean and deviation, and its own augmentation; the others are images of 224 pixels as networks
    of ImageNet expect them, augmented as `augment` says (see `streamed`).
    """
    if data in CLASSES:
        return _open_cifar(data, device)
    if data not in large.SETS:
        raise ValueError(f"unknown data set {data!r}; choose one of {', '.join([*CLASSES, *large.SETS])}")
    packed = large.get(data, progress, augment=augment)
    train, test = (StreamedImages(packed[split], augment=augment, device=device) for split in large.SPLITS)
    left_out = sorted({*packed["train"].left_out, *packed["test"].left_out})
    return Opened(train, test, packed["train"].classes, IMAGENET, left_out)


def _open_cifar(name: str, device: torch.device) -> Opened:
    images = load_cifar(name)
    mean, std = channel_statistics(images.x_train)
    train = ResidentImages(images.x_train, images.y_train, mean=mean, std=std, device=device)
    test = ResidentImages(images.x_test, images.y_test, mean=mean, std=std, device=device)
    own = Input(32, tuple((mean / 255).tolist()), tuple((std / 255).tolist()))
    return Opened(train, test, NAMES[name], own, [])
