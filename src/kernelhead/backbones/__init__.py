"""Networks that end in features, by name."""

import re
from dataclasses import dataclass
from pathlib import Path

from kernelhead.backbones._base import Backbone, Classifier, count_parameters
from kernelhead.backbones.cifar_resnet import CifarResNet
from kernelhead.backbones.lenet import LeNet5

__all__ = [
    "Backbone",
    "CifarResNet",
    "Classifier",
    "Input",
    "LeNet5",
    "count_parameters",
    "create_backbone",
    "expected_input",
    "is_small",
]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Input:
    """The images that a network is made for: their side in pixels, mean and deviation of each channel, of 1."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def is_small(name: str) -> bool:
    """Whether a backbone is one of our own, for 32x32 images, which have no pretrained weights."""
    return name == "lenet5" or re.fullmatch(r"cifar_resnet\d+", name) is not None


def expected_input(name: str) -> Input:
    """What a large network expects: timm's own word for its networks, what is usual on ImageNet for torchvision's."""
    if name.startswith("timm/"):
        try:
            import timm

            known = timm.get_pretrained_cfg(name.removeprefix("timm/"), allow_unregistered=False)
        except ModuleNotFoundError as error:
            raise _missing(name, error) from error
        except RuntimeError:  # a network without a pretrained configuration; an unknown name fails when it is made
            known = None
        if known is not None:
            return Input(known.input_size[-1], tuple(known.mean), tuple(known.std))
    return Input(224, IMAGENET_MEAN, IMAGENET_STD)


def create_backbone(
    name: str,
    *,
    rectified: bool = False,
    kervolution: str | None = None,
    pretrained: bool = False,
    weights: str | Path | None = None,
    stride_first: bool = False,
) -> Backbone:
    """Make the backbone called `name`.

    Args:
        name: "cifar_resnet20" (or another depth 6n + 2), "lenet5", "timm/NAME", or the name of a torchvision network
            such as "resnet50".
        rectified: whether the ReLU before the features stays, where the network has one there.
        kervolution: None, "first" or "all", for CIFAR ResNets.
        pretrained: load the library's own weights, which downloads them.
        weights: a local safetensors file of weights instead.
        stride_first: whether the stride of a torchvision bottleneck sits in its first 1x1 convolution, as in ResNet v1.
            A weights file that says so sets it.
    """
    if pretrained and weights is not None:
        raise ValueError("pretrained and weights exclude each other: choose the library's weights or your own file")
    if is_small(name) and (pretrained or weights is not None):
        raise ValueError(f"there are no pretrained weights for {name}")
    if is_small(name) and name != "lenet5":
        return CifarResNet(int(name.removeprefix("cifar_resnet")), rectified=rectified, kervolution=kervolution)
    if kervolution is not None:
        raise ValueError(f"kervolution is for cifar_resnet backbones, not for {name}")
    if name == "lenet5":
        return LeNet5(rectified=rectified)
    return _from_library(name, rectified, pretrained, None if weights is None else Path(weights), stride_first)


def _missing(name: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    sentence = f"backbone {name!r} needs {error.name}; pip install 'kernelhead[vision]' brings it"
    return ModuleNotFoundError(sentence, name=error.name)


def _from_library(name: str, rectified: bool, pretrained: bool, weights: Path | None, stride_first: bool) -> Backbone:
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
        raise _missing(name, error) from error
    except OSError as error:  # urllib's and the hub's errors are among them
        raise OSError(
            f"the pretrained weights of {name} could not be downloaded ({error}); give a local file of weights, "
            "or train without pretrained weights"
        ) from error
    if weights is not None:
        stride_first = libraries.load_local(network, weights) or stride_first
    if name.startswith("timm/"):
        return libraries.TimmBackbone(network)
    if stride_first:
        libraries.move_stride(network)
    backbone = libraries.TorchvisionBackbone(network, rectified=rectified)
    backbone.stride_first = stride_first
    return backbone
