"""What training asks of logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.ops.modes import runs_kernels, transformed


def loss_and_hits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of logits (N, C) with labels (N,), and which samples have their own class on top (N,)."""
    compiling = torch.compiler.is_compiling()  # a compiler fuses by itself
    if not compiling and runs_kernels(logits.device) and not transformed():
        from kernelhead.ops import few_logits  # imports triton

        if few_logits.supported(logits, target):
            return few_logits.loss_and_hits(logits, target)
    return F.cross_entropy(logits, target), logits.detach().argmax(1) == target
