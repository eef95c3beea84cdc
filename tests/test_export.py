"""Files that run without this library: ONNX and pt2."""

import json
import logging
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import kernelhead
from kernelhead import KernelClassifier, create_head, export
from kernelhead.backbones import Input
from kernelhead.cli import app
from kernelhead.surgery import kernelize
from kernelhead.train.export import export_classifier
from kernelhead.train.job import predict_pictures
from kernelhead.train.run import Run
from kernelhead.train.saved import SavedClassifier, load_classifier, save_classifier

D, C = 5, 3
VECTORS, MAPS, TOKENS = (D,), (D, 2, 3), (4, D)
ROOT = Path(__file__).parent.parent

CASES = {
    "softmax": ("softmax", {}, VECTORS),
    "linear": ("linear", {}, VECTORS),
    "second_order": ("second_order", {}, MAPS),
    "expansion": ("expansion", {"width": 6}, MAPS),
    "expansion-tokens": ("expansion", {"width": 6}, TOKENS),
    "kernel": ("kernel", {}, VECTORS),
    "kernel-sigmoid": ("kernel", {"coefficients": "sigmoid"}, VECTORS),
    "kernel-softmax": ("kernel", {"coefficients": "softmax", "degree": 3, "temperature": 0.1}, VECTORS),
    "kernel-softplus": ("kernel", {"coefficients": "softplus"}, VECTORS),
    "kernel-none": ("kernel", {"coefficients": "none"}, VECTORS),
    "kernel-polynomial": ("kernel", {"kernel": "polynomial", "degree": 10}, VECTORS),
    "kernel-rbf": ("kernel", {"kernel": "rbf", "gamma": 0.5}, VECTORS),
    "kernel-prototypes-sum": ("kernel", {"prototypes": 2, "aggregate": "sum"}, VECTORS),
    "kernel-prototypes-logsumexp": ("kernel", {"prototypes": 2}, VECTORS),
    "kernel-prototypes-large": ("kernel", {"prototypes": 2, "temperature": 0.05}, VECTORS),
    "kernel-landmarks": ("kernel", {"landmarks": 4}, VECTORS),
    "kernel-rkhs-maps": ("kernel", {"pool": "rkhs"}, MAPS),
    "kernel-rkhs-tokens": ("kernel", {"pool": "rkhs", "prototypes": 2}, TOKENS),
    "kernel-landmarks-as-they-are": ("kernel", {"landmarks": 4, "standardize": False}, VECTORS),
    "expansion-normalized": ("expansion", {"width": 6, "normalized": True}, MAPS),
    "kernel-rkhs-landmarks": ("kernel", {"pool": "rkhs", "landmarks": 4}, MAPS),
}


def make(case):
    name, options, shape = CASES[case]
    head = create_head(name, D, C, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.rand_like(parameter))
    head(torch.randn(16, *shape))  # moves running statistics, where there are some
    return head.eval(), shape


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    return torch.from_numpy(session.run(["logits"], {name: x.numpy()})[0])


def largest_difference(run, module, shape):
    """Of logits, in units of the largest of them where it is above 1."""
    differences = []
    for batch in (1, 2, 5):
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            logits = module(x)
            differences.append((run(x) - logits).abs().max().item() / max(1, logits.abs().max().item()))
    return max(differences)


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_gives_the_logits_of_every_head(case, tmp_path):
    head, shape = make(case)
    written = export.export_onnx(head, tmp_path / "head.onnx", torch.zeros(1, *shape), input_name="features")
    assert [path.name for path in tmp_path.iterdir()] == ["head.onnx"]
    assert written.bytes == written.path.stat().st_size
    assert written.difference < 1e-5 / getattr(head, "temperature", 1)
    assert largest_difference(lambda x: run_onnx(written.path, x), head, shape) < 1e-5
    zero = torch.zeros(2, *shape)
    torch.testing.assert_close(run_onnx(written.path, zero), head(zero).detach(), rtol=1e-4, atol=1e-5)
    model = onnx.load(written.path)
    onnx.checker.check_model(model, full_check=True)
    (given,), (logits,) = model.graph.input, model.graph.output
    assert given.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [d.dim_param or d.dim_value for d in logits.type.tensor_type.shape.dim] == ["batch", C]


