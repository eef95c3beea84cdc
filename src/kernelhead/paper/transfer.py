"""Table 4: a ResNet-50 of ImageNet fine-tuned on Oxford-IIIT Pets and Stanford Cars."""

from kernelhead.paper.beyond import ADDED, WHAT_IS_ADDED, Head
from kernelhead.paper.recipe import TRANSFER_PROTOCOLS, Cell, Experiment, Recipe

SETS = {"Oxford-IIIT Pets": "pets", "Stanford Cars": "cars"}
HEADS: dict[str, Head] = {
    "SM": ("softmax", {}),
    "LIN": ("linear", {}),
    "SOP": ("second_order", {}),
    "Ours": ("kernel", {}),
    **ADDED,
}

TRANSFER = Experiment(
    "transfer",
    "Fine-tuning an ImageNet ResNet-50 (the paper's Table 4)",
    tuple(
        Cell(row, column, Recipe(data, "resnet50", head, {"pretrained": True}, options))
        for row, data in SETS.items()
        for column, (head, options) in HEADS.items()
    ),
    TRANSFER_PROTOCOLS,
    notes=(
        "Official splits, the ImageNet augmentation of He et al., centre crops for testing, batch 64.",
        WHAT_IS_ADDED,
    ),
)
