"""A classifier: made from a spec, and kept as one file with its weights, classes and input."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernelhead.finetune.backbones import Input, create_network, without_memory
from kernelhead.finetune.checkpoint import BrokenCheckpointError, load_checkpoint, misfit, save_checkpoint
from kernelhead.finetune.data import Named
from kernelhead.finetune.settings import CONFIG_FILE, MODEL_FILE, MOST, RESULT_FILE, check
from kernelhead.finetune.spec import TrainSpec
from kernelhead.heads import Head
from kernelhead.surgery import changes, kernelize

FORMAT = "kernelhead classifier 2"


@dataclass(frozen=True)
class SavedClassifier:
    """A trained network, its head, the names of its classes, the spec of its run, and the input it expects.

    `files` are those of its run: name, label and fingerprint, by their part: train, val or test.
    """

    model: nn.Module
    head: Head
    classes: list[str]
    spec: TrainSpec
    input: Input
    files: dict[str, list[Named]] = field(default_factory=dict)

    def trained_on(self) -> set[str]:
        """Return the fingerprints of the files of the training."""
        return {mark for _, _, mark in self.files.get("train", ())}


def create_classifier(spec: TrainSpec, num_classes: int, *, stride_first: bool = False) -> nn.Module:
    """Make the network of a resolved spec, with its head, as it is before training: the same for the same seed."""
    assert spec.image_size is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        start: dict[str, Any] = {"pretrained": bool(spec.pretrained), "weights": spec.weights}
        network = create_network(spec.backbone, **start, stride_first=stride_first)
        device = next((each.device for each in network.parameters()), None)
        inputs = torch.zeros(2, 3, spec.image_size, spec.image_size, device=device)
        options = {"head": spec.head, "rectified": spec.rectified, "inputs": inputs, **spec.head_options}
        return kernelize(network, num_classes, **options)


def head_of(model: nn.Module) -> Head:
    """Return the head that `kernelize` put on a network, the first where there are several."""
    head = model.get_submodule(changes(model).layers[0])
    assert isinstance(head, Head)
    return head


def is_finite(model: nn.Module) -> bool:
    """Return whether all weights and statistics of a network are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def save_classifier(path: Path, saved: SavedClassifier) -> None:
    """Write a classifier as one file, whole or not at all."""
    state = {"format": FORMAT, "spec": saved.spec.as_dict(), "stride_first": bool(saved.model.stride_first)}
    state |= {"classes": saved.classes, "input": asdict(saved.input), "files": saved.files}
    save_checkpoint(path, saved.model.state_dict(), state)


def load_classifier(path: Path) -> SavedClassifier:
    """Read a classifier from its file, or from the folder of its run. It is in evaluation mode, on the CPU."""
    file = path / MODEL_FILE if path.is_dir() else path
    if not file.exists():
        why = f"there is no trained classifier in {path}"
        if (path / RESULT_FILE).exists():
            why = f"the run in {path} diverged and left no classifier; see {RESULT_FILE} there"
        elif (path / CONFIG_FILE).exists():
            why = f"the run in {path} is unfinished; 'kernelhead train --resume --out {path}' continues it"
        raise FileNotFoundError(why)
    tensors, state = load_checkpoint(file)
    if state.get("format") != FORMAT:
        raise BrokenCheckpointError(f"{file} is not a classifier of this version of kernelhead; train it again")
    try:
        spec, classes, expected, files = _checked(state)
        start = replace(spec, pretrained=False, weights=None)  # the weights come from this file
        make = partial(create_classifier, start, len(classes), stride_first=state["stride_first"] is True)
        with without_memory():
            if wrong := misfit(make(), tensors):
                raise ValueError(f"its {wrong}")
        model = make()
        model.load_state_dict(tensors)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        words = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise BrokenCheckpointError(f"{file} is not of this version of kernelhead ({words}); train again") from error
    if not is_finite(model):
        raise ValueError(f"{file} has weights that are not finite: its run diverged; train it again")
    return SavedClassifier(model.eval(), head_of(model), classes, spec, expected, files)


def _checked(state: dict[str, Any]) -> tuple[TrainSpec, list[str], Input, dict[str, list[Named]]]:
    """Return settings, classes, input and files of a state that could be those of a classifier."""
    spec, classes, given = TrainSpec.from_dict(state["spec"]), state["classes"], state["input"]
    check(spec)
    expected = Input(given["size"], tuple(given["mean"]), tuple(given["std"]))
    mean, std = torch.tensor([expected.mean, expected.std])
    each = state["files"].items()
    files = {part: [(str(name), int(label), str(mark)) for name, label, mark in named] for part, named in each}
    right = {
        "classes": isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes),
        "input sizes": type(expected.size) is int and 0 < expected.size <= MOST["image_size"],
        "input colours": len(mean) == 3 and mean.abs().max() < 1e3 and std.min() > 1e-3 and std.max() < 1e3,
        "files": all(0 <= label < len(classes) for named in files.values() for _, label, _ in named),
    }
    for what, is_right in right.items():
        if not is_right:
            raise ValueError(f"its {what} are none of a classifier")
    return spec, classes, expected, files
