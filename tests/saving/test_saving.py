"""Folders of heads and of kernelized networks."""

import copy
import json
import logging
import re
import subprocess
import sys

import pytest
import timm
import torch
import torchvision
from torch import nn

import kernelhead
from kernelhead import HEADS, KernelHead, LandmarkHead, create_head, kernelize
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of, save_classifier
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec
from kernelhead.surgery import changes

D, C = 6, 4
SIZES = {"landmarks": {"landmarks": 5}, "expansion": {"width": 5}, "attentive": {"queries": 2}}
FILES = {"config.json", "model.safetensors", "README.md"}


class Net(nn.Module):
    """A network of somebody's own."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, images):
        return self.fc(torch.relu(self.stem(images)).mean((2, 3)))


class Odd(torch.Tensor):
    """As quantised and sharded weights are."""


def head(name, **options):
    """A head whose numbers are not those that it was made with."""
    made = create_head(name, D, C, **SIZES.get(name, {}), **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.rand_like(parameter))
    made(torch.randn(9, D))
    return made.eval()


def trained(network, images, **options):
    """A kernelized network after a batch in training mode, so that no number of BatchNorm is as in the beginning."""
    kernelize(network, C, **options).train()
    with torch.no_grad():
        network(images)
    return network.eval()


def resnet(**options):
    return trained(torchvision.models.resnet18(), torch.randn(4, 3, 64, 64), **{"landmarks": 6, **options})


def same(model, other, x):
    state, others = model.state_dict(), other.state_dict()
    assert list(state) == list(others)
    assert all(tensor.dtype == others[name].dtype for name, tensor in state.items())
    assert all(torch.equal(tensor, others[name]) for name, tensor in state.items())
    assert not any(module.training for module in other.modules())
    with torch.no_grad():
        expected, found = model(x), other(x)
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)
    return torch.equal(found, expected)


def record(folder):
    return json.loads((folder / "config.json").read_text())["kernelhead"]


def change(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    config["kernelhead"] |= entries
    (folder / "config.json").write_text(json.dumps(config))


# --- round trips ------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
import torch
import kernelhead
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
found = {}
for name, x in load_file(sys.argv[1] + "/inputs").items():
    with torch.no_grad():
        found[name] = kernelhead.load(f"{sys.argv[1]}/{name}")(x)
save_file(found, sys.argv[1] + "/logits")
"""


def test_a_new_process_gives_the_same_logits_to_the_bit(tmp_path):
    from safetensors.torch import load_file, save_file

    x, images = torch.randn(7, D), torch.randn(2, 3, 160, 160)
    models = {name: head(name) for name in HEADS}
    models |= {"frozen": head("landmarks").freeze(), "bfloat16": head("landmarks").bfloat16()}
    inputs = {name: x.bfloat16() if name == "bfloat16" else x.clone() for name in models}
    networks = {
        "torchvision": resnet(),
        "timm": trained(timm.create_model("test_vit"), images, landmarks=6),
        "linear": trained(timm.create_model("test_resnet", num_classes=9), images, head="linear"),
    }
    inputs |= {name: images.clone() for name in networks}
    for name, model in (models | networks).items():
        kernelhead.save(model, tmp_path / name)
        assert {file.name for file in (tmp_path / name).iterdir()} == FILES
    save_file(inputs, tmp_path / "inputs")
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    logits = load_file(tmp_path / "logits")
    for name, model in (models | networks).items():
        with torch.no_grad():
            assert torch.equal(logits[name], model(inputs[name])), name