@pytest.mark.parametrize(
    "case", ["softmax", "second_order", "kernel", "kernel-prototypes-logsumexp", "kernel-rkhs-landmarks"]
)
def test_a_pt2_file_gives_the_logits(case, tmp_path):
    head, shape = make(case)
    written = export.export_pt2(head, tmp_path / "head.pt2", torch.zeros(1, *shape), metadata={"classes": ["ä", "b"]})
    extra = {"kernelhead.json": ""}
    program = torch.export.load(written.path, extra_files=extra).module()
    assert largest_difference(program, head, shape) < 1e-5
    assert written.difference < 1e-5
    assert json.loads(extra["kernelhead.json"]) == {"classes": ["ä", "b"]}
    assert str(Path(kernelhead.__file__).parent).encode() not in written.path.read_bytes()


def network_of(library):
    """A network, the shape of its input, and the name of its head."""
    if library == "torchvision":
        return kernelize(torchvision.models.resnet18(), 7, pool="rkhs", window=2, landmarks=9), (3, 64, 64), "fc"
    return kernelize(timm.create_model("test_vit", pretrained=False), 7, prototypes=2), (3, 160, 160), "head"


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_networks_of_other_libraries(library, tmp_path):
    network, shape, name = network_of(library)
    network.train()
    network(torch.randn(4, *shape))  # statistics of BatchNorm that are not those of the start
    written = export.export_onnx(network, tmp_path / "network.onnx", torch.zeros(2, *shape))
    assert type(network.get_submodule(name)) is KernelClassifier
    assert network.training
    network.eval()
    assert largest_difference(lambda x: run_onnx(written.path, x), network, shape) < 1e-5
    program = torch.export.load(export.export_pt2(network, tmp_path / "n.pt2", torch.zeros(2, *shape)).path).module()
    assert largest_difference(program, network, shape) < 1e-5


def test_a_layer_put_in_by_hand(tmp_path):
    network = torchvision.models.shufflenet_v2_x0_5()
    network.fc = KernelClassifier(network.fc.in_features, 7)
    network.eval()
    written = export.export_onnx(network, tmp_path / "network.onnx", torch.zeros(1, 3, 64, 64))
    assert largest_difference(lambda x: run_onnx(written.path, x), network, (3, 64, 64)) < 1e-5


def test_metadata_and_nothing_of_this_machine(tmp_path):
    metadata = {"classes": ["ä", "b", "c"], "note": "as it is", "mean": [0.5]}
    path = export.export_onnx(make("kernel")[0], tmp_path / "a" / "h.onnx", torch.zeros(1, D), metadata=metadata).path
    kept = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert kept["note"] == "as it is"
    assert json.loads(kept["classes"]) == ["ä", "b", "c"]
    assert json.loads(kept["mean"]) == [0.5]
    assert str(Path(kernelhead.__file__).parent).encode() not in path.read_bytes()
    assert path.stat().st_size < 6000


def test_the_exporter_is_quiet(tmp_path, capfd, caplog, recwarn):
    export.export_onnx(make("kernel")[0], tmp_path / "h.onnx", torch.zeros(1, D))
    export.export_pt2(make("kernel")[0], tmp_path / "h.pt2", torch.zeros(1, D))
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.root.manager.disable == 0


