"""Imports point one way: kernels <- fused <- functional <- heads <- surgery, sklearn, finetune <- cli <- laboratory."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY, LABORATORY = ROOT / "src" / "kernelhead", ROOT / "lab" / "src" / "kernelhead_lab"

EVERYWHERE = {"_version", "files", "metrics", "page", "tables"}
STANDS_ON = {
    "kernels": set(),
    "fused": {"kernels"},
    "functional": {"kernels", "fused"},
    "heads": {"kernels", "fused", "functional"},
    "optim": {"kernels", "heads"},
    "inspection": {"kernels", "fused", "functional", "heads"},
    "export": {"kernels", "fused", "functional", "heads"},
    "timing": {"kernels", "fused", "functional", "heads"},
    "surgery": {"kernels", "fused", "functional", "heads", "optim"},
    "sklearn": {"kernels", "fused", "functional", "heads", "optim", "inspection"},
    "recalibration": {"kernels", "fused", "functional", "heads"},
    "saving": {"kernels", "fused", "functional", "heads", "surgery", "finetune", "inspection"},
    "finetune": {"kernels", "fused", "functional", "heads", "optim", "surgery", "inspection", "export"},
}
# A head is described and frozen by what stands on heads, and a teacher is read by `load`: imported when asked for.
DEFERRED = {("heads", "inspection"), ("finetune", "saving")}
WHOLE = {"__init__", "__main__", "cli"}  # they may import everything


def _part(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Modules that a file imports, with the line and whether the import waits in a function or for a type checker."""
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "kernelhead" else []
            names = names or [node.module or ""]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) not in at_top


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_the_library_imports_in_one_direction(path):
    part = _part(path, LIBRARY)
    for name, line, deferred in _imports(path):
        top, *rest = name.split(".")
        assert top != "kernelhead_lab", f"{path}:{line}: the library imports the laboratory"
        if top != "kernelhead" or not rest or part in WHOLE:
            continue
        known = {"__version__"} | EVERYWHERE | STANDS_ON.get(part, set()) | {part}
        allowed = rest[0] in known or (deferred and (part, rest[0]) in DEFERRED)
        assert allowed, f"{path}:{line}: {part} must not import kernelhead.{rest[0]}"


def test_every_part_of_the_library_has_its_place():
    parts = {_part(path, LIBRARY) for path in LIBRARY.rglob("*.py")}
    assert parts == set(STANDS_ON) | EVERYWHERE | WHOLE


def test_the_library_is_small():
    lines = sum(len(path.read_text().splitlines()) for path in LIBRARY.rglob("*.py"))
    assert lines <= 11_300  # on the way back to 11,000


def test_the_laboratory_imports_the_library():
    """Guard the test above: the laboratory's imports are seen by the same function."""
    seen = {name.split(".")[0] for path in LABORATORY.rglob("*.py") for name, *_ in _imports(path)}
    assert "kernelhead" in seen


def test_heads_are_told_apart_by_what_they_say():
    """Outside of heads/, no code asks for the class of a head."""
    classes = {"KernelHead", "PrototypeHead", "LandmarkHead", "PointHead", "ClassPointsHead", "CosineHead"}
    for root in (LIBRARY, LABORATORY):
        for path in root.rglob("*.py"):
            if _part(path, root) == "heads":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                    asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                    assert not asked & classes, f"{path}:{node.lineno} asks whether a head is a {asked & classes}"