def test_what_is_written(tmp_path):
    model = resnet()
    kernelhead.save(
        model, tmp_path, data="Birds of the garden, 300 images", figures={"accuracy": 91.234567, "NLL": 1e-4}
    )
    found = record(tmp_path)
    assert found["version"] == 1
    assert found["network"] == {"name": "torchvision/resnet18", "stride_first": False}
    assert found["heads"] == {"fc": model.fc.config}
    assert found["changes"]["layers"] == ["fc"]
    card = (tmp_path / "README.md").read_text()
    for words in ("library_name: kernelhead", "LandmarkHead for 4 classes", "torchvision/resnet18", str(changes(model)),
                  "Birds of the garden, 300 images", "- accuracy: 91.23\n", "- NLL: 0.0001", "kernelhead.load(",
                  "k(t)\n"):  # fmt: skip
        assert words in card, words
    assert card.count("•") >= 61  # the kernel, drawn
    kernelhead.save(head("linear"), tmp_path / "linear")
    assert "Not stated." in (tmp_path / "linear" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"head": "kernel"}, {"head": "cosine", "warm_start": True}, {"rectified": True}, {"pool": None}, {"layer": "fc"}],
)
def test_arguments_of_kernelize_come_back(options, tmp_path):
    network, images = torchvision.models.resnet18(num_classes=C), torch.randn(4, 3, 64, 64)
    options = options if "head" in options else {"landmarks": 6, **options}
    model = trained(network, images, **options)
    kernelhead.save(model, tmp_path)
    loaded = kernelhead.load(tmp_path)
    assert same(model, loaded, images)
    for part in ("layers", "relus_removed", "pooled"):
        assert getattr(changes(loaded), part) == getattr(changes(model), part)


@pytest.mark.slow
def test_a_class_token_stays_out_and_timms_input_is_known(tmp_path):
    images = torch.randn(2, 3, 160, 160)
    model = trained(timm.create_model("test_vit"), images, landmarks=6, class_token=False)
    kernelhead.save(model, tmp_path)
    loaded = kernelhead.load(tmp_path)
    assert same(model, loaded, images)
    assert loaded.pretrained_cfg["tag"] == model.pretrained_cfg["tag"]


@pytest.mark.slow
def test_inputs_are_remembered_by_their_shapes(tmp_path):
    """A network of 40 x 40 pixels that kernelize was shown."""
    images = torch.randn(2, 3, 40, 40)
    model = trained(torchvision.models.resnet18(), images, head="kernel", inputs={"x": images})
    kernelhead.save(model, tmp_path)
    assert record(tmp_path)["kernelize"]["inputs"] == {"x": {"dtype": "float32", "shape": [2, 3, 40, 40]}}
    assert same(model, kernelhead.load(tmp_path), images)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precision_is_that_of_each_tensor(tmp_path, dtype):
    model, images = resnet().to(dtype), torch.randn(2, 3, 64, 64, dtype=dtype)
    model.layer1.float()
    model.layer1.register_forward_pre_hook(lambda module, given: given[0].float())
    kernelhead.save(model, tmp_path)
    loaded = kernelhead.load(tmp_path)
    loaded.layer1.register_forward_pre_hook(lambda module, given: given[0].float())
    model.layer2.register_forward_pre_hook(lambda module, given: given[0].to(dtype))
    loaded.layer2.register_forward_pre_hook(lambda module, given: given[0].to(dtype))
    assert same(model, loaded, images)


def test_saving_and_loading_change_nothing_else(tmp_path):
    model = resnet().train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    kernelhead.save(model, tmp_path)
    loaded = kernelhead.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (tmp_path / "notes.txt").write_text("mine")
    kernelhead.save(loaded, tmp_path)  # again, where it came from
    assert same(loaded, kernelhead.load(tmp_path), torch.randn(2, 3, 64, 64))
    assert {file.name for file in tmp_path.iterdir()} == {*FILES, "notes.txt"}


def test_shared_weights_stay_shared(tmp_path):
    def network():
        made = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), KernelHead(D, C))
        made[2].weight = made[0].weight
        return made

    model, x = network().eval(), torch.randn(5, D)
    kernelhead.save(model, tmp_path)
    loaded = kernelhead.load(tmp_path, model=network())
    assert same(model, loaded, x)
    assert loaded[0].weight is loaded[2].weight


# --- networks of one's own --------------------------------------------------------------------------------------------


