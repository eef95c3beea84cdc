"""Backbones: networks that end in features."""

import torch
from torch import Tensor, nn

from kernelhead.heads import Head


class Backbone(nn.Module):
    """A network that gives a feature map, and by averaging it over spatial positions a feature vector.

    A subclass sets `num_features` (D) and defines `feature_map`.
    """

    num_features: int
    stride_first = False
    """Whether bottlenecks have their stride in the first 1x1 convolution: an option with which to make it again."""

    def feature_map(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> a map (N, D, h, w)."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> features (N, D)."""
        return self.feature_map(images).mean((2, 3))


class Classifier(nn.Module):
    """A backbone and a head. A head that pools by itself (`head.pools`) is given the feature map."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> logits (N, C)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> what the head takes."""
        features: Tensor = self.backbone.feature_map(images) if self.head.pools else self.backbone(images)
        return features


def initialize(module: nn.Module) -> None:
    """Start convolutions as He et al. do; the rest keeps PyTorch's own start."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")


def count_parameters(module: nn.Module) -> int:
    """Count the numbers that training changes, each once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def rectify(features: Tensor, rectified: bool) -> Tensor:
    """Apply a ReLU where it is wanted."""
    return torch.relu(features) if rectified else features


def last_relu(rectified: bool) -> nn.Module:
    """Return the ReLU before the features, which the paper removes (its section 6.6.2), or an identity."""
    return nn.ReLU() if rectified else nn.Identity()
