"""Several processes, each with its own device and its part of every batch, that train one network.

The batch size is that of all processes together. Every process draws the same random numbers and takes its part, and
BatchNorm takes its statistics over all parts, so that the losses are those of one process up to rounding, whatever the
number of processes. Gradients are averaged by DistributedDataParallel.
"""

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class World:
    """The place of a process among all: its number, how many there are, and its number on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def part(self, batch_size: int) -> slice:
        """The share of a batch of all processes that this one takes."""
        if batch_size % self.size:
            raise ValueError(f"a batch of {batch_size} cannot be shared equally by {self.size} processes")
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a value over all processes."""
        if self.size > 1:
            distributed.all_reduce(value)
            value = value / self.size
        return value

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        return bool(self.mean(torch.tensor(float(flag), device=device)) > 0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the first process go before the others."""
        if self.size > 1 and self.rank > 0:
            distributed.barrier()
        yield
        if self.size > 1 and self.rank == 0:
            distributed.barrier()


def join_world(device: torch.device) -> World:
    """Join the processes that `torchrun` started; alone where it did not."""
    if "WORLD_SIZE" not in os.environ:
        return World()
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    return World(distributed.get_rank(), distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))


def _leave() -> None:
    """End gloo's threads, which would abort a process that exits while they run. NCCL might wait here for others."""
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


@torch.library.custom_op("kernelhead::sum_over_processes", mutates_args=())
def _sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes. Opaque to torch.compile, which in torch 2.11 loses the gradient's sum."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


_sum_over_processes.register_fake(lambda tensor: tensor.new_empty(tensor.shape))
_sum_over_processes.register_autograd(lambda ctx, gradient: _sum_over_processes(gradient))


class _SynchronizedBatchNorm(_BatchNorm):
    """BatchNorm of any dimension with the statistics of all processes, whose parts are of one size.

    torch.nn.SyncBatchNorm does the same on GPUs alone. The processes exchange their own means and variances, not sums
    of squares, which would lose the variance of large numbers.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        shape = [1, -1] + [1] * (input.dim() - 2)
        others = [dim for dim in range(input.dim()) if dim != 1]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(x, others, correction=0)
        own = torch.stack([mean, variance])
        rank, size = distributed.get_rank(), distributed.get_world_size()
        rows = torch.stack([own if row == rank else torch.zeros_like(own) for row in range(size)])
        means, variances = _sum_over_processes(rows).unbind(1)
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                rate = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
                count = size * input.numel() // input.shape[1]
                self.running_mean.lerp_(mean, rate)
                self.running_var.lerp_(variance * count / max(1, count - 1), rate)
        x = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            x = x * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = x.to(input.dtype)
        return result


def synchronize_batch_norm(model: nn.Module) -> None:
    """Make every BatchNorm of a network take its statistics over all processes. Names and values stay."""
    for module in model.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = _SynchronizedBatchNorm
        elif isinstance(module, _BatchNorm) and not isinstance(module, (_SynchronizedBatchNorm, nn.SyncBatchNorm)):
            kind = type(module).__name__
            warnings.warn(
                f"{kind} takes its statistics in each process alone: losses depend on their number", stacklevel=2
            )