def test_a_network_of_ones_own_is_given(tmp_path, caplog):
    images = torch.randn(4, 3, 9, 9)
    model = trained(Net(), images, landmarks=6)
    with caplog.at_level(logging.WARNING, logger="kernelhead"):
        kernelhead.save(model, tmp_path)
    assert caplog.messages == ["kernelhead cannot make this Net by itself: only load(folder, model=...) will read it"]
    assert "model=..." in (tmp_path / "README.md").read_text()
    with pytest.raises(ValueError, match=r"it is a Net of somebody's own; make .* load\(folder, model=...\)$"):
        kernelhead.load(tmp_path)
    plain = Net()
    assert kernelhead.load(tmp_path, model=plain) is plain
    assert same(model, plain, images)
    assert same(model, kernelhead.load(tmp_path, model=kernelize(Net(), C, landmarks=6)), images)
    for wrong, words in (
        (Net().stem, "runs on no input|looked for"),
        (kernelize(Net(), C, landmarks=7), r"the head 'fc' is another: landmarks is 7 here and 6 there"),
        (kernelize(Net(), C, head="kernel"), "the head 'fc' is another: name is 'kernel' here and 'landmarks' there"),
    ):
        with pytest.raises(ValueError, match=words):
            kernelhead.load(tmp_path, model=wrong)


def test_a_head_that_was_put_on_by_hand(tmp_path):
    def network():
        made = torchvision.models.resnet18()
        made.fc = KernelHead(512, C)
        return made

    model, images = network().eval(), torch.randn(2, 3, 64, 64)
    kernelhead.save(model, tmp_path)
    assert same(model, kernelhead.load(tmp_path, model=network()), images)
    with pytest.raises(ValueError, match="a ResNet of somebody's own"):
        kernelhead.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["dropout", "stride", "kind"])
def test_a_network_that_its_name_does_not_make_is_ones_own(change, tmp_path):
    model = timm.create_model("test_resnet", **({"drop_path_rate": 0.1} if change == "dropout" else {}))
    if change == "stride":
        model.conv1[0].stride = 1, 1
    if change == "kind":
        model.act1 = nn.GELU()
    kernelize(model, C, landmarks=6)
    kernelhead.save(model, tmp_path)
    assert record(tmp_path)["network"] == {"name": None, "class": "ResNet"}


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save needs a head of kernelhead; Net has none, call kernelize first"):
        kernelhead.save(Net(), tmp_path)
    model = kernelize(Net(), C, landmarks=6)
    with pytest.raises(ValueError, match="got it wrapped into OptimizedModule"):
        kernelhead.save(torch.compile(model), tmp_path)
    model.stem.weight = nn.Parameter(model.stem.weight.detach().as_subclass(Odd))
    with pytest.raises(ValueError, match=r"save takes plain tensors; stem\.weight is a Odd, so save before quantising"):
        kernelhead.save(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- a run of the command line ----------------------------------------------------------------------------------------


def test_folders_of_kernelhead_train_are_read(colours, tmp_path):
    settings = {"image_size": 32, "pretrained": False, "head_options": {"degree": 3}}
    spec = resolved(TrainSpec("my images", "tiny_networks:tiny", "kernel", **settings))
    model = create_classifier(spec, C).eval()
    expected = Input(32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    save_classifier(
        tmp_path / "model.safetensors", SavedClassifier(model, head_of(model), list("abcd"), spec, expected)
    )
    assert same(model, kernelhead.load(tmp_path), torch.randn(2, 3, 32, 32))
    with pytest.raises(FileNotFoundError, match="there is no trained classifier in"):
        kernelhead.load(tmp_path.parent)


# --- files that are not what they should be ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    kernelhead.save(head("landmarks"), tmp_path)
    return tmp_path


def refused(folder, words):
    with pytest.raises(ValueError, match=words) as error:
        kernelhead.load(folder)
    assert str(error.value).startswith(f"{folder / 'config.json'} cannot be loaded: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting"),
        ("[]", "list"),
        ('{"model_type": "bert"}', "no record of kernelhead"),
        ('{"kernelhead": {}}', "'version' is missing"),
        ('{"kernelhead": {"version": 2}}', "it has version 2; this kernelhead reads version 1"),
        ('{"kernelhead": {"version": 1, "network": null}}', "'heads' is missing"),
    ],
)
def test_another_configuration_file_is_refused(folder, content, words):
    (folder / "config.json").write_text(content)
    refused(folder, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coefficients": "relu"}, "coefficients is 'relu' here and 'softplus' there"),
        ({"scale": 3.0}, "scale is 3.0 here and None there"),
        ({"landmarks": 6}, r"4 of another shape \(weight \(5, 6\) instead of \(6, 6\), mixing"),
        ({"landmarks": 10**12}, "landmarks is 1000000000000, and there are only"),
        ({"kernel": "polynomial", "degree": 10**9}, "degree is 1000000000, and there are only"),
        ({"kernel": "rbf", "gamma": 1e300}, r"gamma is 1e\+300, and there are only"),
        ({"degree": -1}, "degree to be a positive integer; got -1"),
        ({"colour": 3}, "has no option 'colour'"),
        ({"name": "perceptron"}, "unknown head 'perceptron'"),
        ({"version": 7}, "the configuration has version 7"),
    ],
)
def test_heads_that_are_not_those_of_the_weights_are_refused(folder, options, words):
    change(folder, heads={"": {**record(folder)["heads"][""], **options}})
    refused(folder, words)


