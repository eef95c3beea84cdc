"""`kernel_mean`, and losses as functions."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.fused import cross_entropy
from kernelhead.fused.cross_entropy.sharded import Share
from kernelhead.fused.kernel_mean import kernel_mean
from kernelhead.fused.modes import at_hand
from kernelhead.fused.precision import real_dtype

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup

__all__ = ["distillation_loss", "kernel_cross_entropy", "kernel_mean", "mixup_cross_entropy"]

REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100  # the label of samples that do not count, as torch has it


def kernel_cross_entropy(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    prototypes: int = 1,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
    mode: str = "auto",
    group: "ProcessGroup | Share | None" = None,
    negatives: float | None = None,
) -> Tensor:
    """Cross-entropy of the kernel head, from features to the loss, without logits where there are many classes.

        F.cross_entropy(logits, target),   logits = log sum_p exp(k(<w_jp / |w_jp|, f / |f|>) / T),

    where p runs over the `prototypes` of a class: its probability is the sum of theirs.

    Args:
        features: (N, D).
        weight: (C P, D), the prototypes of a class side by side.
        alpha: the kernel's coefficients `(M + 3,)`, ordered `a_{-2}, a_{-1}, a_0 .. a_M`.
        target: labels (N,), integers from 0 to C - 1, or `ignore_index`. A label out of range is an error on a CPU.
            Elsewhere asking would wait for the device, and the loss is NaN.
        temperature: T.
        prototypes: P.
        ignore_index: the label of samples that do not count.
        label_smoothing: the share of a label that is spread evenly over all classes.
        reduction: "mean" over the samples that count, "sum", or "none", which gives (N,).
        backend: "eager" makes logits, as the head does. "chunked" takes a block of classes at a time, on any device.
            "triton" does so in fused kernels, on CUDA, in float32 and half precision. "auto" takes the fastest one.
            "chunked" and "triton" have first derivatives only.
        mode: whether the fused backends keep the cosines (N, C P) for the backward pass ("speed") or compute them
            again, block by block ("memory"). "auto" keeps them while they take less than a sixteenth of a GPU's memory.
        group: processes that share out the classes, in the order of their ranks. Each has the weight of its own
            classes, and all have the same features, alpha and target. Gradients of features and alpha are complete in
            every process. A `Share` of `heads` is taken as well. See docs/scale.md.
        negatives: the share of the classes without a label in the batch that is sampled, for tens of millions of
            classes. The sum of exponentials is unbiased, its logarithm slightly too small on average.

    Every backend gives the same bits for the same inputs on the same machine. In half precision, and under autocast,
    cosines are kept in float16 on a GPU, sums are float32, and end-point terms count as zero.

    Example:
        >>> features, weight, alpha = torch.randn(8, 64), torch.randn(10, 64), torch.ones(10)
        >>> kernel_cross_entropy(features, weight, alpha, torch.arange(8)).shape
        torch.Size([])
    """
    for name, value, choices in (
        ("reduction", reduction, REDUCTIONS),
        ("backend", backend, cross_entropy.BACKENDS),
        ("mode", mode, cross_entropy.MODES),
    ):
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")
    if not 0 < temperature < math.inf:  # torch.compile asks a symbol this, but not math.isfinite
        raise ValueError(f"temperature needs to be positive and finite; got temperature={temperature}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing needs to be at least 0 and below 1; got label_smoothing={label_smoothing}")
    _check_shapes(features, weight, alpha, target, prototypes, empty=group is not None)
    if negatives is not None and (not 0 < negatives <= 1 or label_smoothing):
        raise ValueError(
            f"negatives needs to be a share above 0, up to 1, without label_smoothing; got negatives={negatives}, "
            f"label_smoothing={label_smoothing}"
        )
    sharded = group is not None or negatives is not None
    if sharded and backend == "eager":
        raise ValueError("group and negatives need a fused backend; got backend='eager', use 'auto'")
    if backend == "triton" and (features.device.type != "cuda" or features.dtype == torch.float64):
        found = f"{features.dtype} on {features.device.type}"
        raise ValueError(f"backend='triton' needs float32 or half precision on CUDA; got {found}, use 'chunked'")

    alpha = alpha if temperature == 1 else alpha / temperature
    target = target.long()
    share, classes = group if isinstance(group, Share) else None, weight.shape[0] // prototypes
    share = Share.of(group, classes, features.device) if sharded and share is None else share  # type: ignore[arg-type]
    _check_labels(target, ignore_index, share.total if share else classes)
    backend = cross_entropy.choose(features, weight, fused=sharded) if backend == "auto" else backend
    if backend == "eager":
        scores = kernel_mean(features, weight, alpha)
        if prototypes > 1:
            scores = torch.logsumexp(torch.unflatten(scores, 1, (-1, prototypes)), 2)
        return F.cross_entropy(
            scores, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    options = prototypes, ignore_index, label_smoothing, backend, mode
    losses: Tensor = cross_entropy.fused_nll(features, weight, alpha, target, *options, share, negatives)
    return _reduced(losses, target != ignore_index, reduction)


def sharded_cross_entropy(
    logits: Tensor, target: Tensor, share: Share, *, ignore_index: int, label_smoothing: float, reduction: str
) -> Tensor:
    """`F.cross_entropy` of logits (N, K) of which each process has those of its own classes, for labels (N,) of all."""
    _check_labels(target, ignore_index, share.total)
    losses = share.nll(logits.to(real_dtype(logits.dtype)), target, ignore_index, label_smoothing)
    return _reduced(losses, target != ignore_index, reduction)


def _reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def mixup_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of a batch whose samples are mixed in pairs after the embedding (mixup; Verma et al., ICML 2019).

        mean over i of  -s_i log p_i(y_i) - (1 - s_i) log p_i(y_j),   p_i the softmax of  s_i z_i + (1 - s_i) z_j

    for logits z (N, C), labels y (N,) and s_i drawn evenly from 0 to 1. Sample j is as far from the end of the batch as
    i is from its beginning, so batches have to be in random order. Logits that are linear in an embedding mix as the
    embeddings do, and the logits of a kernel head are linear in the RKHS, except with logsumexp. Labels of -100 do not
    count in the mean.

    Example:
        >>> mixup_cross_entropy(torch.randn(8, 10), torch.arange(8)).shape
        torch.Size([])
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1] or not _is_integer(target):
        raise ValueError(
            f"mixup_cross_entropy needs logits (N, C) and integer labels (N,); got {_kinds(logits, target)}"
        )
    _check_labels(target, IGNORED, logits.shape[1])
    logits, target = logits.to(real_dtype(logits.dtype)), target.long()
    shares = torch.rand(logits.shape[0], dtype=logits.dtype, device=logits.device)
    mixed = torch.lerp(logits.flip(0), logits, shares[:, None])
    own, other = (F.cross_entropy(mixed, labels, reduction="none") for labels in (target, target.flip(0)))
    counted = (target != IGNORED).to(shares.dtype)
    weight = shares * counted + (1 - shares) * counted.flip(0)
    return (shares * own + (1 - shares) * other).sum() / weight.sum()


def distillation_loss(logits: Tensor, teacher_logits: Tensor, *, temperature: float = 20.0) -> Tensor:
    """Cross-entropy of a student with a teacher's softened scores, the paper's equation of section 4.

        T^2 * mean over samples of  -sum_j softmax(h / T)_j log softmax(s / T)_j

    for student logits s and teacher logits h, both (N, C). The factor T^2 (Hinton et al., 2015) keeps the gradient's
    size whatever T is, so that learning rates carry over. The paper does not say whether it has it.

    Example:
        >>> distillation_loss(torch.randn(8, 10), torch.randn(8, 10), temperature=4.0).shape
        torch.Size([])
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"student and teacher need logits of the same shape; got {_kinds(logits, teacher_logits)}")
    if not temperature > 0:
        raise ValueError(f"temperature needs to be positive; got temperature={temperature}")
    target = torch.softmax(teacher_logits.float() / temperature, dim=1)
    return temperature**2 * F.cross_entropy(logits.float() / temperature, target)


