"""LeNet-5 (LeCun et al., 1998) for 32x32 colour images: the student of the distillation tables."""

import torch
from torch import Tensor, nn

from kernelhead_lab.networks.base import Backbone, last_relu


class LeNet5(Backbone):
    """Two convolutions and two layers before the classifier.

    The sizes are the original's; as usual today, the activation is ReLU, pooling takes the maximum, and the second
    convolution sees all channels. The features are the 84 numbers before the classifier, with their ReLU or without.
    They have no spatial positions, so that the map has sides of 1.

    Images (N, 3, 32, 32) -> features (N, 84).
    """

    num_features = 84

    def __init__(self, *, rectified: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.relu = last_relu(rectified)

    def feature_map(self, images: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        features: Tensor = self.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))
        return features[:, :, None, None]
