"""The networks of the tables, by name.

Each function below returns a whole network with a linear classifier, as `kernelhead train --backbone
kernelhead_lab.networks:cifar_resnet20` takes it. `build` makes the network and head of a `LabSpec` for the engine.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from kernelhead_lab.heads import create_lab_head
from kernelhead_lab.networks.base import Backbone, Classifier, count_parameters
from kernelhead_lab.networks.cifar_resnet import CifarResNet
from kernelhead_lab.networks.lenet import LeNet5
from kernelhead_lab.spec import LabSpec

__all__ = [
    "CIFAR_INPUT",
    "Backbone",
    "CifarResNet",
    "Classifier",
    "LeNet5",
    "build",
    "cifar_resnet8",
    "cifar_resnet14",
    "cifar_resnet20",
    "cifar_resnet32",
    "cifar_resnet44",
    "cifar_resnet56",
    "count_parameters",
    "create_backbone",
    "lenet5",
]

# Side of the images, mean and standard deviation of each channel (CIFAR-10's).
CIFAR_INPUT = (32, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
BACKBONES: dict[str, Any] = {
    **{f"cifar_resnet{depth}": partial(CifarResNet, depth) for depth in (8, 14, 20, 32, 44, 56)},
    "lenet5": LeNet5,
}


def cifar_resnet8(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a ResNet-8; `options` are those of `CifarResNet`."""
    return _whole("cifar_resnet8", num_classes, options)


def cifar_resnet14(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a ResNet-14; `options` are those of `CifarResNet`."""
    return _whole("cifar_resnet14", num_classes, options)


def cifar_resnet20(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a ResNet-20; `options` are those of `CifarResNet`."""
    return _whole("cifar_resnet20", num_classes, options)


def cifar_resnet32(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a ResNet-32; `options` are those of `CifarResNet`."""
    return _whole("cifar_resnet32", num_classes, options)


def cifar_resnet44(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a ResNet-44; `options` are those of `CifarResNet`."""
    return _whole("cifar_resnet44", num_classes, options)


def cifar_resnet56(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a ResNet-56; `options` are those of `CifarResNet`."""
    return _whole("cifar_resnet56", num_classes, options)


def lenet5(num_classes: int = 10, **options: Any) -> nn.Module:
    """Return a LeNet-5; `options` are those of `LeNet5`."""
    return _whole("lenet5", num_classes, options)


def _whole(name: str, num_classes: int, options: dict[str, Any]) -> nn.Module:
    """The network with its ReLU before the features, which `kernelize` removes unless it is told to keep it."""
    backbone = BACKBONES[name](**{"rectified": True, **options})
    network = nn.Sequential()
    network.add_module("backbone", backbone)
    network.add_module("fc", nn.Linear(backbone.num_features, num_classes))
    network.expected_input = CIFAR_INPUT  # type: ignore[assignment]
    return network


def create_backbone(spec: LabSpec) -> Backbone:
    """Make the backbone of a spec: `kernelhead_lab.networks:NAME`, or `torchvision/NAME` of a ResNet.

    `spec.backbone_options` are `kervolution` of a CIFAR ResNet, or `stride_first` of torchvision's.
    """
    module, _, name = spec.backbone.partition(":")
    options = {"rectified": spec.rectified, **spec.backbone_options}
    if module == __name__ and name in BACKBONES:
        if spec.pretrained or spec.weights:
            raise ValueError(f"{spec.backbone} has no pretrained weights; leave out pretrained and weights")
        backbone: Backbone = BACKBONES[name](**options)
        return backbone
    if spec.backbone.startswith("torchvision/"):
        from kernelhead_lab.networks.imagenet import ImageNetResNet  # imports torchvision

        return ImageNetResNet(spec.backbone, pretrained=bool(spec.pretrained), weights=spec.weights, **options)
    known = ", ".join(f"{__name__}:{each}" for each in BACKBONES)
    raise ValueError(f"unknown backbone {spec.backbone!r}; choose {known}, or a ResNet as torchvision/resnet50")


def build(spec: LabSpec, num_classes: int) -> Classifier:
    """Make the network of a spec at its start, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        backbone = create_backbone(spec)
        return Classifier(backbone, create_lab_head(spec.head, backbone.num_features, num_classes, **spec.head_options))
