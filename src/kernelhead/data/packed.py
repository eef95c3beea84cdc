"""Large images in one file a split: JPEG bytes, offsets and labels, read by memory map, no pickles.

The file is a plain safetensors file with the arrays `jpeg` (all bytes, one image after the other), `offsets` (n + 1,),
`labels` (n,) and `left_out` (the names of images that could not be read, as JSON), and the names of the classes in its
metadata. Opening it reads a few kilobytes and the labels, whatever its size; making it takes little memory.
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

from kernelhead.data.picture import encode_jpeg, open_picture
from kernelhead.results import replacing

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
FORMAT = "kernelhead packed images 2"

Progress = Callable[[str, int, int], None]  # what is going on, how much of it is done, of how much

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
        """The bytes of one image."""
        return self._jpeg[self._offsets[index] : self._offsets[index + 1]].tobytes()

    def image(self, index: int) -> NDArray[np.uint8]:
        """One image, decoded: uint8 (H, W, 3)."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.jpeg(index))) as image:
                return np.asarray(image)
        except Exception as error:  # see `pack`
            raise ValueError(f"image {index} of {self.path} cannot be decoded ({error})") from error


class PictureFiles:
    """Loose picture files, read in the same way as packed ones: made smaller to `short_side`, labels of zeros.

    A file that cannot be read is named in `broken`, index -> sentence, once its image was asked for; a black pixel
    takes its place, so that the others of a batch are not lost.
    """

    def __init__(self, paths: Sequence[Path], short_side: int) -> None:
        self.paths = list(paths)
        self.short_side = short_side
        self.labels: NDArray[np.int64] = np.zeros(len(self.paths), dtype=np.int64)
        self.broken: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> NDArray[np.uint8]:
        """One picture: uint8 (H, W, 3)."""
        try:
            return open_picture(self.paths[index], self.short_side)
        except ValueError as error:
            self.broken[index] = str(error)
            return np.zeros((1, 1, 3), dtype=np.uint8)


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
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    ]
    if not sources:
        raise ValueError(f"{folder} has no images in class folders; it should look like {folder}/cat/1.jpg")
    empty = sorted(set(range(len(classes))) - {source.label for source in sources})
    if empty:
        raise ValueError(f"{folder / classes[empty[0]]} has no images; every class folder needs some")
    return sources, classes


def find_pictures(places: Sequence[Path]) -> list[Path]:
    """Picture files: those named, and those in the folders named, sorted."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = [path for path in place.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
            found += sorted(path for path in inside if not path.name.startswith("."))
        elif place.exists():
            found.append(place)
        else:
            raise FileNotFoundError(f"there is no file or folder {place}")
    if not found:
        raise ValueError(f"{', '.join(map(str, places))} has no pictures ({', '.join(sorted(SUFFIXES))})")
    return found


def pack(
    sources: Sequence[Source],
    classes: Sequence[str],
    out: Path,
    *,
    short_side: int | None = 256,
    every_class: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackedImages:
    """Pack images into one file. Those that are missing or cannot be decoded are left out, and named in the result.

    Images whose short side is longer than `short_side` are made smaller; JPEG files that need no change keep
    their bytes. `every_class` refuses a class of which no image can be read: a classifier would have it and could not
    learn it. Of an official data set, `kernelhead data verify` tells.
    """

    def encode(source: Source) -> tuple[bytes, int] | None:
        try:
            return encode_jpeg(source.path, short_side)
        except Exception:  # a damaged image fails in many ways: OSError, SyntaxError, struct.error, IndexError, ..
            return None

    offsets, labels, left_out, longest = [0], [], [], 0
    workers = os.cpu_count() or 1
    with replacing(out) as file, ThreadPoolExecutor(workers) as pool:
        # The header, with the sizes in it, comes first but is known last: spaces keep its place, as the format allows.
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
            raise ValueError(f"none of the {len(sources)} images could be read, {left_out[0]} the first of them")
        read = set(labels)
        lost = next((source for source in sources if source.label not in read), None)
        if every_class and lost:
            name = classes[lost.label]
            raise ValueError(f"no image of class {name!r} could be read, {lost.path} the first; every class needs some")
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
    """The progress of one thing, to hand to `pack`."""
    return None if progress is None else lambda done, total: progress(what, done, total)


def started_ahead(start: Callable[[Item], Started], items: Iterable[Item], ahead: int) -> Iterator[Started]:
    """`start` of each item in order, called for `ahead` items more than have been taken."""
    pending: deque[Started] = deque()
    for item in items:
        pending.append(start(item))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending
