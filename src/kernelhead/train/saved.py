"""A trained classifier as one file: weights, classes, and how pictures become its input."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor, nn

from kernelhead.backbones import Classifier, Input
from kernelhead.train.checkpoint import BrokenCheckpointError, load_checkpoint, save_checkpoint
from kernelhead.train.run import Run

MODEL_FILE = "model.safetensors"
FORMAT = "kernelhead classifier 1"
TORCH_FILES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # how files of torch.save begin, since 1.6 and before


@dataclass(frozen=True)
class SavedClassifier:
    """A trained network, the names of its classes, the input it expects, and the settings it was trained with."""

    model: Classifier
    run: Run
    classes: list[str]
    input: Input
    settings: dict[str, Any]


def save_classifier(path: Path, saved: SavedClassifier) -> None:
    """Write a classifier, whole or not at all."""
    state = {
        "format": FORMAT,
        "run": asdict(saved.run),
        "stride_first": saved.model.backbone.stride_first,
        "classes": saved.classes,
        "input": asdict(saved.input),
        "settings": saved.settings,
    }
    save_checkpoint(path, saved.model.state_dict(), state)


def is_finite(model: nn.Module) -> bool:
    """Whether every parameter of a network is a finite number."""
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def is_foreign(file: Path) -> bool:
    """Whether a file is somebody's own weights: one of torch.save, or of safetensors without our checksum."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return "sha256" not in (opened.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        try:
            with file.open("rb") as content:
                return content.read(4) in TORCH_FILES
        except OSError:
            return False


def classifier_file(path: Path) -> Path:
    """The file of a classifier, for the folder of its training or that file."""
    return path / MODEL_FILE if path.is_dir() else path


def load_classifier(path: Path) -> SavedClassifier:
    """Read a classifier from its file, or from the folder of its training. It is in evaluation mode, on the CPU."""
    file = classifier_file(path)
    if not file.exists():
        if path.is_dir() and (path / "result.json").exists():
            raise FileNotFoundError(f"the training in {path} diverged and left no classifier, as result.json says")
        if path.is_dir() and (path / "config.yaml").exists():
            raise FileNotFoundError(
                f"the training in {path} is not finished; 'kernelhead train --resume --out {path}' goes on with it"
            )
        raise FileNotFoundError(f"there is no trained classifier in {path}")
    if is_foreign(file):
        raise BrokenCheckpointError(
            f"{file} was not written by kernelhead train, whose files say what the network, its classes and its input "
            "are; for a network of your own there are model.fc.describe() and kernelhead.export in Python"
        )
    tensors, state = load_checkpoint(file)
    if state.get("format") != FORMAT:
        raise BrokenCheckpointError(f"{file} is not a trained classifier of kernelhead")
    try:
        saved = _restore(tensors, state)
    except (KeyError, TypeError, RuntimeError) as error:
        words = " ".join(str(error).split())
        raise BrokenCheckpointError(f"{file} is not of this version of kernelhead ({words})") from error
    if not is_finite(saved.model):
        raise ValueError(f"{file} has weights that are not finite: its training diverged, and it is of no use")
    return saved


def _restore(tensors: dict[str, Tensor], state: dict[str, Any]) -> SavedClassifier:
    run = Run(**state["run"])
    # The weights come from this file, so those that training started from are not looked for.
    options = {name: value for name, value in run.backbone_options.items() if name not in ("pretrained", "weights")}
    if state["stride_first"]:
        options["stride_first"] = True
    bare = Run(**{**state["run"], "backbone_options": options})
    model = bare.create(len(state["classes"]))
    model.load_state_dict(tensors)
    expected = Input(state["input"]["size"], tuple(state["input"]["mean"]), tuple(state["input"]["std"]))
    return SavedClassifier(model.eval(), run, state["classes"], expected, state["settings"])
