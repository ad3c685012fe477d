"""Waiting for events that have a key, by any number of tasks at once."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop as running_loop
from collections.abc import Hashable

from ..errors import WrongLoopError

__all__ = ["Waiters"]


class Waiters:
    """The waiting tasks by key.  Each task has its own future, so that cancelling one wait affects no other.

    :param loop: the loop on which tasks wait and are woken.
    """

    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._futures: dict[Hashable, dict[asyncio.Future[None], None]] = {}  # in the order of their calls

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, key: Hashable) -> None:
        """Wait for the next `wake` of `key`; the caller checks its condition again afterwards.

        :raises WrongLoopError: in another event loop.
        """
        if running_loop() is not self._loop:
            raise WrongLoopError(
                "an engine belongs to the event loop in which it was opened: wait there, from another thread by "
                "asyncio.run_coroutine_threadsafe"
            )
        future = self._loop.create_future()
        self._futures.setdefault(key, {})[future] = None
        try:
            await future
        finally:
            futures = self._futures.get(key, {})
            if future in futures:
                del futures[future]
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
