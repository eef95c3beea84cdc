"""Networks of torchvision whose last ReLU is a function call: classes without it."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.densenet import DenseNet
from torchvision.models.googlenet import BasicConv2d as GoogLeNetConv
from torchvision.models.inception import BasicConv2d as InceptionConv


class UnrectifiedConv2d(GoogLeNetConv):  # type: ignore[misc]
    """Convolution and BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.bn(self.conv(x))
        return result


class UnrectifiedDenseNet(DenseNet):  # type: ignore[misc]
    """A DenseNet whose features are those of its last BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        logits: Tensor = self.classifier(torch.flatten(pooled, 1))
        return logits


UNRECTIFIED = {GoogLeNetConv: UnrectifiedConv2d, InceptionConv: UnrectifiedConv2d, DenseNet: UnrectifiedDenseNet}
