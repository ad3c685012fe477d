"""Notifications: topics, bounded queues, and what happens to messages that nobody waits for yet."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from .errors import ClosedError

if TYPE_CHECKING:
    from .peer import Peer

__all__ = ["Notification", "Subscription", "Topics"]


class Notification(NamedTuple):
    """One message from a peer."""

    #: Who sent it.
    peer: Peer
    #: The topic under which it was sent.
    topic: str
    #: Its bytes.
    payload: bytes


class Subscription:
    """The notifications of one topic, from the moment of the call on, in an async iterator.

    Each subscription has its own queue, so none can take another's messages.  The queue is bounded: when it is full, the
    newest message is dropped and counted in `dropped`.
    """

    def __init__(self, topics: Topics, topic: str | None, limit: int) -> None:
        #: The topic, or None for all.
        self.topic = topic
        #: Messages dropped because the queue was full.
        self.dropped = 0
        self._topics = topics
        self._limit = limit
        self._queue: deque[Notification] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Notification:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise ClosedError("two tasks wait on one subscription; subscribe once for each")
            self._waiter = self._topics.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._queue.popleft()

    async def get(self) -> Notification:
        """The next notification.

        :raises ClosedError: if the subscription or the engine was closed.
        """
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise ClosedError("the subscription is closed") from None

    def get_nowait(self) -> Notification | None:
        """The next notification if one is here already, else None."""
        return self._queue.popleft() if self._queue else None

    def close(self) -> None:
        """Ends the subscription; the iterator stops after what it holds.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._topics._forget(self)
            self._wake()

    async def aclose(self) -> None:
        """As `close`, for ``async with`` and ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _put(self, note: Notification) -> bool:
        if len(self._queue) >= self._limit:
            self.dropped += 1
            return False
        self._queue.append(note)
        self._wake()
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Topics:
    """All subscriptions of an engine, and a bounded backlog for topics without one.

    A message that arrives before its topic has a subscriber waits in the backlog, so that a consumer which subscribes
    a moment too late misses nothing; the oldest of the backlog makes room for the newest.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self.received = 0
        self.dropped = 0
        self._limit = limit
        self._subscriptions: dict[str | None, list[Subscription]] = {}
        self._backlog: dict[str, deque[Notification]] = {}
        self._held = 0

    def subscribe(self, topic: str | None, limit: int | None = None) -> Subscription:
        """A new subscription, given what the backlog holds for `topic`."""
        subscription = Subscription(self, topic, limit or self._limit)
        self._subscriptions.setdefault(topic, []).append(subscription)
        for name in [topic] if topic is not None else list(self._backlog):
            for note in self._backlog.pop(name, ()):
                self._held -= 1
                self.dropped += not subscription._put(note)
        return subscription

    def deliver(self, peer: Peer, topic: bytes, payload: bytes) -> None:
        """One message, to every subscription of its topic, or to the backlog."""
        note = Notification(peer, topic.decode("utf-8", "replace"), payload)
        self.received += 1
        takers = [*self._subscriptions.get(note.topic, ()), *self._subscriptions.get(None, ())]
        for subscription in takers:
            self.dropped += not subscription._put(note)
        if not takers:
            self._hold(note)

    def _hold(self, note: Notification) -> None:
        if self._held >= self._limit:
            # Dicts keep insertion order, so this is the topic that has waited longest.
            oldest = next(iter(self._backlog))
            self._backlog[oldest].popleft()
            if not self._backlog[oldest]:
                del self._backlog[oldest]
            self._held -= 1
            self.dropped += 1
        self._backlog.setdefault(note.topic, deque()).append(note)
        self._held += 1

    def _forget(self, subscription: Subscription) -> None:
        peers = self._subscriptions[subscription.topic]
        peers.remove(subscription)
        if not peers:
            del self._subscriptions[subscription.topic]

    def close(self) -> None:
        """Ends every subscription."""
        for subscriptions in list(self._subscriptions.values()):
            for subscription in list(subscriptions):
                subscription.close()
        self._backlog.clear()
        self._held = 0
