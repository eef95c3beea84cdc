"""Beyond the paper: what more of the RKHS than one point a class gives, and what the kernel has to do with it.

`landmarks` takes landmarks with pooling in the RKHS apart, on CIFAR-100; `saturation` asks how many points are enough;
`beyond` sets them beside the paper's layer, its baselines and the controls without a kernel, at every depth.
"""

from dataclasses import replace

from kernelhead.paper.cifar import DEPTHS, SHARED, resnet
from kernelhead.paper.recipe import CIFAR_PROTOCOLS, Cell, Experiment, Recipe

Head = tuple[str, dict[str, object]]

DATA = "cifar100"
SOFTPLUS: dict[str, object] = {"landmarks": 512, "coefficients": "softplus"}  # as many as the control has channels
OVER_PLACES: dict[str, object] = {**SOFTPLUS, "pool": "rkhs"}
LIKE_LANDMARKS: dict[str, object] = {"normalized": True, "standardized": True}
NOT_STANDARDISED: dict[str, object] = {"standardize": False}
WINDOWS: dict[str, object] = {"window": 2}
EXACTLY: dict[str, object] = {"eps": 1e-12}

# A fixed kernel's one coefficient is softplus, too: with relu it may die, and the usual eps gives its size a meaning.
FIXED: dict[str, dict[str, object]] = {
    "linear kernel": {"kernel": "linear"},
    "polynomial kernel of degree 2": {"kernel": "polynomial", "degree": 2},
    "polynomial kernel of degree 3": {"kernel": "polynomial", "degree": 3},
    "RBF kernel": {"kernel": "rbf"},
}
LEARNED: dict[str, dict[str, object]] = {
    f"learned kernel, {name}": {"coefficients": name} for name in ("relu", "softplus", "softmax")
}

CONTROLS: dict[str, Head] = {
    "softmax": ("softmax", {}),
    "second-order pooling": ("second_order", {}),
    "second-order, pooled feature": ("second_order", {"places": False}),
    "the paper's layer": ("kernel", {}),
    "the paper's layer, pooled in the RKHS": ("kernel", {"pool": "rkhs"}),
    "expansion": ("expansion", {}),
    "expansion, places normalised": ("expansion", {"normalized": True}),
    "expansion, standardised": ("expansion", {"standardized": True}),
    "expansion, places normalised, standardised": ("expansion", LIKE_LANDMARKS),
    "expansion, pooled feature": ("expansion", {"places": False}),
    "expansion, pooled feature normalised, standardised": ("expansion", {**LIKE_LANDMARKS, "places": False}),
    "expansion, windows": ("expansion", WINDOWS),
    "expansion, windows normalised, standardised": ("expansion", {**LIKE_LANDMARKS, **WINDOWS}),
    **{row: ("kernel", {**OVER_PLACES, **own}) for row, own in {**FIXED, **LEARNED}.items()},
    "learned kernel, softplus, windows": ("kernel", {**OVER_PLACES, **WINDOWS}),
    **{
        f"{row}, standardised exactly": ("kernel", {**OVER_PLACES, **own, **EXACTLY})
        for row, own in {**FIXED, **LEARNED}.items()
        if row in ("polynomial kernel of degree 3", "learned kernel, softplus")
    },
    **{
        f"{row}, not standardised": ("kernel", {**OVER_PLACES, **own, **NOT_STANDARDISED})
        for row, own in LEARNED.items()
    },
    **{f"{row}, pooled feature": ("kernel", {**SOFTPLUS, **own}) for row, own in {**FIXED, **LEARNED}.items()},
    "learned kernel, softplus, pooled feature, not standardised": ("kernel", {**SOFTPLUS, **NOT_STANDARDISED}),
}


# There are many heads to choose for, so a quarter of the epochs has to tell good rates from bad ones.
PROTOCOLS = {name: replace(protocol, choosing_epochs=50) for name, protocol in CIFAR_PROTOCOLS.items()}
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
        "512 landmarks, or channels of the expansion; over places unless said otherwise, or over windows of 2 x 2 "
        f"places. Learning rate and weight decay are chosen for each head, with ResNet-{CHOOSING}. Standardised "
        "exactly: eps of 1e-12 where it is 1e-5 elsewhere.",
    ),
)

SIZES = (64, 128, 256, 512, 1024, 2048)
PROTOTYPES = (1, 2, 4, 8)


def _sizes() -> dict[str, Head]:
    """Heads of growing size by name, the size at its end."""
    heads: dict[str, Head] = {"softmax": ("softmax", {}), "second-order": ("second_order", {})}
    heads |= {f"landmarks {size}": ("kernel", {**OVER_PLACES, "landmarks": size}) for size in SIZES}
    heads |= {f"expansion {size}": ("expansion", {} if size == 512 else {"width": size}) for size in SIZES}
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
        "otherwise. Learning rate and weight decay are chosen for each.",
    ),
)

HEADS: dict[str, Head] = {
    "SM": ("softmax", {}),
    "SOP": ("second_order", {}),
    "EXP": ("expansion", {}),
    "EXN": ("expansion", LIKE_LANDMARKS),
    "Kernel": ("kernel", {}),
    "Landmarks": ("kernel", OVER_PLACES),
}
PAPERS = {"SM": "SM", "SOP": "SOP", "Kernel": "Ours"}

BEYOND = Experiment(
    "beyond",
    "Landmarks beside the paper's layer, its baselines and the controls",
    tuple(
        Cell(
            f"ResNet-{depth}",
            f"{column} {name}",
            resnet(data, depth, head, **options),
            (data, f"ResNet-{depth}", PAPERS[column]) if column in PAPERS else None,
        )
        for data, name in (("cifar100", "CIFAR-100"), ("cifar10", "CIFAR-10"))
        for depth in DEPTHS
        for column, (head, options) in HEADS.items()
    ),
    CIFAR_PROTOCOLS,
    notes=(
        "SM: softmax. SOP: second-order pooling. EXP: expansion, a 1x1 convolution to 512 channels, BatchNorm, ReLU, "
        "mean over places, linear. EXN: the same on places of unit length, its means standardised. Kernel: the paper's "
        "layer. Landmarks: 512 of them, softplus, pooling in the RKHS.",
        SHARED,
    ),
)
