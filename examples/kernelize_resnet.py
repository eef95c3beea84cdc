"""Train a ResNet-18 of torchvision with a kernel head on synthetic images of stripes, in a few seconds on a CPU.

python examples/kernelize_resnet.py
"""

import math

import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernelize, parameter_groups
from kernelhead.surgery import changes

CLASSES = 4


def stripes(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw noisy images (N, 3, 32, 32) of stripes in one of four directions, and the direction."""
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    angles = labels * math.pi / CLASSES
    phases = 2 * math.pi * torch.rand(samples, generator=generator)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = torch.cos(angles)[:, None, None] * x + torch.sin(angles)[:, None, None] * y
    waves = torch.sin(along + phases[:, None, None])
    return waves[:, None] + 0.5 * torch.randn(samples, 3, 32, 32, generator=generator), labels


def main() -> float:
    """Train, print, and return the accuracy in percent."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = kernelize(torchvision.models.resnet18(), CLASSES)
    print(changes(model))

    optimizer = torch.optim.SGD(parameter_groups(model, weight_decay=1e-4), lr=0.02, momentum=0.9)
    for step in range(12):
        images, labels = stripes(32, generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    images, labels = stripes(256, generator)
    with torch.no_grad():
        accuracy = 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.1f} % on new images")
    print("coefficients of the kernel:", [round(a, 3) for a in model.fc.alpha.tolist()])
    return accuracy


if __name__ == "__main__":
    main()
