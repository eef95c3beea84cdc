import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from kernelhead import kernelize
from kernelhead.finetune.backbones import Input, create_network, expected_input
from kernelhead_lab import networks
from kernelhead_lab.heads import create_lab_head
from kernelhead_lab.networks import CifarResNet, Classifier, LeNet5, build, count_parameters, create_backbone
from kernelhead_lab.networks.kervolution import GaussianKervolution2d
from kernelhead_lab.spec import LabSpec


def images(n=2, size=32, seed=0):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)]
)  # He et al. 2016, table 6
def test_parameters_as_in_the_resnet_paper(depth, millions):
    model = Classifier(CifarResNet(depth), create_lab_head("linear", 64, 10))
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
    patches = F.unfold(x, 3, stride=2, padding=1).detach().numpy()  # (N, 27, positions)
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


@pytest.mark.slow
@pytest.mark.parametrize(("which", "rate"), [("first", 0.01), ("all", 0.001)])
def test_kervolution_trains_at_depth_56_without_nan(which, rate):
    torch.manual_seed(0)
    model = Classifier(CifarResNet(56, kervolution=which), create_lab_head("linear", 64, 10))
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


HEADS = {
    "linear": {},
    "cosine": {},
    "second_order": {},
    "expansion": {"width": 32},
    "kernel": {},
    "pooled_kernel": {},
    "landmarks": {"landmarks": 32},
}


def spec(backbone="cifar_resnet8", head="linear", **settings):
    name = backbone if "/" in backbone else f"kernelhead_lab.networks:{backbone}"
    return LabSpec("cifar10", name, head, HEADS.get(head, {}), **settings)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_gets_what_it_takes(head):
    model = build(spec(head=head), 7)
    logits = model(images(3))
    assert logits.shape == (3, 7)
    logits.square().sum().backward()
    assert model.backbone.conv1.weight.grad.abs().sum() > 0


def test_a_network_is_a_function_of_its_spec():
    first, again = (build(spec(seed=3), 10).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(build(spec(seed=4), 10).head.weight, first["head.weight"])
    kervolved = create_backbone(spec(backbone_options={"kervolution": "first"}))
    assert isinstance(kervolved.conv1, GaussianKervolution2d)
    assert create_backbone(spec(rectified=True)).feature_map(images()).min() == 0


@pytest.mark.parametrize("name", [name for name in networks.BACKBONES if name != "cifar_resnet56"])
def test_whole_networks_end_in_a_linear_layer(name):
    network = getattr(networks, name)()
    assert expected_input(name, network) == Input(*networks.CIFAR_INPUT)
    made = create_network(f"kernelhead_lab.networks:{name}")
    assert made.state_dict().keys() == network.state_dict().keys()
    assert network(images()).shape == (2, 10)
    assert network.backbone(images()).min() >= 0  # with the ReLU that kernelize removes
    assert getattr(networks, name)(7, rectified=False)(images()).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "head"), [("cifar_resnet8", "landmarks"), ("cifar_resnet8", "kernel"), ("lenet5", "kernel")]
)
def test_kernelize_gives_the_logits_of_the_engines_network(name, head):
    options = HEADS[head]
    ours = build(spec(name, head), 10).eval()
    theirs = kernelize(getattr(networks, name)(), 10, head=head, **options).eval()
    theirs.backbone.load_state_dict(ours.backbone.state_dict())
    theirs.fc.load_state_dict(ours.head.state_dict())
    torch.testing.assert_close(theirs(images()), ours(images()))


# --- ResNets of torchvision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_the_last_relu_goes_and_nothing_else(name):
    with_relu, without = (create_backbone(spec(f"torchvision/{name}", rectified=kept)).eval() for kept in (True, False))
    assert with_relu.state_dict().keys() == without.state_dict().keys()
    without.load_state_dict(with_relu.state_dict())
    x = images(size=64)
    features = without.feature_map(x)
    assert features.shape == (2, without.num_features, 2, 2)
    assert features.min() < 0
    torch.testing.assert_close(features.clamp_min(0), with_relu.feature_map(x))


def test_a_torchvision_backbone_gives_the_networks_own_features(tmp_path):
    network = torchvision.models.resnet18(num_classes=5).eval()
    safetensors.torch.save_file(network.state_dict(), tmp_path / "w.safetensors")
    weights = str(tmp_path / "w.safetensors")
    backbone = create_backbone(spec("torchvision/resnet18", rectified=True, weights=weights)).eval()
    torch.testing.assert_close(network.fc(backbone(images(size=64))), network(images(size=64)))


@pytest.mark.slow
def test_resnet_v1_weights_move_the_stride(tmp_path):
    metadata = {"stride": "first 1x1 convolution of a bottleneck"}
    path = tmp_path / "v1.safetensors"
    safetensors.torch.save_file(torchvision.models.resnet50().state_dict(), path, metadata=metadata)
    moved = create_backbone(spec("torchvision/resnet50", weights=str(path)))
    again = create_backbone(spec("torchvision/resnet50", backbone_options={"stride_first": moved.stride_first}))
    for backbone, strides in ((moved, ((2, 2), (1, 1))), (again, ((2, 2), (1, 1)))):
        block = backbone.network.layer3[0]
        assert (block.conv1.stride, block.conv2.stride) == strides


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"backbone": "no_such_net"}, "unknown backbone 'kernelhead_lab.networks:no_such_net'; choose"),
        ({"backbone": "timm/resnet10t"}, "unknown backbone 'timm/resnet10t'; choose"),
        ({"backbone": "torchvision/vgg11"}, "takes ResNets of torchvision; got 'torchvision/vgg11', a VGG"),
        ({"backbone_options": {"kervolution": "some"}}, "unknown kervolution 'some'; choose"),
        ({"backbone": "lenet5", "pretrained": True}, "lenet5 has no pretrained weights"),
        ({"head": "no_such_head"}, "unknown head 'no_such_head'; choose one of kernel"),
    ],
)
def test_errors(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(spec(**settings), 10)
    with pytest.raises(ValueError, match=r"needs a depth of 6n \+ 2, such as 20; got 9"):
        CifarResNet(9)
