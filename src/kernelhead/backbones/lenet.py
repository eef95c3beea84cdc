"""LeNet-5 (LeCun et al., 1998) for 32x32 colour images: the student of the distillation experiments."""

import torch
from torch import Tensor, nn

from kernelhead.backbones._base import Backbone, rectify


class LeNet5(Backbone):
    """Two 5x5 convolutions with 6 and 16 channels, layers of 120 and 84.

    The sizes are the original's; as usual today, the activation is ReLU, pooling takes the maximum, and the second
    convolution sees all channels. The features are the 84 numbers before the classifier, with their ReLU or without.
    They have no places: the map is (N, 84, 1, 1).

    Images (N, 3, 32, 32) -> features (N, 84).
    """

    num_features = 84

    def __init__(self, *, rectified: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.rectified = rectified

    def feature_map(self, images: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = rectify(self.fc2(torch.relu(self.fc1(x.flatten(1)))), self.rectified)
        return x[:, :, None, None]
