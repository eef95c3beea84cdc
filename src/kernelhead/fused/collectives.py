"""Sums and pieces of tensors over the processes of a group, with gradients."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup


def add_up(x: Tensor, group: "ProcessGroup | None" = None, *, forward: bool = True, backward: float = 1) -> Tensor:
    """Return the sum of x over processes, or x itself where `forward` is false.

    Its gradient is the sum over processes, times `backward`. It stays that of each process where `backward` is 0, as
    when every process goes on with the sum alike. Without a group these are all processes.
    """
    found: Tensor = _Sum.apply(x, group, forward, backward)
    return found


def gather(x: Tensor, group: "ProcessGroup", dim: int = 0) -> Tensor:
    """Return x of all processes, one after the other; they have as many rows each.

    Its gradient is that of own x, times the number of processes. The loss gives every process the whole gradient.
    Data-parallel training takes the mean over processes of the gradients that each has by its own samples, and needs
    their sum.
    """
    gathered: Tensor = _Gather.apply(x, group, dim)
    return gathered


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool, backward: float) -> Tensor:
        ctx.group, ctx.factor = group, backward
        x = x.clone(memory_format=torch.contiguous_format)
        if forward:
            distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.factor:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(gradient, group=ctx.group)
            gradient = gradient * ctx.factor
        return gradient, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = gradient.narrow(ctx.dim, ctx.group.rank() * ctx.size, ctx.size)
        return ctx.group.size() * own, None, None
