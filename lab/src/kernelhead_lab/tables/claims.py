"""Claims on runs: several processes, such as one per GPU, may work on the same folder.

A process holds a file for the group that it trains, which names the results of the group, and one that all share while
it decides. The system takes a hold away when the process ends, however it ends; a file that nobody holds says nothing.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kernelhead_lab.tables.groups import digest_of

try:
    import fcntl
except ImportError:  # Windows: one process per folder
    fcntl = None  # type: ignore[assignment]

CLAIMS = ".claims"  # the folder of these files, below that of the runs
TURN = "turn"
GROUP = "group-"


class Claims:
    """The groups of runs that are being trained in a folder."""

    def __init__(self, root: Path) -> None:
        self.folder = root / CLAIMS

    @contextmanager
    def turn(self) -> Iterator[set[str]]:
        """Yield the names of the results that others train for, while none of them can take more.

        Results are written before the hold on them is given up, so whoever looks for them in here misses none.
        """
        if fcntl is None:
            yield set()
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / TURN).open("a") as file:
            _hold(file.fileno(), wait=True)
            yield self._taken()

    @contextmanager
    def hold(self, names: Sequence[str]) -> Iterator[None]:
        """Claim these results. Enter it in a `turn`, and leave it when they are written."""
        if fcntl is None or not names:
            yield
            return
        path = self.folder / f"{GROUP}{digest_of(names)}"
        with path.open("w") as file:
            try:
                _hold(file.fileno(), wait=False)
                json.dump(list(names), file)
                file.flush()
                yield
            finally:
                path.unlink(missing_ok=True)

    def _taken(self) -> set[str]:
        found: set[str] = set()
        for path in sorted(self.folder.glob(f"{GROUP}*")):
            with suppress(FileNotFoundError), path.open("r+") as file:  # it may be given up just now
                if _hold(file.fileno(), wait=False):
                    path.unlink()
                else:
                    found.update(json.load(file))
        return found


def _hold(descriptor: int, *, wait: bool) -> bool:
    """Hold a file until it is closed; False if another process does.

    Where a file system has no such thing, everybody holds everything, as if there were one process.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter over a network
        return False
    except OSError:
        return True
    return True
