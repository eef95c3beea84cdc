"""Raw parameters -> non-negative kernel coefficients (the paper's section 5.2 and its Table 9)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Activation:
    """How a raw vector becomes coefficients, and what goes with it."""

    apply: Callable[[Tensor], Tensor]
    temperature: float
    """What the logits are divided by unless the user says otherwise."""
    bounded: bool
    """Whether the coefficients stay bounded on their own; where they don't, weight decay bounds them."""


INITIAL_RAW = 1.0  # the paper's start: raw values all one, whatever the activation


def _softmax(raw: Tensor) -> Tensor:
    return torch.softmax(raw, dim=-1)


def _identity(raw: Tensor) -> Tensor:
    return raw


ACTIVATIONS = {
    "relu": Activation(torch.relu, temperature=1.0, bounded=False),
    "sigmoid": Activation(torch.sigmoid, temperature=0.1, bounded=True),
    "softmax": Activation(_softmax, temperature=0.005, bounded=True),
    # Not in the paper. A relu coefficient that turns negative has no gradient and stays dead; softplus has no such end.
    "softplus": Activation(F.softplus, temperature=1.0, bounded=False),
    # No constraint: the kernel may lose positive definiteness. Kept for the paper's Table 9, where it is unstable.
    "none": Activation(_identity, temperature=1.0, bounded=False),
}


def activation(name: str) -> Activation:
    """The activation called `name`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown coefficients {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
