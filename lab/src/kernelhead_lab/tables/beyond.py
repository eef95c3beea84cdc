"""Beyond the paper: what more of the RKHS than one point per class gives, and what the kernel has to do with it.

`landmarks` takes landmarks with pooling in the RKHS apart, on CIFAR-100. `saturation` asks how many points are enough.
`beyond` sets the best of them beside the paper's layer, its baselines and the control without a kernel, at every depth.
`mixup` trains all of these by another loss.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelhead_lab.tables.cifar import DEPTHS, KERNEL, LINEAR, SECOND_ORDER, SHARED, Head, resnet
from kernelhead_lab.tables.experiment import CIFAR_PROTOCOLS, Cell, Experiment

DATA = "cifar100"
LARGEST = 2048  # landmarks of the best head, channels of its control


def scale_of(count: int) -> float:
    """Return what makes so many standardised values as long as 128 of them."""
    return round(0.25 * math.sqrt(LARGEST / count), 3)


def landmarks(count: int = 512, **own: Any) -> Head:
    """Return so many landmarks, over positions unless `own` says otherwise."""
    return "landmarks", {"landmarks": count, "scale": scale_of(count), **own}


def variant(count: int = 512, **own: Any) -> Head:
    """Return so many landmarks with options that the library's head has not."""
    return "landmarks_variant", landmarks(count, **own)[1]


def expansion(count: int = 512, **own: Any) -> Head:
    """Return the control of so many landmarks."""
    return "expansion", {"width": count, "scale": scale_of(count), **own}


def partial_expansion(count: int = 512, *, normalized: bool = True, standardized: bool = True, **own: Any) -> Head:
    """Return the control with parts left out, or with dropout."""
    scale = scale_of(count) if standardized else 1.0
    parts = {"normalized": normalized, "standardized": standardized}
    return "expansion_variant", {"width": count, "scale": scale, **parts, **own}


BEST, CONTROL = landmarks(LARGEST), expansion(LARGEST)
DROPOUT: dict[str, Any] = {"dropout": 0.5}
NOT_STANDARDISED: dict[str, Any] = {"standardize": False, "scale": 1.0}
POOLED_FEATURE: dict[str, Any] = {"pool": None}

# A fixed kernel's one coefficient is softplus, too: with relu it may die, and the usual eps gives its size a meaning.
FIXED: dict[str, dict[str, Any]] = {
    "cosine kernel": {"kernel": "cosine"},
    "polynomial kernel of degree 2": {"kernel": "polynomial", "degree": 2},
    "polynomial kernel of degree 3": {"kernel": "polynomial", "degree": 3},
    "RBF kernel": {"kernel": "rbf"},
}
# As the paper's ablation has it, and with powers as high as learned kernels have over positions.
HIGH: dict[str, dict[str, Any]] = {"polynomial kernel of degree 10": {"kernel": "polynomial", "degree": 10}}
LEARNED: dict[str, dict[str, Any]] = {
    f"learned kernel, {name}": {"coefficients": name} for name in ("relu", "softplus", "softmax")
}
EXACTLY = ("polynomial kernel of degree 3", "learned kernel, softplus")

CONTROLS: dict[str, Head] = {
    "linear": LINEAR,
    "second-order pooling": SECOND_ORDER,
    "second-order pooling, dropout": ("second_order_variant", DROPOUT),
    "second-order, pooled feature": ("second_order", POOLED_FEATURE),
    "the paper's layer": KERNEL,
    "the paper's layer, pooled in the RKHS": ("pooled_kernel", {}),
    "expansion": partial_expansion(normalized=False, standardized=False),
    "expansion, positions normalised": partial_expansion(standardized=False),
    "expansion, standardised": partial_expansion(normalized=False),
    "expansion, positions normalised, standardised": expansion(),
    "expansion, pooled feature": partial_expansion(normalized=False, standardized=False, **POOLED_FEATURE),
    "expansion, pooled feature normalised, standardised": expansion(**POOLED_FEATURE),
    "expansion, positions normalised, standardised, 2048": CONTROL,
    "expansion, positions normalised, standardised, 2048, dropout": partial_expansion(LARGEST, **DROPOUT),
    **{row: landmarks(**own) for row, own in {**FIXED, **HIGH, **LEARNED}.items()},
    "learned kernel, softplus, windows": variant(window=2),
    "learned kernel, softplus, 2048": BEST,
    "learned kernel, softplus, 2048, dropout": variant(LARGEST, **DROPOUT),
    "learned kernel, softplus, 2048, dropout, not scaled": variant(LARGEST, scale=1.0, **DROPOUT),
    **{
        f"{row}, standardised exactly": variant(eps=1e-12, **own)
        for row, own in {**FIXED, **LEARNED}.items()
        if row in EXACTLY
    },
    **{f"{row}, not standardised": variant(**own, **NOT_STANDARDISED) for row, own in LEARNED.items()},
    **{f"{row}, pooled feature": landmarks(**own, **POOLED_FEATURE) for row, own in {**FIXED, **LEARNED}.items()},
    "learned kernel, softplus, pooled feature, not standardised": variant(**POOLED_FEATURE, **NOT_STANDARDISED),
}


