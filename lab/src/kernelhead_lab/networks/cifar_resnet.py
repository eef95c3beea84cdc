"""The CIFAR ResNets of He et al. (CVPR 2016, section 4.2), and their kervolutional variant."""

from torch import Tensor, nn

from kernelhead_lab.networks.base import Backbone, initialize, last_relu
from kernelhead_lab.networks.conv3x3 import Conv3x3, basic_block, conv_norm
from kernelhead_lab.networks.kervolution import GaussianKervolution2d

KERVOLUTION = (None, "first", "all")


def _convolution(in_channels: int, out_channels: int, stride: int, kervolution: bool) -> nn.Conv2d:
    if kervolution:
        return GaussianKervolution2d(in_channels, out_channels, 3, stride=stride, padding=1)
    return Conv3x3(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a parameter-free shortcut: every other position, new channels zero."""

    def __init__(self, in_channels: int, channels: int, stride: int, *, kervolution: bool, rectified: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, channels, stride, kervolution)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, 1, kervolution)
        self.bn2 = nn.BatchNorm2d(channels)
        self.rectified = rectified

    def forward(self, x: Tensor) -> Tensor:
        return basic_block(self.conv1, self.bn1, self.conv2, self.bn2, x, rectified=self.rectified)


class CifarResNet(Backbone):
    """A ResNet on small images: three stages of n blocks with 16, 32 and 64 channels.

    Args:
        depth: 6n + 2, such as 8, 20 or 56.
        rectified: whether the ReLU before the features stays; the paper takes it away.
        kervolution: None, "first" (the first convolution is kervolutional) or "all". "first" is the default of the
            paper's KER baseline here: Wang et al. replace the first layer and keep the rest, and a Gaussian of the
            image, unlike one of hidden features, is what they motivate. "all" replaces every convolution.

    The map of images of 32 pixels is (N, 64, 8, 8).
    """

    num_features = 64

    def __init__(self, depth: int, *, rectified: bool = False, kervolution: str | None = None) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet needs a depth of 6n + 2, such as 20; got {depth}")
        if kervolution not in KERVOLUTION:
            raise ValueError(f"unknown kervolution {kervolution!r}; choose None, 'first' or 'all'")
        super().__init__()
        self.conv1 = _convolution(3, 16, 1, kervolution is not None)
        self.bn1 = nn.BatchNorm2d(16)
        blocks, in_channels = [], 16
        per_stage = (depth - 2) // 6
        for channels in (16, 32, 64):
            for index in range(per_stage):
                last = channels == 64 and index == per_stage - 1
                stride = 2 if channels > in_channels else 1
                options = {"kervolution": kervolution == "all", "rectified": not last}
                blocks.append(BasicBlock(in_channels, channels, stride, **options))
                in_channels = channels
        self.blocks = nn.Sequential(*blocks)
        self.relu = last_relu(rectified)
        initialize(self)

    def feature_map(self, images: Tensor) -> Tensor:
        features: Tensor = self.relu(self.blocks(conv_norm(self.conv1, self.bn1, images)))
        return features
