"""The reference: the plain head's scores, to be followed by torch's cross-entropy."""

import torch
from torch import Tensor

from kernelhead.ops.kernel_mean import kernel_mean


def scores(features: Tensor, weight: Tensor, alpha: Tensor, prototypes: int) -> Tensor:
    """Log sum exp(k) over the prototypes of each class, (N, C).

    features (N, D), weight (C P, D), alpha (M + 3,) with the temperature in it.
    """
    values = kernel_mean(features, weight, alpha)
    return torch.logsumexp(torch.unflatten(values, 1, (-1, prototypes)), 2) if prototypes > 1 else values
