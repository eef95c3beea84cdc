"""A network of torchvision whose last ReLU is a function call: a class without it."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.densenet import DenseNet


class UnrectifiedDenseNet(DenseNet):  # type: ignore[misc]
    """A DenseNet whose features are those of its last BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        logits: Tensor = self.classifier(torch.flatten(pooled, 1))
        return logits


UNRECTIFIED = {DenseNet: UnrectifiedDenseNet}