def test_a_head_of_ones_own_is_exported_as_it_is(tmp_path):
    class Doubled(KernelClassifier):
        def forward(self, features):
            return 2 * super().forward(features)

    head = Doubled(D, C).eval()
    written = export.export_onnx(nn.Sequential(head), tmp_path / "h.onnx", torch.zeros(1, D))
    assert largest_difference(lambda x: run_onnx(written.path, x), head, VECTORS) < 1e-5


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("module", "example", "kind", "message"),
    [
        (nn.Linear(D, C), torch.zeros(1, D).long(), TypeError, r"the example input must be one floating-point tensor"),
        (nn.Linear(D, C), torch.zeros(D), TypeError, r"the example input must be .* first dimension is the batch$"),
        (
            Pair(),
            torch.zeros(1, D),
            TypeError,
            r"^Pair gives a tuple; only modules that give one tensor can be exported$",
        ),
        (Branching(), torch.zeros(1, D), ValueError, r"^Branching cannot be exported for batches of any size \("),
    ],
)
def test_modules_that_cannot_be_exported(module, example, kind, message, tmp_path):
    for write in (export.export_onnx, export.export_pt2):
        with pytest.raises(kind, match=message) as error:
            write(module, tmp_path / "file", example)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "h.pt2"
    path.write_bytes(b"before")
    monkeypatch.setattr(KernelClassifier, "freeze", lambda head: nn.Linear(D, C))
    with pytest.raises(ValueError, match=r"does not compute what the network does: .* nothing was written$"):
        export.export_pt2(KernelClassifier(D, C), path, torch.zeros(1, D))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("h.pt2", b"before")]


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a file to write$"):
        export.export_pt2(nn.Linear(D, C), tmp_path, torch.zeros(1, D))


def test_what_is_too_large_for_onnx(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LARGEST_ONNX", 10)
    with pytest.raises(ValueError, match=r"an ONNX file can hold 2; export it as pt2 instead$"):
        export.export_onnx(nn.Linear(D, C), tmp_path / "h.onnx", torch.zeros(1, D))


def without(monkeypatch, missing):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == missing else find_spec(name))


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_what_is_not_installed_is_named(missing, tmp_path, monkeypatch):
    without(monkeypatch, missing)
    message = rf"^an ONNX file needs {missing}; pip install 'kernelhead\[export\]' brings it$"
    with pytest.raises(ModuleNotFoundError, match=message):
        export.export_onnx(nn.Linear(D, C), tmp_path / "h.onnx", torch.zeros(1, D))


