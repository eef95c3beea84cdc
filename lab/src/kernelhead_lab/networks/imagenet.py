"""torchvision's ResNets as backbones, for the tables of fine-tuning."""

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from kernelhead.finetune.backbones import create_network
from kernelhead_lab.networks.base import Backbone


class ImageNetResNet(Backbone):
    """A ResNet of torchvision up to its global pooling.

    Args:
        name: as `torchvision/resnet50`.
        rectified: whether the ReLU before the features stays.
        pretrained, weights, stride_first: as of `kernelhead.finetune.backbones.create_network`.

    The map has a 32nd of the images' height and width.
    """

    def __init__(
        self,
        name: str,
        *,
        rectified: bool = False,
        pretrained: bool = False,
        weights: str | None = None,
        stride_first: bool = False,
    ) -> None:
        network = create_network(name, pretrained=pretrained, weights=weights, stride_first=stride_first)
        if not isinstance(network, ResNet):
            raise ValueError(f"the laboratory takes ResNets of torchvision; got {name!r}, a {type(network).__name__}")
        super().__init__()
        self.stride_first = bool(network.stride_first)
        self.num_features = network.fc.in_features
        self.network = nn.Sequential()
        for child_name, child in network.named_children():
            if child_name not in ("avgpool", "fc"):
                self.network.add_module(child_name, child)
        if not rectified:
            _remove_last_relu(self.network)

    def feature_map(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images)
        return features


class UnrectifiedBasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's block without the ReLU after the sum. Its one ReLU module still serves inside of the block."""

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = residual + (x if self.downsample is None else self.downsample(x))
        return result


class UnrectifiedBottleneck(Bottleneck):  # type: ignore[misc]
    """The same with three convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(residual)))))
        result: Tensor = residual + (x if self.downsample is None else self.downsample(x))
        return result


UNRECTIFIED: dict[type, type] = {BasicBlock: UnrectifiedBasicBlock, Bottleneck: UnrectifiedBottleneck}


def _remove_last_relu(network: nn.Module) -> None:
    """Take away the ReLU after the last block. The block changes its class alone, so no weight changes its name."""
    last = [module for module in network.modules() if type(module) in UNRECTIFIED][-1]
    last.__class__ = UNRECTIFIED[type(last)]
