import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from kernelhead.backbones import CifarResNet, Classifier, LeNet5, count_parameters, create_backbone
from kernelhead.backbones.kervolution import GaussianKervolution2d
from kernelhead.heads import create_head


def images(n=2, size=32, seed=0):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)]
)  # He et al. 2016, table 6
def test_parameters_as_in_the_resnet_paper(depth, millions):
    model = Classifier(CifarResNet(depth), create_head("softmax", 64, 10))
    assert round(count_parameters(model) / 1e6, 2) == millions


@pytest.mark.parametrize("depth", [8, 14, 20])
def test_layers_add_up_to_the_depth(depth):
    convolutions = [m for m in CifarResNet(depth).modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 1 == depth


def by_hand(network, x, rectified):
    """The network again, block by block, with the shortcut written out."""
    x = F.relu(network.bn1(network.conv1(x)))
    for index, block in enumerate(network.blocks):
        residual = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
        shortcut = torch.zeros_like(residual)
        stride = x.shape[2] // residual.shape[2]
        offset = (residual.shape[1] - x.shape[1]) // 2
        shortcut[:, offset : offset + x.shape[1]] = x[:, :, ::stride, ::stride]
        x = residual + shortcut
        if rectified or index < len(network.blocks) - 1:
            x = x.clamp_min(0)
    return x


@pytest.mark.parametrize("rectified", [False, True])
def test_cifar_resnet_by_hand(rectified):
    network = CifarResNet(14, rectified=rectified).eval()
    x = images()
    features = network.feature_map(x)
    assert features.shape == (2, 64, 8, 8)
    torch.testing.assert_close(features, by_hand(network, x, rectified))
    assert (features.min() >= 0) == rectified
    torch.testing.assert_close(network(x), features.mean((2, 3)))


def test_lenet():
    network = LeNet5()
    assert network(images()).shape == (2, 84)
    assert network.feature_map(images()).shape == (2, 84, 1, 1)
    weights = (6 * (75 + 1), 16 * (150 + 1), 120 * (400 + 1), 84 * (120 + 1))
    assert count_parameters(network) == sum(weights)
    torch.manual_seed(0)
    plain = LeNet5()
    torch.manual_seed(0)
    rectified = LeNet5(rectified=True)
    assert plain(images()).min() < 0
    torch.testing.assert_close(rectified(images()), plain(images()).clamp_min(0))


def test_kervolution_by_hand():
    layer = GaussianKervolution2d(3, 5, 3, stride=2, padding=1).double()
    with torch.no_grad():
        layer.log_gamma.fill_(0.3)
    x = images(size=8).double()
    patches = F.unfold(x, 3, stride=2, padding=1).detach().numpy()  # (N, 27, places)
    filters = layer.weight.detach().numpy().reshape(5, 27)
    distance = ((patches[:, None] - filters[None, :, :, None]) ** 2).sum(2)
    expected = np.exp(-np.exp(0.3) * distance / 27).reshape(2, 5, 4, 4)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-10)


def test_kervolution_learns_its_width():
    layer = GaussianKervolution2d(3, 4, 3)
    assert "log_gamma" in dict(layer.named_parameters())
    layer(images()).sum().backward()
    assert layer.log_gamma.grad.abs() > 0
    assert "gamma=1" in repr(layer)


@pytest.mark.parametrize("which", ["first", "all"])
def test_kervolution_replaces_what_it_says(which):
    network = CifarResNet(14, kervolution=which)
    replaced = sum(isinstance(m, GaussianKervolution2d) for m in network.modules())
    assert replaced == (1 if which == "first" else 13)


@pytest.mark.parametrize(("which", "rate"), [("first", 0.01), ("all", 0.001)])
def test_kervolution_trains_at_depth_56_without_nan(which, rate):
    torch.manual_seed(0)
    model = Classifier(CifarResNet(56, kervolution=which), create_head("softmax", 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    x, y = images(16), torch.arange(16) % 10
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_under_autocast_kervolution_is_computed_in_float32_and_rounded_once():
    layer = GaussianKervolution2d(3, 4, 3)
    x = images() + 100  # where products in bfloat16 would leave nothing of the distance
    with torch.no_grad():
        layer.weight += 100
        expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x), expected.bfloat16())
            assert layer.double()(x.double()).dtype == torch.float64
    assert expected.dtype == torch.float32


def test_under_autocast_a_kervolutional_network_goes_on_in_half_precision():
    network, dtypes = CifarResNet(8, kervolution="first"), []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda block, inputs: dtypes.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(images())
    assert dtypes == [torch.bfloat16] * 3


