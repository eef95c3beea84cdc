"""One module a table of the paper, and one of tables beyond it: the runs they need, and how these become the table."""

from kernelhead.paper.ablations import ACTIVATIONS, KERNELS, RECTIFICATION
from kernelhead.paper.beyond import BEYOND, LANDMARKS, MIXUP, SATURATION
from kernelhead.paper.cifar import CIFAR10, CIFAR100
from kernelhead.paper.distillation import DISTILLATION
from kernelhead.paper.labelling import ACTIVE
from kernelhead.paper.recipe import Experiment
from kernelhead.paper.transfer import TRANSFER

# All but `synthetic`, whose runs are not trainings on images.
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
    )
}
