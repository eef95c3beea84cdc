"""Cross-entropy of few logits on CUDA, with its gradient, in two Triton kernels and a sum. Needs triton.

Of torch's operations, forward and backward, the same takes about ten, each over in no time: a step of a small network
waits for their launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional as F

MOST_SAMPLES, MOST_CLASSES = 2**12, 2**10  # every program reads all labels, and holds whole rows of logits
BLOCK = 1024  # logits that a program holds
DTYPES = torch.bfloat16, torch.float16, torch.float32
IGNORED = tl.constexpr(-100)


def supported(logits: Tensor, target: Tensor) -> bool:
    """Whether `loss_and_hits` takes these. logits (N, C), target (N,)."""
    return (
        logits.dim() == 2
        and 0 < logits.shape[0] <= MOST_SAMPLES
        and 0 < logits.shape[1] <= MOST_CLASSES
        and logits.dtype in DTYPES
        and target.shape == logits.shape[:1]
        and target.dtype == torch.int64
    )


def loss_and_hits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy (), float32, and which samples have their own class on top (N,).

    Samples with the label -100 do not count, as with torch. Another label that is no class has no loss: the mean is not
    a number.
    """
    loss, hits = _FewLogits.apply(logits if logits.stride(1) == 1 else logits.contiguous(), target.contiguous())
    return loss, hits


@triton.jit
def _kernel(
    logits,  # (N, C)
    target,  # (N,)
    losses,  # (N,), divided by how many count
    hits,  # (N,)
    gradient,  # (N, C), float32, if it is wanted
    samples,
    classes,
    stride,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    everyone = tl.arange(0, SAMPLES)
    labels = tl.load(target + everyone, mask=everyone < samples, other=IGNORED)
    number = tl.sum((labels != IGNORED).to(tl.float32), 0)
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CLASSES)
    exists = (n < samples)[:, None] & (c < classes)[None, :]
    x = tl.load(logits + n[:, None] * stride + c[None, :], mask=exists, other=float("-inf")).to(tl.float32)
    y = tl.load(target + n, mask=n < samples, other=IGNORED)
    top = tl.where(n < samples, tl.max(x, 1), 0.0)
    powers = tl.exp(x - top[:, None])
    sums = tl.where(n < samples, tl.sum(powers, 1), 1.0)
    own = c[None, :] == y[:, None]
    loss = tl.log(sums) - tl.sum(tl.where(own, x - top[:, None], 0.0), 1)
    loss = tl.where((y >= 0) & (y < classes), loss, float("nan"))
    tl.store(losses + n, tl.where(y != IGNORED, loss, 0.0) / number, mask=n < samples)
    first = tl.min(tl.where(x == top[:, None], c[None, :], CLASSES), 1)  # of equals, as argmax
    tl.store(hits + n, first == y, mask=n < samples)
    if gradient is not None:
        change = (powers / sums[:, None] - tl.where(own, 1.0, 0.0)) / number
        change = tl.where((y != IGNORED)[:, None], change, 0.0)
        to = gradient + n[:, None] * classes + c[None, :]
        tl.store(to, change, mask=exists)


@triton.jit
def _scale_kernel(x, factor, out, size, BLOCK: tl.constexpr):
    """Before it is rounded: in half precision a gradient may be too small without its factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(x + at, mask=at < size, other=0.0) * tl.load(factor)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=at < size)


class _FewLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        samples, classes = logits.shape
        ctx.set_materialize_grads(False)  # those of the hits
        losses = logits.new_empty(samples, dtype=torch.float32)
        hits = logits.new_empty(samples, dtype=torch.bool)
        gradient = losses.new_empty(logits.shape) if ctx.needs_input_grad[0] else None
        sizes = {"SAMPLES": triton.next_power_of_2(samples), "CLASSES": triton.next_power_of_2(classes)}
        rows = max(1, BLOCK // sizes["CLASSES"])
        with torch.cuda.device_of(logits):
            _kernel[(triton.cdiv(samples, rows),)](
                logits, target, losses, hits, gradient, samples, classes, logits.stride(0), ROWS=rows, **sizes
            )
        ctx.save_for_backward(logits, target, gradient)
        ctx.mark_non_differentiable(hits)
        return losses.sum(), hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: None) -> tuple[Tensor, None]:
        logits, target, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            again: Tensor = torch.func.vjp(lambda x: F.cross_entropy(x.float(), target), logits)[1](grad_loss)[0]
            return again, None
        out = torch.empty_like(gradient, dtype=logits.dtype)
        with torch.cuda.device_of(out):
            _scale_kernel[(triton.cdiv(out.numel(), BLOCK),)](gradient, grad_loss, out, out.numel(), BLOCK=BLOCK)
        return out, None