@pytest.mark.parametrize("head", ["softmax", "linear", "second_order", "expansion", "kernel"])
def test_every_head_gets_what_it_takes(head):
    model = Classifier(CifarResNet(8), create_head(head, 64, 7))
    logits = model(images(3))
    assert logits.shape == (3, 7)
    logits.sum().backward()
    assert model.backbone.conv1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "mobilenet_v3_small", "densenet121", "regnet_y_400mf", "vgg11"]
)
def test_torchvision_maps_are_those_before_the_pooling(name):
    backbone = create_backbone(name, rectified=True).eval()
    torch.manual_seed(0)
    features = backbone.feature_map(images(size=64))
    assert features.shape[:2] == (2, backbone.num_features)
    assert features.dim() == 4


def test_torchvision_resnet_gives_the_networks_own_logits():
    network = torchvision.models.resnet18(num_classes=5).eval()
    from kernelhead.backbones.pretrained import TorchvisionBackbone

    x = images(size=64)
    expected = network(x)
    backbone = TorchvisionBackbone(network, rectified=True).eval()
    torch.testing.assert_close(network.fc(backbone(x)), expected)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_last_relu_goes_and_nothing_else(name):
    torch.manual_seed(0)
    with_relu = create_backbone(name, rectified=True).eval()
    torch.manual_seed(0)
    without = create_backbone(name).eval()
    assert with_relu.state_dict().keys() == without.state_dict().keys()
    x = images(size=64)
    features = without.feature_map(x)
    assert features.min() < 0
    torch.testing.assert_close(features.clamp_min(0), with_relu.feature_map(x))


@pytest.mark.parametrize(("name", "dims"), [("timm/resnet10t", 4), ("timm/vit_tiny_patch16_224", 3)])
def test_timm(name, dims):
    backbone = create_backbone(name).eval()
    features = backbone.feature_map(images(1, size=224))
    assert features.dim() == dims
    assert features.shape[1 if dims == 4 else 2] == backbone.num_features
    assert backbone(images(1, size=224)).shape == (1, backbone.num_features)


def test_local_weights_with_a_classifier_of_another_size(tmp_path):
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=7)
    safetensors.torch.save_file(network.state_dict(), tmp_path / "w.safetensors")
    backbone = create_backbone("resnet18", weights=tmp_path / "w.safetensors")
    assert torch.equal(backbone.network.conv1.weight, network.conv1.weight)
    assert backbone.network.layer4[1].conv2.stride == (1, 1)


def test_resnet_v1_weights_move_the_stride(tmp_path):
    state = torchvision.models.resnet50().state_dict()
    metadata = {"stride": "first 1x1 convolution of a bottleneck"}
    safetensors.torch.save_file(state, tmp_path / "v1.safetensors", metadata=metadata)
    block = create_backbone("resnet50", weights=tmp_path / "v1.safetensors").network.layer3[0]
    assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))
    usual = create_backbone("resnet50").network.layer3[0]
    assert (usual.conv1.stride, usual.conv2.stride) == ((1, 1), (2, 2))


def broken_weights(tmp_path, kind):
    path = tmp_path / "w.safetensors"
    state = torchvision.models.resnet18().state_dict()
    if kind == "shape":
        state["conv1.weight"] = torch.zeros(1)
    elif kind == "missing":
        del state["layer1.0.conv1.weight"]
    elif kind == "unknown":
        state["other"] = torch.zeros(1)
    safetensors.torch.save_file(state, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:100])
    return path


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("shape", r"conv1\.weight has shape \(1,\)"),
        ("missing", r"layer1\.0\.conv1\.weight is missing"),
        ("unknown", "other is unknown"),
        ("cut", "not a readable safetensors file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, kind, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_backbone("resnet18", weights=broken_weights(tmp_path, kind))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "cifar_resnet9"}, "depth 6n"),
        ({"name": "no_such_net"}, "unknown backbone 'no_such_net'"),
        ({"name": "timm/no_such_net"}, "timm has no network called 'no_such_net'"),
        ({"name": "cifar_resnet8", "kervolution": "some"}, "unknown kervolution 'some'"),
        ({"name": "resnet18", "kervolution": "first"}, "kervolution is for cifar_resnet"),
        ({"name": "lenet5", "pretrained": True}, "no pretrained weights for lenet5"),
        ({"name": "resnet18", "pretrained": True, "weights": "x"}, "exclude each other"),
        ({"name": "vit_b_16"}, "cannot be found by name"),
    ],
)
def test_errors(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_backbone(**arguments)


def test_missing_weights_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights file"):
        create_backbone("resnet18", weights=tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_every_trainable_parameter_of_a_timm_network_has_a_gradient(name):
    backbone = create_backbone(f"timm/{name}")
    trainable = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(backbone(torch.randn(2, 3, 224, 224)).sum(), trainable)
    assert all(gradient is not None for gradient in gradients)
    assert backbone.training
    assert 0 < len(trainable) < len(list(backbone.parameters()))  # the network's own classifier is left out
