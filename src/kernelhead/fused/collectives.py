"""Sums and pieces of tensors over the processes of a group, with gradients."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable


class AddUp(torch.autograd.Function):
    """The sum of x over processes, or x itself where `forward` is false. `AddUp.apply(x, group, forward, backward)`.

    Its gradient is the sum over processes, times `backward`. It stays that of each process where `backward` is 0, as
    when every process goes on with the sum alike. The group None is that of all processes.
    """

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
            gradient *= ctx.factor
        return gradient, None, None, None


class Gather(torch.autograd.Function):
    """x of all processes, one after the other; they have as many rows each. `Gather.apply(x, group, dim)`.

    Its gradient is that of own x, times the number of processes: every process has the whole loss, and data-parallel
    training takes the mean over processes where their sum is meant.
    """

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
