"""How long training is, and the learning rate over it."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = -1  # tells the seeds of augmentation from those of steps


@dataclass(frozen=True)
class Schedule:
    """Epochs, batches and momentum: the paper's Appendix B."""

    epochs: int
    batch_size: int = 128
    momentum: float = 0.9
    warmup_epochs: int = 5

    def steps(self, samples: int) -> int:
        """Steps an epoch; the last incomplete batch is left out."""
        steps = samples // self.batch_size
        if not steps:
            raise ValueError(f"{samples} samples do not fill one batch of {self.batch_size}")
        return steps

    def factors(self, samples: int) -> list[float]:
        """The factor on the base learning rate at every step of training; a short training warms up for half of it."""
        steps = self.steps(samples)
        warmup = min(self.warmup_epochs, self.epochs // 2) * steps
        return [warmup_cosine(step, self.epochs * steps, warmup) for step in range(self.epochs * steps)]


def warmup_cosine(step: int, total: int, warmup: int) -> float:
    """Factor on the base learning rate at `step` of `total`: linear warm-up, then cosine decay to zero.

    The paper's Appendix B. Step 0 of a warm-up of w steps has factor 1 / w, step w - 1 has factor 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch, a function of seed and epoch alone, so that a resumed run repeats it."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def epoch_noise(samples: int, draws: int, seed: int, epoch: int) -> Tensor:
    """The random numbers of an epoch's augmentation, (samples, draws) in [0, 1), likewise, in the epoch's order."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, NOISE))
    return torch.rand(samples, draws, generator=generator)


def mix(*numbers: int) -> int:
    """A seed made of several numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 1
