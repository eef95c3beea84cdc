"""Second-order pooling of half-precision maps on CUDA, in one Triton kernel each way. Needs triton.

    S = X^T X / (L t),  r = S / sqrt(|S| + eps),  e = sqrt(D) r / |r|

for each sample X (L, D) of L places and mean square t. A program has a sample: its D x D moments never leave the
registers, and are computed again backward, where with c = sqrt(D) (g - <g, r> r / |r|^2) / |r| and slope r'(S),

    A = c r' + (c r')^T,  dL/dX = X (A - <A, S> / D) / (L t)

Products of half-precision features are exact in float32, in which they are added up. Those of the gradient are of
bfloat16, whatever the features are: slopes go up to 1 / sqrt(eps). There are no sums across programs: the same numbers
give the same bits, whatever else runs on the device.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.library import custom_op

WIDEST = 128  # features: the moments are a tile in registers
PLACES = 64  # of a product, at most
WARPS = {64: (4, 8), 128: (8, 16)}  # forward and backward, by width up to it: for few spills on sm_90
TINY = tl.constexpr(2.0**-126)  # mean squares below it are zero


def supported(places: Tensor, dtype: torch.dtype) -> bool:
    """Whether `second_order` takes these. places (N, L, D)."""
    half = torch.bfloat16, torch.float16
    return places.dtype in half and dtype in (*half, torch.float32) and places.shape[2] <= WIDEST and places.numel() > 0


def second_order(places: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """The mean of f f^T over places, signed square root, length sqrt(D): in float32, given in `dtype`.

    places (N, L, D), half precision and of any strides -> (N, D * D). A sample of zeros has a zero embedding and a
    zero gradient. What is beyond `supported` has no kernel. Gradients cannot be differentiated again.
    """
    embedding: Tensor = _forward(places, dtype, eps)
    return embedding


@triton.jit
def _chunk(begin, places, width, stride_place, stride_feature, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of some places of a sample (PLACES, WIDTH), and whether they exist."""
    place = begin + tl.arange(0, PLACES)
    d = tl.arange(0, WIDTH)
    at = place.to(tl.int64)[:, None] * stride_place + d[None, :] * stride_feature
    return at, (place < places)[:, None] & (d < width)[None, :]


