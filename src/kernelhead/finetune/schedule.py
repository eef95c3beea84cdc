"""The learning rate over a run, and the seeds of what is random in it."""

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def warmup_cosine(step: int, total: int, warmup: int) -> float:
    """Return the factor on the base learning rate at `step` of `total`: linear warm-up, then cosine decay to zero.

    The paper's Appendix B. Step 0 of a warm-up of w steps has factor 1 / w, step w - 1 has factor 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in an epoch, a function of seed and epoch alone: a resumed run repeats it."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def mix(*values: int | str) -> int:
    """Return a seed made of several values."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest()) >> 1


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Where `wanted`, let torch take deterministic algorithms alone, and refuse what has none."""
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark
