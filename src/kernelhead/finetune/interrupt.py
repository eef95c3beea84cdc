"""SIGINT and SIGTERM, deferred to the end of a training step."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_SECONDS = 2.0  # `timeout` and `torchrun` signal a process and then its group


def ignore_interrupts(*_: object) -> None:
    """Let SIGINT and SIGTERM do nothing from now on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Note SIGINT and SIGTERM instead of raising in the middle of a step; a later signal raises at once.

    Yield a function that says whether a signal asked to stop. Signal handlers belong to the main thread: in other
    threads nothing changes.
    """
    requested, first = False, 0.0
    if threading.current_thread() is not threading.main_thread():
        yield lambda: requested
        return

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal requested, first
        if not requested:
            requested, first = True, time.monotonic()
        elif time.monotonic() - first > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt("stopped at once, without saving; the last checkpoint stays")

    # None is a handler that is not of Python and could not be put back. Background processes of a shell ignore SIGINT.
    handlers = ((number, signal.getsignal(number)) for number in SIGNALS)
    previous = {number: handler for number, handler in handlers if handler not in (None, signal.SIG_IGN)}
    for number in previous:
        signal.signal(number, note)
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