@pytest.mark.parametrize("name", ["os:abort", "torchvision/os:abort", "timm/hf_hub:a/b", "../timm", "torchvision/none"])
def test_networks_that_are_no_names_are_refused(folder, name):
    change(folder, network={"name": name, "stride_first": False}, kernelize={}, changes={})
    refused(folder, "that is not of torchvision, timm or transformers|there is no network called 'none'")


def test_sizes_are_compared_before_a_network_takes_memory(tmp_path, monkeypatch):
    kernelhead.save(resnet(), tmp_path)
    change(tmp_path, network={"name": "torchvision/vit_h_14", "stride_first": False})
    made, real = [], torchvision.models.get_model

    def watched(*arguments, **options):
        made.append(real(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(torchvision.models, "get_model", watched)
    refused(tmp_path, ".")
    assert {parameter.device.type for network in made for parameter in network.parameters()} == {"meta"}


@pytest.mark.slow
def test_a_kernelize_that_would_do_something_else_is_refused(tmp_path):
    kernelhead.save(resnet(), tmp_path)
    change(tmp_path, changes={**record(tmp_path)["changes"], "pooled": ["before 'avgpool2'"]})
    refused(tmp_path, "kernelize does something else to it now: pooled is")


@pytest.mark.parametrize("position", [-1, 300])
def test_damaged_weights_are_refused(folder, position):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[position] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "does not match its own checksum|not a readable")
    (folder / "model.safetensors").write_bytes(content[:200])
    refused(folder, "not a readable")
    (folder / "model.safetensors").unlink()
    refused(folder, "not a readable")


def test_weights_of_another_folder_are_refused(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    kernelhead.save(head("landmarks", coefficients="relu"), other)
    (other / "model.safetensors").replace(folder / "model.safetensors")
    refused(
        folder, re.escape("LandmarkHead cannot take these weights: coefficients is 'softplus' here and 'relu' there")
    )


def test_heads_of_a_subclass_are_ones_own(tmp_path):
    class Mine(LandmarkHead):
        name = "mine"

    model = Mine(D, C, landmarks=5).eval()
    kernelhead.save(model, tmp_path)
    with pytest.raises(ValueError, match="unknown head 'mine'"):
        kernelhead.load(tmp_path)
    assert same(model, kernelhead.load(tmp_path, model=Mine(D, C, landmarks=5)), torch.randn(3, D))
