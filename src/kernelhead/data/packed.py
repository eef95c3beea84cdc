"""Large images in one file a split: JPEG bytes, offsets and labels, read by memory map, no pickles.

The file is a plain safetensors file with the arrays `jpeg` (all bytes, one image after the other), `offsets` (n + 1,)
and `labels` (n,), and the names of the classes in its metadata. Opening it reads a few kilobytes whatever its size.
"""

import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from kernelhead.results import write_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
JPEG_QUALITY = 95


class PackedImages:
    """A packed file, opened. `classes` are the names of the classes, `labels` (n,) indices into them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if 0 < length < 10**8 else {}
            start, size = 8 + length, path.stat().st_size
            metadata = header["__metadata__"]
            if metadata["format"] != "kernelhead packed images 1":
                raise ValueError(f"its format is {metadata['format']!r}")
            arrays = {name: header[name]["data_offsets"] for name in ("jpeg", "offsets", "labels")}
            if size != start + max(end for _, end in arrays.values()):
                raise ValueError(f"it has {size} bytes, {start + max(end for _, end in arrays.values())} expected")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no {path}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
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
        self.classes: list[str] = json.loads(metadata["classes"])
        self.left_out: list[str] = json.loads(metadata["left_out"])

    def __len__(self) -> int:
        return len(self.labels)

    def jpeg(self, index: int) -> bytes:
        """The bytes of one image."""
        return self._jpeg[self._offsets[index] : self._offsets[index + 1]].tobytes()

    def image(self, index: int) -> NDArray[np.uint8]:
        """One image, decoded: uint8 (H, W, 3)."""
        from PIL import Image

        with Image.open(io.BytesIO(self.jpeg(index))) as image:
            return np.asarray(image.convert("RGB"))


@dataclass(frozen=True)
class Source:
    """An image to pack: where it is and its class."""

    path: Path
    label: int


def find_images(folder: Path) -> tuple[list[Source], list[str]]:
    """Images in a folder of class folders, sorted, and the names of the classes."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    sources = [
        Source(path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not sources:
        raise ValueError(f"{folder} has no images in class folders; it should look like {folder}/cat/1.jpg")
    empty = sorted(set(range(len(classes))) - {source.label for source in sources})
    if empty:
        raise ValueError(f"{folder / classes[empty[0]]} has no images; every class folder needs some")
    return sources, classes


def pack(
    sources: Sequence[Source],
    classes: Sequence[str],
    out: Path,
    *,
    short_side: int | None = 256,
    progress: Callable[[int, int], None] | None = None,
) -> PackedImages:
    """Pack images into one file. Those that are missing or cannot be decoded are left out, and named in the result.

    Images whose short side is longer than `short_side` are made smaller; JPEG files that need no change keep
    their bytes.
    """

    def encode(source: Source) -> bytes | None:
        try:
            return _encode(source.path, short_side)
        except (OSError, ValueError, SyntaxError):  # what Pillow raises for a missing, cut or broken image
            return None

    encoded: list[bytes | None] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for content in pool.map(encode, sources):
            encoded.append(content)
            if progress is not None:
                progress(len(encoded), len(sources))
    kept = [(content, source.label) for content, source in zip(encoded, sources, strict=True) if content is not None]
    left_out = [str(source.path) for content, source in zip(encoded, sources, strict=True) if content is None]
    if not kept:
        raise ValueError(f"none of the {len(sources)} images could be read, {left_out[0]} the first of them")
    arrays: dict[str, NDArray[Any]] = {
        "jpeg": np.frombuffer(b"".join(content for content, _ in kept), np.uint8),
        "offsets": np.cumsum([0, *(len(content) for content, _ in kept)], dtype=np.int64),
        "labels": np.array([label for _, label in kept], dtype=np.int64),
    }
    metadata = {
        "format": "kernelhead packed images 1",
        "classes": json.dumps(list(classes)),
        "left_out": json.dumps(left_out),
    }
    write_bytes(out, safetensors.numpy.save(arrays, metadata))
    return PackedImages(out)


def _encode(path: Path, short_side: int | None) -> bytes:
    from PIL import Image, ImageOps

    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as opened:
        opened.load()
        image: Image.Image = ImageOps.exif_transpose(opened)
        turned = image.size != opened.size or opened.getexif().get(0x0112, 1) != 1
        shrink = 1.0 if short_side is None else short_side / min(image.size)
        if opened.format == "JPEG" and opened.mode == "RGB" and not turned and shrink >= 1:
            return content
        return _to_jpeg(image, min(1.0, shrink))


def _to_jpeg(image: "Image", scale: float) -> bytes:
    from PIL.Image import Resampling

    image = image.convert("RGB")
    if scale < 1:
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Resampling.BICUBIC, reducing_gap=3.0)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return out.getvalue()
