"""Waiting for events that have a name, by any number of tasks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

__all__ = ["Waiters"]


class Waiters:
    """Futures by key.  Each waiter has its own, so that cancelling one wait disturbs no other.

    :param loop: the loop on which all tasks wait and are woken.
    """

    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._futures: dict[Hashable, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, key: Hashable) -> None:
        """Wait until the next `wake` of `key`; the caller checks its condition again."""
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
        """Wake all tasks that wait for one of `keys`."""
        for key in keys:
            for future in self._futures.pop(key, ()):
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        """Wake all tasks."""
        self.wake(*self._futures)
