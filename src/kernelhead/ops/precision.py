"""Which precision is used where, and lengths that are safe to divide by."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms and polynomials: float32 for half-precision inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_enabled(device: str) -> bool:
    """Whether operations on `device` are being autocast; meta tensors never are."""
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """What autocast makes of products in `dtype`; it leaves float64 alone."""
    return torch.get_autocast_dtype(device) if dtype != torch.float64 and autocast_enabled(device) else dtype


def without_autocast(device: str) -> AbstractContextManager[None]:
    """A block in which nothing on `device` is autocast."""
    return torch.autocast(device, enabled=False) if autocast_enabled(device) else nullcontext()


def unit_norm(x: Tensor) -> Tensor:
    """What to divide x by for unit length, in at least float32: |x|, or infinity for a zero vector.

    x (..., D) -> (..., 1). With infinity a zero vector stays zero and its gradients, of any order, are zero.
    """
    zero = torch.isinf(raw_unit_norm(x.detach()))
    norm: Tensor = torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True, dtype=real_dtype(x.dtype))
    return norm.masked_fill(zero, math.inf)


def raw_unit_norm(x: Tensor) -> Tensor:
    """`unit_norm` where nothing is differentiated."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=real_dtype(x.dtype))
    return torch.threshold(norm, torch.finfo(norm.dtype).tiny, math.inf)


def product_dtypes(dtype: torch.dtype, device: str) -> tuple[torch.dtype, torch.dtype]:
    """Of the products that are cosines, and of those that are gradients, where products are to be in `dtype`.

    On a GPU cosines in half precision are float16 whatever the inputs are: unit vectors fit its range, and a kernel
    multiplies the error of a cosine by k'(t), so that the three bits it has over bfloat16 are worth having. Gradients
    have no such range, and are bfloat16. (Where torch derives the gradients itself, under torch.compile or twice, both
    are what the inputs are.)
    """
    if dtype == real_dtype(dtype) or device == "cpu":
        return dtype, dtype
    return torch.float16, torch.bfloat16
