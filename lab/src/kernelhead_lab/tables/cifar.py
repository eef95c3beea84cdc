"""Tables 2 and 3: CIFAR ResNets with the linear head, the paper's other baselines, and the learned kernel."""

from typing import Any

from kernelhead_lab.spec import NETWORKS, LabSpec, head
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment

DEPTHS = (8, 14, 20, 32, 44, 56)
CHOOSING = 20  # the depth with which learning rate and weight decay are chosen, for all depths alike
SHARED = f"Learning rate and weight decay are chosen with ResNet-{CHOOSING} and shared by all depths."
SMALL: dict[str, Any] = {"pretrained": False, "augment": "light", "image_size": 32}  # of networks for small images

Head = tuple[str, dict[str, Any]]
"""The name of a head and the options of it that are not `kernelhead_lab.spec.USUAL`."""

LINEAR: Head = ("linear", {})
KERNEL: Head = ("kernel", {})
SECOND_ORDER: Head = ("second_order", {})


def spec_of(data: str, depth: int, own: Head, **settings: Any) -> LabSpec:
    """Return what is trained: a CIFAR ResNet with this head."""
    name, options = own
    return LabSpec(data, f"{NETWORKS}cifar_resnet{depth}", **head(name, **options), **SMALL, **settings)


def resnet(data: str, depth: int, own: Head, *, choosing: int = CHOOSING, **settings: Any) -> Cell:
    """Return the cell of a CIFAR ResNet, whose rate and decay are those of the depth `choosing`."""
    chooser = None if depth == choosing else Cell(spec_of(data, choosing, own, **settings))
    return Cell(spec_of(data, depth, own, **settings), chosen_as=chooser)


def methods(data: str, depth: int) -> dict[str, Cell]:
    """Return the paper's columns."""
    return {
        "SM": resnet(data, depth, LINEAR),
        "LIN": resnet(data, depth, ("cosine", {})),
        "SOP": resnet(data, depth, SECOND_ORDER),
        "KER": resnet(data, depth, LINEAR, backbone_options={"kervolution": "first"}),
        "Ours": resnet(data, depth, KERNEL),
    }


def _experiment(data: str, name: str, number: int) -> Experiment:
    cells = tuple(
        cell.at(f"ResNet-{depth}", column) for depth in DEPTHS for column, cell in methods(data, depth).items()
    )
    return Experiment(data, f"{name} (the paper's Table {number})", cells, CIFAR_PROTOCOLS, notes=(SHARED,))


CIFAR10 = _experiment("cifar10", "CIFAR-10", 2)
CIFAR100 = _experiment("cifar100", "CIFAR-100", 3)
