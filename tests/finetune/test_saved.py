"""A trained classifier as one file: the same to the bit when it is read, and refused when it was changed."""

import copy
from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch
import torchvision

from kernelhead.finetune.backbones import FIRST_1X1, Input
from kernelhead.finetune.checkpoint import BrokenCheckpointError, load_checkpoint, save_checkpoint
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of, load_classifier, save_classifier
from kernelhead.finetune.settings import MODEL_FILE, resolved
from kernelhead.finetune.spec import TrainSpec

CLASSES = ["Katze", '[red]cat, "dog"', "猫"]


def make(backbone, head="kernel", size=32, *, created=None, **changes):
    """A classifier whose every number, those of BatchNorm too, is not the one that it was created with."""
    spec = resolved(TrainSpec("my images", backbone, head, image_size=size, **{"pretrained": False, **changes}))
    model = create_classifier(created or spec, len(CLASSES))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand(tensor.shape, generator=generator)).add_(1e-4)
            else:
                tensor += 5
    expected = Input(size, (0.1, 0.2, 1 / 3), (0.25, 0.5, 0.7))
    return SavedClassifier(model.eval(), head_of(model), CLASSES, spec, expected)


@pytest.fixture
def small(colours, tmp_path):
    """A saved classifier and its file."""
    saved = make("tiny_networks:tiny", head_options={"degree": 3})
    path = tmp_path / "run" / MODEL_FILE
    save_classifier(path, saved)
    return saved, path


def assert_same(loaded, saved):
    own, other = saved.model.state_dict(), loaded.model.state_dict()
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name
    size = saved.input.size
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = saved.model(images)
        assert torch.isfinite(logits).all()
        assert torch.equal(loaded.model(images), logits)
    assert not any(module.training for module in loaded.model.modules())
    assert loaded.head is head_of(loaded.model)
    for field in ("spec", "classes", "input"):
        assert getattr(loaded, field) == getattr(saved, field)


@pytest.mark.parametrize(
    ("backbone", "head", "options", "size"),
    [
        ("tiny_networks:tiny", "linear", {}, 32),
        ("tiny_networks:tiny", "prototypes", {"degree": 4, "prototypes": 2}, 32),
        ("tiny_networks:tiny", "expansion", {"width": 5}, 32),
        ("torchvision/resnet18", "landmarks", {"landmarks": 6}, 64),
        ("timm/test_resnet", "kernel", {}, 64),
        ("timm/test_vit", "landmarks", {"landmarks": 6}, 160),
    ],
)
def test_round_trip_to_the_bit(colours, tmp_path, backbone, head, options, size):
    saved = make(backbone, head, size, head_options=options, rectified=head == "linear")
    save_classifier(tmp_path / MODEL_FILE, saved)
    assert_same(load_classifier(tmp_path / MODEL_FILE), saved)
    assert_same(load_classifier(tmp_path), saved)  # the folder will do


@pytest.mark.slow
def test_the_stride_stays_in_the_first_convolution_without_the_weights_file(tmp_path):
    """Weights of ResNet v1 say where the stride sits: to load them into the other kind would change the results."""
    weights = tmp_path / "v1.safetensors"
    state = torchvision.models.get_model("resnet50").state_dict()
    safetensors.torch.save_file(state, weights, {"stride": FIRST_1X1})
    saved = make("torchvision/resnet50", size=64, weights=str(weights))
    save_classifier(tmp_path / MODEL_FILE, saved)
    weights.unlink()
    loaded = load_classifier(tmp_path)
    assert_same(loaded, saved)
    block = loaded.model.layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))


@pytest.mark.parametrize(
    ("library", "function", "name", "no_weights"),
    [
        (torchvision.models, "get_model", "torchvision/resnet18", {"weights": None}),
        (timm, "create_model", "timm/test_resnet", {"pretrained": False}),
    ],
)
def test_pretrained_weights_are_not_looked_for(tmp_path, monkeypatch, library, function, name, no_weights):
    plain = make(name, size=64).spec
    saved = make(name, size=64, pretrained=True, created=plain)
    assert saved.spec == replace(plain, pretrained=True, **{
        each: getattr(saved.spec, each) for each in ("epochs", "learning_rate", "head_rate", "weight_decay")
    })  # fmt: skip
    save_classifier(tmp_path / MODEL_FILE, saved)
    asked, real = [], getattr(library, function)
    monkeypatch.setattr(library, function, lambda *given, **options: asked.append(options) or real(*given, **options))
    assert_same(load_classifier(tmp_path), saved)
    assert asked == [no_weights] * 2  # without memory first, to compare shapes


def test_reading_draws_no_random_numbers(small):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load_classifier(small[1])
    assert torch.equal(torch.rand(3), expected)


def test_the_file_is_replaced_whole(small):
    saved, path = small
    other = make("tiny_networks:tiny", "linear")
    save_classifier(path, other)
    assert_same(load_classifier(path), other)
    save_classifier(path, saved)
    assert_same(load_classifier(path), saved)
    assert [file.name for file in path.parent.iterdir()] == [MODEL_FILE]


# --- files that are not what they should be ---------------------------------------------------------------------------


def test_a_changed_bit_is_noticed(small):
    _, path = small
    content = path.read_bytes()
    for position in (len(content) - 1, len(content) // 2, content.index(b"Katze")):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(BrokenCheckpointError, match=r"does not match its own checksum|not a readable"):
            load_classifier(path)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_cut_file_is_refused(small, length):
    _, path = small
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(BrokenCheckpointError, match=r"model.safetensors is not a readable safetensors file"):
        load_classifier(path)


def test_a_checkpoint_is_no_classifier(tmp_path):
    save_checkpoint(tmp_path / "c.safetensors", {"x": torch.zeros(2)}, {"step": 3, "format": "kernelhead classifier 1"})
    with pytest.raises(BrokenCheckpointError, match=r"c.safetensors is not a classifier of this version of kernelhead"):
        load_classifier(tmp_path / "c.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(small, value):
    saved, path = small
    with torch.no_grad():
        saved.head.weight[1, 2] = value
    save_classifier(path, saved)
    with pytest.raises(ValueError, match=r"model.safetensors has weights that are not finite: its run diverged"):
        load_classifier(path)


def test_weights_of_somebody_else_are_named_as_such(small, tmp_path):
    state = small[0].model.state_dict()
    safetensors.torch.save_file(state, tmp_path / "own.safetensors")
    with pytest.raises(BrokenCheckpointError, match=r"own.safetensors was not written by kernelhead; it holds weights"):
        load_classifier(tmp_path / "own.safetensors")
    torch.save(state, tmp_path / "own.pt")
    with pytest.raises(BrokenCheckpointError, match=r"own.pt is not a readable safetensors file"):
        load_classifier(tmp_path / "own.pt")


def drop_spec(tensors, state):
    del state["spec"]


def add_setting(tensors, state):
    state["spec"]["colour"] = 3


def add_option(tensors, state):
    state["spec"]["head_options"]["colour"] = 3


def drop_tensor(tensors, state):
    del tensors[min(tensors)]


def add_class(tensors, state):
    state["classes"].append("one more")


@pytest.mark.parametrize("change", [drop_spec, add_setting, add_option, drop_tensor, add_class])
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
    with pytest.raises(FileNotFoundError, match=r"is unfinished; 'kernelhead train --resume --out .*' continues it"):
        load_classifier(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="diverged and left no classifier"):
        load_classifier(tmp_path)