@triton.jit
def _moments(x, places, width, stride_place, stride_feature, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    """Of features that are scaled to a mean square of 1; and one over the mean square, 0 for zeros."""
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for begin in range(0, places, PLACES):
        at, exists = _chunk(begin, places, width, stride_place, stride_feature, PLACES, WIDTH)
        f = tl.load(x + at, mask=exists, other=0.0)
        total = tl.dot(tl.trans(f), f, total)
    total *= 1.0 / places
    d = tl.arange(0, WIDTH)
    square = tl.sum(tl.sum(tl.where(d[:, None] == d[None, :], total, 0.0), 1), 0) / width
    inverse = tl.where(square < TINY, 0.0, 1.0 / square)
    return total * inverse, inverse


@triton.jit
def _unit(rooted):
    """What to multiply with for unit length: 0 for zeros."""
    squares = tl.sum(tl.sum(rooted * rooted, 1), 0)
    return tl.where(squares == 0, 0.0, 1.0 / tl.sqrt(squares))


@triton.jit
def _forward_kernel(
    x,
    out,  # (N, D, D)
    places,
    width,
    length,  # of an embedding
    stride_sample,
    stride_place,
    stride_feature,
    EPS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    s, _ = _moments(x + n * stride_sample, places, width, stride_place, stride_feature, PLACES, WIDTH)
    rooted = s * (1.0 / tl.sqrt(tl.abs(s) + EPS))
    embedding = rooted * (_unit(rooted) * length)
    d = tl.arange(0, WIDTH)
    within = (d < width)[:, None] & (d < width)[None, :]
    to = out + n * width * width + d[:, None] * width + d[None, :]
    tl.store(to, embedding.to(out.dtype.element_ty), mask=within)


@triton.jit
def _backward_kernel(
    gradient,  # (N, D, D)
    x,
    out,  # as x
    places,
    width,
    length,  # of an embedding
    stride_sample,
    stride_place,
    stride_feature,
    out_sample,
    out_place,
    out_feature,
    EPS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    x += n * stride_sample
    s, scale = _moments(x, places, width, stride_place, stride_feature, PLACES, WIDTH)
    inverse = 1.0 / tl.sqrt(tl.abs(s) + EPS)
    rooted = s * inverse
    unit = _unit(rooted)
    d = tl.arange(0, WIDTH)
    within = (d < width)[:, None] & (d < width)[None, :]
    g = tl.load(gradient + n * width * width + d[:, None] * width + d[None, :], mask=within, other=0.0)
    g = g.to(tl.float32) + tl.trans(g).to(tl.float32)  # the moments are symmetric: so is all that follows
    along = tl.sum(tl.sum(g * rooted, 1), 0) * unit
    slope = inverse * inverse * inverse * (0.5 * tl.abs(s) + EPS)
    slope = (g - rooted * (along * unit)) * slope * (unit * length / places * scale)
    along = tl.sum(tl.sum(slope * s, 1), 0) / width  # the embedding is the same for features of any scale
    slope = (slope - tl.where(d[:, None] == d[None, :], along, 0.0)).to(tl.bfloat16)
    for begin in range(0, places, PLACES):
        at, exists = _chunk(begin, places, width, stride_place, stride_feature, PLACES, WIDTH)
        f = tl.load(x + at, mask=exists, other=0.0).to(tl.bfloat16)
        to, exists = _chunk(begin, places, width, out_place, out_feature, PLACES, WIDTH)
        tl.store(out + n * out_sample + to, tl.dot(f, slope).to(out.dtype.element_ty), mask=exists)


@custom_op("kernelhead::second_order", mutates_args=())
def _forward(places: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    out: Tensor = _embedding(places, dtype, eps)
    samples, count, width = places.shape
    with torch.cuda.device_of(places):  # where triton launches
        _forward_kernel[(samples,)](
            places, out, count, width, math.sqrt(width), *places.stride(), **_options(places, eps, 0)
        )
    return out


@_forward.register_fake
def _embedding(places: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    return places.new_empty(places.shape[0], places.shape[2] ** 2, dtype=dtype)


@custom_op("kernelhead::second_order_backward", mutates_args=())
def _gradient(gradient: Tensor, places: Tensor, eps: float) -> Tensor:
    """With respect to the places."""
    out = torch.empty_like(places)
    samples, count, width = places.shape
    with torch.cuda.device_of(places):
        _backward_kernel[(samples,)](
            gradient.contiguous(), places, out, count, width, math.sqrt(width), *places.stride(), *out.stride(),
            **_options(places, eps, 1),
        )  # fmt: skip
    return out


@_gradient.register_fake
def _(gradient: Tensor, places: Tensor, eps: float) -> Tensor:
    return torch.empty_like(places)


def _options(places: Tensor, eps: float, backward: int) -> dict[str, Any]:
    _, count, width = places.shape
    return {
        "EPS": eps,
        "PLACES": min(PLACES, max(16, triton.next_power_of_2(count))),
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "num_warps": next(warps for widest, warps in WARPS.items() if width <= widest)[backward],
        "num_stages": 1,  # the 64 places of a CIFAR ResNet are one chunk: there is none ahead
    }


def _save(ctx: Any, inputs: tuple[Tensor, torch.dtype, float], output: Tensor) -> None:
    places, _, ctx.eps = inputs
    ctx.save_for_backward(places)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _gradient(gradient, *ctx.saved_tensors, ctx.eps), None, None


_forward.register_autograd(_backward, setup_context=_save)
