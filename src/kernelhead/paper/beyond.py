"""Beyond the paper: what more of the RKHS than one point a class gives, and what the kernel has to do with it.

`landmarks` takes landmarks with pooling in the RKHS apart, on CIFAR-100; `saturation` asks how many points are enough;
`beyond` sets the best head beside the paper's layer, its baselines and the control without a kernel.
"""

from dataclasses import replace

from kernelhead.paper.cifar import CHOOSING, DEPTHS, SHARED, resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe

DATA = "cifar100"
PLACES: dict[str, object] = {"landmarks": 512, "pool": "rkhs"}  # as many as the control has channels
BEST: dict[str, object] = {**PLACES, "coefficients": "softplus"}
POOLED: dict[str, object] = {"landmarks": 512, "coefficients": "softplus"}

CONTROLS: dict[str, tuple[str, dict[str, object]]] = {
    "softmax": ("softmax", {}),
    "second-order pooling": ("second_order", {}),
    "expansion": ("expansion", {}),
    "expansion, places normalised": ("expansion", {"normalized": True}),
    "expansion, standardised": ("expansion", {"standardized": True}),
    "expansion, places normalised, standardised": ("expansion", {"normalized": True, "standardized": True}),
    "linear kernel": ("kernel", {**PLACES, "kernel": "linear"}),
    "polynomial kernel of degree 2": ("kernel", {**PLACES, "kernel": "polynomial", "degree": 2}),
    "polynomial kernel of degree 3": ("kernel", {**PLACES, "kernel": "polynomial", "degree": 3}),
    "RBF kernel": ("kernel", {**PLACES, "kernel": "rbf"}),
    "learned kernel, relu": ("kernel", PLACES),
    "learned kernel, softplus": ("kernel", BEST),
    "learned kernel, softmax": ("kernel", {**PLACES, "coefficients": "softmax"}),
    "learned kernel, softplus, not standardised": ("kernel", {**BEST, "standardize": False}),
    "learned kernel, softplus, pooled feature": ("kernel", POOLED),
    "learned kernel, softplus, pooled feature, not standardised": ("kernel", {**POOLED, "standardize": False}),
}

LANDMARKS = Experiment(
    "landmarks",
    "What landmarks with pooling in the RKHS owe to what, CIFAR-100",
    tuple(
        Cell(row, f"ResNet-{depth}", resnet(DATA, depth, head, **options))
        for row, (head, options) in CONTROLS.items()
        for depth in (8, 20)
    ),
    CIFAR_PROTOCOLS,
    references={
        f"ResNet-{depth}": (DATA, Cell(f"ResNet-{depth}", "SM", resnet(DATA, depth, "softmax"))) for depth in (8, 20)
    },
    notes=("512 landmarks, or channels of the expansion; over places unless said otherwise.", SHARED),
)

SIZES = (64, 128, 256, 512, 1024, 2048)
PROTOTYPES = (1, 2, 4, 8)


def _as_chosen_for(options: dict[str, object], depth: int, head: str, **own: object) -> Recipe:
    """A head with learning rate and weight decay as chosen for that with `options`."""
    return replace(resnet(DATA, depth, head, **own), chosen_as=resnet(DATA, CHOOSING, head, **options))


def _sizes(depth: int) -> dict[str, Recipe]:
    """Heads of growing size by name, the size at its end."""
    recipes = {"softmax": resnet(DATA, depth, "softmax"), "second-order": resnet(DATA, depth, "second_order")}
    for size in SIZES:
        recipes[f"landmarks {size}"] = _as_chosen_for(BEST, depth, "kernel", **{**BEST, "landmarks": size})
    for size in SIZES:
        recipes[f"expansion {size}"] = _as_chosen_for(
            {}, depth, "expansion", **({} if size == 512 else {"width": size})
        )
    for aggregate in ("sum", "logsumexp"):
        shared: dict[str, object] = {"aggregate": aggregate, "coefficients": "softplus"}
        for count in PROTOTYPES if aggregate == "sum" else PROTOTYPES[1:]:  # of one they are the same
            own = {**shared, "prototypes": count}
            recipes[f"{aggregate} of prototypes {count}"] = _as_chosen_for(
                {**shared, "prototypes": 4}, depth, "kernel", **own
            )
    return recipes


SATURATION = Experiment(
    "saturation",
    "How many landmarks or prototypes are enough, CIFAR-100, ResNet-8",
    tuple(Cell(row, "ResNet-8", recipe) for row, recipe in _sizes(8).items()),
    CIFAR_PROTOCOLS,
    references={"ResNet-8": LANDMARKS.references["ResNet-8"]},
    notes=(
        SHARED,
        "Landmarks and expansions of all sizes share what is chosen for 512, prototypes what is chosen for four.",
    ),
)

HEADS: dict[str, tuple[str, dict[str, object]]] = {
    "SM": ("softmax", {}),
    "SOP": ("second_order", {}),
    "EXP": ("expansion", {}),
    "Ours": ("kernel", {}),
    "Best": ("kernel", BEST),
}

BEYOND = Experiment(
    "beyond",
    "The best head beside the paper's layer, its baselines and the control",
    tuple(
        Cell(
            f"ResNet-{depth}",
            f"{column} {name}",
            resnet(data, depth, head, **options),
            (data, f"ResNet-{depth}", column),
        )
        for data, name in (("cifar100", "CIFAR-100"), ("cifar10", "CIFAR-10"))
        for depth in DEPTHS
        for column, (head, options) in HEADS.items()
    ),
    CIFAR_PROTOCOLS,
    notes=(
        "SM: softmax. SOP: second-order pooling. EXP: expansion, a 1x1 convolution to 512 channels, BatchNorm, ReLU, "
        "mean over places, linear. Ours: the paper's layer. Best: 512 landmarks, softplus, pooling in the RKHS.",
        SHARED,
    ),
)
