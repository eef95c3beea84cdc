"""A trained classifier, or its head, as a file that runs without this library."""

from pathlib import Path
from typing import Any

import torch

from kernelhead._version import __version__
from kernelhead.data.streamed import SHORTEST
from kernelhead.export import Exported, export_onnx, export_pt2
from kernelhead.train.pictures import margin_of
from kernelhead.train.saved import MODEL_FILE, SavedClassifier

FORMATS = ("onnx", "pt2")
PARTS = ("network", "head")


def default_path(checkpoint: Path, format: str, part: str) -> Path:
    """Beside the checkpoint, which is a file or the folder of a training."""
    file = checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint
    return file.with_name(f"{file.stem}{'-head' if part == 'head' else ''}.{format}")


def export_classifier(saved: SavedClassifier, path: Path, *, format: str = "onnx", part: str = "network") -> Exported:
    """Write a classifier as "onnx" or "pt2", the whole network or the head alone, with all that its user has to know.

    The file's metadata say how a picture becomes its input, and what its outputs are called.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; choose one of {', '.join(PARTS)}")
    example = torch.zeros(2, 3, saved.input.size, saved.input.size)
    module: torch.nn.Module = saved.model
    if part == "head":
        module = saved.model.head
        backbone = saved.model.backbone
        with torch.no_grad():
            example = backbone.feature_map(example) if module.pools else backbone(example)
    with torch.no_grad():
        if not module(torch.randn(example.shape, generator=torch.Generator().manual_seed(0))).isfinite().all():
            raise ValueError("the classifier's scores are not finite: its training diverged, and it is of no use")
    metadata = _metadata(saved, part, tuple(example.shape[1:]))
    if format == "pt2":
        return export_pt2(module, path, example, metadata=metadata)
    return export_onnx(module, path, example, input_name=metadata["input"]["name"], metadata=metadata)


def _metadata(saved: SavedClassifier, part: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if part == "head":
        expected: dict[str, Any] = {"name": "features", "shape": ["batch", *shape]}
    else:
        margin = margin_of(saved)
        expected = {
            "name": "images",
            "shape": ["batch", *shape],
            "channels": "RGB",
            "short_side": round((SHORTEST if margin is None else margin) * saved.input.size),
            "mean": list(saved.input.mean),
            "std": list(saved.input.std),
            "steps": "resize the short side to short_side, crop the square in the centre, scale to 0 .. 1, "
            "subtract mean, divide by std",
        }
    return {
        "kernelhead": __version__,
        "part": part,
        "backbone": saved.run.backbone,
        "head": saved.run.head,
        "input": expected,
        "output": {"name": "logits", "shape": ["batch", len(saved.classes)], "steps": "softmax gives probabilities"},
        "classes": saved.classes,
    }
