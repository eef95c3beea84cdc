"""Files that run without this library: ONNX and pt2."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path

import onnx
import onnxruntime
import pytest
import timm
import torch
import torchvision
from torch import nn

import kernelhead
from kernelhead import KernelHead, LandmarkHead, PrototypeHead, create_head, export
from kernelhead.surgery import kernelize

D, C = 5, 3
VECTORS, MAPS, TOKENS = (D,), (D, 2, 3), (4, D)

CASES = {
    "linear": ("linear", {}, VECTORS),
    "cosine": ("cosine", {}, VECTORS),
    "kernel": ("kernel", {"bias": True}, VECTORS),
    "kernel-sigmoid": ("kernel", {"coefficients": "sigmoid"}, VECTORS),
    "kernel-softmax": ("kernel", {"coefficients": "softmax", "degree": 3, "temperature": 0.1}, VECTORS),
    "kernel-softplus": ("kernel", {"coefficients": "softplus"}, VECTORS),
    "kernel-none": ("kernel", {"coefficients": "none"}, VECTORS),
    "kernel-polynomial": ("kernel", {"kernel": "polynomial", "degree": 10}, VECTORS),
    "kernel-rbf": ("kernel", {"kernel": "rbf", "gamma": 0.5}, VECTORS),
    "prototypes-sum": ("prototypes", {"prototypes": 2}, VECTORS),
    "prototypes-logsumexp": ("prototypes", {"prototypes": 2, "aggregate": "logsumexp"}, VECTORS),
    "prototypes-large": ("prototypes", {"prototypes": 2, "aggregate": "logsumexp", "temperature": 0.05}, VECTORS),
    "landmarks-vectors": ("landmarks", {"landmarks": 4, "pool": None}, VECTORS),
    "landmarks-maps": ("landmarks", {"landmarks": 4}, MAPS),
    "landmarks-tokens": ("landmarks", {"landmarks": 4, "coefficients": "relu"}, TOKENS),
    "second_order": ("second_order", {}, MAPS),
    "expansion": ("expansion", {"width": 6}, MAPS),
    "expansion-tokens": ("expansion", {"width": 6}, TOKENS),
    "attentive": ("attentive", {}, TOKENS),
}
PATHS = ["linear", "prototypes-large", "landmarks-maps", "second_order", "expansion-tokens", "attentive"]


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


@pytest.mark.parametrize("case", [*PATHS, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in PATHS)])
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


@pytest.mark.parametrize("case", ["kernel", "landmarks-maps", "attentive"])
def test_a_pt2_file_gives_the_logits(case, tmp_path):
    head, shape = make(case)
    written = export.export_pt2(head, tmp_path / "head.pt2", torch.zeros(1, *shape), metadata={"classes": ["ä", "b"]})
    extra = {"kernelhead.json": ""}
    program = torch.export.load(written.path, extra_files=extra).module()
    assert largest_difference(program, head, shape) < 1e-5
    assert written.difference < 1e-5 / getattr(head, "temperature", 1)
    assert json.loads(extra["kernelhead.json"]) == {"classes": ["ä", "b"]}
    assert str(Path(kernelhead.__file__).parent).encode() not in written.path.read_bytes()


def network_of(library):
    """A network, the shape of its input, the name of its head and its class."""
    if library == "torchvision":
        network = kernelize(torchvision.models.resnet18(), 7, landmarks=9)
        return network, (3, 64, 64), "fc", LandmarkHead
    network = kernelize(timm.create_model("test_vit", pretrained=False), 7, head="prototypes", prototypes=2)
    return network, (3, 160, 160), "head", PrototypeHead


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_networks_of_other_libraries(library, tmp_path):
    network, shape, name, kind = network_of(library)
    network.train()
    network(torch.randn(4, *shape))  # statistics of BatchNorm that are not those of the start
    written = export.export_onnx(network, tmp_path / "network.onnx", torch.zeros(2, *shape))
    assert type(network.get_submodule(name)) is kind
    assert network.training
    network.eval()
    assert largest_difference(lambda x: run_onnx(written.path, x), network, shape) < 1e-5
    program = torch.export.load(export.export_pt2(network, tmp_path / "n.pt2", torch.zeros(2, *shape)).path).module()
    assert largest_difference(program, network, shape) < 1e-5


def test_a_layer_put_in_by_hand(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Sequential(nn.Flatten(), KernelHead(8 * 36, 7))).eval()
    written = export.export_onnx(network, tmp_path / "network.onnx", torch.zeros(1, 3, 8, 8))
    assert largest_difference(lambda x: run_onnx(written.path, x), network, (3, 8, 8)) < 1e-5
    assert type(network[2][1]) is KernelHead


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
    class Doubled(KernelHead):
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
        (
            nn.Linear(D, C),
            torch.zeros(1, D).long(),
            TypeError,
            r"^example_input needs to be one floating-point tensor \(N, \.\.\.\); got torch\.int64$",
        ),
        (nn.Linear(D, C), torch.zeros(D), TypeError, r"^example_input needs to be one floating-point tensor"),
        (
            Pair(),
            torch.zeros(1, D),
            TypeError,
            r"^Pair gives a tuple; export a module that gives one tensor$",
        ),
        (Branching(), torch.zeros(1, D), ValueError, r"^Branching cannot be exported for batches of any size: "),
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
    monkeypatch.setattr(KernelHead, "freeze", lambda head: nn.Linear(D, C))
    with pytest.raises(ValueError, match=r"^the exported file differs from the network by .*; nothing was written$"):
        export.export_pt2(KernelHead(D, C), path, torch.zeros(1, D))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("h.pt2", b"before")]


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a file to write$"):
        export.export_pt2(nn.Linear(D, C), tmp_path, torch.zeros(1, D))


def test_what_is_too_large_for_onnx(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_ONNX_BYTES", 10)
    with pytest.raises(ValueError, match=r"^an ONNX file holds 2 GiB; the network has .*, export it as pt2 instead$"):
        export.export_onnx(nn.Linear(D, C), tmp_path / "h.onnx", torch.zeros(1, D))


def without(monkeypatch, missing):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == missing else find_spec(name))


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_what_is_not_installed_is_named(missing, tmp_path, monkeypatch):
    without(monkeypatch, missing)
    message = rf"^ONNX export needs {missing}; pip install 'kernelhead\[export\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        export.export_onnx(nn.Linear(D, C), tmp_path / "h.onnx", torch.zeros(1, D))
