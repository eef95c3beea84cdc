"""A trained classifier as one file: the same to the bit when it is read, and refused when it was changed."""

import copy
from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch
import torchvision

from kernelhead.backbones import Input
from kernelhead.backbones.pretrained import FIRST_1X1
from kernelhead.train.checkpoint import BrokenCheckpointError, load_checkpoint, save_checkpoint
from kernelhead.train.run import Run
from kernelhead.train.saved import MODEL_FILE, SavedClassifier, load_classifier, save_classifier

CLASSES = ["Katze", '[red]cat, "dog"', "猫"]
INPUT = Input(32, (0.1, 0.2, 1 / 3), (0.25, 0.5, 0.7))
SETTINGS = {"data": "my pictures", "short_side": 48, "head_options": {}, "weights": None}


def make(run, created=None):
    """A classifier whose every number, those of BatchNorm too, is not the one that it was created with."""
    model = (created or run).create(len(CLASSES))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand(tensor.shape, generator=generator)).add_(1e-4)
            else:
                tensor += 5
    return SavedClassifier(model.eval(), run, CLASSES, INPUT, SETTINGS)


@pytest.fixture
def small(tmp_path):
    """A saved classifier and its file."""
    saved = make(Run("lenet5", "kernel", 0.1, head_options={"degree": 3}))
    path = tmp_path / "run" / MODEL_FILE
    save_classifier(path, saved)
    return saved, path


def assert_same(loaded, saved, size=32):
    own, other = saved.model.state_dict(), loaded.model.state_dict()
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = saved.model(images)
        assert torch.isfinite(logits).all()
        assert torch.equal(loaded.model(images), logits)
    assert not any(module.training for module in loaded.model.modules())
    for field in ("run", "classes", "input", "settings"):
        assert getattr(loaded, field) == getattr(saved, field)


@pytest.mark.parametrize(
    "run",
    [
        Run("lenet5", "softmax", 0.1),
        Run("cifar_resnet8", "kernel", 0.1, 0.5, 7, {"degree": 4, "prototypes": 2}, {"rectified": True}),
        Run("cifar_resnet8", "expansion", 0.1, head_options={"width": 5}, backbone_options={"kervolution": "all"}),
        Run("cifar_resnet8", "kernel", 0.1, head_options={"landmarks": 6, "pool": "rkhs"}),
        Run("resnet18", "linear", 0.1, backbone_options={"rectified": True}),
        Run("timm/test_resnet", "kernel", 0.1),
    ],
    ids=lambda run: f"{run.backbone}-{run.head}",
)
def test_round_trip_to_the_bit(tmp_path, run):
    saved = make(run)
    save_classifier(tmp_path / MODEL_FILE, saved)
    assert_same(load_classifier(tmp_path / MODEL_FILE), saved)
    assert_same(load_classifier(tmp_path), saved)  # the folder will do


def test_a_transformer_of_timm(tmp_path):
    saved = make(Run("timm/test_vit", "kernel", 0.1))
    save_classifier(tmp_path / MODEL_FILE, saved)
    assert_same(load_classifier(tmp_path), saved, size=160)


def test_the_stride_stays_in_the_first_convolution_without_the_weights_file(tmp_path):
    """Weights of ResNet v1 say where the stride sits: to load them into the other kind would change the results."""
    weights = tmp_path / "v1.safetensors"
    state = torchvision.models.get_model("resnet50").state_dict()
    safetensors.torch.save_file(state, weights, {"stride": FIRST_1X1})
    run = Run("resnet50", "softmax", 0.1, backbone_options={"weights": str(weights)})
    saved = make(run)
    assert saved.model.backbone.stride_first
    save_classifier(tmp_path / MODEL_FILE, saved)
    weights.unlink()
    loaded = load_classifier(tmp_path)
    assert_same(loaded, saved, size=64)
    block = loaded.model.backbone.network.layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))


