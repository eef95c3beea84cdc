"""Tables 2 and 3: CIFAR ResNets with the softmax classifier, the paper's other baselines, and the learned kernel."""

from typing import Any

from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe

DEPTHS = (8, 14, 20, 32, 44, 56)
CHOOSING = 20  # the depth with which learning rate and weight decay are chosen, for all depths alike
SHARED = f"Learning rate and weight decay are chosen with ResNet-{CHOOSING} and shared by all depths."


def resnet(data: str, depth: int, head: str, **options: object) -> Recipe:
    """A CIFAR ResNet as the paper trains it. `rectified` and `kervolution` are the backbone's options."""
    backbone: dict[str, Any] = {name: options[name] for name in ("rectified", "kervolution") if name in options}
    head_options = {name: value for name, value in options.items() if name not in backbone}
    chooser = None if depth == CHOOSING else resnet(data, CHOOSING, head, **options)
    return Recipe(data, f"cifar_resnet{depth}", head, backbone, head_options, chosen_as=chooser)


def methods(data: str, depth: int) -> dict[str, Recipe]:
    return {
        "SM": resnet(data, depth, "softmax"),
        "LIN": resnet(data, depth, "linear"),
        "SOP": resnet(data, depth, "second_order"),
        "KER": resnet(data, depth, "softmax", kervolution="first"),
        "Ours": resnet(data, depth, "kernel"),
    }


def _experiment(data: str, name: str, number: int) -> Experiment:
    cells = tuple(
        Cell(f"ResNet-{depth}", column, recipe) for depth in DEPTHS for column, recipe in methods(data, depth).items()
    )
    return Experiment(data, f"{name} (the paper's Table {number})", cells, CIFAR_PROTOCOLS, notes=(SHARED,))


CIFAR10 = _experiment("cifar10", "CIFAR-10", 2)
CIFAR100 = _experiment("cifar100", "CIFAR-100", 3)
