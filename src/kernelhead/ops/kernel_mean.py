"""The core of the kernel head: k(<w/|w|, f/|f|>), averaged over places, with its whole backward pass.

`kernel_mean` is one autograd function. For plain feature vectors it saves the cosines t beside its inputs and their
norms; over places it saves no more than the norms and computes the cosines again, block by block, so that neither the
(N, L, K) cosines nor the kernel values ever exist at once (3 % slower than keeping them, on two cores). With
G = dL/dt = g k'(t), the backward pass needs t alone:

    dL/da_m = sum g t^m
    dL/df   = (G w_hat - (sum_j G t) f_hat) / |f|
    dL/dw   = (G^T f_hat - (sum_n G t) w_hat) / |w|

Where torch has its own way to differentiate or to fuse (torch.compile, torch.export, torch.func, forward mode, double
backward), the same quantity is written as plain differentiable operations, `_composed`, and torch is left to it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelhead import kernels

# Elements of a block. On a CPU a block's few buffers should stay in the cache; on a GPU a block only has to be large
# enough to fill it and small enough to fit.
BLOCK = {"cpu": 2**18}
BLOCK_ELSEWHERE = 2**24


def kernel_mean(features: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
    """Mean over places of the kernel between features and weights.

    features (N, D), or (N, L, D) with L places; weight (K, D); alpha (M + 3,) -> (N, K), at least float32.

    Under autocast, and for half-precision inputs, the products run in the low precision; norms, polynomial and result
    are float32. There a rounded cosine cannot tell t = 1 from its neighbours, and the end-point terms count as zero.
    A zero vector has cosine 0 with everything and receives a zero gradient.
    """
    dtype = _product_dtype(features, weight)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _composed(features, weight, alpha, dtype)
    value: Tensor = _KernelMean.apply(features, weight, alpha, dtype)
    return value


def unit_norm(x: Tensor) -> Tensor:
    """What to divide x by for unit length, in at least float32: |x|, or infinity for a zero vector.

    x (..., D) -> (..., 1). With infinity a zero vector stays zero and its gradients, of any order, are zero.
    """
    zero = torch.isinf(_unit_norm(x.detach()))
    norm: Tensor = torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True, dtype=real_dtype(x.dtype))
    return norm.masked_fill(zero, math.inf)


def _unit_norm(x: Tensor) -> Tensor:
    """`unit_norm` where nothing is differentiated."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=real_dtype(x.dtype))
    return torch.threshold(norm, torch.finfo(norm.dtype).tiny, math.inf)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms and polynomials: float32 for half-precision inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_enabled(device: str) -> bool:
    """Whether operations on `device` are being autocast; meta tensors never are."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _product_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """What autocast would multiply in, or else the inputs' common type."""
    dtype = torch.promote_types(features.dtype, weight.dtype)
    device = features.device.type
    if dtype != torch.float64 and autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def _composed(features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """`kernel_mean` in plain differentiable operations."""
    real = real_dtype(dtype)
    unit, unit_weight = ((x / unit_norm(x)).to(dtype) for x in (features, weight))
    t = (unit @ unit_weight.t()).to(real)
    evaluate = kernels.series if dtype == real else kernels.power_series
    value = evaluate(t, alpha.to(real))
    return value.mean(1) if features.dim() == 3 else value


@lru_cache(maxsize=64)
def _orders(degree: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(1, degree + 1, dtype=dtype, device=device)


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


def _touches_end_points(t: Tensor) -> bool:
    """Whether some cosine is +-1. Almost never on a CPU, where asking costs little; elsewhere asking would wait."""
    if t.device.type != "cpu" or t.numel() == 0:
        return True
    low, high = torch.aminmax(t)
    return not max(-low.item(), high.item()) < 1 - kernels.default_tolerance(t.dtype)  # a NaN is no answer


def _alpha_gradient(gradient: Tensor, t: Tensor, degree: int, end_points: bool) -> Tensor:
    """Sum g k_even, sum g k_odd, sum g t^m for m = 0 .. degree: one buffer, swept once a power."""
    if end_points:
        odd = kernels.end_points(t)
        sums = [(odd * odd).mul_(gradient).sum(), odd.mul_(gradient).sum(), gradient.sum()]
    else:
        nothing = t.new_zeros(())
        sums = [nothing, nothing, gradient.sum()]
    gradient, t = gradient.reshape(-1), t.reshape(-1)
    if t.shape[0] < 2**15:  # below that, the threads of torch.dot cost more than they save: 0.50 ms against 0.40 a step
        running = gradient * t
        sums.append(running.sum())
        sums.extend(running.mul_(t).sum() for _ in range(1, degree))
        return torch.stack(sums)
    square, running = t * t, gradient
    for power in range(1, degree + 1):
        if power % 2 == 1:
            sums.append(torch.dot(running, t))
        else:
            running = gradient * square if power == 2 else running.mul_(square)
            sums.append(running.sum())
    return torch.stack(sums)


def _directions(weight: Tensor, norm: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weights to multiply by (K, D), and what their products are still to be divided by (K,), if anything.

    Dividing the products costs N K operations, dividing the weights K D: at (N, D, K) = (128, 2048, 1000) it is the
    difference between 1.15 and 1.25 times the time of a linear layer. Half precision has no range for raw weights.
    """
    if weight.dtype == dtype == norm.dtype:
        return weight, norm
    return (weight / norm[:, None]).to(dtype), None


class _KernelMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        real = real_dtype(dtype)
        norm, weight_norm = _unit_norm(features), _unit_norm(weight).squeeze(1)
        unit, (directions, divisor) = _cast(features / norm, dtype), _directions(weight, weight_norm, dtype)
        places = features.shape[1] if features.dim() == 3 else 0
        ctx.dtype, ctx.end_points = dtype, False

        all_t = None if places else _cosines(unit, directions, divisor)
        values = []
        for block in _blocks(features.shape[0], max(places, 1), weight.shape[0], features.device):
            t = _cosines(_take(unit, block), directions, divisor) if all_t is None else _take(all_t, block)
            end_points = dtype == real and _touches_end_points(t)
            ctx.end_points |= end_points
            evaluate = kernels.series if end_points else kernels.power_series
            value = evaluate(_cast(t, real), _cast(alpha, real), in_place=True)
            values.append(value.mean(1) if places else value)
        ctx.save_for_backward(features, weight, alpha, norm, weight_norm, all_t)
        return values[0] if len(values) == 1 else torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, alpha, norm, weight_norm, all_t = ctx.saved_tensors
        dtype: torch.dtype = ctx.dtype
        # create_graph=True wants gradients that can be differentiated again, is_grads_batched=True ones under vmap.
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):

            def composed(features: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
                return _composed(features, weight, alpha, dtype)

            pull_back = torch.func.vjp(composed, features, weight, alpha)[1]
            return (*pull_back(gradient), None)

        real = real_dtype(dtype)
        wants_features, wants_weight, wants_alpha, _ = ctx.needs_input_grad
        degree = alpha.shape[0] - kernels.END_POINTS - 1
        slope = (alpha[kernels.END_POINTS + 1 :] * _orders(degree, real, alpha.device)).unbind()
        unit, (directions, divisor) = _cast(features / norm, dtype), _directions(weight, weight_norm, dtype)
        (classes, width), places = weight.shape, features.shape[1] if all_t is None else 0
        if places:
            gradient = gradient / places

        parts: list[Tensor] = []  # of dL/df, a block each
        grad_weight = radial = grad_alpha = None
        for block in _blocks(features.shape[0], max(places, 1), classes, features.device):
            rows, g = _take(unit, block), _take(gradient, block)
            if places:
                rows = rows.reshape(-1, width)
                t = _cosines(rows, directions, divisor)
                g = g[:, None, :].expand(-1, places, -1).reshape(-1, classes)
            else:
                t = _take(all_t, block)
            t = _cast(t, real)
            if wants_alpha:
                grad_alpha = _plus(grad_alpha, _alpha_gradient(g, t, degree, ctx.end_points))
            if not (wants_features or wants_weight):
                continue
            grad_t = kernels.horner(t, slope, in_place=True).mul_(g)
            inward = grad_t * t
            if divisor is not None:
                grad_t.div_(divisor)
            grad_t = _cast(grad_t, dtype)
            if wants_features:
                part = _cast(torch.mm(grad_t, directions), real)
                parts.append(part.addcmul_(rows, inward.sum(1, keepdim=True), value=-1))
            if wants_weight:
                grad_weight = _plus(grad_weight, _cast(torch.mm(grad_t.t(), rows), real))
                radial = _plus(radial, inward.sum(0))

        grad_features = None
        if wants_features:
            grad_features = parts[0] if len(parts) == 1 else torch.cat(parts)
            grad_features = _cast(grad_features.view(features.shape).div_(norm), features.dtype)
        if grad_weight is not None and radial is not None:
            if divisor is not None:
                radial.div_(divisor).div_(divisor)
            grad_weight.addcmul_(directions, radial[:, None], value=-1)
            if divisor is None:
                grad_weight.div_(weight_norm[:, None])
            grad_weight = _cast(grad_weight, weight.dtype)
        if grad_alpha is not None:
            grad_alpha = _cast(grad_alpha, alpha.dtype)
        return grad_features, grad_weight, grad_alpha, None


def _cosines(unit: Tensor, directions: Tensor, divisor: Tensor | None) -> Tensor:
    t = torch.matmul(unit, directions.t())
    return t if divisor is None else t.div_(divisor)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
