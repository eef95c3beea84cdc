"""The wheel and the source distribution: the library alone, which installs with what it declares and nothing else."""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
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
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert not [
        name for name in names if name.startswith("kernelhead/") and not name.endswith((".py", "py.typed", "page.css"))
    ]


def test_the_source_holds_the_library_and_its_documents(tmp_path):
    program = f"from hatchling.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    with tarfile.open(tmp_path / made.stdout.strip()) as opened:
        names = [Path(*Path(each.name).parts[1:]) for each in opened.getmembers()]
    parts = {name.parts[0] for name in names}
    files = {"README.md", "LICENSE", "SECURITY.md", "CHANGELOG.md", "PKG-INFO", "pyproject.toml", ".gitignore"}
    files |= {"mkdocs.yml", "CITATION.cff"}
    assert parts <= {"src", "docs", "examples"} | files
    assert {"LICENSE", "SECURITY.md"} <= parts
    assert {name.parts[1] for name in names if name.parts[0] == "src"} == {"kernelhead"}


def needed(name, extras=()):
    """The distributions that one needs, by what their metadata declare; those of other machines are not here."""
    from packaging.requirements import Requirement

    found, todo = {}, [(name, tuple(extras))]
    while todo:
        one, own = todo.pop()
        try:
            about = distribution(one)
        except PackageNotFoundError:
            continue
        if (one, own) in found:
            continue
        found[one, own] = about
        for each in map(Requirement, about.requires or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *own)):
                todo.append((re.sub(r"[-_.]+", "-", each.name).lower(), tuple(sorted(each.extras))))
    return {one: about for (one, _), about in found.items() if one != name}


@pytest.mark.slow
def test_it_installs_into_an_empty_environment_of_what_it_declares(wheel, tmp_path):
    """Its dependencies are linked there, as they are installed here: what is not declared is not there."""
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    (place,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    for about in needed("kernelhead").values():
        for top in {each.parts[0] for each in about.files or () if each.parts[0] not in ("..", "__pycache__")}:
            source = Path(about.locate_file(top))
            if source.exists() and not (place / top).exists():
                (place / top).symlink_to(source)

    def succeed(*arguments):
        done = subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    succeed("-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel)
    assert "No broken requirements" in succeed("-m", "pip", "check")
    assert succeed("-m", "kernelhead", "--version").startswith("kernelhead ")
    saved = "import kernelhead as k; k.save(k.LandmarkHead(6, 4, landmarks=5), 'head'); k.load('head')"
    succeed("-W", "error", "-c", saved)
    failed = subprocess.run([python, "-c", "import sklearn"], capture_output=True, cwd=tmp_path)
    assert failed.returncode  # it is empty of all else


def test_the_licences_of_all_dependencies_are_listed():
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE)
    listed = {re.sub(r"[-_.]+", "-", name).lower(): (version, licence) for name, version, licence in rows[1:]}
    pinned = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned}
    assert not set(needed("kernelhead", ("export", "hub", "plot", "sklearn", "vision"))) - set(listed)
    others = {name: version for name, (version, _) in listed.items() if versions.get(name, version) != version}
    assert not others
    assert [name for name, (_, licence) in listed.items() if licence == "UNKNOWN"] in ([], ["cuda-toolkit"])


def test_with_torch_and_numpy_alone_it_swaps_a_layer_and_trains(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
