"""Which precision is used where, and lengths that are safe to divide by."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kernelhead.fused.modes import at_hand


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms and polynomials: float32 for half-precision inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_enabled(device: str) -> bool:
    """Whether operations on `device` are being autocast; meta tensors never are."""
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The precision that autocast gives to products in `dtype`; it leaves float64 alone."""
    return torch.get_autocast_dtype(device) if dtype != torch.float64 and autocast_enabled(device) else dtype


def without_autocast(device: str) -> AbstractContextManager[None]:
    """A block in which nothing on `device` is autocast."""
    return torch.autocast(device, enabled=False) if autocast_enabled(device) else nullcontext()


def product_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """The precision of matrix products between features and weight, autocast included."""
    return autocast_dtype(torch.promote_types(features.dtype, weight.dtype), features.device.type)


def product_dtypes(dtype: torch.dtype, device: str) -> tuple[torch.dtype, torch.dtype]:
    """The precisions of cosines and of gradients, where products are to be in `dtype`.

    On a GPU half-precision cosines are float16 whatever the inputs are. Unit vectors fit its range, and a kernel
    multiplies the error of a cosine by k'(t), so the three bits it has over bfloat16 matter. Gradients need the range
    of bfloat16, or of float32 on a CPU. (Where torch derives the gradients itself, under torch.compile or twice,
    `followed_dtype` is that of both.)
    """
    if dtype == real_dtype(dtype) or device == "cpu":
        return dtype, followed_dtype(dtype, device)
    return torch.float16, torch.bfloat16


def followed_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The precision of products that torch differentiates: not float16 on a CPU, where it is no faster."""
    return torch.float32 if dtype == torch.float16 and device == "cpu" else dtype


def unit_vectors(x: Tensor) -> Tensor:
    """Unit vectors x / |x| in at least float32, for x (..., D) of any length. A zero vector stays zero.

    Derivatives of any order are those of the quotient, and zero at a zero vector.
    """
    x = moderate(x)
    zero = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True) == 0
    unit: Tensor = x / torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True)
    return unit


def moderate(x: Tensor) -> Tensor:
    """Vectors (..., D), each divided by its largest entry, so that no square overflows or vanishes. Zero stays zero.

    A cosine does not depend on lengths, so the largest entry counts as a constant. The result is at least float32.
    """
    x = x.to(real_dtype(x.dtype))
    largest = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True)
    scaled: Tensor = x / largest.masked_fill(largest == 0, math.inf)
    return scaled


def lengths(x: Tensor) -> Tensor:
    """Lengths |x| to divide by where nothing is differentiated. x (..., D) -> (..., 1), infinity for a zero vector.

    They are float64, unless all are known to lie in the middle of float32's range: squares of 1e-20 vanish in float32,
    and those of 1e20 overflow.
    """
    real = real_dtype(x.dtype)
    if at_hand(x):
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=real)
        if _in_range(norm):
            return norm
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return torch.threshold(norm, torch.finfo(torch.float64).tiny, math.inf)


def _in_range(norm: Tensor) -> bool:
    """Whether all lengths are such that no square has vanished or overflowed."""
    kind, (shortest, longest) = torch.finfo(norm.dtype), torch.aminmax(norm)
    return bool(kind.tiny**0.5 / kind.eps < shortest.item() and longest.item() < kind.max**0.5 * kind.eps)


def divided(x: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """The quotient in `dtype`, where nothing is differentiated and `lengths` may be more precise than x."""
    return torch.div(x, lengths, out=torch.empty_like(x, dtype=dtype))


def add_product(total: Tensor, slopes: Tensor, weight: Tensor) -> None:
    """Total (N, D) += slopes (N, K) @ weight (K, D), the sum in the precision of `total`."""
    if slopes.dtype == total.dtype or total.device.type != "cuda":
        total.addmm_(slopes.to(total.dtype), weight.to(total.dtype))
    else:
        torch.addmm(total, slopes, weight, out_dtype=total.dtype, out=total)
