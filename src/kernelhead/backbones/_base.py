"""What a backbone is: a network that ends in features."""

import torch
from torch import Tensor, nn


class Backbone(nn.Module):
    """A network that gives a feature map, and by averaging it over places a feature vector.

    Subclasses set `num_features` (D) and define `feature_map`.
    """

    num_features: int
    stride_first = False  # see `create_backbone`

    def feature_map(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> a map (N, D, h, w), or tokens (N, L, D)."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> features (N, D)."""
        features = self.feature_map(images)
        return features.mean((2, 3)) if features.dim() == 4 else features.mean(1)


class Classifier(nn.Module):
    """A backbone and a head. The head is given the feature map where it pools by itself (`head.pools`)."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> logits (N, C)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> what the head takes."""
        return self.backbone.feature_map(images) if self.head.pools else self.backbone(images)


def initialize(module: nn.Module) -> None:
    """He et al.'s start for convolutions, PyTorch's own for the rest."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")


def count_parameters(module: nn.Module) -> int:
    """Numbers that training changes, each once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def rectify(features: Tensor, rectified: bool) -> Tensor:
    """The ReLU before the features, which the paper takes away (its section 6.6.2)."""
    return torch.relu(features) if rectified else features
