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
HEADS = {"SM": "softmax", "LIN": "linear", "Ours": "kernel"}
STRATEGIES = ("random", "margin", "k-center")  # of `kernelhead.active`, the paper's three


def _subset(depth: int, head: str, strategy: str, percent: int, seed_model: Recipe | None = None) -> Recipe:
    whole = resnet(DATA, depth, head)
    subset = Subset(strategy, percent)
    return Recipe(DATA, whole.backbone, head, subset=subset, seed_model=seed_model, chosen_as=whole)


SEED_MODELS = {depth: _subset(depth, "softmax", "random", FIRST) for depth in DEPTHS}


def _cell(depth: int, percent: int, column: str, strategy: str) -> Cell:
    row, recipe = f"{percent} %", _subset(depth, HEADS[column], strategy, percent, SEED_MODELS[depth])
    published = ("active", row, f"{column} {strategy}") if depth == PAPERS else None
    return Cell(row, f"{column} {strategy} ResNet-{depth}", recipe, published)


ACTIVE = Experiment(
    "active",
    "Active learning, CIFAR-100, ResNet-56 (the paper's Table 6) and ResNet-20",
    (
        *(
            _cell(depth, percent, column, strategy)
            for depth in DEPTHS
            for percent in PERCENTS
            for column in ("SM", "Ours")
            for strategy in STRATEGIES
        ),
        # What of the learned kernel's gain comes with unit lengths, a scale and no bias: where it was largest at first.
        _cell(20, 30, "LIN", "random"),
    ),
    CIFAR_PROTOCOLS,
    notes=(
        f"Each subset holds the random {FIRST} % that the seed model was trained on. "
        "Learning rate and weight decay are those chosen for the whole data set.",
        SHARED,
    ),
)
