"""Bounded queues that are read with ``async for``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from .._core import Core
from ..core import in_flight
from ..core.sealed import Sealed
from ..core.transfer import Transfer, wake
from ..core.unpicklable import unpicklable
from ..errors import ClosedError
from .started import Started, already_over

__all__ = ["BoundedQueue", "SubscriptionQueue"]

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """The writing end of a `SubscriptionQueue`.

    The writer refers to this end only, so that a queue that its reader has dropped, say by a ``break``, is freed.
    """

    __slots__ = ("_entries", "_room", "_weight", "closed", "dropped", "limit", "waiter")

    def __init__(self, limit: int, room: int) -> None:
        """
        :param limit: the most items.
        :param room: the most that their weights may add up to; one item always fits.
        """
        self.limit = limit
        self.dropped = 0
        self.closed = False
        self.waiter: Transfer | None = None
        self._room = room
        self._weight = 0
        self._entries: deque[tuple[T, int]] = deque()  # with their weights

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, item: T, weight: int = 0) -> bool:
        """Add an item, or count it in `dropped` if there is no room for it.

        :return: True if the item was added.
        """
        entries = self._entries
        if entries and (len(entries) >= self.limit or self._weight + weight > self._room):
            self.dropped += 1
            return False
        entries.append((item, weight))
        self._weight += weight
        if self.waiter is not None:
            wake(self.waiter)
        return True

    def take(self) -> T:
        """Remove and return the oldest item.

        :raises IndexError: if there is none.
        """
        item, weight = self._entries.popleft()
        self._weight -= weight
        return item

    def close(self) -> None:
        """End the reader once the queue is empty.  Idempotent."""
        self.closed = True
        self.wake()

    def wake(self) -> None:
        """Wake the reader."""
        if self.waiter is not None:
            wake(self.waiter)


class SubscriptionQueue(Sealed, Generic[T], maker="engine.notifications() and engine.accepted()"):
    """An async iterator over the items that arrive after it was made.

    It ends when it is closed, when the engine closes, or when the last reference to it is dropped.
    """

    __reduce__ = unpicklable("send the items, or subscribe there")

    def __init__(self, core: Core, queue: BoundedQueue[T], forget: Callable[[BoundedQueue[T]], None]) -> None:
        """
        :param forget: called once with `queue`, when the iterator ends and the queue need not be filled any more.
        """
        self._core = core
        self._queue = queue
        self._forget = forget

    def __del__(self) -> None:
        self._end()

    def __len__(self) -> int:
        return len(self._queue)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self._describe()}>"

    def _describe(self) -> str:
        """Return a text for what it holds."""
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return f"{len(self)} waiting{dropped}{', closed' if self._queue.closed else ''}"

    @property
    def dropped(self) -> int:
        """The number of items that were dropped because the queue was full."""
        return self._queue.dropped

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        queue = self._queue
        if queue._entries and (pause := in_flight.checkpoint(self._core)) is not None:
            await pause
        while not queue._entries:
            if queue.closed:
                raise StopAsyncIteration
            if queue.waiter is not None and not queue.waiter.done():
                raise ClosedError(f"two tasks wait on one {type(self).__name__}; make one for each")
            queue.waiter = in_flight.new_waiter(self._core)
            await queue.waiter
        return queue.take()

    async def get(self) -> T:
        """Wait for the next item, and return it.

        :return: the item.
        :raises ClosedError: if this queue or the engine was closed, or another task waits on this queue.
        """
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise ClosedError(f"this {type(self).__name__} is closed") from None

    def get_nowait(self) -> T | None:
        """Return the next item if there is one already, else None.

        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._core)
        return self._queue.take() if self._queue else None

    def close(self) -> None:
        """End the iteration after the items that are already queued.  Idempotent.

        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._core)
        self._end()

    def _end(self) -> None:
        if not self._queue.closed:
            self._queue.close()
            self._forget(self._queue)

    def aclose(self) -> Started[None]:
        """Call `close`; for ``contextlib.aclosing``.

        :return: an awaitable, which need not be awaited.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self.close()
        return Started(already_over)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
