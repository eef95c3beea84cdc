"""Tables 7 to 9: what the learned kernel, unrectified features and the coefficients' activation each contribute.

All on CIFAR-100 with ResNet-56. Runs that the table of CIFAR-100 has are the same runs here.
"""

from kernelhead.paper.cifar import resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe

SOFTMAX = ("cifar100", Cell("ResNet-56", "SM", resnet("cifar100", 56, "softmax")))


def _ours(**options: object) -> Recipe:
    return resnet("cifar100", 56, "kernel", **options)


KERNELS = Experiment(
    "kernels",
    "Learned and fixed kernels, CIFAR-100, ResNet-56 (the paper's Table 7)",
    (
        Cell("Gaussian RBF kernel", "Accuracy", _ours(kernel="rbf")),
        Cell("Polynomial kernel", "Accuracy", _ours(kernel="polynomial", degree=10)),
        Cell("Learned kernel", "Accuracy", _ours()),
    ),
    CIFAR_PROTOCOLS,
    reference=SOFTMAX,
)

RECTIFICATION = Experiment(
    "rectification",
    "Rectified and unrectified features, CIFAR-100, ResNet-56 (the paper's Table 8)",
    (
        Cell("rectified features", "SM", resnet("cifar100", 56, "softmax", rectified=True)),
        Cell("rectified features", "Ours", _ours(rectified=True)),
        Cell("unrectified features", "SM", resnet("cifar100", 56, "softmax")),
        Cell("unrectified features", "Ours", _ours()),
    ),
    CIFAR_PROTOCOLS,
)

ACTIVATIONS = Experiment(
    "activations",
    "Activation of the kernel's coefficients, CIFAR-100, ResNet-56 (the paper's Table 9)",
    (
        Cell("sigmoid", "Accuracy", _ours(coefficients="sigmoid")),
        Cell("softmax", "Accuracy", _ours(coefficients="softmax")),
        Cell("relu", "Accuracy", _ours()),
        Cell("none", "Accuracy", _ours(coefficients="none")),
    ),
    CIFAR_PROTOCOLS,
    reference=SOFTMAX,
)
