"""The blocks of `blocks` as one differentiable operation: for torch as it runs, and for torch as it traces."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from kernelhead.fused.cross_entropy import blocks
from kernelhead.fused.cross_entropy.blocks import Found, Settings, precision


def kernel_nll(features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, settings: Settings) -> Tensor:
    """Negative log-likelihood (N,) of the targets (N,).

    features (N, D), weight (K, D) with K = classes * prototypes, alpha (M + 3,) with the temperature in it.
    """
    traced = torch.compiler.is_compiling() or type(features) not in (Tensor, nn.Parameter)
    inputs = features, weight, alpha, target
    nll: Tensor = _traced(*inputs, *settings)[0] if traced else _KernelNLL.apply(*inputs, settings)
    return nll


class _KernelNLL(torch.autograd.Function):
    """The loss where torch runs it as it stands: an operator of its own costs the host as much again."""

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


INPUTS = "Tensor features, Tensor weight, Tensor alpha, Tensor target"
SETTINGS = (  # the fields of Settings
    "SymInt classes, SymInt prototypes, SymInt ignored, float smoothing, ScalarType dtype, SymInt width, bool keep, "
    "bool fused, SymInt total"
)


@custom_op(
    "kernelhead::kernel_nll",
    mutates_args=(),
    schema=f"({INPUTS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _traced(features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    nll, found = blocks.forward(features, weight, alpha, target, Settings(*settings))
    return nll, *found


@_traced.register_fake
def _(features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    settings = Settings(*fields)
    kind = precision(settings.dtype, features.device.type)
    samples, columns = features.shape[0], weight.shape[0]
    nll, z, likelihood = (features.new_empty(samples, dtype=kind.real) for _ in range(3))
    kept = settings.empty_cosines(features, kind.cosines) if settings.keep else nll.new_empty(0, dtype=kind.cosines)
    return nll, z, likelihood, nll.new_empty(samples, 1), nll.new_empty(columns, 1), kept


@custom_op(
    "kernelhead::kernel_nll_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {INPUTS}, Tensor[] found, {SETTINGS}, bool[] wants) -> (Tensor, Tensor, Tensor)",
)
def _traced_backward(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    found, settings, wants = Found(*given[4]), Settings(*given[5:-1]), given[-1]
    return blocks.backward(gradient, given[:4], found, settings, wants, spend=False)  # torch may run it again


@_traced_backward.register_fake
def _(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    inputs, wants = given[:3], given[-1]
    return tuple(x.new_empty(x.shape if wanted else 0) for x, wanted in zip(inputs, wants, strict=True))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.settings = inputs[4:]


def _backward_of_traced(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, found = ctx.saved_tensors[:4], list(ctx.saved_tensors[4:])
    parts = _traced_backward(gradient.contiguous(), *inputs, found, *ctx.settings, list(ctx.needs_input_grad[:3]))
    return *parts, *(None,) * (1 + len(ctx.settings))


_traced.register_autograd(_backward_of_traced, setup_context=_keep_for_backward)