def _check_shapes(
    features: Tensor, weight: Tensor, alpha: Tensor, target: Tensor, prototypes: int, *, empty: bool
) -> None:
    """Refuse shapes and types that the backends cannot make sense of."""
    if not (features.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"features and weight need to be floating-point; got {features.dtype} and {weight.dtype}")
    if features.dim() != 2 or weight.dim() != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"kernel_cross_entropy needs features (N, D) and weight (C P, D); got {_kinds(features, weight)}"
        )
    if prototypes < 1 or weight.shape[0] % prototypes or not (weight.shape[0] or empty):
        raise ValueError(
            f"weight needs `prototypes` rows per class; got {weight.shape[0]} rows, prototypes={prototypes}"
        )
    if alpha.dim() != 1 or alpha.shape[0] < 4:
        raise ValueError(f"alpha needs the shape (M + 3,) with M of 1 or more; got {tuple(alpha.shape)}")
    if target.shape != features.shape[:1] or not _is_integer(target):
        raise ValueError(f"target needs to be {features.shape[0]} integer labels; got {_kinds(target)}")


def _check_labels(target: Tensor, ignore_index: int, classes: int) -> None:
    """Refuse labels out of range, where they are at hand."""
    if at_hand(target):
        low, high = (int(value) for value in torch.aminmax(target * (target != ignore_index)))
        if low < 0 or high >= classes:
            raise ValueError(f"labels need to lie in 0 .. {classes - 1}; got {low} to {high}")


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _kinds(*tensors: Tensor) -> str:
    return " and ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in tensors)
