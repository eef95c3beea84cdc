"""Table 5: LeNet-5 learns the softened scores of a ResNet-56 with the linear head."""

from dataclasses import replace

from kernelhead_lab.spec import NETWORKS, LabSpec, head
from kernelhead_lab.tables.beyond import ADDED, WHAT_IS_ADDED
from kernelhead_lab.tables.cifar import KERNEL, LINEAR, SMALL, Head, resnet
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment

SETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
HEADS: dict[str, Head] = {"SM": LINEAR, "Ours": KERNEL, **ADDED}

# At a high temperature students match scores, by a loss that grows with the square of the difference, and LeNet-5 has
# no BatchNorm: with the linear head it needs smaller rates than other networks (lab/docs/paper.md). There are many
# candidates, so they are trained for a quarter of the usual epochs.
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PROTOCOLS = {
    name: replace(protocol, learning_rates=RATES, choosing_epochs=50, below=protocol)
    for name, protocol in CIFAR_PROTOCOLS.items()
}


def _student(data: str, own: Head) -> Cell:
    teacher, (name, options) = resnet(data, 56, LINEAR), own
    spec = LabSpec(data, f"{NETWORKS}lenet5", **head(name, **options), **SMALL, teacher=teacher.spec)
    return Cell(spec, builds_on=teacher)


DISTILLATION = Experiment(
    "distillation",
    "LeNet-5 taught by ResNet-56 (the paper's Table 5)",
    tuple(_student(data, own).at(row, column) for row, data in SETS.items() for column, own in HEADS.items()),
    PROTOCOLS,
    notes=(
        "Cross-entropy with the teacher's scores alone, temperature 20, times its square. The teacher is the ResNet-56 "
        "with the linear head of the CIFAR tables with the same seed.",
        f"{WHAT_IS_ADDED} Both have one position here, the features of LeNet-5.",
    ),
)
