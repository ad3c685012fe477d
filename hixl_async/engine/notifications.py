"""Notifications: subscriptions, their bounded queues, and the store of unclaimed messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core import Core
from ..display import shown
from ..errors import InvalidArgumentError
from .arguments import number_of
from .subscription_queue import BoundedQueue, SubscriptionQueue
from .unclaimed import ROOM, UnclaimedNotifications, weigh

if TYPE_CHECKING:
    from .peer import Peer

__all__ = ["Notification", "Subscription", "Subscriptions"]

#: The most topics whose queues are cached, and the most bytes of each topic.
MOST_REMEMBERED, SHORT = 4096, 256


class Notification(NamedTuple):
    """One message from a peer."""

    #: The peer that sent it.
    peer: Peer
    #: The topic under which it was sent.
    topic: str
    #: The bytes of the message.
    payload: bytes


class Subscription(SubscriptionQueue[Notification]):
    """The notifications of one topic, in an async iterator.

    Each subscription has its own queue, and so never takes messages from another.  The queue is bounded by number and by
    bytes: when it is full, the newest message is dropped and counted in `dropped`.
    """

    def __init__(self, owner: Subscriptions, topic: str | None, queue: BoundedQueue[Notification]) -> None:
        super().__init__(owner.core, queue, lambda queue: owner.forget(topic, queue))
        self._topic = topic

    @property
    def topic(self) -> str | None:
        """The topic, or None for all."""
        return self._topic

    def __repr__(self) -> str:
        return f"<Subscription to {'all topics' if self.topic is None else repr(self.topic)}, {self._describe()}>"


class Subscriptions:
    """All subscriptions of an engine, and a bounded store of unclaimed notifications.

    A message that arrives before its topic has a subscriber waits in the store, so that a consumer which subscribes a moment
    too late misses nothing.
    """

    def __init__(self, core: Core, limit: int) -> None:
        self.core = core
        self.received = 0
        self.dropped = 0
        self._limit = limit
        self._queues: dict[str | None, list[BoundedQueue[Notification]]] = {}
        self._unclaimed = UnclaimedNotifications(limit)
        self._takers: dict[bytes, tuple[str, list[BoundedQueue[Notification]]]] = {}

    def subscribe(self, topic: str | None, limit: int | None = None) -> Subscription:
        """Return a new subscription, filled with the unclaimed notifications of `topic`.

        :raises InvalidArgumentError: if `topic` or `limit` is malformed.
        """
        if topic is not None and (not isinstance(topic, str) or not topic):
            raise InvalidArgumentError(
                f"topic must be a string that is not empty, or None for all; it is {shown(topic)}"
            )
        if topic is not None and not _utf8(topic):
            raise InvalidArgumentError(
                f"the topic {shown(topic)} holds half a surrogate pair, which UTF-8 cannot carry"
            )
        most = self._limit if limit is None else number_of("messages", "limit", limit, 1, 62)
        queue: BoundedQueue[Notification] = BoundedQueue(most, ROOM)
        self._queues.setdefault(topic, []).append(queue)
        self._takers.clear()
        for peer, name, payload in self._unclaimed.take(topic):
            self.dropped += not queue.put(Notification(peer, name, payload), weigh(name, payload))
        return Subscription(self, topic, queue)

    def deliver(self, peer: Peer, topic: bytes, payload: bytes) -> None:
        """Deliver a message to every subscription of its topic, or keep it as unclaimed."""
        name, takers = self._takers.get(topic) or self._find_takers(topic)
        self.received += 1
        if not takers:
            self.dropped += self._unclaimed.hold(peer, name, payload)
            return
        note = Notification(peer, name, payload)
        weight = weigh(name, payload)
        for queue in takers:
            if not queue.put(note, weight):
                self.dropped += 1

    def _find_takers(self, topic: bytes) -> tuple[str, list[BoundedQueue[Notification]]]:
        """Return a topic's name and its queues.

        They are cached until a subscription begins or ends; topics without a queue are not cached.
        """
        name = topic.decode("utf-8", "replace")
        takers = [*self._queues.get(name, ()), *self._queues.get(None, ())]
        if takers and len(topic) <= SHORT and len(self._takers) < MOST_REMEMBERED:  # peers choose the topics
            self._takers[topic] = name, takers
        return name, takers

    def forget(self, topic: str | None, queue: BoundedQueue[Notification]) -> None:
        """Undo `subscribe`."""
        queues = self._queues.get(topic, [])
        if queue in queues:
            queues.remove(queue)
            self._takers.clear()
            if not queues:
                del self._queues[topic]

    def close(self) -> None:
        """End every subscription."""
        for queues in self._queues.values():
            for queue in queues:
                queue.close()
        self._queues.clear()
        self._takers.clear()
        self._unclaimed.clear()


def _utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
