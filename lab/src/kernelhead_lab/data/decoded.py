"""Large images that were decoded once and stay on the device, where there is room for them.

A GPU trains a network on more images per second than threads of Python decode, and several networks at once would
decode every image several times per epoch. The bytes of a few thousand images fit into its memory.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelhead_lab.data.packed import Progress, progress_of, started_ahead

if TYPE_CHECKING:
    from kernelhead_lab.data.streamed import ImageSource

SAMPLE = 64  # images by which the bytes of all are judged
TOGETHER = 256  # images that go to the device at a time
SHARE = 8  # the images of a split take one part in so many of a GPU's free memory at most, and twice that for a moment


class DecodedImages:
    """Images of a source on a device, one pixel after the other.

    Args:
        pixels: uint8 (P, 3), of all images.
        sides: height and width of each image of the source (n, 2); zeros for an image that is not there.

    Attributes:
        sides: the same as tuples, which is what the host reads, one image at a time.
    """

    def __init__(self, pixels: Tensor, sides: NDArray[np.int64]) -> None:
        self.pixels = pixels
        self.sides: list[tuple[int, int]] = [(height, width) for height, width in sides.tolist()]
        self._sides = torch.from_numpy(sides).to(pixels.device)
        counts = self._sides.prod(1)
        self._starts = counts.cumsum(0) - counts

    def canvases(self, index: Tensor, corners: Tensor, side: int) -> Tensor:
        """Return squares (B, side, side, 3) of images at `index` (B,), whose tops and lefts are `corners` (B, 2).

        Beyond the end of an image its last row or column is repeated.
        """
        sides, steps = self._sides[index, :, None], torch.arange(side, device=corners.device)
        rows, columns = (corners[:, :, None] + steps).minimum(sides - 1).unbind(1)
        first = self._starts[index, None, None]
        return self.pixels[first + rows[:, :, None] * sides[:, 1:] + columns[:, None]]


def decode(
    source: "ImageSource",
    chosen: NDArray[np.int64],
    device: torch.device,
    *,
    workers: int,
    most_bytes: int,
    progress: Progress | None = None,
) -> DecodedImages | None:
    """Return the images of `source` at `chosen` (m,), decoded; None where they take more than `most_bytes`."""
    if not most_bytes or not len(chosen):
        return None
    wanted = np.unique(chosen)
    sides = np.zeros((len(source), 2), dtype=np.int64)
    parts: list[Tensor] = []
    tell = progress_of("decoding", progress) or (lambda done, total: None)
    with ThreadPoolExecutor(workers, thread_name_prefix="kernelhead-decode") as pool:
        sample = wanted[np.linspace(0, len(wanted) - 1, min(SAMPLE, len(wanted))).astype(int)].tolist()
        found = sum(image.size for image in pool.map(source.image, sample))
        if found * len(wanted) > most_bytes * len(sample):
            return None
        done, left = 0, most_bytes
        groups = np.split(wanted, range(TOGETHER, len(wanted), TOGETHER))
        for images in started_ahead(lambda group: [pool.submit(source.image, at) for at in group.tolist()], groups, 1):
            pixels = [image.result() for image in images]
            sides[wanted[done : done + len(pixels)]] = [each.shape[:2] for each in pixels]
            parts.append(torch.from_numpy(np.concatenate([each.reshape(-1, 3) for each in pixels])).to(device))
            done, left = done + len(pixels), left - parts[-1].numel()
            if left < 0:
                pool.shutdown(cancel_futures=True)
                return None
            tell(done, len(wanted))
    return DecodedImages(torch.cat(parts), sides)


def room_on(device: torch.device) -> int:
    """Return the bytes that decoded images may take on a device: none on a CPU, where decoding is the least work."""
    return torch.cuda.mem_get_info(device)[0] // SHARE if device.type == "cuda" else 0
