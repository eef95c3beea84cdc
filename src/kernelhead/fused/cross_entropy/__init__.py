"""Cross-entropy of the kernel head, from features to a number: three backends, and which of them when.

    z_nj = log sum_p exp(k(<w_jp, f_n>) / T),        loss_n = log sum_j exp(z_nj) - z_n,target

- `eager`: the head's logits and torch's cross-entropy, in `functional`. The reference, and the fastest for few classes.
- `chunked`: one block of classes at a time, in plain torch, on any device.
- `triton`: the same blocks on CUDA, with everything between the matrix products in Triton kernels.

| (1024, 64) features, 100 classes, bfloat16, H200 | ms per step |  lab/results/bench/loss.json
| eager                                            |        1.17 |
| triton                                           |        1.89 |
"""

import torch
from torch import Tensor

from kernelhead.fused.cross_entropy import autograd, sharded
from kernelhead.fused.cross_entropy.blocks import Settings
from kernelhead.fused.cross_entropy.sharded import Share
from kernelhead.fused.modes import runs_kernels, transformed
from kernelhead.fused.precision import lengths, moderate, product_dtype, real_dtype, without_autocast

BACKENDS = ("auto", "eager", "chunked", "triton")
MODES = ("auto", "speed", "memory")

# From how many logits N K on a fused backend is faster than the plain head: benchmarks/loss.py, --crossover.
CROSSOVER = {"cpu": 2**22, "cuda": 3 * 2**22}
# Cosines of a block. On a CPU a block's few buffers should stay in the cache. On a GPU wider blocks leave the host less
# to do, and the memory mode is to stay below a gigabyte with what the gradient of the weights leaves of it. In the
# speed mode `triton` has memory for all cosines and takes them as one block.
BLOCK = {"cpu": (2**19, 2**19), "cuda": (2**26, 2**27)}  # at least, at most
BLOCK_BYTES = 9 * 10**8
KEPT_SHARE = 16  # the mode "auto" keeps cosines that fit into a GPU's memory as often as this
MIN_BLOCK_COLUMNS = 128


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would unroll the blocks
def fused_nll(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    prototypes: int,
    ignored: int,
    smoothing: float,
    backend: str,
    mode: str,
    share: Share | None = None,
    negatives: float | None = None,
) -> Tensor:
    """Negative log-likelihood (N,).

    features `(N, D)`, weight `(C P, D)`, alpha `(M + 3,)` with the temperature in it. target `(N,)`: labels, or
    `ignored`, whose loss is zero. With a `share` the weight is that of this process's classes.
    """
    device, dtype = features.device.type, product_dtype(features, weight)
    if device == "cpu":  # blocks have lengths in float32
        features, weight = (x if lengths(x).dtype == real_dtype(x.dtype) else moderate(x) for x in (features, weight))
    samples, columns, size, fused = features.shape[0], weight.shape[0], dtype.itemsize, backend == "triton"
    keep = mode == "speed"
    if mode == "auto" and device == "cuda":  # a CPU's cache they never fit
        memory = torch.cuda.get_device_properties(features.device).total_memory
        keep = KEPT_SHARE * samples * columns * size <= memory
    least, most = BLOCK.get(device, BLOCK["cuda"])
    block = min(most, max(least, (BLOCK_BYTES - weight.numel() * size) // (2 * size)))
    per_block = max(MIN_BLOCK_COLUMNS, block // max(1, samples)) // MIN_BLOCK_COLUMNS * MIN_BLOCK_COLUMNS
    slots = 1 << (prototypes - 1).bit_length()  # of a class in a tile of columns, which a block holds whole
    classes = columns // prototypes
    width = max(1, classes) if keep and fused else max(1, per_block // slots)
    with without_autocast(device):
        settings = Settings(classes, prototypes, ignored, smoothing, dtype, width, keep, fused, classes)
        inputs = features, weight, alpha, target, settings
        if share is None:
            nll: Tensor = autograd.KernelNLL.apply(*inputs)
        else:
            nll = sharded.kernel_nll(*inputs, share, negatives)
        return nll


def choose(features: Tensor, weight: Tensor, *, fused: bool = False) -> str:
    """The backend that `auto` stands for, a `fused` one where that is wanted. features (N, D), weight (K, D)."""
    logits, device = features.shape[0] * weight.shape[0], features.device.type
    if not fused and (transformed() or device not in CROSSOVER or logits < CROSSOVER[device]):
        return "eager"  # under a transform, as the fused ones have first derivatives only
    exact = product_dtype(features, weight) == torch.float64
    return "triton" if runs_kernels(features.device) and not exact else "chunked"
