"""Every `raise` of the library has a sentence, and a test that provokes it and names its words.

A sentence is looked for in the texts of all tests by its own words: runs of characters that no other `raise` has. A
test that expects them passes only if they are raised.
"""

import ast
import collections
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import NETWORK
from safetensors.torch import save_file

import kernelhead
from kernelhead.finetune.checkpoint import digest, load_checkpoint
from kernelhead.finetune.cifar import load_cifar
from kernelhead.finetune.images import read_image
from kernelhead.finetune.results import load_result
from kernelhead.finetune.saved import load_classifier
from kernelhead.sklearn import KernelHeadClassifier
from kernelhead.sklearn.features import load_features
from kernelhead.surgery import kernelize

ROOT = Path(__file__).resolve().parents[2]
GRAM = 10  # characters in a row that tell sentences apart
# Those without words of their own, by file: they pass on a sentence that was made elsewhere, or only an exit status.
PASSED_ON = {
    "cli/_console.py": 1, "cli/_progress.py": 1, "cli/classifier.py": 1, "cli/train.py": 2, "finetune/saved.py": 1,
    "finetune/settings.py": 1, "saving.py": 2, "sklearn/compare.py": 1,
}  # fmt: skip


def raises():
    """Yield the place of each `raise` with a call, and the constant parts of its sentence, from wherever it is made."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
            known = collections.defaultdict(list)  # texts that a name may stand for
            for node in ast.walk(function):
                if isinstance(node, ast.Assign | ast.NamedExpr | ast.AugAssign):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
                    for name in names:
                        known[name] += texts(node.value, {})
            for node in own_nodes(function):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    parts = [part for each in node.exc.args for part in texts(each, known)]
                    yield f"{path.relative_to(ROOT / 'src' / 'kernelhead')}:{node.lineno}", parts


def own_nodes(function):
    """The nodes of a function without those of functions inside."""
    todo = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def texts(tree, known):
    """The constant texts of an expression."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.Name):
            found += known.get(node.id, [])
    return found


def grams(text):
    """All runs of characters of a text, without what a regular expression adds."""
    plain = re.sub(r"\s+", " ", text.replace("\\", ""))
    return {plain[i : i + GRAM] for i in range(len(plain) - GRAM + 1)}


def expected():
    """The runs of characters of all texts in the tests of the library and of the laboratory."""
    found = set()
    for path in [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "lab" / "tests").rglob("test_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= grams(node.value)
    return found


def test_every_error_has_a_sentence_that_a_test_provokes():
    sentences = dict(raises())
    assert len(sentences) > 200
    own = {place: set().union(*map(grams, parts)) for place, parts in sentences.items()}
    wordless = collections.Counter(place.partition(":")[0] for place, words in own.items() if not words)
    assert wordless == PASSED_ON
    counts = collections.Counter(gram for words in own.values() for gram in words)
    named = expected()
    missing = []
    for place, words in own.items():
        unique = {gram for gram in words if counts[gram] == 1} or words
        if words and not unique & named:
            missing.append(f"{place}: {' .. '.join(sentences[place])}")
    assert missing == []


# --- sentences that no other test names -------------------------------------------------------------------------------


def sign(path, text):
    """Write a file with this state and a checksum that is right."""
    tensors = {"x": torch.zeros(2)}
    save_file(tensors, path, {"state": text, "sha256": digest(tensors, text)})


@pytest.mark.parametrize("state", ["[1]", "{", "[" * 9999, "null"])
def test_a_checkpoint_without_a_state(tmp_path, state):
    sign(tmp_path / "a.safetensors", state)
    with pytest.raises(ValueError, match=r"a\.safetensors has no readable state; it was changed or damaged"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("classes", [[], {}, "abc", [1], None])
def test_a_classifier_without_names_of_classes(tmp_path, monkeypatch, classes):
    from kernelhead.finetune.settings import make_spec, resolved

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nameless_networks.py").write_text(NETWORK)
    spec = resolved(make_spec(None, {"data": "cifar10", "backbone": "nameless_networks:small"})).as_dict()
    files = {"train": [], "test": []}
    given = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3}
    state = {"format": "kernelhead classifier 2", "spec": spec, "classes": classes, "input": given, "files": files}
    text = json.dumps(state)
    save_file(
        {"x": torch.zeros(2)},
        tmp_path / "a.safetensors",
        {"state": text, "sha256": digest({"x": torch.zeros(2)}, text)},
    )
    with pytest.raises(ValueError, match="its classes are none of a classifier"):
        load_classifier(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input": {"size": 10**9, "mean": [0.5] * 3, "std": [0.5] * 3}}, "its input sizes are none of a classifier"),
        ({"input": {"size": 16, "mean": [0.5] * 3, "std": [0.0] * 3}}, "its input colours are none"),
        ({"files": {"test": [["a.png", 7, ""]]}}, "its files are none of"),
        ({"backbone": "os:getcwd"}, "'os:getcwd' is of Python's own library; name a function of yours"),
        ({"epochs": 10**18}, "epochs must be at most 1,000,000, got 1000000000000000000"),
        ({"image_size": 10**9}, "image_size must be at most 4,096, got 1000000000"),
        ({"amp": 7}, "amp is 7, which is no <class 'str'>"),
        ({"head_options": {"degree": 5000}}, "needs a degree of at most 1000; got 5000"),
        ({"head_options": {"landmarks": 2**31 - 1}}, "landmarks must be at most 1,000,000, got 2147483647"),
    ],
)
def test_a_classifier_that_wants_too_much(tmp_path, monkeypatch, change, sentence):
    from kernelhead.finetune.settings import make_spec, resolved

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "greedy_networks.py").write_text(NETWORK)
    spec = resolved(make_spec(None, {"data": "cifar10", "backbone": "greedy_networks:small"})).as_dict()
    state = {"format": "kernelhead classifier 2", "spec": spec, "classes": ["a", "b"], "files": {}}
    state["stride_first"] = False
    state["input"] = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3}
    for name, value in change.items():
        (state if name in state else spec)[name] = value
    text = json.dumps(state)
    save_file(
        {"x": torch.zeros(2)},
        tmp_path / "a.safetensors",
        {"state": text, "sha256": digest({"x": torch.zeros(2)}, text)},
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_classifier(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros((2, 32, 32), np.uint8), r"x_train is uint8 \(2, 32, 32\), not uint8 \(n, 32, 32, 3\)"),
        (np.zeros((90_000, 32, 32, 3), np.uint8), "unpacked, it has .* bytes, and no such file has more than"),
    ],
)
def test_a_cifar_of_another_size(tmp_path, monkeypatch, array, sentence):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path))
    arrays = {"x_train": array, "y_train": np.zeros(2, int), "x_test": array[:1], "y_test": np.zeros(1, int)}
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(ValueError, match=sentence):
        load_cifar("cifar10")


