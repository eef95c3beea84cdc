"""A trained network as a teacher: its softened scores are learned instead of the labels."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.finetune.backbones import Input
from kernelhead.finetune.evaluation import main_logits, precision
from kernelhead.finetune.saved import head_of, load_classifier
from kernelhead.heads import Head

RECORD_FILE = "config.json"  # of `kernelhead.save`, which knows no classes


def load_teacher(
    teacher: str, classes: Sequence[str], given: Input, device: torch.device, amp: str
) -> Callable[[Tensor], Tensor]:
    """Return a function from images (B, 3, S, S), normalised as `given`, to a teacher's logits (B, C).

    The teacher is a run of `kernelhead train`, its model.safetensors, or a folder of `kernelhead.save`. A run is shown
    the images in its own size, normalised its own way.
    """
    path, expected, size, order = Path(teacher), given, 0, list(range(len(classes)))
    if (path / RECORD_FILE).is_file():
        from kernelhead.saving import load  # it is made of this package

        model = load(path)
        if isinstance(model, Head):
            raise ValueError(f"{path} is a head alone; a teacher is a network with its head")
        count = head_of(model).num_classes
        if count != len(classes):
            raise ValueError(f"the teacher {path} has {count} classes, and the images have {len(classes)}")
    else:
        saved = load_classifier(path)
        model, expected, size = saved.model, saved.input, saved.input.size
        odd = sorted(set(saved.classes) ^ set(classes))
        if odd:
            which = "only the teacher's" if odd[0] in saved.classes else "not the teacher's"
            raise ValueError(
                f"the classes of the teacher {path} differ from those of the images: {odd[0]!r} is {which}"
            )
        order = [saved.classes.index(name) for name in classes]
    model, dtype = model.to(device).eval().requires_grad_(False), precision(amp, device)
    mean, std, own_mean, own_std = (
        torch.tensor(each, device=device).view(3, 1, 1) for each in (given.mean, given.std, expected.mean, expected.std)
    )

    def logits(images: Tensor) -> Tensor:
        if (given.mean, given.std) != (expected.mean, expected.std):
            images = (images * std + mean - own_mean) / own_std
        if size not in (0, images.shape[-1]):
            images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return main_logits(model(images)).float()[:, order]

    return logits
