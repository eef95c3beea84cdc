"""Table 6: active learning on CIFAR-100 with ResNet-56.

A softmax network trained on a random tenth of the images, the seed model, chooses what else to label. A subset of 30 %
is that tenth and 20 % that were chosen. Learning rate and weight decay are those chosen for the whole data set: to
choose them for each of the 42 cells would multiply the trainings by five, and hold out a tenth of every subset.
"""

from kernelhead.paper.cifar import resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe, Subset

DATA = "cifar100"
DEPTH = 56
FIRST = 10  # percent that the seed model is trained on
PERCENTS = (30, 40, 50, 60, 70, 80, 90)
HEADS = {"SM": "softmax", "Ours": "kernel"}
STRATEGIES = ("random", "margin", "k-center")  # of `kernelhead.active`, the paper's three


def _subset(head: str, strategy: str, percent: int, seed_model: Recipe | None = None) -> Recipe:
    whole = resnet(DATA, DEPTH, head)
    subset = Subset(strategy, percent)
    return Recipe(DATA, whole.backbone, head, subset=subset, seed_model=seed_model, chosen_as=whole)


SEED_MODEL = _subset("softmax", "random", FIRST)

ACTIVE = Experiment(
    "active",
    "Active learning, CIFAR-100, ResNet-56 (the paper's Table 6)",
    tuple(
        Cell(f"{percent} %", f"{column} {strategy}", _subset(head, strategy, percent, SEED_MODEL))
        for percent in PERCENTS
        for column, head in HEADS.items()
        for strategy in STRATEGIES
    ),
    CIFAR_PROTOCOLS,
    notes=(
        f"Each subset holds the random {FIRST} % that the seed model was trained on. "
        "Learning rate and weight decay are those chosen for the whole data set.",
    ),
)