@pytest.mark.parametrize(
    ("library", "function", "name", "no_weights"),
    [(torchvision.models, "get_model", "resnet18", {"weights": None}), (timm, "create_model", "timm/test_resnet", {})],
)
def test_pretrained_weights_are_not_looked_for(tmp_path, monkeypatch, library, function, name, no_weights):
    run = Run(name, "softmax", 0.1, backbone_options={"pretrained": True})
    saved = make(run, created=replace(run, backbone_options={}))
    save_classifier(tmp_path / MODEL_FILE, saved)
    asked = []
    real = getattr(library, function)

    def watched(*arguments, **options):
        asked.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(library, function, watched)
    assert_same(load_classifier(tmp_path), saved)
    assert asked == [no_weights or {"pretrained": False}]


def test_reading_draws_no_random_numbers(small):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load_classifier(small[1])
    assert torch.equal(torch.rand(3), expected)


def test_the_file_is_replaced_whole(small):
    saved, path = small
    other = make(Run("lenet5", "softmax", 0.1))
    save_classifier(path, other)
    assert_same(load_classifier(path), other)
    save_classifier(path, saved)
    assert_same(load_classifier(path), saved)
    assert [file.name for file in path.parent.iterdir()] == [MODEL_FILE]


# --- files that are not what they should be ---------------------------------------------------------------------------


def test_a_changed_bit_is_noticed(small):
    _, path = small
    content = path.read_bytes()
    for place in (len(content) - 1, len(content) // 2, content.index(b"Katze")):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(BrokenCheckpointError, match=r"does not match its own checksum|not a readable"):
            load_classifier(path)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_cut_file_is_refused(small, length):
    _, path = small
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(BrokenCheckpointError, match=r"model.safetensors is not a readable checkpoint"):
        load_classifier(path)


def test_a_checkpoint_is_no_classifier(tmp_path):
    save_checkpoint(tmp_path / "c.safetensors", {"x": torch.zeros(2)}, {"step": 3})
    with pytest.raises(BrokenCheckpointError, match=r"c.safetensors is not a trained classifier of kernelhead"):
        load_classifier(tmp_path / "c.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(small, value):
    saved, path = small
    with torch.no_grad():
        saved.model.head.weight[1, 2] = value
    save_classifier(path, saved)
    with pytest.raises(ValueError, match=r"model.safetensors has weights that are not finite: its training diverged"):
        load_classifier(path)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "old torch"])
def test_weights_of_somebody_else_are_not_called_damaged(small, tmp_path, kind):
    state, path = small[0].model.state_dict(), tmp_path / "own.bin"
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(BrokenCheckpointError, match=r"own.bin was not written by kernelhead train.*fc.describe\(\)"):
        load_classifier(path)


def drop_run(tensors, state):
    del state["run"]


def add_option(tensors, state):
    state["run"]["colour"] = 3


def drop_tensor(tensors, state):
    del tensors[min(tensors)]


def add_class(tensors, state):
    state["classes"].append("one more")


@pytest.mark.parametrize("change", [drop_run, add_option, drop_tensor, add_class])
def test_a_file_of_another_version_is_refused_in_one_sentence(small, change):
    _, path = small
    tensors, state = copy.deepcopy(load_checkpoint(path))
    change(tensors, state)
    save_checkpoint(path, tensors, state)
    with pytest.raises(
        BrokenCheckpointError, match=r"model.safetensors is not of this version of kernelhead"
    ) as caught:
        load_classifier(path)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no trained classifier in .*nowhere"):
        load_classifier(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="there is no trained classifier in"):
        load_classifier(tmp_path)
    (tmp_path / "config.yaml").write_text("data: cifar10\n")
    with pytest.raises(FileNotFoundError, match=r"is not finished; 'kernelhead train --resume --out .*' goes on"):
        load_classifier(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="diverged and left no classifier"):
        load_classifier(tmp_path)
