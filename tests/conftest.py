"""Shared by the tests of the library: a folder of images, networks that are quick on them, a group of processes."""

import sys

import numpy as np
import pytest
import torch

IMAGE_NETWORKS = """
from torch import nn


class Tiny(nn.Module):
    expected_input = (16, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))

    def __init__(self, dropout=0.0, norm=nn.BatchNorm2d):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), norm(8), nn.GELU(), nn.Conv2d(8, 12, 3))
        self.bn, self.drop = norm(12), nn.Dropout(dropout)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, 5)

    def forward(self, images):
        return self.fc(self.pool(self.drop(self.bn(self.features(images)))).flatten(1))


def tiny():
    return Tiny()


def dropped():
    return Tiny(dropout=0.3)


def grouped():
    return Tiny(norm=lambda channels: nn.GroupNorm(2, channels))


class Exact(Tiny):
    def forward(self, images):
        return super().forward(images.double())


def exact():
    return Exact().double()
"""
COLOURS = {"blue": (60, 60, 170), "green": (60, 170, 60), "red": (170, 60, 60)}


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """A folder to work in: `images` has a class folder of 20 images per colour; `tiny_networks` can be imported."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("colours")
    random = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / "images" / name).mkdir(parents=True)
        for index in range(20):
            pixels = np.array(colour) + random.integers(-60, 60, size=(20 + index % 3, 20, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / name / f"{index}.png")
    (folder / "tiny_networks.py").write_text(IMAGE_NETWORKS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
