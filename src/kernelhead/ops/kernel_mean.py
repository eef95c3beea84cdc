"""The core of the kernel head: k(<w/|w|, f/|f|>), averaged over places, with its whole backward pass.

`kernel_mean` is an autograd function. For plain feature vectors it saves the cosines t beside its inputs and their
norms. Over places it never holds the (N, L, K) cosines or kernel values at once: it goes through blocks of samples,
saves the mean powers of the cosines (M + 2, N, K), of which value and coefficients' gradient are linear functions, and
computes the cosines of a block again when it goes back. In half precision on CUDA that is left to the Triton kernels of
`kernelhead.ops.kernel_pool`. With G = dL/dt = g k'(t) the backward pass is

    dL/da_m = sum g t^m
    dL/df   = (G w_hat - (sum_j G t) f_hat) / |f|
    dL/dw   = (G^T f_hat - (sum_n G t) w_hat) / |w|

Where torch has its own way to differentiate or to fuse (torch.compile, torch.export, torch.func, forward mode, double
backward), the same quantity is written as plain differentiable operations, `_composed`, and torch is left to it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernelhead import kernels
from kernelhead.ops.modes import runs_kernels, transformed
from kernelhead.ops.precision import (
    autocast_enabled,
    product_dtypes,
    raw_unit_norm,
    real_dtype,
    unit_norm,
    without_autocast,
)

# Elements of a block. On a CPU a block's few buffers should stay in the cache; on a GPU a block only has to be large
# enough to fill it and small enough to fit.
BLOCK = {"cpu": 2**19}
BLOCK_ELSEWHERE = 2**24
WIDEST, HIGHEST = 256, 32  # features and degree of `kernel_pool`: what fits in a GPU's registers
FEW = 2**20  # values (N, K) up to which it takes vectors too; beyond, torch is faster (64 features, benchmarks/pool.py)


def kernel_mean(features: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
    """Mean over places of the kernel between features and weights.

    features (N, D), or (N, L, D) with L places; weight (K, D); alpha (M + 3,) -> (N, K), at least float32.

    Under autocast, and for half-precision inputs, the products run in the low precision; norms, polynomial and result
    are float32. There a rounded cosine cannot tell t = 1 from its neighbours, and the end-point terms count as zero.
    A zero vector has cosine 0 with everything and receives a zero gradient.
    """
    dtype, device = torch.promote_types(features.dtype, weight.dtype), features.device.type
    if dtype != torch.float64 and autocast_enabled(device):
        with without_autocast(device):  # which precision is used where is said here alone
            return _kernel_mean(features, weight, alpha, torch.get_autocast_dtype(device))
    return _kernel_mean(features, weight, alpha, dtype)


def _kernel_mean(features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """`kernel_mean` with its products in `dtype`."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or transformed():
        return _composed(features, weight, alpha, dtype)
    value: Tensor
    if is_pooled(features, weight, alpha, dtype):
        value = _KernelPool.apply(features if features.dim() == 3 else features[:, None], weight, alpha, dtype)
    else:
        value = _KernelMean.apply(features, weight, alpha, dtype)
    return value


