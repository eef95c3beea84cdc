"""Large images, decoded by threads on the host; cropped, resized, flipped and coloured on the device.

The host knows from the random numbers which box of an image will be seen. A worker decodes the image and puts the
pixels of the box into a batch of canvases, or they are taken from images that stay on the device (`decoded`). There,
crop, resize and flip are one linear map per image: two matrix products.

There are two augmentations. "he" is the one of He et al. (CVPR 2016) for ImageNet. The short side is resized at random
(256 to 480 pixels for images of 224), and a square is cropped at random. It is flipped half of the time. Its colour is
shifted along the principal axes of ImageNet's colours (Krizhevsky et al., 2012). "imagenet" is that of `kernelhead
train`: a box of a random area and ratio is resized to a square, and flipped half of the time.
"""

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelhead.finetune.backbones import Input
from kernelhead.finetune.views import RATIOS, training_view
from kernelhead_lab.data.decoded import DecodedImages, decode, room_on
from kernelhead_lab.data.packed import Progress, started_ahead

IMAGENET = Input(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SHORTEST, LONGEST = 256 / 224, 480 / 224  # the short side that an image is resized to, over the size of the crop

# The principal axes of ImageNet's colours, one a column, times the standard deviation of the shift along each, in
# units of a byte: 0.1 of the spread of the colours.
COLOUR_AXES = torch.tensor(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], dtype=torch.float64
) * torch.tensor([0.2175, 0.0188, 0.0045], dtype=torch.float64).mul(0.1 * 255)


class ImageSource(Protocol):
    """Where images come from: `labels` (n,), and `short_side`, which no image's short side exceeds."""

    labels: NDArray[np.int64]
    short_side: int

    def __len__(self) -> int: ...

    def image(self, index: int) -> NDArray[np.uint8]:
        """One image, uint8 (H, W, 3); called from several threads at a time."""
        ...


@dataclass(frozen=True)
class _Started:
    """A batch on its way: what is seen of the images and maps (B, 3, 3), which the tasks fill in.

    `seen` are canvases (B, side, side, 3). For `decoded` images they are index in the source, top and left of a box,
    (B, 3).
    """

    index: Tensor
    seen: Tensor
    maps: Tensor
    tasks: list[Future[None]]
    decoded: DecodedImages | None = None


