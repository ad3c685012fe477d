"""Signals that the program handles, sent to the main thread while a test runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Count:
    """The number of signals so far."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, *_: object) -> None:
        self.n += 1


@contextlib.contextmanager
def interrupted() -> Iterator[Count]:
    """Interrupt the main thread a thousand times a second; the test's own time limit is suspended meanwhile."""
    count = Count()
    handler = signal.signal(signal.SIGALRM, count)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield count
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
