"""Which options of the kernel layer there are, and which go together."""

import math

from kernelhead.coefficients import activation

KERNELS = ("learned", "linear", "polynomial", "rbf")
AGGREGATES = ("logsumexp", "sum")


def check_choices(
    *,
    kernel: str,
    coefficients: str,
    temperature: float | None,
    prototypes: int,
    aggregate: str,
    landmarks: int | None,
    pool: str | None,
    window: int,
    standardize: bool,
    scale: float,
    eps: float,
    dropout: float,
    gamma: float,
) -> None:
    """Refuse options of `KernelClassifier` that are unknown, out of range, or without meaning beside the others."""
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; choose one of {', '.join(KERNELS)}")
    activation(coefficients)
    if aggregate not in AGGREGATES:
        raise ValueError(f"unknown aggregate {aggregate!r}; choose one of {', '.join(AGGREGATES)}")
    if pool not in (None, "rkhs"):
        raise ValueError(f"unknown pool {pool!r}; choose 'rkhs', or None for feature vectors")
    if pool is None and window != 1:
        raise ValueError("window is about neighbouring places: it goes with pool='rkhs'")
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if not (gamma > 0 and math.isfinite(gamma)):
        raise ValueError(f"gamma must be positive and finite, got {gamma}")
    if not (eps > 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be positive and finite, got {eps}")
    if dropout and landmarks is None:
        raise ValueError("dropout is of the kernel values of landmarks, and there are none: it has to be 0")
    if landmarks is None and not standardize:
        raise ValueError("standardize is about the kernel values of landmarks, and there are none")
    if scale != 1 and landmarks is None:
        raise ValueError("scale is of the standardised kernel values of landmarks, and there are none: it has to be 1")
    if scale != 1 and not standardize:
        raise ValueError("scale is of standardised kernel values: with standardize=False it has to be 1")
    if landmarks is not None and standardize and temperature is not None:
        raise ValueError("temperature does nothing with landmarks: their kernel values are standardised")
    if landmarks is not None and prototypes != 1:
        raise ValueError("landmarks are shared by all classes: use either landmarks or prototypes, not both")
    if kernel != "learned" and coefficients == "softmax":
        raise ValueError(f"kernel={kernel!r} has one coefficient, and softmax of one number is always 1")


def check_scale(scale: float) -> float:
    """The scale as a number, positive and finite."""
    number = _number("scale", scale)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return number


def check_dropout(dropout: float) -> float:
    """The share as a number; one that would leave nothing is refused."""
    share = _number("dropout", dropout)
    if not 0 <= share < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    return share


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, got {value!r}") from error
