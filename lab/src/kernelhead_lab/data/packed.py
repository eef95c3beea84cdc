"""Large images in one file per split: JPEG bytes, offsets and labels, read by memory map, no pickles.

The file is a plain safetensors file with these arrays, and the names of the classes in its metadata:

    jpeg       all bytes, one image after the other
    offsets    (n + 1,)
    labels     (n,)
    left_out   the names of images that could not be read, as JSON

Opening it reads a few kilobytes and the labels, whatever its size; making it takes little memory. safetensors' own
writer would need all images in memory.
"""

import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kernelhead.files import replacing

FORMAT = "kernelhead packed images 2"
ORIENTATION = 0x0112  # the EXIF tag; 2 to 8 are turned or mirrored

Progress = Callable[[str, int, int], None]  # the task, how much of it is done, of how much

Item = TypeVar("Item")
Started = TypeVar("Started")


class PackedImages:
    """A packed file, opened.

    `classes` are the names of the classes, `labels` (n,) indices into them, `left_out` the names of images that could
    not be packed, `short_side` the longest short side of an image.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if 0 < length < 10**8 else {}
            start, size = 8 + length, path.stat().st_size
            metadata = header["__metadata__"]
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']!r}")
            arrays = {name: header[name]["data_offsets"] for name in ("jpeg", "offsets", "labels", "left_out")}
            if size != start + max(end for _, end in arrays.values()):
                raise ValueError(f"it has {size} bytes, {start + max(end for _, end in arrays.values())} expected")
            classes, short_side = json.loads(metadata["classes"]), int(metadata["short_side"])
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no {path}") from error
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            # Their words, such as the name of a key, tell nobody that this is another kind of file.
            raise ValueError(f"{path} is not a readable file of packed images (it has no header of one)") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a readable file of packed images ({error})") from error

        def view(name: str, dtype: str) -> NDArray[np.generic]:
            begin, end = arrays[name]
            count = (end - begin) // np.dtype(dtype).itemsize
            if not count:
                return np.empty(0, dtype)
            return np.memmap(path, dtype=dtype, mode="r", offset=start + begin, shape=(count,))

        self._jpeg = view("jpeg", "u1")
        self._offsets = np.array(view("offsets", "<i8"))
        self.labels: NDArray[np.int64] = np.array(view("labels", "<i8"))
        self.classes: list[str] = classes
        self.left_out: list[str] = json.loads(view("left_out", "u1").tobytes())
        self.short_side: int = short_side

    def __len__(self) -> int:
        return len(self.labels)

    def jpeg(self, index: int) -> bytes:
        """Return the bytes of one image."""
        return self._jpeg[self._offsets[index] : self._offsets[index + 1]].tobytes()

    def image(self, index: int) -> NDArray[np.uint8]:
        """Return one image, decoded: uint8 (H, W, 3)."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.jpeg(index))) as image:
                return np.asarray(image)
        except Exception as error:  # see `pack`
            raise ValueError(f"image {index} of {self.path} cannot be decoded ({error})") from error


@dataclass(frozen=True)
class Source:
    """An image to pack: its file and its class."""

    path: Path
    label: int


def pack(
    sources: Sequence[Source],
    classes: Sequence[str],
    out: Path,
    *,
    short_side: int,
    quality: int = 95,
    progress: Callable[[int, int], None] | None = None,
) -> PackedImages:
    """Pack images into one file. Images that are missing or cannot be decoded are left out, and named in the result.

    Images whose short side is longer than `short_side` are made smaller, and are JPEGs of this quality then. JPEG files
    that need no change keep their bytes.
    """

    def encode(source: Source) -> tuple[bytes, int] | None:
        try:
            return _jpeg_of(source.path, short_side, quality)
        except Exception:  # a damaged image fails in many ways: OSError, SyntaxError, struct.error, IndexError, ..
            return None

    offsets, labels, left_out, longest = [0], [], [], 0
    workers = os.cpu_count() or 1
    with replacing(out) as file, ThreadPoolExecutor(workers) as pool:
        # The header comes first and is known last: spaces reserve its bytes, as the format allows.
        room = 1024 + len(json.dumps(json.dumps(list(classes))))
        room += -(8 + room) % 8
        file.write(b" " * (8 + room))
        futures = started_ahead(lambda source: pool.submit(encode, source), sources, 4 * workers)
        for done, (source, future) in enumerate(zip(sources, futures, strict=True), 1):
            encoded = future.result()
            if encoded is None:
                left_out.append(str(source.path))
            else:
                file.write(encoded[0])
                offsets.append(offsets[-1] + len(encoded[0]))
                labels.append(source.label)
                longest = max(longest, encoded[1])
            if progress is not None:
                progress(done, len(sources))
        if not labels:
            raise ValueError(f"none of {len(sources)} images can be read, such as {left_out[0]}; get them again")
        padding = -offsets[-1] % 8
        file.write(bytes(padding))
        arrays = {
            "offsets": ("I64", np.array(offsets, dtype="<i8").tobytes(), 8),
            "labels": ("I64", np.array(labels, dtype="<i8").tobytes(), 8),
            "left_out": ("U8", json.dumps(left_out).encode(), 1),
        }
        end = offsets[-1] + padding
        header: dict[str, object] = {
            "__metadata__": {"format": FORMAT, "classes": json.dumps(list(classes)), "short_side": str(longest)},
            "jpeg": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]},
        }
        for name, (dtype, content, itemsize) in arrays.items():
            file.write(content)
            shape, begin, end = [len(content) // itemsize], end, end + len(content)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        file.seek(0)
        file.write(room.to_bytes(8, "little") + json.dumps(header).encode())
    return PackedImages(out)


def progress_of(what: str, progress: Progress | None) -> Callable[[int, int], None] | None:
    """Return the progress of one task, as `pack` takes it."""
    return None if progress is None else lambda done, total: progress(what, done, total)


def started_ahead(start: Callable[[Item], Started], items: Iterable[Item], ahead: int) -> Iterator[Started]:
    """Yield `start` of each item in order, called for `ahead` items more than have been taken."""
    pending: deque[Started] = deque()
    for item in items:
        pending.append(start(item))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending


def _jpeg_of(path: Path, short_side: int, quality: int) -> tuple[bytes, int]:
    """Return the JPEG bytes of an image file, upright and in RGB, and the length of its short side."""
    from PIL import Image, ImageOps

    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as opened:
        turned, fits = opened.getexif().get(ORIENTATION, 1) in range(2, 9), min(opened.size) <= short_side
        if opened.format == "JPEG" and opened.mode == "RGB" and fits and not turned:
            opened.load()
            return content, min(opened.size)
        if not fits:
            # A JPEG decoder can make an image smaller while it decodes; twice the size keeps the detail.
            width, height = (2 * side * short_side // min(opened.size) + 1 for side in opened.size)
            opened.draft(None, (width, height))
        image: Image.Image = ImageOps.exif_transpose(opened) if turned else opened
        if "transparency" in image.info:  # Pillow warns of a palette with transparency that becomes RGB at once
            image = image.convert("RGBA")
        image = image.convert("RGB")
    if min(image.size) > short_side:
        width, height = (max(1, round(side * short_side / min(image.size))) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality, subsampling=0)
    return out.getvalue(), min(image.size)
