"""The wheel: the library alone, which needs torch and numpy to be imported, to swap a layer and to train."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import sys
import numpy, torch, torch._dynamo, torch.export, torch.func

known = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names) | {"kernelhead"}


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in known:
            raise ImportError(f"kernelhead imports {name}")


for name in ("torchvision", "timm", "sklearn", "safetensors", "typer", "rich", "yaml", "scipy", "matplotlib"):
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]
    known.discard(name)
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import kernelhead

assert kernelhead.__file__.startswith(sys.argv[1]), kernelhead.__file__
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
network[2] = kernelhead.KernelHead(16, 3)
optimizer = torch.optim.SGD(kernelhead.parameter_groups(network, 1e-4), lr=0.1, momentum=0.9)
images, labels = torch.randn(32, 8), torch.randint(3, (32,))
before = network[2].weight.detach().clone()
loss = torch.nn.functional.cross_entropy(network(images), labels)
loss.backward()
optimizer.step()
assert torch.isfinite(loss) and not torch.equal(before, network[2].weight)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(ROOT),
    ]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (path,) = out.glob("kernelhead-*.whl")
    return path


def test_it_holds_the_library_and_nothing_of_the_laboratory(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    packages = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packages == {"kernelhead"}
    assert "kernelhead/py.typed" in names
    assert not [name for name in names if {"lab", "results", "tests"} & set(Path(name).parts)]


def test_with_torch_and_numpy_alone_it_swaps_a_layer_and_trains(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
