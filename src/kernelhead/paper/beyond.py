"""Beyond the paper: what more of the RKHS than one point a class gives, and what the kernel has to do with it.

`landmarks` takes landmarks with pooling in the RKHS apart, on CIFAR-100; `saturation` asks how many points are enough;
`beyond` sets the best of them beside the paper's layer, its baselines and the control without a kernel, at every depth;
`mixup` trains all of these by another loss.
"""

from dataclasses import replace

from kernelhead.heads.kernel import BEST, scale_of
from kernelhead.paper.cifar import DEPTHS, SHARED, resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe

Head = tuple[str, dict[str, object]]

DATA = "cifar100"


def _without(option: str, options: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name != option}


SCALED: dict[str, object] = {"scale": scale_of(512)}  # as many landmarks, or channels of the control, unless said
SOFTPLUS: dict[str, object] = {"landmarks": 512, "coefficients": "softplus", **SCALED}
OVER_PLACES: dict[str, object] = {**SOFTPLUS, "pool": "rkhs"}
LIKE_LANDMARKS: dict[str, object] = {"normalized": True, "standardized": True, **SCALED}
NOT_STANDARDISED: dict[str, object] = {"standardize": False}
WINDOWS: dict[str, object] = {"window": 2}
LIKE_BEST: dict[str, object] = {**LIKE_LANDMARKS, "width": BEST["landmarks"], "scale": BEST["scale"]}
DROPOUT: dict[str, object] = {"dropout": 0.5}
EXACTLY: dict[str, object] = {"eps": 1e-12}

# A fixed kernel's one coefficient is softplus, too: with relu it may die, and the usual eps gives its size a meaning.
FIXED: dict[str, dict[str, object]] = {
    "linear kernel": {"kernel": "linear"},
    "polynomial kernel of degree 2": {"kernel": "polynomial", "degree": 2},
    "polynomial kernel of degree 3": {"kernel": "polynomial", "degree": 3},
    "RBF kernel": {"kernel": "rbf"},
}
# As the paper's ablation has it, and with powers as high as learned kernels have over places.
HIGH: dict[str, dict[str, object]] = {"polynomial kernel of degree 10": {"kernel": "polynomial", "degree": 10}}
LEARNED: dict[str, dict[str, object]] = {
    f"learned kernel, {name}": {"coefficients": name} for name in ("relu", "softplus", "softmax")
}

CONTROLS: dict[str, Head] = {
    "softmax": ("softmax", {}),
    "second-order pooling": ("second_order", {}),
    "second-order pooling, dropout": ("second_order", DROPOUT),
    "second-order, pooled feature": ("second_order", {"places": False}),
    "the paper's layer": ("kernel", {}),
    "the paper's layer, pooled in the RKHS": ("kernel", {"pool": "rkhs"}),
    "expansion": ("expansion", {}),
    "expansion, places normalised": ("expansion", {"normalized": True}),
    "expansion, standardised": ("expansion", {"standardized": True, **SCALED}),
    "expansion, places normalised, standardised": ("expansion", LIKE_LANDMARKS),
    "expansion, pooled feature": ("expansion", {"places": False}),
    "expansion, pooled feature normalised, standardised": ("expansion", {**LIKE_LANDMARKS, "places": False}),
    "expansion, places normalised, standardised, 2048": ("expansion", LIKE_BEST),
    "expansion, places normalised, standardised, 2048, dropout": ("expansion", {**LIKE_BEST, **DROPOUT}),
    **{row: ("kernel", {**OVER_PLACES, **own}) for row, own in {**FIXED, **HIGH, **LEARNED}.items()},
    "learned kernel, softplus, windows": ("kernel", {**OVER_PLACES, **WINDOWS}),
    "learned kernel, softplus, 2048": ("kernel", BEST),
    "learned kernel, softplus, 2048, dropout": ("kernel", {**BEST, **DROPOUT}),
    "learned kernel, softplus, 2048, dropout, not scaled": ("kernel", {**_without("scale", BEST), **DROPOUT}),
    **{
        f"{row}, standardised exactly": ("kernel", {**OVER_PLACES, **own, **EXACTLY})
        for row, own in {**FIXED, **LEARNED}.items()
        if row in ("polynomial kernel of degree 3", "learned kernel, softplus")
    },
    **{
        f"{row}, not standardised": ("kernel", {**_without("scale", OVER_PLACES), **own, **NOT_STANDARDISED})
        for row, own in LEARNED.items()
    },
    **{f"{row}, pooled feature": ("kernel", {**SOFTPLUS, **own}) for row, own in {**FIXED, **LEARNED}.items()},
    "learned kernel, softplus, pooled feature, not standardised": (
        "kernel",
        {**_without("scale", SOFTPLUS), **NOT_STANDARDISED},
    ),
}


# There are many heads to choose for: all rates but the highest, told apart by short trainings.
PROTOCOLS = {
    name: replace(protocol, learning_rates=protocol.learning_rates[:-1], choosing_epochs=30)
    for name, protocol in CIFAR_PROTOCOLS.items()
}
CHOOSING = 8


def _by_itself(depth: int, head: str, **options: object) -> Recipe:
    """With learning rate and weight decay chosen for this head, with the smallest network."""
    chooser = None if depth == CHOOSING else _by_itself(CHOOSING, head, **options)
    return replace(resnet(DATA, depth, head, **options), chosen_as=chooser)


