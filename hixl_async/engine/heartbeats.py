"""The signs of life that an engine sends to one peer, while somewhere a lease depends on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from ..errors import InvalidArgumentError

__all__ = ["Heartbeats"]


class Heartbeats:
    """A timer for all leases that one peer granted, which runs only while there are any.

    :param loop: the engine's event loop.
    :param send: sends a sign of life.
    """

    __slots__ = ("_intervals", "_loop", "_send", "_stopped", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[], None]) -> None:
        self._loop = loop
        self._send = send
        self._intervals: Counter[float] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def begin(self, interval: float) -> None:
        """Send a sign of life at least every `interval` seconds, until as many calls of `end`."""
        shorter = not self._intervals or interval < min(self._intervals)
        self._intervals[interval] += 1
        if shorter:
            self._schedule()

    def end(self, interval: float) -> None:
        """Undo one `begin`.

        :raises InvalidArgumentError: if there is none of that interval.
        """
        if interval not in self._intervals:
            raise InvalidArgumentError(f"interval must be that of a call to undo, not {interval:g}")
        self._intervals[interval] -= 1
        if not self._intervals[interval]:
            del self._intervals[interval]
        if not self._intervals:
            self._schedule()

    def stop(self) -> None:
        """Send no more, because the peer is down."""
        self._stopped = True
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._intervals and not self._stopped:
            self._timer = self._loop.call_later(min(self._intervals), self._beat)

    def _beat(self) -> None:
        self._send()
        self._schedule()
