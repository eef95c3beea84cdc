"""The packed files that trainings made of folders of pictures, one for each state of a folder, and what they are of."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kernelhead.data.cifar import CLASSES, data_folder
from kernelhead.data.folder import TEST_FOLDERS, digest_of
from kernelhead.data.images import Images
from kernelhead.data.large import SETS
from kernelhead.data.packed import PackedImages, find_images
from kernelhead.data.streamed import StreamedImages
from kernelhead.results import write_bytes

IN_USE = "as its folder is"


def remember_folder(data: str, short_side: int, *images: Images) -> None:
    """Note beside the packed files of a folder where it is and how it was packed, which they do not say themselves.

    `kernelhead data clean` asks for it.
    """
    folder = Path(data).expanduser()
    if data in (*CLASSES, *SETS) or not folder.is_dir():
        return
    content = json.dumps({"folder": str(folder.resolve()), "short_side": short_side}).encode()
    for each in images:
        if isinstance(each, StreamedImages) and isinstance(each.source, PackedImages):
            with suppress(OSError):  # others' data folder may be for reading only
                write_bytes(each.source.path.with_suffix(".json"), content)


@dataclass(frozen=True)
class PackedFolder:
    """A packed file that `kernelhead train` made of a folder, which is None where no note says which."""

    path: Path
    bytes: int
    folder: Path | None
    state: str

    @property
    def useless(self) -> bool:
        return self.folder is not None and self.state != IN_USE

    def remove(self) -> None:
        """Delete it and its note."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".json").unlink(missing_ok=True)


def packed_place() -> Path:
    """Where they are."""
    return data_folder() / "packed"


def packed_folders() -> list[PackedFolder]:
    """All there are, in the order of their names."""
    digests: dict[tuple[Path, int], set[str]] = {}
    found = []
    for path in sorted(packed_place().glob("*.safetensors")):
        folder, state = None, "of an unknown folder"
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(path.with_suffix(".json").read_text())
            key = Path(note["folder"]), int(note["short_side"])
            if key not in digests:
                digests[key] = _digests(*key)
            folder, state = key[0], "its folder has changed"
            if not folder.is_dir():
                state = "its folder is gone"
            elif path.stem.rpartition("-")[2] in digests[key]:
                state = IN_USE
        found.append(PackedFolder(path, path.stat().st_size, folder, state))
    return found


def _digests(folder: Path, short_side: int) -> set[str]:
    """What the packed files of a folder, or of its parts for training and testing, are called as it is now."""
    digests = set()
    for part in (folder, *(folder / name for name in ("train", *TEST_FOLDERS))):
        with suppress(OSError, ValueError):  # not there, or without pictures
            digests.add(digest_of(part, find_images(part)[0], short_side))
    return digests
