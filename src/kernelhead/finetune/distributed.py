"""The device of a process, and several processes that train one network on their parts of every batch.

The batch size is that of all processes together. Losses are those of one process up to rounding, except for dropout and
mixup, which each process draws for itself.
"""

import atexit
import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm

from kernelhead.fused.collectives import AddUp
from kernelhead.fused.precision import real_dtype

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often `torchrun --max-restarts` has begun again
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class World:
    """The rank of a process, and the number of processes."""

    rank: int = 0
    size: int = 1

    def part(self, batch_size: int, pieces: int = 1) -> slice:
        """Return the share of a batch of all processes that this one takes, in so many pieces of the same size."""
        if batch_size % self.size:
            raise ValueError(f"{self.size} processes cannot share a batch of {batch_size} equally; choose a multiple")
        if batch_size // self.size % pieces:
            wrong = f"--accumulate {pieces} cannot split {batch_size // self.size} images equally"
            raise ValueError(f"{wrong}; choose a multiple for --batch-size")
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all processes."""
        if self.size > 1:
            distributed.all_reduce(value)
            value = value / self.size
        return value

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set in any process."""
        return flag if self.size == 1 else bool(self.mean(torch.tensor(float(flag), device=device)) > 0)


def join_world(device: torch.device) -> World:
    """Join the processes that `torchrun` started; without torchrun there is one process."""
    if "WORLD_SIZE" not in os.environ:
        return World()
    if not distributed.is_initialized():
        store, rank, size = next(rendezvous("env://"))
        # The store of torchrun outlives a restart, and with it the addresses of processes that are gone.
        store = PrefixStore(f"attempt-{os.environ.get(RESTARTS)}", store)
        kind = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(kind, store=store, rank=rank, world_size=size)
        atexit.register(_leave)
    return World(distributed.get_rank(), distributed.get_world_size())


def _leave() -> None:
    """End gloo's threads, which would abort a process that exits while they run. NCCL might wait here for others."""
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def is_first() -> bool:
    """Return whether this is the first of the processes that `torchrun` started: it speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that other processes cannot be reached; gloo has no type of its own for it."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def choose_device(name: str) -> torch.device:
    """Return the device called `name`. `auto` is the GPU of this process where there is one, the CPU otherwise."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdigit():
        raise ValueError(f"unknown device {name!r}; choose auto, cpu or cuda")
    if kind == "cpu":
        return torch.device("cpu")
    index, count = int(number or os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"there is no CUDA device {index} here, which has {count}; choose --device cpu or another")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class SharedBatchNorm(_BatchNorm):
    """BatchNorm whose statistics are those of all processes, on any device. That of torch needs GPUs."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        x = input.to(real_dtype(input.dtype)).movedim(1, -1)
        own = x.flatten(0, -2)
        sums = AddUp.apply(torch.cat([own.sum(0), own.new_tensor([len(own)])]), None, True, 1)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        variance = AddUp.apply((own - mean).square().sum(0), None, True, 1) / count
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            for kept, new in ((self.running_mean, mean), (self.running_var, variance * count / (count - 1))):
                kept.lerp_(new.detach().to(kept.dtype), share)  # type: ignore[union-attr]
        standard = (x - mean) * (variance + self.eps).rsqrt()
        standard = standard * self.weight + self.bias if self.affine else standard
        found: Tensor = standard.movedim(-1, 1).to(input.dtype)
        return found


def synchronize_batch_norm(model: nn.Module, device: torch.device) -> None:
    """Let BatchNorm take its statistics over all processes. Names stay; subclasses by others are named in a warning."""
    own_statistics = set()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in BATCH_NORMS and device.type == "cuda":
                setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))  # type: ignore[no-untyped-call]
            elif type(child) in BATCH_NORMS:
                child.__class__ = SharedBatchNorm
            elif isinstance(child, BATCH_NORMS):
                own_statistics.add(type(child).__name__)
    if own_statistics and is_first():
        kinds = ", ".join(sorted(own_statistics))
        warnings.warn(f"{kinds} take statistics per process, so losses depend on their number", stacklevel=2)
