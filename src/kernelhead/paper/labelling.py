"""Table 6: active learning on CIFAR-100 with ResNet-56, and with ResNet-20.

A softmax network trained on a random tenth of the images, the seed model, chooses what else to label. A subset of 30 %
is that tenth and 20 % that were chosen. Learning rate and weight decay are those chosen for the whole data set: to
choose them for each of the cells would multiply the trainings by five, and hold out a tenth of every subset.

The paper's two heads, and in one cell the linear kernel.
"""

from kernelhead.paper.cifar import SHARED, resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe, Subset

DATA = "cifar100"
PAPERS = 56  # the depth of the paper's table
DEPTHS = (PAPERS, 20)
FIRST = 10  # percent that the seed model is trained on
PERCENTS = (30, 40, 50, 60, 70, 80, 90)
HEADS = {"SM": "softmax", "Ours": "kernel"}
STRATEGIES = ("random", "margin", "k-center")  # of `kernelhead.active`, the paper's three


def _subset(depth: int, head: str, strategy: str, percent: int, seed_model: Recipe | None = None) -> Recipe:
    whole = resnet(DATA, depth, head)
    subset = Subset(strategy, percent)
    return Recipe(DATA, whole.backbone, head, subset=subset, seed_model=seed_model, chosen_as=whole)


SEED_MODELS = {depth: _subset(depth, "softmax", "random", FIRST) for depth in DEPTHS}

# What of the learned kernel's gain is the kernel's, and what comes with unit lengths: asked where the gain is largest.
CONTROL = Cell("30 %", "LIN random ResNet-20", _subset(20, "linear", "random", 30, SEED_MODELS[20]))

ACTIVE = Experiment(
    "active",
    "Active learning, CIFAR-100, ResNet-56 (the paper's Table 6) and ResNet-20",
    (
        *(
            Cell(
                f"{percent} %",
                f"{column} {strategy} ResNet-{depth}",
                _subset(depth, head, strategy, percent, SEED_MODELS[depth]),
                ("active", f"{percent} %", f"{column} {strategy}") if depth == PAPERS else None,
            )
            for depth in DEPTHS
            for percent in PERCENTS
            for column, head in HEADS.items()
            for strategy in STRATEGIES
        ),
        CONTROL,
    ),
    CIFAR_PROTOCOLS,
    notes=(
        f"Each subset holds the random {FIRST} % that the seed model was trained on. "
        "Learning rate and weight decay are those chosen for the whole data set.",
        SHARED,
    ),
)
