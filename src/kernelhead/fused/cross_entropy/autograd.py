"""The blocks of `blocks` as one differentiable operation."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernelhead.fused.cross_entropy import blocks
from kernelhead.fused.cross_entropy.blocks import Settings


class KernelNLL(torch.autograd.Function):
    """Negative log-likelihood (N,) of the targets (N,).

    features (N, D), weight (K, D) with K = classes * prototypes, alpha (M + 3,) with the temperature in it.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, settings: Settings
    ) -> Tensor:
        nll, ctx.found = blocks.forward(features, weight, alpha, target, settings)
        ctx.save_for_backward(features, weight, alpha, target)
        ctx.settings = settings
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        settings, found, wants = ctx.settings, ctx.found, ctx.needs_input_grad[:3]
        parts = blocks.backward(gradient, ctx.saved_tensors, found, settings, wants, spend=settings.fused)
        # The cosines that were kept are spent; a second pass, after retain_graph=True, makes them anew.
        ctx.settings, ctx.found = settings._replace(keep=False), found._replace(kept=found.kept.new_empty(0))
        return *parts, None, None
