"""One module per table of the paper, one of tables beyond it, and how runs become tables."""

from kernelhead_lab.tables.ablations import ACTIVATIONS, KERNELS, RECTIFICATION
from kernelhead_lab.tables.beyond import BEYOND, LANDMARKS, MIXUP, SATURATION
from kernelhead_lab.tables.cifar import CIFAR10, CIFAR100
from kernelhead_lab.tables.distillation import DISTILLATION
from kernelhead_lab.tables.epochs import EPOCHS
from kernelhead_lab.tables.experiment import Experiment
from kernelhead_lab.tables.labelling import ACTIVE
from kernelhead_lab.tables.transfer import TRANSFER, TRANSFER_LONG

# All but `synthetic`, whose runs do not see images.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        CIFAR10,
        CIFAR100,
        TRANSFER,
        DISTILLATION,
        ACTIVE,
        KERNELS,
        RECTIFICATION,
        ACTIVATIONS,
        LANDMARKS,
        SATURATION,
        BEYOND,
        MIXUP,
        EPOCHS,
        TRANSFER_LONG,
    )
}
