"""Table 6: active learning with ResNet-56, and with ResNet-20.

A network with the linear head, trained on a random tenth of the images, is the seed model: it chooses what else to
label. A subset of 30 % is that tenth and 20 % that were chosen. Learning rate and weight decay are those chosen for the
whole data set. A choice for each cell would multiply the runs by five, and hold out a tenth of every subset.

The paper's two heads, and in one cell the cosine head.
"""

from kernelhead_lab.spec import Subset
from kernelhead_lab.tables.cifar import KERNEL, LINEAR, SHARED, Head, resnet, spec_of
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment

DATA = "cifar100"
PAPERS = 56  # the depth of the paper's table
DEPTHS = (PAPERS, 20)
FIRST = 10  # percent that the seed model is trained on
PERCENTS = (30, 40, 50, 60, 70, 80, 90)
HEADS: dict[str, Head] = {"SM": LINEAR, "LIN": ("cosine", {}), "Ours": KERNEL}
STRATEGIES = ("random", "margin", "k-center")  # of `kernelhead.finetune.select`, the paper's three

SEED_MODELS = {
    depth: Cell(spec_of(DATA, depth, LINEAR, subset=Subset("random", FIRST)), chosen_as=resnet(DATA, depth, LINEAR))
    for depth in DEPTHS
}


def _cell(depth: int, percent: int, column: str, strategy: str) -> Cell:
    row, own, seed_model = f"{percent} %", HEADS[column], SEED_MODELS[depth]
    spec = spec_of(DATA, depth, own, subset=Subset(strategy, percent), seed_model=seed_model.spec)
    published = ("active", row, f"{column} {strategy}") if depth == PAPERS else None
    cell = Cell(spec, chosen_as=resnet(DATA, depth, own), builds_on=seed_model)
    return cell.at(row, f"{column} {strategy} ResNet-{depth}", published)


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
        # How much of the learned kernel's gain unit lengths, a scale and no bias give, where it was largest at first.
        _cell(20, 30, "LIN", "random"),
    ),
    CIFAR_PROTOCOLS,
    notes=(
        f"Each subset holds the random {FIRST} % that the seed model was trained on. "
        "Learning rate and weight decay are those chosen for the whole data set.",
        SHARED,
    ),
)