def test_an_image_that_would_fill_the_memory(tmp_path):
    from PIL import Image

    Image.new("L", (8000, 8000)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png is not a readable image \(it would take 192 MB; make it smaller\)"):
        read_image(tmp_path / "a.png")


def test_a_result_of_other_settings(tmp_path):
    told = {"format": 2, "spec": {"data": 7}, "images": {}, "parameters": {}, "seconds": 1.0, "curve": {}}
    told |= {"at_once": 1, "choosing": False, "extra": {}}
    (tmp_path / "a.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"a\.json has no usable spec \(data is 7, .*\); delete it and run again"):
        load_result(tmp_path / "a.json")


def test_features_in_whole_numbers():
    with pytest.raises(TypeError, match=r"features and weight need to be floating-point; got torch\.int64"):
        kernelhead.kernel_cross_entropy(
            torch.ones(2, 3, dtype=int), torch.ones(4, 3), torch.ones(10), torch.zeros(2, dtype=int)
        )


def test_classes_that_change_between_calls():
    x, y = np.eye(4), np.array([0, 1, 0, 1])
    model = KernelHeadClassifier(solver="adam").partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"got classes \[0 2\] after \[0 1\] in the first call; keep them"):
        model.partial_fit(x, y, classes=[0, 2])


def test_tables_that_lack_something(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", z=np.zeros(3))
    with pytest.raises(ValueError, match=r"has no array x or X or features; it has z: choose with --features NAME"):
        load_features(tmp_path / "a.npz")
    (tmp_path / "a.csv").write_text("a,b,label\n1,dog,3\n2,cat,4\n")
    with pytest.raises(ValueError, match=r"leave it out, or choose the labels with --label COLUMN"):
        load_features(tmp_path / "a.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ModuleNotFoundError, match=r"a\.parquet needs pyarrow; run pip install pyarrow"):
        load_features(tmp_path / "a.parquet")


class NoVectors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(1, 5)

    def forward(self, images):
        return self.fc(self.conv(images).mean((1, 2, 3)).unsqueeze(1))


def test_a_network_that_pools_its_channels_too():
    with pytest.raises(ValueError, match="in a way that leaves no feature vectors; leave pool out"):
        kernelize(NoVectors(), 3, head="landmarks", landmarks=4, pool="auto", inputs=torch.zeros(2, 3, 8, 8))