# --- kernelhead export ------------------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def save(path, head, **options):
    run = Run(backbone="cifar_resnet8", head=head, learning_rate=0.1, head_options=options)
    model = run.create(C)
    model(torch.randn(8, 3, 32, 32))
    expected = Input(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    save_classifier(path / "model.safetensors", SavedClassifier(model.eval(), run, ["cat", "dog", "ü"], expected, {}))
    return path


@pytest.mark.parametrize(("head", "options"), [("softmax", {}), ("kernel", {"pool": "rkhs", "landmarks": 6})])
@pytest.mark.parametrize("part", ["network", "head"])
def test_a_checkpoint_becomes_a_file(head, options, part, tmp_path):
    folder = save(tmp_path, head, **options)
    result = invoke("export", folder, "--part", part)
    assert result.exit_code == 0, (result.output, result.exception)
    file = folder / ("model.onnx" if part == "network" else "model-head.onnx")
    assert f"Written {file}, {file.stat().st_size:,} bytes" in result.stdout
    difference = float(result.stdout.split("Run by onnxruntime on random input, its logits differ by at most ")[1])
    assert difference < 1e-5
    model = load_classifier(folder).model
    images = torch.randn(4, 3, 32, 32)
    given = (
        images
        if part == "network"
        else model.backbone.feature_map(images)
        if model.head.pools
        else model.backbone(images)
    )
    torch.testing.assert_close(run_onnx(file, given.detach()), model(images).detach(), rtol=0, atol=1e-5)
    kept = onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map
    assert json.loads(kept["classes"]) == ["cat", "dog", "ü"]
    assert json.loads(kept["input"])["shape"] == ["batch", *given.shape[1:]]


def test_pt2_where_it_is_wanted(tmp_path):
    folder = save(tmp_path, "kernel")
    result = invoke("export", folder / "model.safetensors", "--format", "pt2", "--out", tmp_path / "new" / "x.pt2")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Run by PyTorch on random input, its logits differ by at most" in result.stdout
    images = torch.randn(3, 3, 32, 32)
    program = torch.export.load(tmp_path / "new" / "x.pt2").module()
    torch.testing.assert_close(program(images), load_classifier(folder).model(images).detach(), rtol=0, atol=1e-5)


def test_the_metadata_are_all_that_a_user_needs(tmp_path):
    """A picture, prepared as the metadata say, gets the probabilities that `kernelhead predict` gives it."""
    saved = load_classifier(save(tmp_path, "kernel"))
    export_classifier(saved, tmp_path / "m.onnx")
    pixels = np.kron(np.random.default_rng(0).integers(0, 255, size=(6, 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    kept = session.get_modelmeta().custom_metadata_map
    given = json.loads(kept["input"])

    with Image.open(tmp_path / "p.png") as opened:
        picture = opened.convert(given["channels"])
    scale = given["short_side"] / min(picture.size)
    picture = picture.resize([round(side * scale) for side in picture.size], Image.Resampling.BILINEAR)
    size = given["shape"][-1]
    left, top = ((side - size) // 2 for side in picture.size)
    x = np.asarray(picture.crop((left, top, left + size, top + size)), dtype=np.float32) / 255
    x = ((x - given["mean"]) / given["std"]).astype(np.float32).transpose(2, 0, 1)[None]
    (logits,) = session.run([json.loads(kept["output"])["name"]], {given["name"]: x})
    probabilities = np.exp(logits) / np.exp(logits).sum()

    expected, broken = predict_pictures(saved, [tmp_path / "p.png"], torch.device("cpu"))
    assert not broken
    np.testing.assert_allclose(probabilities, expected.numpy(), atol=2e-3)  # PIL rounds to bytes
    assert np.ptp(probabilities) > 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "tflite"], r"unknown format 'tflite'; choose one of onnx, pt2"),
        (["--part", "body"], r"unknown part 'body'; choose one of network, head"),
        (["--out", "."], r". is a folder; name a file to write"),
        (["--out", "model.safetensors"], r"model.safetensors is a checkpoint; give the onnx file another name"),
    ],
)
def test_wrong_options(options, message, tmp_path, monkeypatch):
    save(tmp_path, "softmax")
    monkeypatch.chdir(tmp_path)
    result = invoke("export", ".", *options)
    assert result.exit_code == 1
    assert str(result.exception) == message
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_no_checkpoint(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    assert (
        str(invoke("export", tmp_path / "none").exception) == f"there is no trained classifier in {tmp_path / 'none'}"
    )
    assert "is not a readable checkpoint" in str(invoke("export", tmp_path / "broken.safetensors").exception)


@pytest.mark.parametrize("part", ["network", "head"])
def test_a_network_whose_scores_are_not_finite_is_not_exported(part, tmp_path):
    saved = load_classifier(save(tmp_path, "kernel", landmarks=6))
    saved.model.head.norm.running_var.fill_(float("nan"))
    save_classifier(tmp_path / "model.safetensors", saved)
    result = invoke("export", tmp_path, "--part", part)
    assert result.exit_code == 1
    assert str(result.exception).startswith("the classifier's scores are not finite: its training diverged")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_without_onnxruntime_it_says_that_nothing_was_checked(tmp_path, monkeypatch):
    without(monkeypatch, "onnxruntime")
    result = invoke("export", save(tmp_path, "linear"), "--part", "head")
    assert result.exit_code == 0
    assert (tmp_path / "model-head.onnx").exists()
    assert (
        "was not run to check it: that needs onnxruntime; pip install 'kernelhead[export]' brings it" in result.stderr
    )


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["export_onnx.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "export_onnx.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "shapes.pt2: the same logits" in said
    assert {path.name for path in tmp_path.iterdir()} == {"shapes.onnx", "shapes.pt2"}
