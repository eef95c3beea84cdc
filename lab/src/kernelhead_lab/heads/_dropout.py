"""Dropout as an option of heads."""

from torch import Tensor
from torch.nn import functional as F


def check_dropout(owner: str, dropout: float) -> float:
    """Return the share that is left out; it has to be at least 0 and below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"{owner} needs dropout to be at least 0 and below 1; got {dropout}")
    return float(dropout)


def dropped(values: Tensor, share: float, training: bool) -> Tensor:
    """Leave out this share of the values (N, K) of each sample in training."""
    return F.dropout(values, share, training) if share else values
