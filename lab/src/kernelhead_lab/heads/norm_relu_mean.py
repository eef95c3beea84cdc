"""BatchNorm of the batch, ReLU and the mean over positions as one operation, in half precision on CUDA.

Row: lab/results/bench/expansion.json. Eight at once, torch.compile of the plain operations takes 1.6 times as long at
512 channels, and 1.7 times at 2048.

    value[n] = mean over l of relu(z[n, l]),  z = x weight + bias,  x = (y - mean) / deviation

With y (N, L, C) in half precision, torch's operations make three more such tensors, and as many backward. Here y is
read twice forward, for the statistics and for the value, and once backward, where dL/dy is written. BatchNorm's
gradient needs two sums over all positions, which are also dL/dbias and dL/dweight. They need no reading of y: with
dL/dz = g / L where z > 0,

    dL/dbias = sum_n g s,     s = share of the positions of a sample with z > 0
    dL/dweight = sum_n g m,   m = sum of x over these positions, divided by L

and value = weight m + bias s. So s and m (N, C) are computed forward and kept; z > 0 is found again from y.

The statistics are sums of differences from the first position of the batch, and of their squares. Squares of the values
themselves would lose a small variance in a large mean. There are no atomic sums: the same numbers give the same bits,
whatever else runs on the device. The kernels are those of `kernelhead_lab.heads.norm_relu_mean_kernels`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from kernelhead.fused.modes import differentiated_by_torch, runs_kernels
from kernelhead.fused.precision import autocast_enabled


def supported(expand: nn.Module, norm: nn.Module, positions: Tensor) -> bool:
    """Whether `norm_relu_mean` takes what the linear layer `expand` makes of positions (N, L, D), followed by `norm`.

    That is training under autocast on CUDA, with modules that nobody has changed or hooked. BatchNorm itself refuses a
    single position.
    """
    if differentiated_by_torch():
        return False
    return (
        type(positions) is Tensor  # a fake tensor has nothing to read
        and runs_kernels(positions.device)
        and autocast_enabled(positions.device.type)
        and positions.numel() > positions.shape[2]  # more than one position
        and _is_usual(expand, norm, positions)
        and not (modules._has_any_global_hook() or _is_hooked(expand) or _is_hooked(norm))  # type: ignore[no-untyped-call]
    )


def _is_usual(expand: nn.Module, norm: nn.Module, positions: Tensor) -> bool:
    return (
        type(expand) is nn.Linear
        and expand.bias is None
        and torch.float64 not in (expand.weight.dtype, positions.dtype)  # which autocast leaves alone
        and type(norm) is nn.BatchNorm1d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
    )


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def norm_relu_mean(y: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    """The mean over positions of relu(norm(y)) in training, which updates the running statistics.

    y (N, L, C), half precision, N L > 1 -> (N, C), float32.
    """
    state = norm.running_mean, norm.running_var, norm.num_batches_tracked
    value: Tensor = _NormReluMean.apply(y, norm.weight, norm.bias, *state, norm.momentum, norm.eps)
    return value


def _composed(y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`norm_relu_mean` in plain differentiable operations."""
    y = y.float()
    centred = y - y.mean((0, 1))
    normalised = centred * torch.rsqrt(centred.square().mean((0, 1)) + eps)
    return torch.relu(normalised * weight + bias).mean(1)


class _NormReluMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        batches: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        from kernelhead_lab.heads import norm_relu_mean_kernels as kernels  # imports triton

        y, ctx.eps = y.contiguous(), eps
        statistics = kernels.batch_statistics(y, running_mean, running_var, batches, momentum, eps)
        value, passed = kernels.pool(y, statistics, weight, bias, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(y, weight, bias, statistics, passed)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from kernelhead_lab.heads import norm_relu_mean_kernels as kernels

        y, weight, bias, statistics, passed = ctx.saved_tensors
        # Under create_graph=True, for gradients to be differentiated again; under is_grads_batched=True, within vmap.
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):

            def composed(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                return _composed(y, weight, bias, ctx.eps)

            return *torch.func.vjp(composed, y, weight, bias)[1](gradient), None, None, None, None, None
        wants_y, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        sums = kernels.parameter_gradients(gradient, passed)
        dy = kernels.input_gradient(gradient, y, statistics, weight, bias, sums) if wants_y else None
        return dy, sums[1] if wants_weight else None, sums[0] if wants_bias else None, None, None, None, None, None
