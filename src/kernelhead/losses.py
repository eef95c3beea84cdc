"""Losses."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.ops import cross_entropy
from kernelhead.ops.cross_entropy import eager
from kernelhead.ops.modes import transformed
from kernelhead.ops.precision import real_dtype

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
    negligible: float = 0.0,
) -> Tensor:
    """Cross-entropy of the kernel head, from features to the loss: no logits in between where there are many classes.

    The value and the gradients of

        F.cross_entropy(logits, target, ..),   logits = log sum_p exp(k(<w_jp / |w_jp|, f / |f|>) / T),

    where p runs over the `prototypes` of a class: its probability is the sum of theirs.

    Args:
        features: (N, D).
        weight: (C P, D), the prototypes of a class side by side.
        alpha: the kernel's coefficients (M + 3,), ordered a_{-2}, a_{-1}, a_0 .. a_M.
        target: labels (N,), integers from 0 to C - 1, or `ignore_index`. A label out of range is an error on a CPU;
            elsewhere asking would wait for the device, and the loss is NaN.
        temperature: T.
        prototypes: P.
        ignore_index: the label of samples that do not count.
        label_smoothing: the share of a label that is spread evenly over all classes.
        reduction: "mean" over the samples that count, "sum", or "none", which gives (N,).
        backend: "eager" (logits as the plain head has them), "chunked" (a block of classes at a time, any device),
            "triton" (the same in fused kernels, on CUDA, in float32 and half precision), or "auto", the fastest for
            this device and size. The last three have first derivatives only.
        mode: of the fused backends. "speed" keeps the cosines (N, C P) for the backward pass, "memory" computes them
            again, block by block; "auto" keeps them while they take less than a sixteenth of a GPU's memory.
        negligible: of the triton backend in half precision, without label smoothing: leave tiles of samples and classes
            out of the gradients that together hold at most this part of the probability that went to wrong classes.
            2**-14 is far below the rounding of half precision. It pays where most samples are sure of their class, and
            waits for the device once. Nothing is left out while a CUDA graph is captured.

    The same inputs give the same bits on the same machine, with every backend. For half-precision inputs, and under
    autocast, cosines are kept in float16 on a GPU, sums are float32, and end-point terms count as zero.
    """
    _check_loss(features, weight, alpha, target, prototypes, reduction, backend, mode)
    if not 0 < temperature < math.inf:  # torch.compile asks a symbol this, but not math.isfinite
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    if not 0 <= negligible < 1:
        raise ValueError(f"negligible must be at least 0 and below 1, got {negligible}")
    if temperature != 1:
        alpha = alpha / temperature
    if backend == "auto":
        backend = cross_entropy.choose(features, weight)
    if target.dtype != torch.long:
        target = target.long()
    _check_labels(target, ignore_index, weight.shape[0] // prototypes)
    if backend == "eager":
        scores = eager.scores(features, weight, alpha, prototypes)
        return F.cross_entropy(
            scores, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    losses, _ = cross_entropy.fused_nll(
        features,
        weight,
        alpha,
        target,
        prototypes=prototypes,
        ignored=ignore_index,
        smoothing=label_smoothing,
        backend=backend,
        mode=mode,
        negligible=negligible,
    )
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()


def _check_loss(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    prototypes: int,
    reduction: str,
    backend: str,
    mode: str,
) -> None:
    """Refuse what the backends could not make sense of."""
    name = "kernel_cross_entropy"
    for given, choices in ((reduction, REDUCTIONS), (backend, cross_entropy.BACKENDS), (mode, cross_entropy.MODES)):
        if given not in choices:
            raise ValueError(f"{name} does not know {given!r}; choose one of {', '.join(choices)}")
    if not (torch.is_floating_point(features) and torch.is_floating_point(weight)):
        raise TypeError(f"{name} expects floating-point numbers, got {features.dtype} and {weight.dtype}")
    if features.dim() != 2 or weight.dim() != 2 or features.shape[1] != weight.shape[1]:
        shapes = f"{tuple(features.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"{name} expects features (N, D) and weight (C P, D), got {shapes}")
    if prototypes < 1 or weight.shape[0] % prototypes or not weight.shape[0]:
        raise ValueError(f"{weight.shape[0]} rows of weight do not make classes of {prototypes} prototypes")
    if alpha.dim() != 1 or alpha.shape[0] < 4:
        raise ValueError(f"{name} expects alpha (M + 3,) with M of 1 or more, got {tuple(alpha.shape)}")
    if target.shape != features.shape[:1] or torch.is_floating_point(target) or target.dtype == torch.bool:
        raise ValueError(
            f"{name} expects {features.shape[0]} integer labels, got {tuple(target.shape)} of {target.dtype}"
        )
    if backend == "triton" and (features.device.type != "cuda" or features.dtype == torch.float64):
        place = f"{features.dtype} on {features.device.type}"
        raise ValueError(f"backend 'triton' needs float32 or half precision on CUDA, got {place}; 'chunked' takes any")


def _check_shares(shares: Tensor, target: Tensor) -> None:
    """Refuse shares that are not one a sample, or, on a CPU, out of range."""
    if shares.shape != target.shape:
        raise ValueError(f"there are {target.shape[0]} samples, and shares of shape {tuple(shares.shape)}")
    if _can_be_asked(shares) and not (shares.min() >= 0 and shares.max() <= 1):
        raise ValueError(f"shares go from {shares.min():g} to {shares.max():g}, and have to lie between 0 and 1")


def _can_be_asked(x: Tensor) -> bool:
    """Whether its numbers are at hand: on a CPU, where asking does not wait, outside of compilers and transforms."""
    if x.device.type != "cpu" or x.numel() == 0 or torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and not transformed()  # a fake one has no answer, a batched one many


def _check_labels(target: Tensor, ignore_index: int, classes: int) -> None:
    """Refuse labels out of range, where they are at hand."""
    if not _can_be_asked(target):
        return
    low, high = (int(value) for value in torch.aminmax(target * (target != ignore_index)))
    if low < 0 or high >= classes:
        raise ValueError(f"labels go from {low} to {high}, but there are {classes} classes")


def mixup_cross_entropy(logits: Tensor, target: Tensor, *, shares: Tensor | None = None) -> Tensor:
    """Cross-entropy of a batch whose samples are mixed in pairs after the embedding (mixup; Verma et al., ICML 2019).

    mean over i of  -s_i log p_i(y_i) - (1 - s_i) log p_i(y_j),  p_i the softmax of  s_i z_i + (1 - s_i) z_j

    for logits z (N, C) and labels y (N,), j the sample as far from the end of the batch as i is from its beginning.
    Logits that are linear in an embedding mix as the embeddings do, and those of a kernel head are linear in the RKHS
    (not of prototypes with logsumexp): what it learns to tell apart there is the mean embedding of both images' places.
    Batches have to be in random order. Labels of -100 do not count: the mean is over the shares of the others.

    `shares` (N,) from 0 to 1 are s, drawn evenly unless given.
    """
    integers = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if logits.dim() != 2 or target.shape != logits.shape[:1] or not integers:
        raise ValueError(
            f"mixup_cross_entropy expects logits (N, C) and integer labels (N,), got {tuple(logits.shape)} and "
            f"{tuple(target.shape)} of {target.dtype}"
        )
    _check_labels(target, IGNORED, logits.shape[1])
    logits, target = logits.to(real_dtype(logits.dtype)), target.long()
    if shares is None:
        shares = torch.rand(logits.shape[0], dtype=logits.dtype, device=logits.device)
    else:
        shares = torch.as_tensor(shares, dtype=logits.dtype, device=logits.device)
        _check_shares(shares, target)
    others = logits.flip(0)
    masked = (logits == -torch.inf) | (others == -torch.inf)  # of which lerp makes NaN
    mixed = torch.lerp(others, logits, shares[:, None]).masked_fill(masked, -torch.inf)
    own, other = (F.cross_entropy(mixed, labels, reduction="none") for labels in (target, target.flip(0)))
    counted = (target != IGNORED).to(shares.dtype)
    weight = shares * counted + (1 - shares) * counted.flip(0)
    return (shares * own + (1 - shares) * other).sum() / weight.sum()


def distillation_loss(logits: Tensor, teacher_logits: Tensor, *, temperature: float = 20.0) -> Tensor:
    """Cross-entropy of a student with a teacher's softened scores, the paper's equation of section 4.

    T^2 * mean over samples of  -sum_j softmax(h / T)_j log softmax(s / T)_j

    for student logits s and teacher logits h, both (N, C). The factor T^2 (Hinton et al., 2015) keeps the gradient's
    size whatever T is, so that learning rates carry over; the paper does not say whether it has it. Without it the
    same training needs a learning rate T^2 as large, and weight decay as much smaller.
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"the student's logits are {tuple(logits.shape)}, the teacher's {tuple(teacher_logits.shape)}: "
            "they need the same classes"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    target = torch.softmax(teacher_logits.float() / temperature, dim=1)
    return temperature**2 * F.cross_entropy(logits.float() / temperature, target)
