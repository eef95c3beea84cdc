"""Networks that end in features, by name."""

import re
from pathlib import Path

from kernelhead.backbones._base import Backbone, Classifier, count_parameters
from kernelhead.backbones.cifar_resnet import CifarResNet
from kernelhead.backbones.lenet import LeNet5

__all__ = ["Backbone", "CifarResNet", "Classifier", "LeNet5", "count_parameters", "create_backbone"]


def create_backbone(
    name: str,
    *,
    rectified: bool = False,
    kervolution: str | None = None,
    pretrained: bool = False,
    weights: str | Path | None = None,
) -> Backbone:
    """Make the backbone called `name`.

    Args:
        name: "cifar_resnet20" (or another depth 6n + 2), "lenet5", "timm/NAME", or the name of a torchvision network
            such as "resnet50".
        rectified: whether the ReLU before the features stays, where the network has one there.
        kervolution: None, "first" or "all", for CIFAR ResNets.
        pretrained: load the library's own weights, which downloads them.
        weights: a local safetensors file of weights instead.
    """
    if pretrained and weights is not None:
        raise ValueError("pretrained and weights exclude each other: choose the library's weights or your own file")
    small = re.fullmatch(r"cifar_resnet(\d+)", name)
    if small or name == "lenet5":
        if pretrained or weights is not None:
            raise ValueError(f"there are no pretrained weights for {name}")
        if small:
            return CifarResNet(int(small[1]), rectified=rectified, kervolution=kervolution)
    if kervolution is not None:
        raise ValueError(f"kervolution is for cifar_resnet backbones, not for {name}")
    if name == "lenet5":
        return LeNet5(rectified=rectified)
    return _from_library(name, rectified, pretrained, None if weights is None else Path(weights))


def _from_library(name: str, rectified: bool, pretrained: bool, weights: Path | None) -> Backbone:
    try:
        from kernelhead.backbones import pretrained as libraries

        if name.startswith("timm/"):
            import timm

            if not timm.is_model(name.removeprefix("timm/")):
                raise ValueError(f"timm has no network called {name.removeprefix('timm/')!r}")
            network = timm.create_model(name.removeprefix("timm/"), pretrained=pretrained)
        else:
            import torchvision

            if name not in torchvision.models.list_models(module=torchvision.models):
                raise ValueError(
                    f"unknown backbone {name!r}; choose cifar_resnetN, lenet5, timm/NAME or a classification network "
                    "of torchvision"
                )
            network = torchvision.models.get_model(name, weights="DEFAULT" if pretrained else None)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"backbone {name!r} needs {error.name}; 'pip install kernelhead[vision]' brings it", name=error.name
        ) from error
    if weights is not None:
        libraries.load_local(network, weights)
    if name.startswith("timm/"):
        return libraries.TimmBackbone(network)
    return libraries.TorchvisionBackbone(network, rectified=rectified)