def is_pooled(features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> bool:
    """Whether `kernel_pool` takes these: places, or a few vectors, not too wide, with products in half precision."""
    return (
        (features.dim() == 3 or features.shape[0] * weight.shape[0] <= FEW)
        and dtype != real_dtype(dtype)
        and features.shape[-1] <= WIDEST
        and alpha.shape[0] - kernels.END_POINTS - 1 <= HIGHEST
        and features.numel() > 0
        and type(features) is Tensor  # a fake tensor has nothing to read
        and runs_kernels(features.device)
    )


def _composed(features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """`kernel_mean` in plain differentiable operations."""
    real = real_dtype(dtype)
    unit, unit_weight = ((x / unit_norm(x)).to(dtype) for x in (features, weight))
    t = (unit @ unit_weight.t()).to(real)
    evaluate = kernels.series if dtype == real else kernels.power_series
    value = evaluate(t, alpha.to(real))
    return value.mean(1) if features.dim() == 3 else value


def _orders(degree: int, like: Tensor) -> Tensor:
    """The numbers 1 .. degree. Kept on a CPU; a captured CUDA graph or a fake tensor mode must make its own."""
    if like.device.type == "cpu" and type(like) is Tensor:
        return _kept_orders(degree, like.dtype)
    return torch.arange(1, degree + 1, dtype=like.dtype, device=like.device)


@lru_cache(maxsize=64)
def _kept_orders(degree: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1, degree + 1, dtype=dtype)


def _blocks(samples: int, places: int, classes: int, device: torch.device) -> Sequence[slice | None]:
    """Slices of samples with at most BLOCK cosines, or at least 256 rows each; None alone stands for all of them."""
    step = max(BLOCK.get(device.type, BLOCK_ELSEWHERE) // (places * classes), -(-256 // places))
    if samples <= step:
        return (None,)
    return [slice(start, start + step) for start in range(0, samples, step)]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _take(x: Tensor, block: slice | None) -> Tensor:
    return x if block is None else x[block]


def touches_end_points(t: Tensor) -> bool:
    """Whether some cosine is +-1. Almost never on a CPU, where asking costs little; elsewhere asking would wait."""
    if t.device.type != "cpu" or t.numel() == 0 or type(t) is not Tensor:  # a fake tensor has no answer
        return True
    low, high = torch.aminmax(t)
    return not max(-low.item(), high.item()) < 1 - kernels.default_tolerance(t.dtype)  # a NaN is no answer


def _alpha_gradient(gradient: Tensor, t: Tensor, degree: int, end_points: bool) -> Tensor:
    """Sums of g k_even, g k_odd and g t^m for m = 0 .. degree: one buffer, swept once a power. g, t (R, K)."""
    if end_points:
        odd = kernels.end_points(t)
        sums = [(odd * odd).mul_(gradient).sum(), odd.mul_(gradient).sum(), gradient.sum()]
    else:
        nothing = t.new_zeros(())
        sums = [nothing, nothing, gradient.sum()]
    running = gradient * t
    sums.append(running.sum())
    sums.extend(running.mul_(t).sum() for _ in range(1, degree))
    return torch.stack(sums)


def _mean_powers(t: Tensor, out: Tensor, end_points: bool) -> None:
    """Means over places of k_even, k_odd, t, t^2, .. t^M, into out (M + 2, N, K). t (N, L, K)."""
    if end_points:
        odd = kernels.end_points(t)
        torch.mean(odd, 1, out=out[1])
        torch.mean(odd.mul_(odd), 1, out=out[0])
    else:
        out[:2].zero_()
    torch.mean(t, 1, out=out[2])
    running = t
    for power in range(3, out.shape[0]):
        running = t * t if power == 3 else running.mul_(t)
        torch.mean(running, 1, out=out[power])


class _KernelMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        real = real_dtype(dtype)
        samples, (classes, width) = features.shape[0], weight.shape
        places = features.shape[1] if features.dim() == 3 else 0
        ctx.dtype, ctx.end_points = dtype, False
        cosines, _ = product_dtypes(dtype, features.device.type)
        # Unit weights cost K D divisions; dividing the products costs N K, less where features are few and long: at
        # (N, D, K) = (128, 2048, 1000) 1.15 instead of 1.25 times the time of a linear layer. Half precision has no
        # range for weights of any length.
        ctx.unit_weights = weight.dtype != real or dtype != real or samples * max(places, 1) > width

        norm, weight_norm = raw_unit_norm(features), raw_unit_norm(weight)
        unit = _cast(features / norm, cosines)
        directions = _cast(weight / weight_norm, cosines) if ctx.unit_weights else weight
        alpha_ = _cast(alpha, real)
        t = powers = None
        if places:
            powers = unit.new_empty(alpha.shape[0] - 1, samples, classes, dtype=real)
            for block in _blocks(samples, places, classes, unit.device):
                block_t = torch.matmul(_take(unit, block), directions.t())
                block_t = _cast(block_t if ctx.unit_weights else block_t.div_(weight_norm.view(-1)), real)
                end_points = dtype == real and touches_end_points(block_t)
                _mean_powers(block_t, powers if block is None else powers[:, block], end_points)
            slopes = torch.cat([alpha_[: kernels.END_POINTS], alpha_[kernels.END_POINTS + 1 :]])
            value: Tensor = torch.tensordot(slopes, powers, 1).add_(alpha_[kernels.END_POINTS])
        else:
            t = torch.mm(unit, directions.t())
            if not ctx.unit_weights:
                t.div_(weight_norm.view(-1))
            ctx.end_points = dtype == real and touches_end_points(t)
            evaluate = kernels.series if ctx.end_points else kernels.power_series
            values = [
                evaluate(_cast(_take(t, block), real), alpha_, in_place=True)
                for block in _blocks(samples, 1, classes, t.device)
            ]
            value = values[0] if len(values) == 1 else torch.cat(values)
        ctx.save_for_backward(features, weight, alpha, norm, weight_norm, t, powers)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, alpha, norm, weight_norm, all_t, powers = ctx.saved_tensors
        dtype: torch.dtype = ctx.dtype
        if _wants_composed(gradient):
            return (*_composed_backward(features, weight, alpha, dtype, gradient), None)

        real = real_dtype(dtype)
        wants_features, wants_weight, wants_alpha, _ = ctx.needs_input_grad
        degree = alpha.shape[0] - kernels.END_POINTS - 1
        alpha_ = _cast(alpha, real)
        slope = (alpha_[kernels.END_POINTS + 1 :] * _orders(degree, alpha_)).unbind()
        (classes, width), places = weight.shape, features.shape[1] if all_t is None else 0
        cosines, gradients = product_dtypes(dtype, features.device.type)
        unit = _cast(features / norm, gradients)
        directions = _cast(weight / weight_norm, gradients) if ctx.unit_weights else weight
        lengths = weight_norm.view(-1)
        if places and cosines != gradients:
            fine_unit, fine_directions = _cast(features / norm, cosines), _cast(weight / weight_norm, cosines)
        else:
            fine_unit, fine_directions = unit, directions

        parts: list[Tensor] = []  # of dL/df, a block each
        grad_weight = radial = grad_alpha = None
        if places and wants_alpha:
            sums = torch.mv(powers.view(degree + 2, -1), gradient.reshape(-1))
            grad_alpha = torch.cat([sums[: kernels.END_POINTS], gradient.sum()[None], sums[kernels.END_POINTS :]])
        for block in _blocks(features.shape[0], max(places, 1), classes, features.device):
            rows, g = _take(unit, block), _take(gradient, block)
            if places:
                if not (wants_features or wants_weight):
                    break
                rows = rows.reshape(-1, width)
                t = torch.mm(_take(fine_unit, block).reshape(-1, width), fine_directions.t())
                t = _cast(t if ctx.unit_weights else t.div_(lengths), real)
                grad_t = kernels.horner(t, slope, in_place=True)
                grad_t.view(-1, places, classes).mul_((g / places)[:, None, :])
            else:
                t = _cast(_take(all_t, block), real)
                if wants_alpha:
                    grad_alpha = _plus(grad_alpha, _alpha_gradient(g, t, degree, ctx.end_points))
                if not (wants_features or wants_weight):
                    continue
                grad_t = kernels.horner(t, slope, in_place=True).mul_(g)
            # What points along f or w itself is taken out: here, in N K operations, or below, in N D + K D.
            inward = None if ctx.unit_weights else grad_t * t
            grad_t = _cast(grad_t if inward is None else grad_t.div_(lengths), gradients)
            if wants_features:
                part = _cast(torch.mm(grad_t, directions), real)
                along = (part * rows if inward is None else inward).sum(1, keepdim=True)
                parts.append(part.addcmul_(rows, along, value=-1))
            if wants_weight:
                grad_weight = _plus(grad_weight, _cast(torch.mm(grad_t.t(), rows), real))
                if inward is not None:
                    radial = _plus(radial, inward.sum(0))

        grad_features = None
        if wants_features:
            grad_features = parts[0] if len(parts) == 1 else torch.cat(parts)
            grad_features = _cast(grad_features.view(features.shape).div_(norm), features.dtype)
        if grad_weight is not None:
            if radial is None:
                along = (grad_weight * directions).sum(1, keepdim=True)
                grad_weight.addcmul_(directions, along, value=-1).div_(weight_norm)
            else:
                grad_weight.addcmul_(weight, radial.div_(lengths).div_(lengths)[:, None], value=-1)
            grad_weight = _cast(grad_weight, weight.dtype)
        if grad_alpha is not None:
            grad_alpha = _cast(grad_alpha, alpha.dtype)
        return grad_features, grad_weight, grad_alpha, None


class _KernelPool(torch.autograd.Function):
    """`_KernelMean` over places, in the kernels of `kernel_pool`. Keeps unit vectors too, in half precision."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        from kernelhead.ops import kernel_pool  # imports triton

        ctx.dtype = dtype
        with torch.cuda.device_of(features):  # type: ignore[no-untyped-call]  # where triton launches
            unit, norm = kernel_pool.normalised(features)
            directions, lengths = kernel_pool.normalised(weight)
            value, powers = kernel_pool.pool(unit, directions, _plain(alpha), keep=ctx.needs_input_grad[2])
        ctx.save_for_backward(features, weight, alpha, unit, norm, directions, lengths, powers)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from kernelhead.ops import kernel_pool

        features, weight, alpha, unit, norm, directions, lengths, powers = ctx.saved_tensors
        if _wants_composed(gradient):
            return (*_composed_backward(features, weight, alpha, ctx.dtype, gradient), None)
        wants_features, wants_weight, wants_alpha, _ = ctx.needs_input_grad
        g, a = _plain(gradient), _plain(alpha)
        grad_features = grad_weight = grad_alpha = None
        if wants_features:
            grad_features = kernel_pool.features_gradient(g, unit, norm, directions, a, features.dtype)
        if wants_weight:
            grad_weight = kernel_pool.weight_gradient(g, unit, directions, lengths, a, weight.dtype)
        if wants_alpha:
            grad_alpha = _cast(kernel_pool.alpha_gradient(g, powers), alpha.dtype)
        return grad_features, grad_weight, grad_alpha, None


def _plain(x: Tensor) -> Tensor:
    return _cast(x, torch.float32).contiguous()


def _wants_composed(gradient: Tensor) -> bool:
    """Under create_graph=True, for gradients to be differentiated again; under is_grads_batched=True, within vmap."""
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient)


def _composed_backward(
    features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    def composed(features: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
        return _composed(features, weight, alpha, dtype)

    gradients: tuple[Tensor, Tensor, Tensor] = torch.func.vjp(composed, features, weight, alpha)[1](gradient)
    return gradients


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
