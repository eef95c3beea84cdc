"""What is being trained, and by whom: several processes, as one for each GPU, may work on the same folder of runs.

A process holds a file for the group that it trains, `<group>.lock`, which names the results of the group, and while it
decides the folder of these files. The system takes a hold away when the process ends, however it ends; a file that
nobody holds says nothing.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kernelhead.paper.groups import digest_of

try:
    import fcntl
except ImportError:  # Windows: one process a folder
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".lock"


class Claims:
    """The groups of trainings that go on, by files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def turn(self) -> Iterator[set[str]]:
        """The results that others train for, as they named them, while none of them can take more.

        Results are written before the hold on them is given up, so whoever looks for them in here misses none.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as turn:
            if fcntl is not None:
                descriptor = os.open(self.folder, os.O_RDONLY)
                turn.callback(os.close, descriptor)
                _hold(descriptor, wait=True)
            yield self._taken()

    def hold(self, names: Sequence[str]) -> ExitStack:
        """Take the trainings for these results, in a `turn`; they are given up where what this gives is left."""
        held = ExitStack()
        if names:
            path = self.folder / f"{digest_of(names)}{SUFFIX}"
            file = held.enter_context(path.open("w"))
            held.callback(path.unlink, missing_ok=True)
            _hold(file.fileno(), wait=False)
            json.dump(list(names), file)
            file.flush()
        return held

    def _taken(self) -> set[str]:
        found: set[str] = set()
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            with suppress(FileNotFoundError), path.open("r+") as file:  # it may be given up just now
                if _hold(file.fileno(), wait=False):
                    path.unlink()
                else:
                    found.update(json.load(file))
        return found


def _hold(descriptor: int, *, wait: bool) -> bool:
    """Hold a file or folder until it is closed; False if another process does.

    Where a system or a file system has no such thing, everybody holds everything.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
