"""The core of every kernel head: mean over positions l of k(t_nlk), with t_nlk = <w_k, f_nl> / (|w_k| |f_nl|).

With the gradient g of a value, per position, and G = dL/dt = g k'(t) the backward pass is

    dL/da_m = sum g t^m
    dL/df   = (G w_hat - (sum_k G t) f_hat) / |f|
    dL/dw   = (G^T f_hat - (sum_n G t) w_hat) / |w|

For vectors it saves the cosines and nothing else of their size. For maps and tokens it goes through blocks of samples
and never holds all cosines. It saves the mean powers `(M + 2, N, K)`, of which the value and dL/da are linear
functions, and computes the cosines of a block again on the way back.

    | (1024, 512) features, 10,000 classes, CPU | ms per step | saved for backward, MB |  lab/results/bench/head.json
    | this function                             |         266 |                     64 |
    | powers of t left to autograd              |        1406 |                    496 |

Where torch differentiates or fuses in its own way, as torch.compile and torch.func do, `_composed` has the same
quantity in plain operations.
"""

from typing import Any, cast

import torch
from torch import Tensor

from kernelhead import kernels
from kernelhead.fused.modes import at_hand, differentiated_by_torch
from kernelhead.fused.precision import (
    add_product,
    divided,
    followed_dtype,
    lengths,
    product_dtype,
    product_dtypes,
    real_dtype,
    unit_vectors,
    without_autocast,
)

# Cosines of a block, which is a matrix product, and of a strip of it, whose few buffers should stay in a CPU's cache.
# On a GPU both have to be large enough to fill it and small enough to fit.
BLOCK, STRIP = {"cpu": 2**19}, {"cpu": 2**17}
BLOCK_ELSEWHERE = 2**24
MIN_BLOCK_ROWS = 256
FEW = 2**15  # cosines, or numbers in the weights: below, an operation costs more to begin than to do


