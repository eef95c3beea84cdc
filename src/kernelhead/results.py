"""Result files: one small JSON a run, written whole or not at all."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from kernelhead._version import __version__

FORMAT = 1
REQUIRED = ("experiment", "protocol", "method", "seed", "config", "accuracy", "seconds")
KINDS: dict[str, Any] = {
    **dict.fromkeys(("config", "images", "parameters", "curve", "hardware"), dict),
    **dict.fromkeys(("accuracy", "nll", "ece"), float | int | None),  # None of a run that diverged
    "seconds": float | int,
    "seed": int,
}


def environment() -> dict[str, Any]:
    """Code version, library versions and hardware, for a result file."""
    import torch  # reading results, as `kernelhead report` does, goes without its seconds of import

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "version": __version__,
        "libraries": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads(), "gpu": gpu},
    }


def hardware_name(hardware: dict[str, Any]) -> str:
    """What `environment` found, in words: the GPU or, without one, the threads of the CPU."""
    gpu, threads = hardware["gpu"], hardware["threads"]
    return str(gpu or f"{threads} CPU thread{'s' * (threads != 1)}")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write in place of `path`, which is there afterwards whole, or as it was before; a link stays a link."""
    path = path.resolve() if path.is_symlink() else path  # as the user named it, for messages
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or an interruption, finds the old one or the new one and nothing between."""
    with replacing(path) as file:
        file.write(content)


def sha256_of(path: Path) -> str:
    """The digest of what a file contains, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Write one run's result, with the environment it was made in."""
    complete = {"format": FORMAT, **result, **environment()}
    write_bytes(path, (json.dumps(complete, indent=1, allow_nan=False) + "\n").encode())


class BrokenResultError(ValueError):
    """A result file that cannot be read."""


def load_result(path: Path, needed: Sequence[str] = REQUIRED) -> dict[str, Any]:
    """Read one result file, and see that it has what is `needed`."""
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BrokenResultError(f"{path} is not a readable result file ({error}); delete it and run again") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise BrokenResultError(f"{path} is not a result file of format {FORMAT}; delete it and run again")
    check_fields(path, result, needed)
    return result


def check_fields(path: Path, result: dict[str, Any], needed: Sequence[str]) -> None:
    """See that a result has what is `needed`, of the kind that it should be."""
    missing = [key for key in needed if key not in result]
    if missing:
        raise BrokenResultError(f"{path} has no {', '.join(missing)}; delete it and run again")
    wrong = [key for key in needed if not isinstance(result[key], KINDS.get(key, object))]
    if wrong:
        raise BrokenResultError(f"{path} has no usable {', '.join(wrong)}; delete it and run again")


def find_results(folder: Path, broken: list[str]) -> Iterator[dict[str, Any]]:
    """Every result below `folder`, in the order of file names. What cannot be read is named in `broken`."""
    for path in sorted(folder.rglob("*.json")):
        try:
            yield load_result(path)
        except BrokenResultError as error:
            broken.append(str(error))
