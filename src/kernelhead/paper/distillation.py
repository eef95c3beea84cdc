"""Table 5: LeNet-5 learns the softened scores of a ResNet-56 with the softmax classifier."""

from dataclasses import replace

from kernelhead.paper.beyond import ADDED, WHAT_IS_ADDED, Head
from kernelhead.paper.cifar import resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe

SETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
HEADS: dict[str, Head] = {"SM": ("softmax", {}), "Ours": ("kernel", {}), **ADDED}

# At a high temperature students match scores, by a loss that grows with the square of the difference, and LeNet-5 has
# no BatchNorm: with softmax it bears smaller rates than other networks (docs/paper.md). As there are many candidates,
# they are trained for a quarter of the usual epochs.
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PROTOCOLS = {
    name: replace(protocol, learning_rates=RATES, choosing_epochs=50, below=protocol)
    for name, protocol in CIFAR_PROTOCOLS.items()
}

DISTILLATION = Experiment(
    "distillation",
    "LeNet-5 taught by ResNet-56 (the paper's Table 5)",
    tuple(
        Cell(row, column, Recipe(data, "lenet5", head, head_options=options, teacher=resnet(data, 56, "softmax")))
        for row, data in SETS.items()
        for column, (head, options) in HEADS.items()
    ),
    PROTOCOLS,
    notes=(
        "Cross-entropy with the teacher's scores alone, temperature 20, times its square. The teacher is the softmax "
        "ResNet-56 of the CIFAR tables with the same seed.",
        f"{WHAT_IS_ADDED} Both have one place here, the features of LeNet-5.",
    ),
)
