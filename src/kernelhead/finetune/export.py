"""A trained classifier, or its head, as a file that runs without this library."""

from pathlib import Path
from typing import Any

import torch

from kernelhead._version import __version__
from kernelhead.export import Exported, export_onnx, export_pt2
from kernelhead.finetune.evaluation import features_and_logits, finite
from kernelhead.finetune.saved import SavedClassifier
from kernelhead.finetune.views import plain_short_side
from kernelhead.heads import create_head

FORMATS = ("onnx", "pt2")
PARTS = ("network", "head")
RESIZE = {
    "crop": "resize the short side to short_side, crop the centre's square",
    "squash": "resize to a square of side short_side",
    "pad": "resize the long side to short_side, fill up to a square with black on either side",
}
STEPS = "scale to 0 .. 1, subtract mean, divide by std"


def export_classifier(saved: SavedClassifier, path: Path, *, format: str = "onnx", part: str = "network") -> Exported:
    """Write a network, or its head, as "onnx" or "pt2"; metadata say how an image becomes input, and name classes."""
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; choose one of {', '.join(PARTS)}")
    size = saved.input.size
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    features, logits = features_and_logits(saved.model.cpu().eval(), images)
    finite(logits)
    module, example = saved.model, images
    if part == "head":  # made anew: the network's head may carry hooks of the network
        module, example = create_head(**saved.head.config), features
        module.load_state_dict(saved.head.state_dict())
    given: dict[str, Any] = {"name": "features", "shape": ["batch", *example.shape[1:]]}
    if part == "network":
        given |= {
            "name": "images",
            "channels": "RGB",
            "short_side": plain_short_side(saved.spec.augment, size, saved.spec.resize),
            "mean": list(saved.input.mean),
            "std": list(saved.input.std),
            "steps": f"{RESIZE[saved.spec.resize]}, {STEPS}",
        }
    metadata = {
        "kernelhead": __version__,
        "part": part,
        "backbone": saved.spec.backbone,
        "head": saved.spec.head,
        "input": given,
        "output": {"name": "logits", "shape": ["batch", len(saved.classes)], "steps": "softmax gives probabilities"},
        "classes": saved.classes,
    }
    if format == "pt2":
        return export_pt2(module, path, example, metadata=metadata)
    return export_onnx(module, path, example, input_name=given["name"], metadata=metadata)
