"""Files that are written whole or not at all, and what they say of where they were made."""

import glob
import os
import platform
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from kernelhead._version import __version__

LOCK_FILE = ".lock"
PATIENCE_SECONDS = 1.0  # for another process to end, or to say who it is
TEMPORARY = re.compile(r"\..+\.(\d+)@(.*)\.tmp", re.DOTALL)  # process and host
UNTOUCHED_SECONDS = 3600  # after which a temporary file is dead, whoever has the number of its process now


class BusyFolderError(RuntimeError):
    """A folder that another process writes."""


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


def plain_file(path: Path, most: int | None = None) -> Path:
    """Return the path of a file. Refuse what may never end, such as a pipe, and what has more than `most` bytes."""
    try:
        told = path.stat()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {path}") from error
    if not stat.S_ISREG(told.st_mode):
        kind = "a folder" if stat.S_ISDIR(told.st_mode) else "a pipe or a device"
        raise ValueError(f"{path} is {kind}; give a plain file")
    if most is not None and told.st_size > most:
        raise ValueError(f"{path} has {told.st_size:,} bytes, and such files have {most:,} at most; give another")
    return path


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove the temporary files of processes that died while they wrote files called `name` in a folder."""
    for each in folder.glob(f".{name}.*.tmp"):
        with suppress(OSError, AttributeError):  # on Windows, a file that is written cannot be removed
            number, host = TEMPORARY.fullmatch(each.name).groups()  # type: ignore[union-attr]
            untouched = time.time() - each.stat().st_mtime > UNTOUCHED_SECONDS
            if untouched or (host == platform.node() and not _runs_elsewhere(int(number))):
                shutil.rmtree(each) if each.is_dir() else each.unlink()


def _runs_elsewhere(number: int) -> bool:
    """Return whether a process of this number runs and is not this one, whose number a dead one may have had."""
    if number == os.getpid() or os.name == "nt":  # there, signal 0 would end it
        return False
    try:
        os.kill(number, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A name for what will become `path`, which is gone afterwards. Those of processes that died are removed first."""
    remove_leftovers(path.parent, glob.escape(path.name))
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{platform.node()}.tmp")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write instead of `path`, which is there afterwards whole, or as it was before. A link stays a link."""
    given, path = path, path.resolve() if path.is_symlink() else path  # messages name what the user named
    if path.exists():
        plain_file(path)
    with _naming(given):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_beside(path) as temporary:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, temporary)
            temporary.replace(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise type(error)(f"{path} cannot be written ({error.strerror or error})") from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Be the only process that writes a run into a folder. What dead processes left half-written there is removed.

    The system takes a lock away with the process that holds it, however it ends. This process may enter again.
    """
    from filelock import FileLock, Timeout

    new, file = not folder.exists(), folder / LOCK_FILE
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.resolve() / LOCK_FILE, is_singleton=True)
        with suppress(Timeout):
            lock.acquire(timeout=PATIENCE_SECONDS)
    if not lock.is_locked:
        who = "another process" if os.name == "nt" else file.read_text()[:80]  # there, nobody else reads it
        raise BusyFolderError(f"{who} writes into {folder}; wait for it, or choose another folder")
    try:
        if lock.lock_counter == 1:
            remove_leftovers(folder)
            with suppress(OSError):
                file.write_text(f"process {os.getpid()} since {datetime.now():%Y-%m-%d %H:%M:%S}")
        yield
    finally:
        if lock.lock_counter == 1 and os.name != "nt":  # there, the lock removes its file itself
            file.unlink(missing_ok=True)
        lock.release()
        if new:
            with suppress(OSError):  # nothing came of it, so nothing is there
                folder.rmdir()


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say what an import is for, and which extra has it, where it fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        sentence = f"{what} needs {error.name}; install it with pip install 'kernelhead[{extra}]'"
        raise ModuleNotFoundError(sentence, name=error.name) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or an interruption, finds the old one or the new one and nothing between."""
    with replacing(path) as file:
        file.write(content)
