"""Networks of torchvision and timm as backbones, with weights from their own sources or from a local file."""

from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from kernelhead.backbones._base import Backbone

FIRST_1X1 = "first 1x1 convolution of a bottleneck"  # metadata `stride` of a safetensors file of ResNet v1 weights


class TorchvisionBackbone(Backbone):
    """A torchvision classification network up to its global pooling.

    Known are networks that end in `avgpool` and `fc` (ResNet, ResNeXt, Wide ResNet, RegNet, ShuffleNet, ..) and those
    made of `features` and `classifier` (VGG, DenseNet, MobileNet, EfficientNet, ConvNeXt, ..).
    """

    def __init__(self, network: nn.Module, *, rectified: bool = False) -> None:
        super().__init__()
        self.rectified = rectified
        children = dict(network.named_children())
        if "fc" in children and isinstance(children["fc"], nn.Linear):
            self.num_features = children["fc"].in_features
            del children["fc"]
            children.pop("avgpool", None)
        elif "features" in children and "classifier" in children:
            children = {"features": children["features"]}
        else:
            raise ValueError(
                f"{type(network).__name__} ends neither in avgpool and fc nor in features and classifier; "
                "its feature map cannot be found by name"
            )
        self.network = nn.Sequential()
        for name, child in children.items():
            self.network.add_module(name, child)
        if not rectified:
            remove_last_relu(self.network)
        if not hasattr(self, "num_features"):
            self.num_features = self._measure()

    def _measure(self) -> int:
        was_training = self.training
        with torch.no_grad():
            channels: int = self.eval().network(torch.zeros(1, 3, 64, 64)).shape[1]
        self.train(was_training)
        return channels

    def feature_map(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images)
        return features


class TimmBackbone(Backbone):
    """A timm network up to its global pooling: a map (N, D, H, W), or tokens (N, L, D) for transformers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.num_features = int(network.num_features)  # type: ignore[arg-type]
        self._freeze_unused()

    def _freeze_unused(self) -> None:
        """What comes after the feature map, the network's own classifier for one, is neither trained nor counted."""
        was_training = self.training
        size = self.network.pretrained_cfg.get("input_size", (3, 224, 224))  # type: ignore[union-attr, operator]
        features = self.eval().feature_map(torch.zeros(1, *size))
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        self.train(was_training)

    def feature_map(self, images: Tensor) -> Tensor:
        features: Tensor = self.network.forward_features(images)  # type: ignore[operator]
        if features.dim() == 4 and features.shape[1] != self.num_features:  # channels last
            features = features.permute(0, 3, 1, 2)
        return features


class UnrectifiedBasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's block without the ReLU after the sum. Its one ReLU module serves inside the block as before."""

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = residual + (x if self.downsample is None else self.downsample(x))
        return result


class UnrectifiedBottleneck(Bottleneck):  # type: ignore[misc]
    """Likewise, of three convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(residual)))))
        result: Tensor = residual + (x if self.downsample is None else self.downsample(x))
        return result


def remove_last_relu(network: nn.Module) -> bool:
    """Take away the ReLU after the last residual block of a torchvision ResNet. True if there was one.

    The block changes its class alone, so no weight changes its name.
    """
    unrectified = {BasicBlock: UnrectifiedBasicBlock, Bottleneck: UnrectifiedBottleneck}
    blocks = [module for module in network.modules() if type(module) in unrectified]
    if blocks:
        blocks[-1].__class__ = unrectified[type(blocks[-1])]  # type: ignore[assignment]
    return bool(blocks)


def load_local(network: nn.Module, path: Path) -> bool:
    """Load a safetensors file of a whole network's weights; a classifier of another size is left out.

    True where the file's metadata say that the stride sits in the first 1x1 convolution of a bottleneck (ResNet v1 of
    2015, as opposed to torchvision's v1.5): then `move_stride` has to follow.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error})") from error
    own = network.state_dict()
    unfitting = [name for name, tensor in state.items() if name in own and tensor.shape != own[name].shape]
    classifier = [name for name in unfitting if name.split(".")[0] in ("fc", "classifier", "head")]
    if len(classifier) < len(unfitting):
        wrong = next(name for name in unfitting if name not in classifier)
        raise ValueError(
            f"{path} does not fit: {wrong} has shape {tuple(state[wrong].shape)}, not {tuple(own[wrong].shape)}"
        )
    result = network.load_state_dict({n: t for n, t in state.items() if n not in classifier}, strict=False)
    missing = [name for name in result.missing_keys if name not in classifier]
    if missing or result.unexpected_keys:
        name = (missing or result.unexpected_keys)[0]
        raise ValueError(f"{path} does not fit: {name} is {'missing in it' if missing else 'unknown to the network'}")
    stride: str | None = metadata.get("stride")
    return stride == FIRST_1X1


def move_stride(network: nn.Module) -> None:
    """Put the stride of every bottleneck into its first 1x1 convolution, as in He et al. 2016."""
    for block in network.modules():
        if isinstance(block, Bottleneck):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
