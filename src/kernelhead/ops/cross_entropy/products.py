"""The matrix products behind the loss, and their precision."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhead.ops.precision import real_dtype


class Precision(NamedTuple):
    """Of cosines, of the products that make gradients, and of everything else."""

    cosines: torch.dtype
    slopes: torch.dtype
    real: torch.dtype
    ends: bool
    """Whether a cosine can tell 1 from its neighbours; where not, the end-point terms count as zero."""


def precision(dtype: torch.dtype, device: str) -> Precision:
    """What products in `dtype` mean here.

    In half precision the cosines are float16 whatever the inputs are: unit vectors fit its range, and a kernel
    multiplies the error of a cosine by k'(t), so that the three bits it has over bfloat16 are worth having. Gradients
    have no such range, and are bfloat16. A CPU has no faster half precision: there it is float32 throughout.
    """
    real = real_dtype(dtype)
    if dtype == real or device == "cpu":
        return Precision(real, real, real, dtype == real)
    return Precision(torch.float16, torch.bfloat16, real, False)


class Products:
    """The three matrix products of a block, whole."""

    def cosines(self, unit: Tensor, unit_weight: Tensor, out: Tensor) -> None:
        """Out (N, c P) = unit (N, D) @ unit_weight^T (D, c P)."""
        torch.mm(unit, unit_weight.t(), out=out)

    def add_features(self, total: Tensor, slopes: Tensor, weight: Tensor) -> None:
        """Total (N, D) += slopes (N, c P) @ weight (c P, D), the sum in the precision of `total`."""
        if slopes.dtype == total.dtype or total.device.type != "cuda":
            total.addmm_(slopes.to(total.dtype), weight.to(total.dtype))
        else:
            torch.addmm(total, slopes, weight, out_dtype=total.dtype, out=total)

    def of_weight(self, slopes: Tensor, unit: Tensor, out: Tensor) -> None:
        """Out (c P, D) = slopes^T (c P, N) @ unit (N, D)."""
        torch.mm(slopes.t(), unit, out=out)
