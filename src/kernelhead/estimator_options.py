"""The options of the estimator: whether they can be, are of use, and the device they name; and features it can read."""

import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernelhead.weighting import scalings

SOLVERS = ("auto", "exact", "adam")
OF_ADAM = ("landmarks", "epochs", "batch_size", "learning_rate")  # what "exact" has no use for
OF_STOPPING = ("validation_fraction", "patience")  # what "adam" uses with early stopping alone
FARTHEST = 400  # squares of 2^400 and of 2^-400 are numbers of float64, and so are sums and small parts of them

Array = NDArray[Any]


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what makes no sense."""
    if options["solver"] not in SOLVERS:
        raise ValueError(f"unknown solver {options['solver']!r}; choose one of {', '.join(SOLVERS)}")
    for name in ("degree", "landmarks", "epochs", "batch_size", "patience"):
        value = options[name]
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    rate, fraction = options["learning_rate"], options["validation_fraction"]
    if not isinstance(rate, Real) or not 0 < float(rate) < np.inf:
        raise ValueError(f"learning_rate must be positive and finite, got {rate!r}")
    if not isinstance(fraction, Real) or not 0 < float(fraction) < 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1, got {fraction!r}")


def warn_of_ignored(options: Mapping[str, Any], defaults: Mapping[str, Any], solver: str, limit: int) -> None:
    """Say which options a fit by `solver` was given in vain: a search over them would choose at random."""
    exact, stopping = solver == "exact", options["early_stopping"]
    names = (*OF_ADAM, "early_stopping", *OF_STOPPING) if exact else () if stopping else OF_STOPPING
    given = [name for name in names if options[name] != defaults[name]]
    if not given:
        return
    asked = ["solver='adam'"] if exact else []
    if not stopping and not set(given).isdisjoint(OF_STOPPING):
        asked.append("early_stopping=True")
    chosen = f", which 'auto' is up to {limit:,} samples," if exact and options["solver"] == "auto" else ""
    need = "it needs" if len(given) == 1 else "they need"
    sentence = f"solver {solver!r}{chosen} ignores {', '.join(given)}: {need} {' and '.join(asked)}"
    warnings.warn(sentence, UserWarning, stacklevel=3)


def as_device(name: str) -> torch.device:
    """The device called so, or for "auto" a CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"unknown device {name!r}; choose auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; set_params(device='auto') takes what there is")
    try:
        torch.zeros(1, dtype=torch.float64, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError):
        raise ValueError(f"device {name!r} is not here, or has no float64; choose auto, cpu or cuda") from None
    return device


def readable(given: Any) -> Any:
    """A tensor as NumPy can read it: on the CPU, without its gradient, and not in bfloat16, which NumPy lacks."""
    if not isinstance(given, torch.Tensor):
        return given
    given = given.detach().cpu()
    return given.float() if given.dtype is torch.bfloat16 else given


def shifts(features: Array) -> Array:
    """Powers of two (D,), as exponents, over which the columns of features (N, D) and their squares are in range.

    Zeros for usual features. Others have one in common, but for columns that are 2^400 times larger or smaller than
    most: beside the larger ones nothing is seen of the smaller, unless each is scaled by its own deviation.
    """
    size = np.abs(features).max(0)
    exponent = np.frexp(size)[1]
    if np.abs(exponent).max() <= FARTHEST:
        return np.zeros_like(exponent)
    middle = int(np.median(exponent[size > 0]))
    shift: Array = exponent - np.clip(exponent - middle, -FARTHEST, FARTHEST)
    return np.where(size > 0, shift, middle)


def scalings_in_range(features: Array, weight: Array) -> tuple[Array, list[Array]]:
    """`scalings` of features (N, D) whose squares may overflow or vanish. The mean of a constant is that very value."""
    shift = shifts(features)
    mean, scales = scalings(np.ldexp(features, -shift), weight)
    lowest, highest = features.min(0), features.max(0)
    mean = np.where(lowest == highest, lowest, np.ldexp(mean, shift))
    return mean, [np.ldexp(scale, shift) for scale in scales]
