"""Learning rates and random numbers of a run, step by step."""

import torch
from torch import Tensor

from kernelhead.finetune.schedule import mix, warmup_cosine

NOISE = -1  # tells the seeds of augmentation from those of steps


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of whole batches; the last incomplete one is left out."""
    steps = samples // batch_size
    if not steps:
        raise ValueError(f"{samples} samples do not fill a batch of {batch_size}; make batches smaller")
    return steps


def rate_factors(steps: int, epochs: int, warmup_epochs: int) -> list[float]:
    """Return the factor on the base learning rate at every step; a short run warms up for half of its epochs.

    `steps` are those of an epoch.
    """
    warmup = min(warmup_epochs, epochs // 2) * steps
    return [warmup_cosine(step, epochs * steps, warmup) for step in range(epochs * steps)]


def epoch_noise(samples: int, draws: int, seed: int, epoch: int) -> Tensor:
    """Return the random numbers of an epoch's augmentation, (samples, draws) in [0, 1), in the epoch's order."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, NOISE))
    return torch.rand(samples, draws, generator=generator)