def _softmax(*depths: int) -> dict[str, tuple[str, Cell]]:
    return {f"ResNet-{depth}": ("landmarks", Cell("softmax", "", _by_itself(depth, "softmax"))) for depth in depths}


LANDMARKS = Experiment(
    "landmarks",
    "What landmarks with pooling in the RKHS owe to what, CIFAR-100",
    tuple(
        Cell(row, f"ResNet-{depth}", _by_itself(depth, head, **options))
        for row, (head, options) in CONTROLS.items()
        for depth in (8, 20)
    ),
    PROTOCOLS,
    references=_softmax(8, 20),
    notes=(
        "512 landmarks, or channels of the expansion, unless it is 2048; over places unless said otherwise, or over "
        "windows of 2 x 2 places. Dropout: of a half. Standardised exactly: eps of 1e-12 where it is 1e-5 elsewhere. "
        "What is standardised is multiplied by a half, of 2048 by a quarter, unless it is not scaled. "
        f"Learning rate and weight decay are chosen for each head, with ResNet-{CHOOSING}.",
    ),
)

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
PROTOTYPES = (1, 2, 4, 8)


def _sizes() -> dict[str, Head]:
    """Heads of growing size by name, the size at its end."""
    heads: dict[str, Head] = {"softmax": ("softmax", {}), "second-order": ("second_order", {})}
    for size in SIZES:
        heads[f"landmarks {size}"] = ("kernel", {**OVER_PLACES, "landmarks": size, "scale": scale_of(size)})
    for size in SIZES[3:]:
        _, options = heads[f"landmarks {size}"]
        heads[f"landmarks with dropout {size}"] = ("kernel", {**options, **DROPOUT})
    for size in SIZES:
        width: dict[str, object] = {} if size == 512 else {"width": size}
        heads[f"expansion {size}"] = ("expansion", {**LIKE_LANDMARKS, **width, "scale": scale_of(size)})
    heads[f"expansion with dropout {BEST['landmarks']}"] = ("expansion", {**LIKE_BEST, **DROPOUT})
    for name, own in {
        "sum of prototypes": {"aggregate": "sum"},
        "sum of prototypes over places": {"aggregate": "sum", "pool": "rkhs"},
        "logsumexp of prototypes": {},
    }.items():
        for count in PROTOTYPES if own else PROTOTYPES[1:]:  # of one, sum and logsumexp are the same
            heads[f"{name} {count}"] = ("kernel", {"coefficients": "softplus", "prototypes": count, **own})
    return heads


SIZED = _sizes()
SATURATION = Experiment(
    "saturation",
    "How many landmarks or prototypes are enough, CIFAR-100, ResNet-8",
    tuple(Cell(row, "ResNet-8", _by_itself(8, head, **options)) for row, (head, options) in SIZED.items()),
    PROTOCOLS,
    references=_softmax(8),
    notes=(
        "Landmarks, expansions and second-order pooling work over places, prototypes on the pooled feature unless said "
        "otherwise. Expansions have places of unit length and standardised means. These, and the values of landmarks, "
        "are as long as 128 standardised numbers. Learning rate and weight decay are chosen for each.",
    ),
)

HEADS: dict[str, Head] = {
    "SM": ("softmax", {}),
    "SOP": ("second_order", {}),
    "EXP": ("expansion", LIKE_BEST),
    "Kernel": ("kernel", {}),
    "Best": ("kernel", BEST),
}
ADDED = {column: HEADS[column] for column in ("EXP", "Best")}  # to tables of the paper
PAPERS = {"SM": "SM", "SOP": "SOP", "Kernel": "Ours"}
DATA_SETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10"}
WHAT_IS_ADDED = (
    "EXP: expansion, a 1x1 convolution to 2048 channels on places of unit length, BatchNorm, ReLU, mean over places, "
    "standardised, times a quarter, linear. Best: 2048 landmarks, softplus, pooling in the RKHS, times a quarter."
)
WHICH = f"SM: softmax. SOP: second-order pooling. Kernel: the paper's layer. {WHAT_IS_ADDED}"


def _mixed(recipe: Recipe) -> Recipe:
    """Trained by the loss of mixed images, with the learning rate and weight decay of the other loss."""
    return replace(recipe, mixup=True, chosen_as=recipe.chooser)


BEYOND = Experiment(
    "beyond",
    "The best head beside the paper's layer, its baselines and its control",
    tuple(
        Cell(
            f"ResNet-{depth}",
            f"{column} {name}",
            resnet(data, depth, head, **options),
            (data, f"ResNet-{depth}", PAPERS[column]) if column in PAPERS else None,
        )
        for data, name in DATA_SETS.items()
        for depth in DEPTHS
        for column, (head, options) in HEADS.items()
    ),
    CIFAR_PROTOCOLS,
    notes=(WHICH, SHARED),
)

MIXUP = Experiment(
    "mixup",
    "The heads of `beyond`, trained on images that are mixed in pairs",
    tuple(
        Cell(f"ResNet-{depth}", f"{column} {name}", _mixed(resnet(data, depth, head, **options)))
        for data, name in DATA_SETS.items()
        for depth in (8, 20, 56)
        for column, (head, options) in HEADS.items()
    ),
    CIFAR_PROTOCOLS,
    notes=(WHICH, f"{SHARED} They are those of the table `beyond`, chosen without mixing."),
)