def kernel_mean(features: Tensor, weight: Tensor, alpha: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over positions of the kernel between features and weights.

    features `(N, D)`, or `(N, L, D)` with L positions; weight `(K, D)`; alpha `(M + 3,)` -> `(N, K)`, at least float32.
    mask `(N, L)` is 0 at positions that do not count, which may hold anything and receive a zero gradient. A sample
    without any other has the value a_0.

    Under autocast, and for half-precision inputs, the products run in the low precision. Norms, polynomial and result
    are float32. A rounded cosine cannot tell t = 1 from its neighbours, so the end-point terms count as zero there. A
    zero vector has cosine 0 with everything and receives a zero gradient.

    Example:
        >>> kernel_mean(torch.randn(8, 49, 64), torch.randn(10, 64), torch.ones(10)).shape
        torch.Size([8, 10])
    """
    dtype = product_dtype(features, weight)
    share = None
    if mask is not None:
        features, share = masked(features, mask, real_dtype(dtype))
    with without_autocast(features.device.type):  # which precision is used where is said here alone
        if differentiated_by_torch():
            return _composed(features, weight, alpha, dtype, share)
        few = features.dim() == 2 and features.shape[0] * weight.shape[0] <= FEW and weight.numel() <= FEW
        trained = torch.is_grad_enabled() and all(x.requires_grad for x in (features, weight, alpha))
        if few and trained and features.dtype == weight.dtype == alpha.dtype == real_dtype(dtype):
            return cast(Tensor, _FewCosines.apply(features, weight, alpha))
        return cast(Tensor, _KernelMean.apply(features, weight, alpha, dtype, share))


def masked(features: Tensor, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions with zeros where the mask is 0, and the factor that makes up for them in a mean.

    A zero vector has cosine 0, where all terms of the kernel but a_0 vanish. features (N, L, D), mask (N, L) -> the
    same and (N, 1).
    """
    if features.dim() != 3 or mask.shape != features.shape[:2]:
        shapes = f"{tuple(mask.shape)} with features of shape {tuple(features.shape)}"
        raise ValueError(f"a mask needs the shape (N, L) and features (N, L, D); got a mask {shapes}")
    real = mask > 0
    counts = real.sum(1, keepdim=True).clamp(min=1).to(dtype)
    return features.masked_fill(~real[..., None], 0), features.shape[1] / counts


def _composed(
    features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype, share: Tensor | None = None
) -> Tensor:
    """`kernel_mean` in plain differentiable operations."""
    real = real_dtype(dtype)
    products = followed_dtype(dtype, features.device.type)
    unit, directions = (unit_vectors(x).to(products) for x in (features, weight))
    value = kernels.series((unit @ directions.t()).to(real), alpha.to(real), ends=dtype == real)
    if share is not None:
        a_0 = alpha[kernels.END_POINTS].to(real)
        return (value - a_0).mean(1) * share + a_0
    return value.mean(1) if features.dim() == 3 else value


def block_rows(positions: int, classes: int, device: torch.device) -> int:
    """How many samples go through the series at once: BLOCK cosines at most, or MIN_BLOCK_ROWS rows at least."""
    return max(BLOCK.get(device.type, BLOCK_ELSEWHERE) // (positions * classes), -(-MIN_BLOCK_ROWS // positions))


def _blocks(samples: int, positions: int, classes: int, device: torch.device) -> list[slice]:
    step = block_rows(positions, classes, device)
    return [slice(start, start + step) for start in range(0, max(samples, 1), step)]


def _strips(t: Tensor) -> list[slice]:
    """Parts of t (N, ...) that go through the steps of a series at once: STRIP cosines, or one sample."""
    step = max(1, STRIP.get(t.device.type, BLOCK_ELSEWHERE) // max(1, t[:1].numel()))
    return [slice(start, start + step) for start in range(0, t.shape[0], step)]


def touches_end_points(t: Tensor) -> bool:
    """Whether some cosine is +-1. Almost never on a CPU, where asking costs little; elsewhere asking would wait."""
    if not at_hand(t):
        return True
    low, high = torch.aminmax(t)
    return not max(-low.item(), high.item()) < 1 - kernels.rounding(t.dtype)  # a NaN is no answer


def alpha_gradient(gradient: Tensor, t: Tensor, degree: int, ends: bool) -> Tensor:
    """Sums of g k_even, g k_odd and g t^m for m = 0 .. degree, in one buffer swept once per power. g, t (R, K)."""
    sums = [t.new_zeros(())] * kernels.END_POINTS
    if ends:
        odd = kernels.end_points(t)
        sums = [(odd * odd).mul_(gradient).sum(), odd.mul_(gradient).sum()]
    running = gradient * t
    sums += [gradient.sum(), running.sum(), *(running.mul_(t).sum() for _ in range(1, degree))]
    return torch.stack(sums)


def _mean_powers(t: Tensor, out: Tensor, ends: bool) -> None:
    """Means over positions of k_even, k_odd, t, t^2, .. t^M, into out (M + 2, N, K). t (N, L, K)."""
    out[:2].zero_()
    if ends:
        odd = kernels.end_points(t)
        torch.mean(odd, 1, out=out[1])
        torch.mean(odd.mul_(odd), 1, out=out[0])
    torch.mean(t, 1, out=out[2])
    running = t
    for power in range(3, out.shape[0]):
        running = t * t if power == 3 else running.mul_(t)
        torch.mean(running, 1, out=out[power])


def _differentiated_again(gradient: Tensor) -> bool:
    """Whether create_graph=True wants gradients of gradients, or vmap is at work for is_grads_batched=True."""
    return torch.is_grad_enabled() or bool(torch._C._functorch.is_legacy_batchedtensor(gradient))


def _composed_gradients(
    features: Tensor, weight: Tensor, alpha: Tensor, gradient: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.func.vjp(lambda *inputs: _composed(*inputs, *options), features, weight, alpha)[1](gradient))


class _FewCosines(torch.autograd.Function):
    """`_KernelMean` of so few cosines that the number of operations counts, not their size.

    All powers of the cosines stand in one tensor, of which the value and both gradients are products. Features and
    weights are normalised as one matrix.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
        samples, classes, count = features.shape[0], weight.shape[0], alpha.shape[0] - kernels.END_POINTS
        both = torch.cat((features, weight))
        norm = lengths(both)
        both.div_(norm)
        powers = both.new_empty(count, samples, classes)
        powers[0].fill_(1)
        t = torch.mm(both[:samples], both[samples:].t(), out=powers[1])
        known = 2
        while known < count:
            more = min(known - 1, count - known)
            torch.mul(powers[1 : 1 + more], powers[known - 1], out=powers[known : known + more])
            known += more
        rows = powers.view(count, -1)
        ctx.save_for_backward(features, weight, alpha, both, norm, rows)
        ctx.ends = touches_end_points(t)
        return kernels.series(t, alpha) if ctx.ends else torch.mv(rows.t(), alpha[kernels.END_POINTS :]).view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        features, weight, alpha, both, norm, rows = ctx.saved_tensors
        if _differentiated_again(gradient):
            return _composed_gradients(features, weight, alpha, gradient, features.dtype)
        samples = features.shape[0]
        if ctx.ends:
            grad_alpha = alpha_gradient(gradient, rows[1].view_as(gradient), rows.shape[0] - 1, ends=True)
        else:
            grad_alpha = torch.zeros_like(alpha)
            torch.mv(rows, gradient.reshape(-1), out=grad_alpha[kernels.END_POINTS :])
        slopes = torch.mv(rows[:-1].t(), kernels.derivative_coefficients(alpha))
        grad_t = slopes.view_as(gradient).mul_(gradient)
        grad_both = torch.empty_like(both)
        torch.mm(grad_t, both[samples:], out=grad_both[:samples])
        torch.mm(grad_t.t(), both[:samples], out=grad_both[samples:])
        grad_both.addcmul_(both, torch.linalg.vecdot(grad_both, both)[:, None], value=-1).div_(norm)
        return grad_both[:samples], grad_both[samples:], grad_alpha


class _KernelMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, alpha: Tensor, dtype: torch.dtype, share: Tensor | None
    ) -> Tensor:
        real = real_dtype(dtype)
        samples, classes = features.shape[0], weight.shape[0]
        positions = features.shape[1] if features.dim() == 3 else 0
        ctx.dtype, ctx.ends = dtype, False
        cosines, _ = product_dtypes(dtype, features.device.type)
        norm, weight_norm = lengths(features), lengths(weight)
        # Unit weights cost K D divisions and as much memory; dividing the products costs N K in the cache. That needs
        # products in the range of their precision.
        ctx.unit_weights = positions > 0 or not real == dtype == weight.dtype == weight_norm.dtype
        unit = divided(features, norm, cosines)
        directions = divided(weight, weight_norm, cosines) if ctx.unit_weights else weight
        alpha_, t, powers = alpha.to(real), None, None
        if positions:
            powers = unit.new_empty(alpha.shape[0] - 1, samples, classes, dtype=real)
            for block in _blocks(samples, positions, classes, features.device):
                block_t = torch.matmul(unit[block], directions.t()).to(real)
                _mean_powers(block_t, powers[:, block], dtype == real and touches_end_points(block_t))
            if share is not None:
                powers.mul_(share)
            slopes = torch.cat([alpha_[: kernels.END_POINTS], alpha_[kernels.END_POINTS + 1 :]])
            value: Tensor = torch.tensordot(slopes, powers, 1).add_(alpha_[kernels.END_POINTS])
        else:
            t = torch.mm(unit, directions.t())
            value = torch.empty_like(t, dtype=real)
            for strip in _strips(t):
                own = t[strip] if ctx.unit_weights else t[strip].div_(weight_norm.view(-1))
                ends = dtype == real and touches_end_points(own)
                kernels.series(own.to(real), alpha_, ends=ends, out=value[strip])
                ctx.ends = ctx.ends or ends
        ctx.save_for_backward(features, weight, alpha, norm, weight_norm, t, powers, share)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, alpha, norm, weight_norm, all_t, powers, share = ctx.saved_tensors
        dtype: torch.dtype = ctx.dtype
        if _differentiated_again(gradient):
            return (*_composed_gradients(features, weight, alpha, gradient, dtype, share), None, None)

        real = real_dtype(dtype)
        wants_features, wants_weight, wants_alpha, *_ = ctx.needs_input_grad
        degree = alpha.shape[0] - kernels.END_POINTS - 1
        slope = kernels.derivative_coefficients(alpha.to(real)).unbind()
        (classes, width), positions = weight.shape, features.shape[1] if all_t is None else 0
        cosines, gradients = product_dtypes(dtype, features.device.type)
        unit = divided(features, norm, gradients)
        directions = divided(weight, weight_norm, gradients) if ctx.unit_weights else weight
        fine_unit, fine_directions = unit, directions
        if positions and cosines != gradients:
            fine_unit, fine_directions = divided(features, norm, cosines), divided(weight, weight_norm, cosines)

        grad_features = features.new_empty(features.shape, dtype=real) if wants_features else None
        grad_weight: Tensor | None = None
        grad_alpha = torch.zeros_like(alpha, dtype=real) if wants_alpha else None
        along_weight = torch.zeros_like(weight_norm[:, 0])
        if positions and wants_alpha:
            sums = torch.mv(powers.view(degree + 2, -1), gradient.reshape(-1))
            grad_alpha = torch.cat([sums[: kernels.END_POINTS], gradient.sum()[None], sums[kernels.END_POINTS :]])
        for block in _blocks(len(features), positions or 1, classes, features.device):
            rows, g = unit[block].reshape(-1, width), gradient[block]
            if positions:
                t = torch.mm(fine_unit[block].reshape(-1, width), fine_directions.t())
                g = g / positions if share is None else g * (share[block] / positions)
            else:
                t = all_t[block]
            t = t.view(len(g), positions or 1, classes)
            grad_t = torch.empty_like(t, dtype=real)
            for strip in _strips(t):
                own, slopes = t[strip].to(real), grad_t[strip]
                if grad_alpha is not None and not positions:
                    grad_alpha += alpha_gradient(g[strip], own[:, 0], degree, ctx.ends)
                kernels.horner(own, slope, out=slopes).mul_(g[strip, None])
                if not ctx.unit_weights:
                    along_weight += (slopes * own).sum((0, 1))
                    slopes.div_(weight_norm.view(-1))
            grad_t = grad_t.view(-1, classes).to(gradients)
            if grad_features is not None:
                part = torch.mm(grad_t, directions).to(real)
                along = (part * rows).sum(1, keepdim=True)  # of f, and below of w: it is taken out
                torch.addcmul(part, rows, along, value=-1, out=grad_features[block].view(part.shape))
            if grad_weight is not None:
                add_product(grad_weight, grad_t.t(), rows)
            elif wants_weight:
                grad_weight = torch.mm(grad_t.t(), rows).to(real)

        if grad_features is not None:
            grad_features = grad_features.div_(norm).to(features.dtype)
        if grad_weight is not None:
            if ctx.unit_weights:
                along = (grad_weight * directions).sum(1, keepdim=True)
                grad_weight.addcmul_(directions, along, value=-1).div_(weight_norm)
            else:
                grad_weight.addcmul_(weight, along_weight[:, None].div_(weight_norm).div_(weight_norm), value=-1)
            grad_weight = grad_weight.to(weight.dtype)
        return grad_features, grad_weight, None if grad_alpha is None else grad_alpha.to(alpha.dtype), None, None
