"""Tables 7 to 9: what the learned kernel, unrectified features and the coefficients' activation each contribute.

All on CIFAR-100 with ResNet-56, as in the paper, and with ResNet-20, which can be repeated often enough to tell
differences from noise. Runs that the table of CIFAR-100 has are the same runs here.
"""

from typing import Any

from kernelhead_lab.tables.cifar import KERNEL, LINEAR, SHARED, Head, resnet
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment

DATA = "cifar100"
PAPERS = 56  # the depth of the paper's tables
DEPTHS = (PAPERS, 20)
LINEAR_CELLS = {f"ResNet-{depth}": (DATA, resnet(DATA, depth, LINEAR).at(f"ResNet-{depth}", "SM")) for depth in DEPTHS}


def _cell(table: str, row: str, column: str, depth: int, own: Head, **settings: Any) -> Cell:
    """Return a cell of a table with both depths, whose columns end in the depth; `column` is the paper's."""
    words = f"{'' if column == 'Accuracy' else column} ResNet-{depth}".strip()
    published = (table, row, column) if depth == PAPERS else None
    return resnet(DATA, depth, own, **settings).at(row, words, published)


def _kernels(table: str, rows: dict[str, dict[str, Any]]) -> tuple[Cell, ...]:
    return tuple(
        _cell(table, row, "Accuracy", depth, ("kernel", options)) for depth in DEPTHS for row, options in rows.items()
    )


KERNELS = Experiment(
    "kernels",
    "Learned and fixed kernels, CIFAR-100, ResNet-56 (the paper's Table 7) and ResNet-20",
    _kernels(
        "kernels",
        {
            "Gaussian RBF kernel": {"kernel": "rbf"},
            "Polynomial kernel": {"kernel": "polynomial", "degree": 10},
            "Learned kernel": {},
        },
    ),
    CIFAR_PROTOCOLS,
    references=LINEAR_CELLS,
    notes=(SHARED,),
)

RECTIFICATION = Experiment(
    "rectification",
    "Rectified and unrectified features, CIFAR-100, ResNet-56 (the paper's Table 8) and ResNet-20",
    tuple(
        _cell("rectification", row, column, depth, own, rectified=rectified)
        for depth in DEPTHS
        for row, rectified in (("rectified features", True), ("unrectified features", False))
        for column, own in (("SM", LINEAR), ("Ours", KERNEL))
    ),
    CIFAR_PROTOCOLS,
    notes=(SHARED,),
)

ACTIVATIONS = Experiment(
    "activations",
    "Activation of the kernel's coefficients, CIFAR-100, ResNet-56 (the paper's Table 9) and ResNet-20",
    _kernels("activations", {name: {"coefficients": name} for name in ("sigmoid", "softmax", "relu", "none")}),
    CIFAR_PROTOCOLS,
    references=LINEAR_CELLS,
    notes=(SHARED,),
)
