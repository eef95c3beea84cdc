"""Table 4: a ResNet-50 of ImageNet fine-tuned on Oxford-IIIT Pets and Stanford Cars."""

from typing import Any

from kernelhead_lab.spec import LabSpec, head
from kernelhead_lab.tables.beyond import ADDED, WHAT_IS_ADDED
from kernelhead_lab.tables.cifar import KERNEL, LINEAR, SECOND_ORDER, Head
from kernelhead_lab.tables.experiment import LONG_PROTOCOL, TRANSFER_PROTOCOLS, Cell, Experiment

SETS = {"Oxford-IIIT Pets": "pets", "Stanford Cars": "cars"}
HEADS: dict[str, Head] = {"SM": LINEAR, "LIN": ("cosine", {}), "SOP": SECOND_ORDER, "Ours": KERNEL, **ADDED}
ATTENTIVE: Head = ("attentive", {})
LARGE: dict[str, Any] = {"pretrained": True, "augment": "he", "image_size": 224}

LONG: dict[str, Any] = {**LARGE, "augment": "imagenet"}

TRANSFER = Experiment(
    "transfer",
    "Fine-tuning an ImageNet ResNet-50 (the paper's Table 4)",
    tuple(
        Cell(LabSpec(data, "torchvision/resnet50", **head(name, **options), **LARGE), row, column)
        for row, data in SETS.items()
        for column, (name, options) in HEADS.items()
    ),
    TRANSFER_PROTOCOLS,
    notes=(
        "Official splits, the ImageNet augmentation of He et al., centre crops for testing, batch 64.",
        WHAT_IS_ADDED,
    ),
)

TRANSFER_LONG = Experiment(
    "transfer-long",
    "Fine-tuning an ImageNet ResNet-50 for longer, on random-resized crops",
    tuple(
        Cell(
            LabSpec(data, "torchvision/resnet50", **head(name, **options), **LONG),
            row,
            column,
            published=("transfer", row, column),
        )
        for row, data in SETS.items()
        for column, (name, options) in {**HEADS, "ATT": ATTENTIVE}.items()
    ),
    {"tuned": LONG_PROTOCOL},
    notes=(
        "Official splits, random-resized crops of 224 pixels and flips, centre crops of 224 for testing, batch 64.",
        "ATT: the head of attentive probing, 16 queries.",
        WHAT_IS_ADDED,
    ),
)
