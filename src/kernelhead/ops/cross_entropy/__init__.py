"""The loss of the kernel head from features to a number: three backends, and which of them when.

- `eager`: the plain head's logits and torch's cross-entropy. The reference, and the fastest for few classes.
- `chunked`: one block of classes at a time, in plain torch, on any device.
- `triton`: the same blocks on CUDA, with everything between the matrix products in Triton kernels.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kernelhead.ops.cross_entropy import autograd
from kernelhead.ops.cross_entropy.blocks import Settings
from kernelhead.ops.modes import transformed
from kernelhead.ops.precision import autocast_dtype, real_dtype, without_autocast

BACKENDS = ("auto", "eager", "chunked", "triton")
MODES = ("auto", "speed", "memory")

# From how many logits N K on a fused backend is faster than the plain head: benchmarks/loss.py, --crossover.
CROSSOVER = {"cpu": 2**22, "cuda": 3 * 2**22}
# Cosines of a block. On a CPU a block's few buffers should stay in the cache. On a GPU wider blocks leave the host less
# to do, and the memory mode is to stay below a gigabyte with what the gradient of the weights leaves of it. In the
# speed mode `triton` has memory for all cosines and takes them as one block.
BLOCK = {"cpu": (2**19, 2**19), "cuda": (2**26, 2**27)}  # at least, at most
MEMORY = 9 * 10**8  # bytes
NARROWEST = 128  # columns of a block


def fused_nll(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    *,
    prototypes: int = 1,
    ignored: int = -100,
    smoothing: float = 0.0,
    backend: str,
    mode: str = "auto",
    negligible: float = 0.0,
    ranked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (N,), and if `ranked` whether no other class has a higher score (N,).

    features (N, D), weight (C P, D), alpha (M + 3,) with the temperature in it, target (N,): labels, or
    `ignored`, whose loss is zero.
    """
    device, dtype = features.device.type, product_dtype(features, weight)
    samples, columns = features.shape[0], weight.shape[0]
    with without_autocast(device):
        keep = _keeps_cosines(features, dtype, columns) if mode == "auto" else mode == "speed"
        fused = backend == "triton"
        least, most = BLOCK.get(device, BLOCK["cuda"])
        size = dtype.itemsize
        block = min(most, max(least, (MEMORY - weight.numel() * size) // (2 * size)))
        per_block = max(NARROWEST, block // max(1, samples)) // NARROWEST * NARROWEST
        places = 1 << (prototypes - 1).bit_length()  # of a class in a tile of columns, which a block holds whole
        width = columns // prototypes if keep and fused else max(1, per_block // places)
        skipped = negligible if fused and dtype != real_dtype(dtype) and smoothing == 0 else 0.0
        settings = Settings(prototypes, ignored, smoothing, dtype, width, keep, ranked, fused, skipped)
        return autograd.kernel_nll(features, weight, alpha, target, settings)


def product_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """The precision of matrix products between features and weight, as autocast has it."""
    return autocast_dtype(torch.promote_types(features.dtype, weight.dtype), features.device.type)


def choose(features: Tensor, weight: Tensor) -> str:
    """The backend that `auto` stands for. features (N, D), weight (K, D)."""
    device = features.device.type
    if transformed():
        return "eager"  # the fused ones have first derivatives only
    if device not in CROSSOVER or features.shape[0] * weight.shape[0] < CROSSOVER[device]:
        return "eager"
    exact = product_dtype(features, weight) == torch.float64
    return "triton" if device == "cuda" and not exact and _has_triton() else "chunked"


def _keeps_cosines(features: Tensor, dtype: torch.dtype, columns: int) -> bool:
    """Whether the cosines are a small part of the memory: a sixteenth of a GPU's; of a CPU's cache they never are."""
    if features.device.type != "cuda":
        return False
    size = real_dtype(dtype).itemsize if dtype == real_dtype(dtype) else 2
    return 16 * features.shape[0] * columns * size <= _memory(features.device)


@lru_cache
def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
