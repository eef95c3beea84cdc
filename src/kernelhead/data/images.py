"""What the training loop asks of a data set."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images (B, 3, H, W), normalised, and labels (B,), on the device


class Images(Protocol):
    """Labelled images that come in batches on a device.

    All that is random about an augmented image is `noise`, `draws` numbers an image in [0, 1). So the same numbers
    give the same image on every device, in every process and after every interruption.
    """

    labels: Tensor
    size: int
    draws: int

    def __len__(self) -> int: ...

    def augmented(self, index: Tensor, noise: Tensor) -> Batch:
        """Images at `index` (B,), altered by `noise` (B, draws)."""
        ...

    def plain(self, index: Tensor) -> Batch:
        """Images at `index` (B,) as they are."""
        ...

    def restricted(self, index: Tensor) -> "Images":
        """Those at `index` (m,) alone."""
        ...

    def batches(self, wanted: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[Batch]:
        """A batch for each pair of index and noise, or of index and None for plain images."""
        ...
