"""When a layer may leave: ready marks of all kinds, and the one poller that looks at them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgumentError
from ..types import Ready

__all__ = ["ReadyPoller", "predicate"]

#: Seconds between two looks at the marks: the first, and what it doubles up to while nothing happens.  Loops
#: round timers to milliseconds, up (asyncio) or to the nearest (uvloop), so that the short ones mean "soon".
SHORTEST, LONGEST = 50e-6, 1e-3

#: Where torch's events (of NPUs, of CUDA, of any accelerator) show the device's own event: 0 until they are first recorded.
HANDLES = ("npu_event", "cuda_event", "event_id")


def predicate(ready: Ready) -> Callable[[], Any] | None:
    """The question to ask of a ready mark; None if there is none to ask.

    :raises InvalidArgumentError: if `ready` is neither None, nor has ``query()`` or ``is_set()``, nor can be called.
    """
    if ready is None:
        return None
    query = getattr(ready, "query", None)
    if callable(query):
        handle = next((name for name in HANDLES if hasattr(ready, name)), None)
        # An event that was never recorded calls itself done, but nothing has been computed yet.
        return query if handle is None else lambda: getattr(ready, handle) and query()
    is_set = getattr(ready, "is_set", None)
    if callable(is_set):
        return is_set  # type: ignore[no-any-return]
    if callable(ready):
        return ready
    raise InvalidArgumentError(
        f"ready must be None, an event with query() or is_set(), or a callable, not {type(ready).__name__}"
    )


class ReadyPoller:
    """Asks the streams whose next layer is not ready yet to look again, with one timer for all of them.

    Device events have no descriptor to wait for, so they are polled: on the loop, first in first out within a stream,
    backing off from 50 us to 1 ms, and only while a stream waits.

    :param loop: the loop of the streams.
    """

    __slots__ = ("_delay", "_loop", "_timer", "_watched")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[Callable[[], bool], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._delay = SHORTEST

    def watch(self, look: Callable[[], bool]) -> None:
        """Calls `look` again and again until it answers True: nothing is left to wait for."""
        self._watched[look] = None
        self._delay = SHORTEST
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay, self._poll)

    def forget(self, look: Callable[[], bool]) -> None:
        """Stops calling `look`."""
        self._watched.pop(look, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self) -> None:
        self._timer = None
        done = [look for look in list(self._watched) if look()]
        for look in done:
            self._watched.pop(look, None)
        self._delay = SHORTEST if done else min(2 * self._delay, LONGEST)
        if self._watched and self._timer is None:
            self._timer = self._loop.call_later(self._delay, self._poll)
