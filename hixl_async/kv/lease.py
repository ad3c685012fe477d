"""The time for which one side of a stream relies on the other without hearing from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["BEATS", "Lease"]

#: The signs of life that the other side sends within a lease; some may be late.
BEATS = 3
#: The part of a lease for which its owner waits on, once it has passed.  The owner's own loop may have been busy, and has then
#: to read what arrived meanwhile.
GRACE = 0.1


class Lease:
    """A timer that ends unless the other side is heard within each `seconds`.

    Durations cross the wire, never times; both are of the owner's clock here.

    :param loop: the event loop of the owner.
    :param seconds: the length of the lease.
    :param heard_at: returns the time, by the loop's clock, at which the other side was last heard; of several, the one that has
        been silent for longest.
    :param expired: called once the lease has passed.
    """

    __slots__ = ("_expired", "_heard_at", "_loop", "_suspected", "_timer", "seconds")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        heard_at: Callable[[], float],
        expired: Callable[[], None],
    ) -> None:
        self.seconds = seconds
        self._loop = loop
        self._heard_at = heard_at
        self._expired = expired
        self._suspected = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Count from now on; no effect if it does."""
        if self._timer is None:
            self._timer = self._loop.call_later(self.seconds, self._check)

    def end(self) -> None:
        """Count no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        rest = self._heard_at() + self.seconds - self._loop.time()
        if rest > 0:
            self._suspected = False
            self._timer = self._loop.call_later(rest, self._check)
        elif not self._suspected:
            self._suspected = True
            self._timer = self._loop.call_later(self.seconds * GRACE, self._check)
        else:
            self._timer = None
            self._expired()
