"""Waiting for something that has a name, any number of tasks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

__all__ = ["Waiters"]


class Waiters:
    """Futures by key.  Every waiter has its own: cancelling one wait disturbs no other.

    :param loop: the loop on which everybody waits and is woken.
    """

    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._futures: dict[Hashable, list[asyncio.Future[None]]] = {}

    async def wait(self, key: Hashable) -> None:
        """Sleeps until the next `wake` of `key`; the caller re-checks its condition."""
        future = self._loop.create_future()
        self._futures.setdefault(key, []).append(future)
        try:
            await future
        finally:
            futures = self._futures.get(key, [])
            if future in futures:
                futures.remove(future)
                if not futures:
                    del self._futures[key]

    def wake(self, *keys: Hashable) -> None:
        """Wakes everybody who waits for one of `keys`."""
        for key in keys:
            for future in self._futures.pop(key, ()):
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        """Wakes everybody."""
        self.wake(*self._futures)
