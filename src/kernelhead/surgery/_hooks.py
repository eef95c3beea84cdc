"""Hooks between a network and its new head: they change shapes alone, and no weight changes its name.

They are functions and methods of objects of this module, so that a network with them can be copied and pickled.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rectified(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """The ReLU that a module stood before."""
    return torch.relu(output)


def channels_last(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Before a head in the place of a 1x1 convolution: (N, D, ...) -> (N, ..., D)."""
    return (args[0].movedim(1, -1),)


def channels_first(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """After a head in the place of a 1x1 convolution: (N, ..., C) -> (N, C, ...)."""
    return output.movedim(-1, 1)


class Fold:
    """Makes every place a sample of its own, before a network's global pooling.

    A map (N, D, H, W) becomes (N H W, D, 1, 1), tokens (N, L, D) become (N L, 1, D). The pooling has nothing left to
    pool then, and whatever the network does between pooling and classifier (normalise, a hidden layer) it does at
    every place. `Unfold` gathers the places again.

    Args:
        channel: where D stands.
        prefix: tokens at the beginning that the network's own pooling leaves out.
    """

    def __init__(self, channel: int, prefix: int = 0) -> None:
        self.channel = channel
        self.prefix = prefix
        self.own = threading.local()  # threads may share a network, and run it on images of other sizes
        self.latest: tuple[int, ...] = (1,)

    def __reduce__(self) -> tuple[type["Fold"], tuple[int, int]]:
        return Fold, (self.channel, self.prefix)  # a copy has runs of its own

    @property
    def sides(self) -> tuple[int, ...]:
        """H and W, or L, of the run that goes on; a classifier may run again in the thread of a backward pass."""
        return getattr(self.own, "sides", self.latest)

    def __call__(self, features: Tensor) -> Tensor:
        last = features.movedim(self.channel, -1)
        if self.prefix:
            last = last[:, self.prefix :]
        self.own.sides = self.latest = tuple(last.shape[1:-1])
        alone = last.reshape(-1, *(1 for _ in last.shape[1:-1]), last.shape[-1])
        if self.prefix:  # the network cuts off as many as before
            alone = F.pad(alone, (0, 0, self.prefix, 0))
        return alone.movedim(-1, self.channel)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self(args[0]), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self(output)


class Unfold:
    """Brings what a classifier receives into a form that a pooling head takes, and its logits back.

    That is a map (N, D, H, W) where places have two axes, and tokens (N, L, D) otherwise.

    Args:
        fold: what made samples of places; None where the classifier receives the map or the tokens themselves.
        axis: where D stands in what the classifier receives: 1 after convolutions, -1 otherwise.
        prefix: tokens at the beginning to leave out, where nothing was folded.
        rank: axes of what the classifier used to give: 2 for (N, C), 4 for (N, C, 1, 1).
    """

    def __init__(self, fold: Fold | None, axis: int, prefix: int = 0, rank: int = 2) -> None:
        self.fold = fold
        self.axis = axis
        self.prefix = prefix
        self.rank = rank

    def before(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        last = args[0].movedim(self.axis, -1)
        if self.fold is not None:
            last = last.reshape(-1, *self.fold.sides, last.shape[-1])
        if last.dim() == 4:
            return (last.movedim(-1, 1),)
        last = last.flatten(1, -2)
        return (last[:, self.prefix :] if self.prefix else last,)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        logits = output.reshape(output.shape[0], *(1 for _ in range(self.rank - 2)), output.shape[1])
        return logits.movedim(-1, self.axis)