class StreamedImages:
    """Images of a source as normalised batches on a device.

    Args:
        source: `PackedImages`, or another `ImageSource`.
        size: of the square images of a batch.
        augment: "he" or "imagenet".
        workers: threads that decode; as many as there are processors unless given.
        subset: indices (n,) of the images of `source` that are meant, all unless given.

    Attributes:
        labels: int64 (n,), on the device.
        draws: how many random numbers the augmentation of one image takes.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        size: int = IMAGENET.size,
        augment: str = "he",
        device: torch.device,
        workers: int | None = None,
        subset: Tensor | None = None,
    ) -> None:
        self.source, self.size, self.device = source, size, device
        self._augment = AUGMENTATIONS[augment]
        self.draws = self._augment.draws
        mean, std = (torch.tensor([255 * value for value in each]) for each in (IMAGENET.mean, IMAGENET.std))
        self.mean, self.std = mean.view(1, 3, 1, 1).to(device), std.view(1, 3, 1, 1).to(device)
        self.workers = workers or os.cpu_count() or 1
        self._chosen = np.arange(len(source)) if subset is None else subset.cpu().numpy()
        if len(self._chosen) and not (self._chosen.min() >= 0 and self._chosen.max() < len(source)):
            raise ValueError(f"subset needs indices from 0 to {len(source) - 1}; got others")
        self.labels = torch.from_numpy(source.labels[self._chosen].astype("int64")).to(device)
        self._plain_short = round(SHORTEST * size)
        self._side = self._augment.longest(source.short_side, size)
        self._decoded: DecodedImages | None = None

    def __len__(self) -> int:
        return len(self._chosen)

    def restricted(self, index: Tensor) -> "StreamedImages":
        """Return those at `index` (m,) alone."""
        part = copy.copy(self)
        part._chosen = self._chosen[index.cpu().numpy()]
        part.labels = self.labels[index.to(self.device)]
        return part

    def resized(self, size: int) -> "StreamedImages":
        """Return the same images for testing at another size: the whole square in the centre of each."""
        other = copy.copy(self)
        other.size = other._plain_short = size
        other._side = _longest_box(self.source.short_side, size, size)
        return other

    def keep_decoded(self, most_bytes: int | None = None, progress: Progress | None = None) -> bool:
        """Decode all images once and keep them on the device, if they fit; return whether they do.

        Batches stay the same to the bit. `most_bytes` is an eighth of the free memory on a GPU and nothing on a CPU,
        unless given. Parts that are `restricted` later share them.
        """
        room = room_on(self.device) if most_bytes is None else most_bytes
        self._decoded = decode(
            self.source, self._chosen, self.device, workers=self.workers, most_bytes=room, progress=progress
        )
        return self._decoded is not None

    def augmented(self, index: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, size, size) and labels (B,) at `index` (B,), changed as `noise` (B, draws) says.

        The noise is uniform in [0, 1). The result is a function of index and noise alone.
        """
        (batch,) = self.batches([(index, noise)])
        return batch

    def plain(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, size, size) and labels (B,) at `index` (B,), without random change.

        The short side is resized to 256/224 of the size, and the square in the centre cropped.
        """
        (batch,) = self.batches([(index, None)])
        return batch

    def batches(
        self, wanted: Iterable[tuple[Tensor, Tensor | None]], ahead: int = 4
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a batch for each pair of index and noise, plain where the noise is None.

        The images of the next `ahead` batches are decoded meanwhile. Index and noise are read by the host: on a GPU
        they would make it wait.
        """
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kernelhead-decode")
        try:
            for batch in started_ahead(lambda pair: self._start(pool, *pair), wanted, ahead):
                yield self._finish(batch)
        finally:  # also when the consumer stops early or a worker fails
            pool.shutdown(cancel_futures=True)

    def _start(self, pool: ThreadPoolExecutor, index: Tensor, noise: Tensor | None) -> _Started:
        positions = index.tolist()
        if positions and not (min(positions) >= 0 and max(positions) < len(self)):
            raise IndexError(
                f"indices have to be 0 to {len(self) - 1}; got some from {min(positions)} to {max(positions)}"
            )
        if noise is not None and noise.shape != (len(positions), self.draws):
            raise ValueError(f"noise needs the shape {(len(positions), self.draws)}; got {tuple(noise.shape)}")
        pinned = self.device.type == "cuda"
        maps = torch.zeros((len(positions), 3, 3), pin_memory=pinned)
        if noise is not None and self._augment.coloured:
            maps[:, 2] = colour_shift(noise[:, -3:].cpu())
        images = self._chosen[positions].tolist()
        rows = [None] * len(positions) if noise is None else noise.tolist()
        if self._decoded is not None:
            seen = torch.zeros((len(positions), 3), dtype=torch.long, pin_memory=pinned)
            for image, row, corner, map_ in zip(images, rows, seen.numpy(), maps.numpy(), strict=True):
                vertical, horizontal = self._boxes(self._decoded.sides[image], row)
                corner[:] = image, vertical.begin, horizontal.begin
                map_[:2] = vertical.numbers, horizontal.numbers
            return _Started(index, seen, maps, [], self._decoded)
        canvases = torch.empty((len(positions), self._side, self._side, 3), dtype=torch.uint8, pin_memory=pinned)

        def fill(image: int, row: list[float] | None, canvas: NDArray[np.uint8], map_: NDArray[np.float32]) -> None:
            pixels = self.source.image(image)
            vertical, horizontal = self._boxes(pixels.shape[:2], row)
            box = pixels[vertical.begin : vertical.end, horizontal.begin : horizontal.end]
            canvas[: box.shape[0], : box.shape[1]] = box
            map_[:2] = vertical.numbers, horizontal.numbers

        arguments = zip(images, rows, canvases.numpy(), maps.numpy(), strict=True)
        return _Started(index, canvases, maps, [pool.submit(fill, *each) for each in arguments])

    def _boxes(self, sides: tuple[int, ...], row: list[float] | None) -> "tuple[_Box, _Box]":
        """Return the visible part of an image in either direction: by random numbers, or the centre without."""
        height, width = sides
        if row is None:
            return _central_boxes(height, width, self.size, self._plain_short)
        return self._augment.boxes(height, width, self.size, row)

    def _finish(self, batch: _Started) -> tuple[Tensor, Tensor]:
        for task in batch.tasks:
            task.result()
        seen = batch.seen.to(self.device, non_blocking=True)
        canvases = seen if batch.decoded is None else batch.decoded.canvases(seen[:, 0], seen[:, 1:], self._side)
        maps = batch.maps.to(self.device, non_blocking=True)
        labels = self.labels[batch.index.to(self.device, non_blocking=True)]
        with torch.autocast(self.device.type, enabled=False):  # half precision would lose the last bits of a byte
            images = resample(canvases, maps[:, 0], maps[:, 1], self.size)
        return (images + maps[:, 2, :, None, None] - self.mean) / self.std, labels


@dataclass(frozen=True)
class _Box:
    """One side of the box of an image: its pixels, and where the centres of the result's pixels lie in it."""

    begin: int
    end: int
    first: float
    step: float

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.first, self.step, self.end - self.begin


def _box(length: int, resized: int, offset: int, size: int, flip: bool = False) -> _Box:
    """Return pixels offset .. offset + size of `length` pixels resized to `resized`, with the filter's margin."""
    step = length / resized
    return _with_margin(length, step, (offset + 0.5) * step, (offset + size - 0.5) * step, flip)


