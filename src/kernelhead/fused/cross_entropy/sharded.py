"""The loss with the classes shared out over processes, or with a sample of the negative classes.

Each process has the weights of its own classes and the features of all samples. Forward, the processes reduce log sum
exp(k), once for its maximum and once for the sum beside what they know of the labels: five numbers per sample.
Backward, they sum the gradients of features (N, D) and alpha (M + 3,). Gradients of weights stay where the weights are.

With `negatives` q a process takes the classes that are labels in the batch, and of its R others n = q R at random. With
S the sum of exp(k) over the former and S' over the sampled, S + S' R / n is unbiased for the sum over all classes. Its
logarithm, the loss, is too small on average, by half the relative variance of that sum as q grows.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from kernelhead.fused.collectives import AddUp, Gather
from kernelhead.fused.cross_entropy import blocks
from kernelhead.fused.cross_entropy.blocks import Settings, Sums
from kernelhead.fused.precision import real_dtype

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup

IGNORED = -1  # the label of samples that do not count, among labels of a share


@dataclass(frozen=True)
class Share:
    """The classes `first` .. `first + classes` of `total`, which this process of a group has."""

    group: "ProcessGroup | None"
    first: int
    classes: int
    total: int

    @classmethod
    def of(cls, group: "ProcessGroup | None", classes: int, device: torch.device) -> Self:
        """Find the place of this process's classes, which are in the order of ranks. All processes call this."""
        if group is None:
            return cls(None, 0, classes, classes)
        counts = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(group.size())]
        distributed.all_gather(counts, torch.tensor([classes], device=device), group)
        known = [int(count) for count in counts]
        return cls(group, sum(known[: group.rank()]), classes, sum(known))

    def labels(self, target: Tensor, ignored: int) -> Tensor:
        """Return labels (N,) among own classes; `classes` for those of other processes."""
        own = target - self.first
        inside = (target != ignored) & (own >= 0) & (own < self.classes)
        return torch.where(inside, own, self.classes).masked_fill(target == ignored, IGNORED)

    def reduce(self, x: Tensor, operation: str = "SUM") -> Tensor:
        """Reduce x over the group, in place."""
        if self.group is not None:
            distributed.all_reduce(x, getattr(distributed.ReduceOp, operation), self.group)
        return x

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return x of all processes, one after the other."""
        gathered: Tensor = Gather.apply(x, self.group, dim)
        return gathered

    def alike(self, *tensors: Tensor, mean: bool = False) -> list[Tensor]:
        """Return tensors that are the same in all processes, as ones whose gradient is the sum over these, or mean."""
        assert self.group is not None
        factor = 1 / self.group.size() if mean else 1
        return [AddUp.apply(x, self.group, False, factor) for x in tensors]

    def combine(self, sums: Sums, target: Tensor) -> Sums:
        """Add what the classes of all processes have; target (N,) are own labels."""
        highest = self.reduce(sums.z.detach().clone(), "MAX")
        own = (target >= 0) & (target < self.classes)
        likelihood = torch.where(own, sums.likelihood, 0.0)
        parts = torch.stack([torch.exp(sums.z - highest), likelihood, own.to(likelihood.dtype), sums.spread])
        mass, likelihood, owners, spread = parts if self.group is None else AddUp.apply(parts, self.group, True, 0)
        return Sums(mass.log() + highest, torch.where(owners > 0, likelihood, torch.nan), spread)

    def nll(self, logits: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
        """Return the negative log-likelihoods (N,) of logits (N, K) of own classes, for labels (N,) among all."""
        own = self.labels(target, ignored)
        outside = logits.new_full((len(logits), 1), -torch.inf)  # where the labels of other processes point to
        padded = torch.cat([logits, outside], 1)
        likelihood = padded.gather(1, own.clamp(min=0)[:, None])[:, 0]
        sums = self.combine(Sums(padded.logsumexp(1), likelihood, logits.sum(1)), own)
        losses = sums.z - (1 - smoothing) * sums.likelihood - smoothing / self.total * sums.spread
        return losses.masked_fill(own == IGNORED, 0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def kernel_nll(
    features: Tensor,
    weight: Tensor,
    alpha: Tensor,
    target: Tensor,
    settings: Settings,
    share: Share,
    negatives: float | None,
) -> Tensor:
    """Negative log-likelihood (N,) of targets (N,), labels among all classes.

    features (N, D), weight (K, D) of own classes, alpha (M + 3,) with the temperature in it.
    """
    own = share.labels(target, settings.ignored)
    settings = settings._replace(ignored=IGNORED, total=share.total)
    if negatives is None:
        whole: Tensor = _ShardedNLL.apply(features, alpha, own, settings, share, 0.0, weight)
        return whole
    positive, sampled, factor = _sample(own, share.classes, negatives)
    by_class = weight.view(share.classes, settings.prototypes, -1)
    among = torch.searchsorted(positive, own).clamp(max=max(0, len(positive) - 1))
    found = (own >= 0) & (own < share.classes)
    own = torch.where(found, among, len(positive)).masked_fill(own == IGNORED, IGNORED)
    parts = [by_class.index_select(0, index).flatten(0, 1) for index in (positive, sampled)]
    part = Share(share.group, share.first, len(positive), share.total)
    nll: Tensor = _ShardedNLL.apply(features, alpha, own, settings, part, math.log(factor), *parts)
    return nll


def _sample(own: Tensor, classes: int, share: float) -> tuple[Tensor, Tensor, float]:
    """Return the classes that are labels, a share of the others at random, and how many of these each stands for."""
    is_label = torch.zeros(classes + 1, dtype=torch.bool, device=own.device)
    is_label[own.clamp(min=0)] = own >= 0
    positive, others = ((is_label[:-1] == wanted).nonzero()[:, 0] for wanted in (True, False))
    count = min(len(others), math.ceil(share * len(others)))
    sampled = others[torch.randperm(len(others), device=own.device)[:count]].sort().values
    return positive, sampled, len(others) / count if count else 1.0


class _ShardedNLL(torch.autograd.Function):
    """The loss of the weights of own classes; the mass of the `sampled` ones counts exp(`offset`) times."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        alpha: Tensor,
        target: Tensor,
        settings: Settings,
        share: Share,
        offset: float,
        weight: Tensor,
        sampled: Tensor | None = None,
    ) -> Tensor:
        ctx.parts = []
        masses = []
        nobody = torch.full_like(target, share.total).masked_fill(target == IGNORED, IGNORED)
        if sampled is not None:
            part = _of_size(settings, sampled)
            _, found = blocks.forward(features, sampled, alpha, nobody, part)
            masses = [found.z + offset]
            ctx.parts = [(sampled, nobody, part, found)]

        def combine(sums: Sums) -> Sums:
            z = torch.logsumexp(torch.stack([sums.z, *masses]), 0)
            return share.combine(sums._replace(z=z), target)

        own = _of_size(settings, weight)
        nll, found = blocks.forward(features, weight, alpha, target, own, combine)
        ctx.parts = [
            (weight, target, own, found),
            *((*known, before._replace(z=found.z - offset)) for *known, before in ctx.parts),
        ]
        ctx.save_for_backward(features, alpha)
        ctx.share = share
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, alpha = ctx.saved_tensors
        wants_features, wants_alpha, *_ = ctx.needs_input_grad
        wanted = ctx.needs_input_grad[6:]
        of_features = torch.zeros_like(features, dtype=real_dtype(features.dtype)) if wants_features else None
        of_alpha = torch.zeros_like(alpha, dtype=real_dtype(alpha.dtype)) if wants_alpha else None
        of_weights = []
        for (weight, target, settings, found), wants_weight in zip(ctx.parts, wanted, strict=False):
            wants = wants_features, wants_weight, wants_alpha
            inputs = features, weight, alpha, target
            parts = blocks.backward(gradient, inputs, found, settings, wants, spend=settings.fused)
            of_weights.append(parts[1] if wants_weight else None)
            if of_features is not None:
                of_features += parts[0]
            if of_alpha is not None:
                of_alpha += parts[2]
        # As in `autograd`: the cosines that were kept are spent.
        ctx.parts = [
            (*known, settings._replace(keep=False), found._replace(kept=found.kept.new_empty(0)))
            for *known, settings, found in ctx.parts
        ]
        for total in (of_features, of_alpha):
            if total is not None:
                ctx.share.reduce(total)
        of_features = None if of_features is None else of_features.to(features.dtype)
        of_alpha = None if of_alpha is None else of_alpha.to(alpha.dtype)
        missing = [None] * (len(wanted) - len(of_weights))
        return of_features, of_alpha, None, None, None, None, *of_weights, *missing


def _of_size(settings: Settings, weight: Tensor) -> Settings:
    """Return the settings for these classes."""
    classes = weight.shape[0] // settings.prototypes
    return settings._replace(classes=classes, width=max(1, min(settings.width, classes)))
