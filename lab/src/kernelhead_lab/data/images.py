"""The interface of a data set, as the engine uses it."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images (B, 3, H, W), normalised, and labels (B,), on the device


class Images(Protocol):
    """Labelled images that come in batches on a device.

    An augmented image is a function of the image and of its `noise`: `draws` numbers in [0, 1). So the same numbers
    give the same image on every device, in every process and after every interruption.
    """

    labels: Tensor
    size: int
    draws: int

    def __len__(self) -> int: ...

    def augmented(self, index: Tensor, noise: Tensor) -> Batch:
        """Return images at `index` (B,), altered by `noise` (B, draws)."""
        ...

    def plain(self, index: Tensor) -> Batch:
        """Return images at `index` (B,) as they are."""
        ...

    def restricted(self, index: Tensor) -> "Images":
        """Return those at `index` (m,) alone."""
        ...

    def batches(self, wanted: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[Batch]:
        """Yield a batch for each pair of index and noise, or of index and None for plain images."""
        ...


def hold_out(labels: NDArray[np.int64], holdout: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return ascending indices to keep and to hold out, the share `holdout` of every class.

    At least one image per class is held out, and not the last one.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout needs to be between 0 and 1; got {holdout}")
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(holdout * len(members))), len(members) - 1)
        held[members[:count]] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))
