"""The options of the estimator: whether they can be, whether they are of use, and the device they name."""

import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

SOLVERS = ("auto", "exact", "adam")
OF_ADAM = ("landmarks", "epochs", "batch_size", "learning_rate")  # what "exact" has no use for
OF_STOPPING = ("validation_fraction", "patience")  # what "adam" uses with early stopping alone


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
