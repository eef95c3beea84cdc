"""The matrix products behind the loss, and their precision."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhead.ops.precision import product_dtypes, real_dtype


class Precision(NamedTuple):
    """Of cosines, of the products that make gradients, and of everything else."""

    cosines: torch.dtype
    slopes: torch.dtype
    real: torch.dtype
    ends: bool
    """Whether a cosine can tell 1 from its neighbours; where not, the end-point terms count as zero."""


def precision(dtype: torch.dtype, device: str) -> Precision:
    """What products in `dtype` mean here: `product_dtypes`; on a CPU, where half precision is no faster, float32."""
    real = real_dtype(dtype)
    cosines, slopes = product_dtypes(real if device == "cpu" else dtype, device)
    return Precision(cosines, slopes, real, dtype == real)


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
