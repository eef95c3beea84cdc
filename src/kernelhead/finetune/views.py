"""What a network sees of an image: a box, perhaps mirrored, resized for a whole batch on the device at once."""

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CROP_MARGIN = 8 / 7  # the short side over the side of the centre crop, as 256 over 224
SCALES, RATIOS = (0.25, 1.0), (3 / 4, 4 / 3)  # area and sides of a random crop
TRIES = 10  # to fit a random crop into an image


class View(NamedTuple):
    """A box in an image, in pixels; what lies beyond the image is black."""

    top: float
    left: float
    height: float
    width: float
    mirrored: bool = False


class _Canvas(NamedTuple):
    """A rectangle that is shown in place of an image, with the image somewhere on it, perhaps squashed."""

    height: int
    width: int
    top: float = 0.0  # of the image
    left: float = 0.0
    rows: float = 1.0  # pixels of the image per pixel of the canvas
    columns: float = 1.0

    def view(self, corner: Sequence[float], sides: Sequence[float], mirrored: bool) -> View:
        """Return a box of the canvas as a view of the image."""
        top, left = (corner[0] - self.top) * self.rows, (corner[1] - self.left) * self.columns
        return View(top, left, sides[0] * self.rows, sides[1] * self.columns, mirrored)


def _canvas(resize: str, height: int, width: int) -> _Canvas:
    side = max(height, width)
    if resize == "squash":
        return _Canvas(side, side, rows=height / side, columns=width / side)
    if resize == "pad":
        return _Canvas(side, side, (side - height) // 2, (side - width) // 2)
    return _Canvas(height, width)


def plain_short_side(augment: str, size: int, resize: str = "crop") -> int:
    """Return the short side of a test image before its centre is cropped; all of a square one stays without margin."""
    return round(CROP_MARGIN * size) if augment in ("imagenet", "randaugment") and resize == "crop" else size


def test_view(height: int, width: int, size: int, augment: str, resize: str) -> View:
    """Return the centre of an image: for `crop` its square, with a margin for networks trained on random crops."""
    canvas, short = _canvas(resize, height, width), plain_short_side(augment, size, resize)
    sides = [int(short * side / min(canvas[:2])) for side in canvas[:2]]
    return _cut(canvas, sides, [round((side - size) / 2) for side in sides], size, mirrored=False)


def training_view(height: int, width: int, size: int, augment: str, resize: str, random: Random) -> View:
    """Return a view of a training image: padded by an eighth and cropped for `light`, else a random-resized crop."""
    if augment == "none":
        return test_view(height, width, size, augment, resize)
    canvas, mirrored = _canvas(resize, height, width), random.random() < 0.5
    if augment == "light":
        sides = [int(size * side / min(canvas[:2])) for side in canvas[:2]]
        corner = [random.randint(-(size // 8), side + size // 8 - size) for side in sides]
        return _cut(canvas, sides, corner, size, mirrored)
    high, wide = canvas[:2]
    for _ in range(TRIES):
        area = high * wide * random.uniform(*SCALES)
        ratio = math.exp(random.uniform(*map(math.log, RATIOS)))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= high and 0 < columns <= wide:
            corner = [random.randint(0, high - rows), random.randint(0, wide - columns)]
            return canvas.view(corner, (rows, columns), mirrored)
    most = min(high, wide * RATIOS[1]), min(wide, high * RATIOS[1])
    return canvas.view(((high - most[0]) / 2, (wide - most[1]) / 2), most, mirrored)


def _cut(canvas: _Canvas, sides: Sequence[int], corner: Sequence[int], size: int, mirrored: bool) -> View:
    """Return the square with side `size` and that corner of a canvas that is resized to `sides`."""
    zoom = [full / side for full, side in zip(canvas[:2], sides, strict=True)]
    start = [at * by for at, by in zip(corner, zoom, strict=True)]
    return canvas.view(start, [size * by for by in zoom], mirrored)


def cut_out(pixels: Tensor, view: View, size: int) -> tuple[Tensor, View]:
    """Return the part of an image (3, H, W) that a view needs, and the view of that part."""
    kept, corner = pixels, list[float]()
    for axis in (0, 1):
        start, length, full = view[axis], view[axis + 2], pixels.shape[axis + 1]
        reach = max(1.0, length / size)
        first = min(max(0, math.floor(start - reach)), full - 1)
        last = max(min(full, math.ceil(start + length + reach)), first + 1)
        kept = kept.narrow(axis + 1, first, last - first)
        corner.append(start - first)
    return kept, view._replace(top=corner[0], left=corner[1])


def stack(images: Sequence[Tensor], views: Sequence[View]) -> tuple[Tensor, Tensor]:
    """Return images of any sides as one tensor (B, 3, H, W), filled up with zeros, and their views with H and W."""
    rows, columns = (max(image.shape[axis] for image in images) for axis in (1, 2))
    whole = images[0].new_zeros(len(images), 3, rows, columns)
    for place, image in zip(whole, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    about = [[*view, *image.shape[1:]] for view, image in zip(views, images, strict=True)]
    return whole, torch.tensor(about, dtype=torch.float64)


def resample(images: Tensor, about: Tensor, size: int) -> Tensor:
    """Return the views of a batch that `stack` made as (B, 3, size, size) of values from 0 to 255.

    Resizing is linear, with antialiasing, and the same along each axis. On a GPU two matrices per image do it, in
    float16, which holds a byte exactly. On a CPU, where most of their entries are zeros, each output line is a sum of
    the few source lines that count (benchmarks/views.py: a fifth of the time).
    """
    top, left, height, width, mirrored, rows, columns = about.to(torch.float32).unbind(1)
    axes = ((top, height, rows, torch.zeros_like(mirrored)), (left, width, columns, mirrored))
    if images.device.type == "cuda":
        down, across = (
            _weights(*axis, size, torch.arange(extent, device=images.device)).to(torch.float16)
            for axis, extent in zip(axes, images.shape[2:], strict=True)
        )
        narrow = images.to(torch.float16).flatten(1, 2) @ across.mT
        seen: Tensor = down[:, None] @ narrow.view(*images.shape[:3], size)
        return seen.float()
    made = torch.empty(len(images), 3, size, size)
    for index, (place, image) in enumerate(zip(made, images, strict=True)):
        lines = image.transpose(0, 1)  # (H, 3, W), and then (W, 3, size)
        for axis in axes:
            start, length, count, turned = (each[index : index + 1] for each in axis)
            lines = lines[: int(count)]
            reach = max(1.0, float(length) / size)
            first = (_centres(start, length, turned, size) - reach).floor()
            which = first[..., None] + torch.arange(math.ceil(2 * reach) + 1)
            weights = _weights(start, length, count, turned, size, which)[0]
            table, bags = lines.float().flatten(1), which[0].long().clamp(0, len(lines) - 1)
            summed = F.embedding_bag(bags, table, per_sample_weights=weights, mode="sum")
            lines = summed.view(size, 3, -1).permute(2, 1, 0)
        place.copy_(lines.transpose(0, 1))
    return made


def _centres(start: Tensor, length: Tensor, mirrored: Tensor, size: int) -> Tensor:
    """Return where output pixels look at along one axis of the source (B, size): c = start + (i + 1/2) * scale."""
    index = torch.arange(size, device=start.device).expand(len(start), size)
    index = torch.where(mirrored[:, None] > 0, size - 1 - index, index)
    return start[:, None] + (index + 0.5) * (length / size)[:, None]


def _weights(start: Tensor, length: Tensor, count: Tensor, mirrored: Tensor, size: int, source: Tensor) -> Tensor:
    """Return the weights (B, size, n) of `source` pixels, (n,) or (B, size, n), in the output pixels of one axis.

    They are a triangle about the centre c as wide as the scale, or as a source pixel, divided by their sum. The output
    pixel is black if c is beyond the image.
    """
    centre, count = _centres(start, length, mirrored, size), count[:, None]
    reach = (length / size).clamp_min(1)[:, None, None]
    weights = (1 - (source + 0.5 - centre[..., None]).abs() / reach).clamp_min(0)
    weights = weights * ((source >= 0) & (source < count[..., None]))
    inside = (centre >= 0) & (centre < count)
    return weights / weights.sum(2, keepdim=True).clamp_min(1e-12) * inside[..., None]
