"""Hooks between a network and its new head: they change shapes alone, and no weight changes its name.

They are functions and methods of objects of this module, so that a network with them can be copied and pickled.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rectified(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Apply the ReLU that followed a module."""
    return torch.relu(output)


class Noted:
    """Notes of a network's current run, from its hooks for its head. A copy of the network has runs of its own.

    A copy of the head alone, as PEFT makes of `modules_to_save`, shares the notes: the network is the same.
    """

    def __init__(self, *site: Any) -> None:
        self.site = site
        self.own = threading.local()  # threads may share a network, and run it on inputs of other sizes
        self.network: Any = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.site

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo.get(id(self.network()))
        if copied is None:
            return self
        made = type(self)(*self.site)
        made.network = weakref.ref(copied)
        return made


class Fold(Noted):
    """Make every position a sample of its own, before a network's global pooling.

    A map (N, D, H, W) becomes (N H W, D, 1, 1), tokens (N, L, D) become (N L, 1, D). The pooling has nothing left to
    pool then, and the layers between pooling and classifier act at every position. `Slot` gathers the positions again.
    It folds the first argument of a module, or else its result. `channel` is the axis of D. `prefix` counts tokens at
    the beginning that the network's own pooling leaves out, and `skipped` those to leave out.
    """

    def __init__(self, module: str, first: bool, channel: int, prefix: int, skipped: int = 0) -> None:
        super().__init__(module, first, channel, prefix, skipped)
        self.latest: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        return f"{'before' if self.site[1] else 'after'} {self.site[0]!r}"

    @property
    def sides(self) -> tuple[int, ...]:
        """H and W, or L, of the current run; a classifier may run again in the thread of a backward pass."""
        return getattr(self.own, "sides", self.latest)

    def install(self, model: nn.Module, heads: Any) -> None:
        self.network, module = weakref.ref(model), model.get_submodule(self.site[0])
        if self.site[1]:
            module.register_forward_pre_hook(self.before)
        else:
            module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.after(module, (), args[0]), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        *_, channel, prefix, skipped = self.site
        last = output.movedim(channel, -1)[:, skipped:]
        self.own.sides = self.latest = tuple(last.shape[1:-1])
        alone = last.reshape(-1, *(1 for _ in last.shape[1:-1]), last.shape[-1])
        if prefix:  # the network cuts off as many as before
            alone = F.pad(alone, (0, 0, prefix, 0))
        return alone.movedim(-1, channel)

    def gather(self, features: Tensor) -> Tensor:
        """Return the positions of the current run, (N, H, W, D) or (N, L, D), from the classifier's input."""
        return features.reshape(-1, *self.sides, features.shape[-1])


class Mask(Noted):
    """The attention mask of a network's current run, which a hook on the network notes for its head.

    `position` is that of the argument `attention_mask`, and `skipped` counts tokens at the beginning of each text that
    the head leaves out.
    """

    def __init__(self, position: int, skipped: int = 0) -> None:
        super().__init__(position, skipped)
        self.latest: Tensor | None = None

    def install(self, model: nn.Module, heads: Any) -> None:
        self.network = weakref.ref(model)
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[self.site[0]] if len(args) > self.site[0] else kwargs.get("attention_mask")
        self.own.given = self.latest = given

    def of(self, tokens: Tensor) -> Tensor | None:
        """Return which of the tokens (N, L, D) count, (N, L), or None for all."""
        given: Tensor | None = getattr(self.own, "given", self.latest)
        skipped = self.site[1]
        if given is None and not skipped:
            return None
        mask: Tensor = tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if given is None else given.to(tokens.device)
        return mask * (mask.cumsum(1) > skipped) if skipped else mask


@dataclass(frozen=True)
class Slot:
    """A layer that gives way to a head. Its hooks give the head the layer's input and bring the logits back.

    A head that pools receives a map (N, D, H, W) if positions have two axes, and tokens (N, L, D) otherwise. Any other
    receives (..., D).
    """

    name: str
    in_features: int
    num_classes: int | None  # None for a placeholder
    axis: int  # of D in the layer's input: 1 for convolutions, -1 otherwise
    pools: bool = False
    fold: Fold | None = None  # what made samples of positions; None if the layer receives them itself
    prefix: int = 0  # tokens at the beginning to leave out, if nothing was folded
    rank: int = 2  # the number of axes of the layer's usual output, (N, C) or (N, C, 1, 1)
    mask: Mask | None = None

    def before(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        last = args[0].movedim(self.axis, -1)
        if self.fold is not None:
            last = self.fold.gather(last)
        if not self.pools:
            return (last,)
        if last.dim() == 4:
            return (last.movedim(-1, 1),)
        tokens = last.flatten(1, -2)[:, self.prefix :]
        mask = None if self.mask is None else self.mask.of(tokens)
        return (tokens,) if mask is None else (tokens, mask)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self.mask is not None and self.rank == 3:  # the network picks the logits of one token
            output = output[:, None].expand(-1, args[0].shape[1], -1)
        elif self.pools:
            output = output.reshape(output.shape[0], *(1 for _ in range(self.rank - 2)), output.shape[1])
        return output.movedim(-1, self.axis)
