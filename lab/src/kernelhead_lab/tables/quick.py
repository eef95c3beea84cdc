"""Small made-up data instead of a data set, to see whether a table runs at all."""

from dataclasses import replace

import numpy as np
import torch

from kernelhead.finetune.backbones import Input
from kernelhead.finetune.cifar import NAMES
from kernelhead_lab.data.images import Images
from kernelhead_lab.data.large import SETS
from kernelhead_lab.data.open import Opened
from kernelhead_lab.data.resident import ResidentImages, channel_statistics
from kernelhead_lab.spec import LabSpec

TRAIN, TEST, SIZE = 64, 40, 32
PRESENT = 8  # of the classes, however many there are


def quick_spec(spec: LabSpec) -> LabSpec:
    """Return a spec whose network is small and not pretrained: second-order pooling of 2048 features takes its time."""
    if not spec.pretrained:
        return spec
    return replace(spec, backbone="torchvision/resnet18", pretrained=False, image_size=SIZE)


def open_quick(name: str, device: torch.device) -> Opened:
    """Return images of 32x32 pixels, noise around a colour for each class, of the first eight classes alone."""
    if name in NAMES:
        classes = NAMES[name]
    elif name in SETS:
        classes = [f"class {number}" for number in range(PRESENT)]  # second-order pooling is vast with 196
    else:
        raise ValueError(f"there are no quick data for {name!r}; choose one of {', '.join([*NAMES, *SETS])}")
    rng = np.random.default_rng(len(classes))
    colours = rng.integers(40, 216, size=(PRESENT, 3))

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % PRESENT
        noise = rng.integers(-40, 41, size=(count, SIZE, SIZE, 3))
        return (colours[labels][:, None, None] + noise).clip(0, 255).astype(np.uint8), labels.astype(np.uint8)

    x_train, y_train = images(TRAIN)
    mean, std = channel_statistics(x_train)

    def resident(x: np.ndarray, y: np.ndarray) -> Images:
        return ResidentImages(x, y, mean=mean, std=std, device=device)

    expected = Input(SIZE, tuple((mean / 255).tolist()), tuple((std / 255).tolist()))
    return Opened(resident(x_train, y_train), resident(*images(TEST)), classes, expected, [])
