"""Files that are written whole or not at all, and what they say of where they were made."""

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from kernelhead._version import __version__


def environment() -> dict[str, Any]:
    """Code version, library versions and hardware, for a result file."""
    import torch  # reading results, as `kernelhead-lab report` does, goes without its seconds of import

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "version": __version__,
        "libraries": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads(), "gpu": gpu},
    }


def hardware_name(hardware: dict[str, Any]) -> str:
    """Name the hardware that `environment` found: the GPU or, without one, the threads of the CPU."""
    gpu, threads = hardware["gpu"], hardware["threads"]
    return str(gpu or f"{threads} CPU thread{'s' * (threads != 1)}")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write instead of `path`, which is there afterwards whole, or as it was before. A link stays a link."""
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
