"""Notifications: topics, bounded queues, and what happens to messages that nobody waits for yet."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ._core import Core
from .errors import InvalidArgumentError
from .feed import Feed, Queue

if TYPE_CHECKING:
    from .peer import Peer

__all__ = ["Notification", "Subscription", "Topics"]

#: Bytes that one queue, or the backlog, may hold: peers choose how much they send.
ROOM = 16 << 20
#: What one notification costs beside its bytes.
OVERHEAD = 256


class Notification(NamedTuple):
    """One message from a peer."""

    #: Who sent it.
    peer: Peer
    #: The topic under which it was sent.
    topic: str
    #: Its bytes.
    payload: bytes


class Subscription(Feed[Notification]):
    """The notifications of one topic, from the moment of the call on, in an async iterator.

    Each subscription has its own queue, so none can take another's messages.  The queue is bounded, by number and by
    bytes: when it is full, the newest message is dropped and counted in `dropped`.
    """

    def __init__(self, topics: Topics, topic: str | None, queue: Queue[Notification]) -> None:
        super().__init__(topics.core, queue, lambda queue: topics.forget(topic, queue))
        #: The topic, or None for all.
        self.topic = topic


def _weight(topic: str, payload: bytes) -> int:
    return OVERHEAD + len(topic) + len(payload)


class _Backlog:
    """Messages of one peer, numbered, in the order of arrival and by topic.

    They are kept as plain tuples of text and bytes, which Python's garbage collector lets go of; thousands of
    `Notification` would make its full collections longer, at a time that the sender chooses.
    """

    def __init__(self) -> None:
        self.weight = 0
        self._notes: OrderedDict[int, tuple[str, bytes]] = OrderedDict()
        self._topics: dict[str, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, number: int, topic: str, payload: bytes) -> None:
        self._notes[number] = topic, payload
        self._topics.setdefault(topic, deque()).append(number)
        self.weight += _weight(topic, payload)

    def drop_oldest(self) -> int:
        """Answers its weight."""
        _, (topic, payload) = self._notes.popitem(last=False)
        numbers = self._topics[topic]
        numbers.popleft()
        if not numbers:
            del self._topics[topic]
        weight = _weight(topic, payload)
        self.weight -= weight
        return weight

    def take(self, topic: str | None) -> Iterable[tuple[int, str, bytes]]:
        """All of one topic, or all."""
        for name in [topic] if topic is not None else list(self._topics):
            for number in self._topics.pop(name, ()):
                _, payload = self._notes.pop(number)
                self.weight -= _weight(name, payload)
                yield number, name, payload


class Topics:
    """All subscriptions of an engine, and a bounded backlog for topics without one.

    A message that arrives before its topic has a subscriber waits in the backlog, so that a consumer which subscribes
    a moment too late misses nothing.  When that is full, the peer that takes up most of it loses its oldest message, so
    that none can push out what others sent.
    """

    def __init__(self, core: Core, limit: int) -> None:
        self.core = core
        self.received = 0
        self.dropped = 0
        self._limit = limit
        self._queues: dict[str | None, list[Queue[Notification]]] = {}
        self._backlogs: dict[Peer, _Backlog] = {}
        self._numbers = count()
        self._held = self._weight = 0  # of all backlogs together
        self._takers: dict[bytes, tuple[str, list[Queue[Notification]]]] = {}

    def subscribe(self, topic: str | None, limit: int | None = None) -> Subscription:
        """A new subscription, given what the backlog holds for `topic`.

        :raises InvalidArgumentError: if `topic` or `limit` is malformed.
        """
        if topic is not None and (not isinstance(topic, str) or not topic):
            raise InvalidArgumentError(f"topic must be a string that is not empty, or None for all; it is {topic!r}")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise InvalidArgumentError(f"limit must be a number of messages of at least 1, not {limit!r}")
        queue: Queue[Notification] = Queue(self._limit if limit is None else limit, ROOM)
        self._queues.setdefault(topic, []).append(queue)
        self._takers.clear()
        for note in self._take(topic):
            self.dropped += not queue.put(note, _weight(note.topic, note.payload))
        return Subscription(self, topic, queue)

    def deliver(self, peer: Peer, topic: bytes, payload: bytes) -> None:
        """One message, to every subscription of its topic, or to the backlog."""
        name, takers = self._takers.get(topic) or self._find_takers(topic)
        self.received += 1
        if not takers:
            self._hold(peer, name, payload)
            return
        note = Notification(peer, name, payload)
        weight = _weight(name, payload)
        for queue in takers:
            if not queue.put(note, weight):
                self.dropped += 1

    def _find_takers(self, topic: bytes) -> tuple[str, list[Queue[Notification]]]:
        """A topic's name and its queues, remembered until somebody subscribes or leaves; topics without a queue are not."""
        name = topic.decode("utf-8", "replace")
        takers = [*self._queues.get(name, ()), *self._queues.get(None, ())]
        if takers and len(self._takers) < self._limit:  # peers choose the topics
            self._takers[topic] = name, takers
        return name, takers

    def _hold(self, peer: Peer, topic: str, payload: bytes) -> None:
        backlog = self._backlogs.get(peer)
        if backlog is None:
            backlog = self._backlogs[peer] = _Backlog()
        backlog.add(next(self._numbers), topic, payload)
        self._held += 1
        self._weight += _weight(topic, payload)
        while self._held > self._limit or self._weight > ROOM:
            greediest = max(self._backlogs, key=lambda peer: self._backlogs[peer].weight)
            self._weight -= self._backlogs[greediest].drop_oldest()
            self._held -= 1
            self.dropped += 1
            if not self._backlogs[greediest]:
                del self._backlogs[greediest]

    def _take(self, topic: str | None) -> list[Notification]:
        taken = [
            (number, Notification(peer, name, payload))
            for peer, backlog in self._backlogs.items()
            for number, name, payload in backlog.take(topic)
        ]
        taken.sort(key=itemgetter(0))
        self._backlogs = {peer: backlog for peer, backlog in self._backlogs.items() if backlog}
        self._held -= len(taken)
        self._weight -= sum(_weight(note.topic, note.payload) for _, note in taken)
        return [note for _, note in taken]

    def forget(self, topic: str | None, queue: Queue[Notification]) -> None:
        """Undoes `subscribe`."""
        queues = self._queues.get(topic, [])
        if queue in queues:
            queues.remove(queue)
            self._takers.clear()
            if not queues:
                del self._queues[topic]

    def close(self) -> None:
        """Ends every subscription."""
        for queues in self._queues.values():
            for queue in queues:
                queue.close()
        self._queues.clear()
        self._takers.clear()
        self._backlogs.clear()
        self._held = self._weight = 0
