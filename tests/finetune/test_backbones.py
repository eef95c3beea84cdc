"""Networks by name."""

import sys

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

from kernelhead.finetune.backbones import Input, create_network, expected_input

OWN = """
import torch
from torch import nn

def make(width=4):
    network = nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))
    network.expected_input = (32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return network

def needs(width):
    return nn.Identity()

def none():
    return None

def broken():
    network = make()
    network.expected_input = 32
    return network

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of one's own that can be imported: `own_networks`."""
    (tmp_path / "own_networks.py").write_text(OWN)
    (tmp_path / "needs_another.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_networks", None)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("torchvision/mobilenet_v3_small", "torchvision.models.mobilenetv3"),
        ("mobilenet_v3_small", "torchvision.models.mobilenetv3"),  # of both: torchvision comes first
        ("resnet18", "torchvision.models.resnet"),
        ("timm/resnet18", "timm.models.resnet"),
        ("test_resnet", "timm.models.resnet"),
        ("timm/test_resnet.r160_in1k", "timm.models.resnet"),
    ],
)
def test_a_network_comes_with_its_own_classifier(name, of):
    network = create_network(name)
    assert type(network).__module__ == of
    assert network.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert not network.stride_first


def test_own_networks(own):
    network = create_network("own_networks:make")
    assert network(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert expected_input("own_networks:make", network) == Input(32, (0.5,) * 3, (0.25,) * 3)
    with pytest.raises(ValueError, match=r"expected_input of own_networks:broken is 32; make it \(size, mean, std\)"):
        expected_input("own_networks:broken", create_network("own_networks:broken"))


def test_expected_inputs():
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert expected_input("resnet18", create_network("resnet18")) == Input(224, *imagenet)
    assert expected_input("timm/test_vit", create_network("timm/test_vit")) == Input(160, (0.5,) * 3, (0.5,) * 3)
    assert expected_input("mine", nn.Identity()) == Input(224, *imagenet)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("resnet81", {}, "there is no network called 'resnet81' in torchvision or timm; did you mean resnet18"),
        ("timm/resnet81", {}, "there is no network called 'resnet81' in timm; did you mean"),
        ("torchvision/vit_tiny", {}, "there is no network called 'vit_tiny' in torchvision"),
        ("fancy/qqqq", {}, "'fancy/qqqq' in torchvision or timm; a network of your own is package.module:function"),
        ("resnet18", {"pretrained": True, "weights": "x"}, "pretrained=True and weights='x' exclude each other"),
        ("own_networks:make", {"pretrained": True}, "own_networks:make has no weights to download"),
        ("own_networks:other", {}, "module 'own_networks' has no function 'other'"),
        ("own_networks:number", {}, "module 'own_networks' has no function 'number'"),
        ("own_networks:needs", {}, r"own_networks:needs cannot be called without arguments \(.* missing .* 'width'\)"),
    ],
)
def test_names_that_do_not_serve(own, name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_network(name, **options)


def test_functions_and_modules_that_do_not_serve(own):
    with pytest.raises(TypeError, match="own_networks:none returned a NoneType"):
        create_network("own_networks:none")
    for name, missing in (("not_there:make", "not_there"), ("needs_another:make", "no_such_library")):
        with pytest.raises(ModuleNotFoundError, match=f"network '{name}' needs the module '{missing}'"):
            create_network(name)


def test_the_extra_is_named_where_a_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match=r"'timm/resnet18' needs timm; .* pip install 'kernelhead\[vision\]'"):
        create_network("timm/resnet18")


@pytest.mark.parametrize(("name", "module"), [("timm/test_resnet", timm), ("resnet18", torchvision.models)])
def test_a_download_that_fails_is_one_sentence(monkeypatch, name, module):
    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(module, "create_model" if module is timm else "get_model", fail)
    with pytest.raises(OSError, match=rf"weights of {name} could not be downloaded \(no network\); give a local file"):
        create_network(name, pretrained=True)


def test_local_weights_with_a_classifier_of_another_size(tmp_path):
    torch.manual_seed(1)
    saved = torchvision.models.resnet18(num_classes=7)
    safetensors.torch.save_file(saved.state_dict(), tmp_path / "w.safetensors")
    network = create_network("resnet18", weights=tmp_path / "w.safetensors")
    assert torch.equal(network.conv1.weight, saved.conv1.weight)
    assert network.fc.out_features == 1000
    assert not network.stride_first


def test_weights_of_resnet_v1_move_the_stride(tmp_path, monkeypatch):
    def small(name, weights):
        return torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], width_per_group=4)

    monkeypatch.setattr(torchvision.models, "get_model", small)
    metadata = {"stride": "first 1x1 convolution of a bottleneck"}
    safetensors.torch.save_file(small("", None).state_dict(), tmp_path / "v1.safetensors", metadata=metadata)
    for options in ({"weights": tmp_path / "v1.safetensors"}, {"stride_first": True}):
        network = create_network("resnet50", **options)
        assert network.stride_first
        assert (network.layer3[0].conv1.stride, network.layer3[0].conv2.stride) == ((2, 2), (1, 1))
    usual = create_network("resnet50").layer3[0]
    assert (usual.conv1.stride, usual.conv2.stride) == ((1, 1), (2, 2))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("shape", r"1 of another shape \(0\.weight \(1,\) instead of"),
        ("missing", r"1 missing \(0\.weight\)"),
        ("unknown", r"1 unknown \(other\)"),
        ("cut", "not a readable safetensors file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(own, tmp_path, kind, sentence):
    state = create_network("own_networks:make").state_dict()
    if kind == "shape":
        state["0.weight"] = torch.zeros(1)
    elif kind == "missing":
        del state["0.weight"]
    elif kind == "unknown":
        state["other"] = torch.zeros(1)
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(state, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=sentence):
        create_network("own_networks:make", weights=path)
    with pytest.raises(FileNotFoundError, match="no weights file"):
        create_network("own_networks:make", weights=tmp_path / "none.safetensors")
