"""What a release promises: types for a user's program, files that can be read, versions that agree."""

import ast
import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import kernelhead

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import kernelhead
from kernelhead import HEADS, KernelHead, KernelHeadClassifier, LandmarkHead, create_head, kernelize
from kernelhead.export import export_onnx
from kernelhead.surgery import Changes, changes


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = KernelHead(8, 3, coefficients="softplus")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x)
        return logits


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], head: kernelhead.LandmarkHead) -> float:
    optimizer = torch.optim.SGD(kernelhead.parameter_groups(model, 1e-4), lr=0.1)
    loss = torch.zeros(())
    for features, target in batches:
        loss = head.loss(features, target)
        loss = loss + kernelhead.mixup_cross_entropy(model(features), target)
        loss = loss + kernelhead.distillation_loss(model(features), head(features), temperature=4.0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
    return loss.item()


names: list[str] = sorted(HEADS)
landmarks: LandmarkHead = LandmarkHead(8, 3, landmarks=16, pool=None)
model: nn.Module = kernelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 3, head="kernel")
record: Changes = changes(model)
alpha: Tensor = KernelHead(8, 3).alpha
options: dict[str, object] = create_head("linear", 8, 3).config
classifier = KernelHeadClassifier(random_state=0).fit(np.eye(4), np.arange(4))
probabilities: np.ndarray = classifier.predict_proba(np.eye(4))
kernelhead.save(model, "folder")
loaded: nn.Module = kernelhead.load("folder")
path: Path = export_onnx(Network(), "file.onnx", torch.zeros(1, 8)).path
drawn: str = str(landmarks.describe())
"""


@pytest.mark.slow
def test_a_program_of_a_user_is_typed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text("from kernelhead import KernelHead\nKernelHead('8', 3)\n")
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--follow-imports", "silent"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--ignore-missing-imports"]
    done = subprocess.run([*command, "program.py"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([*command, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "incompatible type" in done.stdout


NAMED = [name for name in kernelhead.__all__ if callable(getattr(kernelhead, name))]


@pytest.mark.parametrize("name", NAMED)
def test_every_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = getattr(kernelhead, name)
    examples = doctest.DocTestParser().get_examples(one.__doc__ or "")
    assert examples, f"{name} has no example"
    known = {"torch": torch, "nn": torch.nn, "kernelhead": kernelhead, "features": torch.randn(8, 64)}
    known |= {each: getattr(kernelhead, each) for each in kernelhead.__all__}
    known |= {each: importlib.import_module(each) for each in ("numpy", "torchvision")}
    test = doctest.DocTest(examples, known, name, None, None, None)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


def test_versions_agree():
    for name in ("CITATION.cff",):
        assert yaml.safe_load((ROOT / name).read_text())["version"] == kernelhead.__version__
    assert f"## {kernelhead.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_templates_of_issues_can_be_read(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} == set(form)
    assert all(part["attributes"]["label"] for part in form["body"])


LINUX_ALONE = {"fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios", "triton"}
TRITON = {"triton.py", "triton_kernels.py"}  # imported when a kernel is launched, on CUDA


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: path.name)
def test_nothing_that_only_linux_has_is_imported_at_import_time(path):
    tree = ast.parse(path.read_text())
    named = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    found = {name.partition(".")[0] for name in named} & LINUX_ALONE
    assert not found or path.name in TRITON, f"{path} imports {', '.join(found)}"
