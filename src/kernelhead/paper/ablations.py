"""Tables 7 to 9: what the learned kernel, unrectified features and the coefficients' activation each contribute.

All on CIFAR-100 with ResNet-56, as in the paper, and with ResNet-20, which can be repeated often enough to tell
differences from noise. Runs that the table of CIFAR-100 has are the same runs here.
"""

from kernelhead.paper.cifar import SHARED, resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment

DATA = "cifar100"
PAPERS = 56  # the depth of the paper's tables
DEPTHS = (PAPERS, 20)
SOFTMAX = {f"ResNet-{depth}": (DATA, Cell(f"ResNet-{depth}", "SM", resnet(DATA, depth, "softmax"))) for depth in DEPTHS}


def _cell(table: str, row: str, column: str, depth: int, head: str, **options: object) -> Cell:
    """A cell of a table with both depths, whose columns end in that; `column` is the paper's."""
    words = f"{'' if column == 'Accuracy' else column} ResNet-{depth}".strip()
    published = (table, row, column) if depth == PAPERS else None
    return Cell(row, words, resnet(DATA, depth, head, **options), published)


def _kernels(table: str, rows: dict[str, dict[str, object]]) -> tuple[Cell, ...]:
    return tuple(
        _cell(table, row, "Accuracy", depth, "kernel", **options) for depth in DEPTHS for row, options in rows.items()
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
    references=SOFTMAX,
    notes=(SHARED,),
)

RECTIFIED: dict[str, dict[str, object]] = {"rectified features": {"rectified": True}, "unrectified features": {}}

RECTIFICATION = Experiment(
    "rectification",
    "Rectified and unrectified features, CIFAR-100, ResNet-56 (the paper's Table 8) and ResNet-20",
    tuple(
        _cell("rectification", row, column, depth, head, **options)
        for depth in DEPTHS
        for row, options in RECTIFIED.items()
        for column, head in (("SM", "softmax"), ("Ours", "kernel"))
    ),
    CIFAR_PROTOCOLS,
    notes=(SHARED,),
)

ACTIVATIONS = Experiment(
    "activations",
    "Activation of the kernel's coefficients, CIFAR-100, ResNet-56 (the paper's Table 9) and ResNet-20",
    _kernels(
        "activations",
        {
            "sigmoid": {"coefficients": "sigmoid"},
            "softmax": {"coefficients": "softmax"},
            "relu": {},
            "none": {"coefficients": "none"},
        },
    ),
    CIFAR_PROTOCOLS,
    references=SOFTMAX,
    notes=(SHARED,),
)