def _with_margin(length: int, step: float, first: float, last: float, flip: bool) -> _Box:
    """Return the box of `length` pixels that the filter reads for pixels with centres first, first + step, .. last."""
    begin = max(0, math.floor(first - max(1.0, step)))
    end = min(length, math.ceil(last + max(1.0, step)))
    return _Box(begin, end, last - begin, -step) if flip else _Box(begin, end, first - begin, step)


def _central_boxes(height: int, width: int, size: int, short: int) -> tuple[_Box, _Box]:
    """Return the box in the centre of an image resized to a short side, vertically and horizontally."""
    rows, columns = _resized(height, width, short)
    return _box(height, rows, (rows - size) // 2, size), _box(width, columns, (columns - size) // 2, size)


def _random_boxes(height: int, width: int, size: int, noise: Sequence[float]) -> tuple[_Box, _Box]:
    """Return the box that four random numbers say: short side, top, left, flip."""

    def pick(of: float, choices: int) -> int:
        return min(int(of * choices), choices - 1)

    shortest, longest = round(SHORTEST * size), round(LONGEST * size)
    rows, columns = _resized(height, width, shortest + pick(noise[0], longest - shortest + 1))
    top, left = pick(noise[1], rows - size + 1), pick(noise[2], columns - size + 1)
    return _box(height, rows, top, size), _box(width, columns, left, size, flip=noise[3] < 0.5)


def _random_resized_boxes(height: int, width: int, size: int, noise: Sequence[float]) -> tuple[_Box, _Box]:
    """Return the box of a random area and ratio that one random number stands for."""
    view = training_view(height, width, size, "imagenet", "crop", Random(noise[0]))

    def box(length: int, start: float, count: float, flip: bool) -> _Box:
        step = count / size
        return _with_margin(length, step, start + 0.5 * step, start + count - 0.5 * step, flip)

    return box(height, view.top, view.height, False), box(width, view.left, view.width, view.mirrored)


def _resized(height: int, width: int, short: int) -> tuple[int, int]:
    return round(height * short / min(height, width)), round(width * short / min(height, width))


def _longest_box(short_side: int, size: int, short: int) -> int:
    """Return the length of the longest box, at short sides resized to `short` or more: a multiple of 8."""
    step = short_side / (short - 0.5)  # the long side is rounded, at worst by half a pixel
    return 8 * math.ceil((size * step + 2 * max(1.0, step) + 2) / 8)


def _longest_random_box(short_side: int, size: int) -> int:
    """Return the length of the longest box of a random area and ratio: a multiple of 8."""
    longest = RATIOS[1] * short_side + 1
    return 8 * math.ceil((longest + 2 * max(1.0, longest / size) + 2) / 8)


@dataclass(frozen=True)
class _Augmentation:
    """How `draws` random numbers make the box of an image, and shift its colour; `longest` bounds its sides."""

    draws: int
    boxes: Callable[[int, int, int, Sequence[float]], tuple[_Box, _Box]]
    longest: Callable[[int, int], int]
    coloured: bool


AUGMENTATIONS = {
    "he": _Augmentation(7, _random_boxes, lambda short, size: _longest_box(short, size, round(SHORTEST * size)), True),
    "imagenet": _Augmentation(1, _random_resized_boxes, _longest_random_box, False),
}


def colour_shift(noise: Tensor) -> Tensor:
    """Return the shift of red, green and blue (B, 3), in units of a byte, from noise (B, 3) uniform in [0, 1)."""
    normal: Tensor = torch.special.ndtri(noise.double().clamp(2.0**-25, 1 - 2.0**-25))
    return (normal @ COLOUR_AXES.T).float()


def resample(canvases: Tensor, vertical: Tensor, horizontal: Tensor, size: int) -> Tensor:
    """Resize canvases (B, S, S, 3) to (B, 3, size, size) by the triangle filter, as antialiased bilinear resizing does.

    vertical, horizontal (B, 3) hold three numbers per image: where the result's first pixel has its centre in the
    canvas, the step to the next pixel, negative in a mirrored image, and how many pixels are the image's.
    """
    count, side = canvases.shape[:2]
    rows, columns = (_weights(axis, size, side) for axis in (vertical, horizontal))
    squeezed = (rows @ canvases.float().view(count, side, 3 * side)).view(count, size, side, 3)
    lines = squeezed.permute(0, 3, 1, 2).reshape(count, 3 * size, side)
    return (lines @ columns.mT).view(count, 3, size, size)


def _weights(axis: Tensor, size: int, side: int) -> Tensor:
    """Return the filter's weights (B, size, side), a row for each pixel of the result, rows of sum 1."""
    first, step, length = axis[:, :, None, None].unbind(1)
    centres = first + step * torch.arange(size, device=axis.device)[:, None]
    pixels = torch.arange(side, device=axis.device)
    weights = (1 - (pixels + 0.5 - centres).abs() / step.abs().clamp(min=1)).clamp(min=0)
    weights = weights * (pixels < length)
    return weights / weights.sum(-1, keepdim=True)
