"""The blocks of `blocks` as one differentiable operation: for torch as it runs, and for torch as it traces."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from kernelhead.ops.cross_entropy import blocks
from kernelhead.ops.cross_entropy.blocks import Found, Settings
from kernelhead.ops.cross_entropy.products import precision


def kernel_nll(
    features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (N,) of the targets (N,), and `Found.right`.

    features (N, D), weight (K, D) with K = classes * prototypes, alpha (M + 3,) with the temperature in it.
    """
    if torch.compiler.is_compiling() or type(features) not in (Tensor, nn.Parameter):
        found = _traced(features, weight, alpha, target, *settings)
        return found[0], found[1]
    nll, right = _KernelNLL.apply(features, weight, alpha, target, settings)
    return nll, right


class _KernelNLL(torch.autograd.Function):
    """The loss where torch runs it as it stands: an operator of its own costs the host as much again."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        found = blocks.forward(features, weight, alpha, target, settings)
        ctx.save_for_backward(features, weight, alpha, target)
        ctx.found = found._replace(nll=found.z, right=found.z)  # these outputs would keep ctx alive for ever
        ctx.settings = settings
        ctx.mark_non_differentiable(found.right)
        return found.nll, found.right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad[:3]
        settings, found = ctx.settings, ctx.found
        features, weight, alpha, target = ctx.saved_tensors
        parts = blocks.backward(gradient, features, weight, alpha, target, found, settings, wants, settings.fused)
        # The cosines that were kept are spent; a second pass, after retain_graph=True, makes them anew.
        ctx.settings, ctx.found = settings._replace(keep=False), found._replace(kept=found.kept.new_empty(0))
        return (*(part if wanted else None for part, wanted in zip(parts, wants, strict=True)), None, None)


@custom_op("kernelhead::kernel_nll", mutates_args=())
def _traced(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    prototypes: int,
    ignored: int,
    smoothing: float,
    dtype: torch.dtype,
    width: int,
    keep: bool,
    ranked: bool,
    fused: bool,
    negligible: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(prototypes, ignored, smoothing, dtype, width, keep, ranked, fused, negligible)
    return tuple(blocks.forward(features, weight, alpha, target, settings))  # type: ignore[return-value]


@_traced.register_fake
def _(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    prototypes: int,
    ignored: int,
    smoothing: float,
    dtype: torch.dtype,
    width: int,
    keep: bool,
    ranked: bool,
    fused: bool,
    negligible: float,
) -> tuple[Tensor, ...]:
    kind = precision(dtype, features.device.type)
    (samples, columns), classes = (features.shape[0], weight.shape[0]), weight.shape[0] // prototypes
    vector = features.new_empty(samples, dtype=kind.real)
    tiles = blocks.passes_of(fused).tiles(classes, width, prototypes) if negligible else 0
    return (
        vector,
        vector.new_empty(samples if ranked else 0, dtype=torch.bool),
        torch.empty_like(vector),
        torch.empty_like(vector),
        vector.new_empty(samples, 1),
        vector.new_empty(columns, 1),
        blocks.aligned(samples, columns, features, kind.cosines) if keep else vector.new_empty(0, dtype=kind.cosines),
        vector.new_empty(samples, tiles) if negligible else vector.new_empty(0),
    )


@custom_op("kernelhead::kernel_nll_backward", mutates_args=())
def _traced_backward(
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    found: list[Tensor],
    prototypes: int,
    ignored: int,
    smoothing: float,
    dtype: torch.dtype,
    width: int,
    keep: bool,
    ranked: bool,
    fused: bool,
    negligible: float,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(prototypes, ignored, smoothing, dtype, width, keep, ranked, fused, negligible)
    # Not to be spent: who knows how often torch will run what it has traced.
    return blocks.backward(gradient, features, weight, alpha, target, Found(*found), settings, wants, spend=False)


@_traced_backward.register_fake
def _(
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    found: list[Tensor],
    prototypes: int,
    ignored: int,
    smoothing: float,
    dtype: torch.dtype,
    width: int,
    keep: bool,
    ranked: bool,
    fused: bool,
    negligible: float,
    wants: list[bool],
) -> tuple[Tensor, ...]:
    inputs = zip((features, weight, alpha), wants, strict=True)
    return tuple(x.new_empty(x.shape if wanted else 0) for x, wanted in inputs)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.settings = inputs[4:]
    ctx.mark_non_differentiable(output[1])


def _backward_of_traced(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    wants = list(ctx.needs_input_grad[:3])
    inputs, found = ctx.saved_tensors[:4], list(ctx.saved_tensors[4:])
    parts = _traced_backward(gradient.contiguous(), *inputs, found, *ctx.settings, wants)
    nothing = (None,) * (len(ctx.settings) + 1)
    return (*(part if wanted else None for part, wanted in zip(parts, wants, strict=True)), *nothing)


_traced.register_autograd(_backward_of_traced, setup_context=_keep_for_backward)
