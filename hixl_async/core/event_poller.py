"""Polling of device events on the loop, because devices have no descriptor to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .guard import guarded

__all__ = ["EventPoller"]

#: The first and the longest interval between two polls, in seconds; it doubles while nothing happens.  Loops round timers to
#: milliseconds, up (asyncio) or to the nearest (uvloop), so that the short ones mean "soon".
SHORTEST, LONGEST = 50e-6, 1e-3


class EventPoller:
    """A timer for all events of an engine or a pool, which runs only while there are any.

    :param loop: the loop on which the events are polled.
    """

    __slots__ = ("_delay", "_loop", "_timer", "_watched")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[Callable[[], bool], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._delay = SHORTEST

    @property
    def idle(self) -> bool:
        """True while there is no event to poll, and no timer."""
        return self._timer is None

    def watch(self, look: Callable[[], bool]) -> None:
        """Call `look` repeatedly, in the order of the calls of `watch`, until it returns True.

        :param look: returns True when the wait has ended; if it raises, that is reported, and the wait has ended too.
        """
        self._watched[look] = None
        self._delay = SHORTEST
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay, self._poll)

    def forget(self, look: Callable[[], bool]) -> None:
        """Stop calling `look`."""
        self._watched.pop(look, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self) -> None:
        self._timer = None
        done = [look for look in list(self._watched) if self._has_ended(look)]
        for look in done:
            self._watched.pop(look, None)
        self._delay = SHORTEST if done else min(2 * self._delay, LONGEST)
        if self._watched and self._timer is None:
            self._timer = self._loop.call_later(self._delay, self._poll)

    def _has_ended(self, look: Callable[[], bool]) -> bool:
        return guarded(self._loop, "an event could not be polled", look) is not False
