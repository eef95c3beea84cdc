"""Signals that wait for the end of a training step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST = 2.0  # seconds: `timeout` and `torchrun` signal a process and then its group


class Interruption:
    """Whether somebody asked to stop."""

    requested = False


@contextmanager
def deferred_interrupts() -> Iterator[Interruption]:
    """Note SIGINT and SIGTERM instead of raising in the middle of a step; one that comes later raises at once.

    Signal handlers belong to the main thread: elsewhere nothing is changed.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    first = 0.0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if not interruption.requested:
            interruption.requested, first = True, time.monotonic()
        elif time.monotonic() - first > SAME_REQUEST:
            raise KeyboardInterrupt("left at once, without saving; the last checkpoint stays")

    # None: a handler that was not installed from Python and could not be put back. What is ignored, as SIGINT is by the
    # background processes of a shell, stays ignored.
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    previous = {number: handler for number, handler in previous.items() if handler not in (None, signal.SIG_IGN)}
    for number in previous:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