# There are many heads to choose for: all rates but the highest, told apart by short runs.
PROTOCOLS = {
    name: replace(protocol, learning_rates=protocol.learning_rates[:-1], choosing_epochs=30)
    for name, protocol in CIFAR_PROTOCOLS.items()
}
CHOOSING = 8


def _by_itself(heads: dict[str, Head], depths: Iterable[int]) -> tuple[Cell, ...]:
    """Return a row per head, with learning rate and weight decay chosen for it with the smallest network."""
    return tuple(
        resnet(DATA, depth, own, choosing=CHOOSING).at(row, f"ResNet-{depth}")
        for row, own in heads.items()
        for depth in depths
    )


def _linear(*depths: int) -> dict[str, tuple[str, Cell]]:
    return {cell.column: ("landmarks", cell) for cell in _by_itself({"linear": LINEAR}, depths)}


LANDMARKS = Experiment(
    "landmarks",
    "Landmarks with pooling in the RKHS, taken apart, CIFAR-100",
    _by_itself(CONTROLS, (8, 20)),
    PROTOCOLS,
    references=_linear(8, 20),
    notes=(
        "512 landmarks, or channels of the expansion, unless it is 2048. They work over positions unless said "
        "otherwise, or over windows of 2 x 2 positions. Dropout: of a half. Standardised exactly: eps of 1e-12 where "
        "it is 1e-5 elsewhere. Standardised values are multiplied by a half, of 2048 by a quarter, unless they are "
        f"not scaled. Learning rate and weight decay are chosen for each head, with ResNet-{CHOOSING}.",
    ),
)

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
PROTOTYPES = (1, 2, 4, 8)


def _sizes() -> dict[str, Head]:
    """Return heads of growing size by name, the size at its end."""
    heads: dict[str, Head] = {"linear": LINEAR, "second-order": SECOND_ORDER}
    heads |= {f"landmarks {size}": landmarks(size) for size in SIZES}
    heads |= {f"landmarks with dropout {size}": variant(size, **DROPOUT) for size in SIZES[3:]}
    heads |= {f"expansion {size}": expansion(size) for size in SIZES}
    heads[f"expansion with dropout {LARGEST}"] = partial_expansion(LARGEST, **DROPOUT)
    for words, name, aggregate in (
        ("sum of prototypes", "prototypes", "sum"),
        ("sum of prototypes over positions", "pooled_prototypes", "sum"),
        ("logsumexp of prototypes", "prototypes", "logsumexp"),
    ):
        for count in PROTOTYPES if aggregate == "sum" else PROTOTYPES[1:]:  # of one, both are the same
            options = {"coefficients": "softplus", "prototypes": count, "aggregate": aggregate}
            heads[f"{words} {count}"] = (name, options)
    return heads


SATURATION = Experiment(
    "saturation",
    "How many landmarks or prototypes are enough, CIFAR-100, ResNet-8",
    _by_itself(_sizes(), (8,)),
    PROTOCOLS,
    references=_linear(8),
    notes=(
        "Landmarks, expansions and second-order pooling work over positions, prototypes on the pooled feature unless "
        "said otherwise. Expansions have positions of unit length and standardised means. These, and the values of "
        "landmarks, are as long as 128 standardised numbers. Learning rate and weight decay are chosen for each.",
    ),
)

HEADS: dict[str, Head] = {"SM": LINEAR, "SOP": SECOND_ORDER, "EXP": CONTROL, "Kernel": KERNEL, "Best": BEST}
ADDED = {column: HEADS[column] for column in ("EXP", "Best")}  # to tables of the paper
PAPERS = {"SM": "SM", "SOP": "SOP", "Kernel": "Ours"}
DATA_SETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10"}
WHAT_IS_ADDED = (
    "EXP: expansion, a 1x1 convolution of unit-length positions to 2048 channels, BatchNorm and ReLU. Its means over "
    "positions are standardised, times a quarter, then linear. Best: 2048 landmarks, softplus, pooled in the RKHS, "
    "times a quarter."
)
WHICH = f"SM: the linear head. SOP: second-order pooling. Kernel: the paper's layer. {WHAT_IS_ADDED}"


def _mixed(cell: Cell) -> Cell:
    """Return the cell trained by the loss of mixed images, with learning rate and weight decay of the other loss."""
    return replace(cell, spec=replace(cell.spec, mixup=True), chosen_as=cell.chooser)


BEYOND = Experiment(
    "beyond",
    "The best head beside the paper's layer, its baselines and its control",
    tuple(
        resnet(data, depth, own).at(
            f"ResNet-{depth}",
            f"{column} {name}",
            (data, f"ResNet-{depth}", PAPERS[column]) if column in PAPERS else None,
        )
        for data, name in DATA_SETS.items()
        for depth in DEPTHS
        for column, own in HEADS.items()
    ),
    CIFAR_PROTOCOLS,
    notes=(WHICH, SHARED),
)

MIXUP = Experiment(
    "mixup",
    "The heads of `beyond`, trained on images that are mixed in pairs",
    tuple(
        _mixed(resnet(data, depth, own)).at(f"ResNet-{depth}", f"{column} {name}")
        for data, name in DATA_SETS.items()
        for depth in (8, 20, 56)
        for column, own in HEADS.items()
    ),
    CIFAR_PROTOCOLS,
    notes=(WHICH, f"{SHARED} They are those of the table `beyond`, chosen without mixing."),
)
