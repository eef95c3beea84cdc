"""Handwritten digits of scikit-learn as class folders, and a small network for them.

    python examples/digits.py FOLDER
    kernelhead train --data FOLDER --backbone examples.digits:network --head linear --head landmarks

It writes 1,797 images of 8 x 8 pixels, one folder per class. `make demo` runs both commands.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """Four convolutions with BatchNorm and ReLU, an average over positions, and a linear layer."""

    expected_input = (8, (0.3, 0.3, 0.3), (0.38, 0.38, 0.38))  # side, mean and deviation of the images

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((3, width, 1), (width, width, 2), (width, 2 * width, 1), (2 * width, 64, 2)):
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.flatten(self.pool(self.features(images)), 1))
        return logits


def network() -> Network:
    """Return the network; --backbone examples.digits:network names this function."""
    return Network()


def write_images(folder: Path) -> int:
    """Write the digits as PNG files into folders 0 to 9, and return how many there are."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype("uint8")).save(place / f"{index:04d}.png")
    return len(digits.images)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "digits")
    print(f"{write_images(target):,} images written to {target}")
