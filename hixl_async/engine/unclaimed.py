"""Notifications without a subscriber: a bounded store that is fair between peers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .peer import Peer

__all__ = ["OVERHEAD", "ROOM", "UnclaimedNotifications", "weigh"]

#: The most bytes that one queue, or the store, may hold, because peers choose how much they send.
ROOM = 16 << 20
#: The bytes that one notification costs beside its topic and payload.
OVERHEAD = 256


def weigh(topic: str, payload: bytes) -> int:
    """Return the bytes that one notification takes up."""
    return OVERHEAD + len(topic) + len(payload)


class _Share:
    """The messages of one peer, numbered, in the order of arrival and by topic.

    They are kept as plain tuples of text and bytes, which Python's garbage collector stops tracking.  Thousands of
    `Notification` objects would make its full collections longer, at a time that the sender chooses.
    """

    __slots__ = ("_notes", "_topics", "number", "peer", "weight")

    def __init__(self, number: int, peer: Peer) -> None:
        self.number = number
        self.peer = peer
        self.weight = 0
        self._notes: OrderedDict[int, tuple[str, bytes, int]] = OrderedDict()
        self._topics: dict[str, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, number: int, topic: str, payload: bytes, weight: int) -> None:
        self._notes[number] = topic, payload, weight
        self._topics.setdefault(topic, deque()).append(number)
        self.weight += weight

    def drop_oldest(self) -> int:
        """Drop the oldest message, and return its weight."""
        _, (topic, _, weight) = self._notes.popitem(last=False)
        numbers = self._topics[topic]
        numbers.popleft()
        if not numbers:
            del self._topics[topic]
        self.weight -= weight
        return weight

    def take(self, topic: str | None) -> Iterator[tuple[int, Peer, str, bytes]]:
        """Remove and yield the messages of one topic, or all, with their numbers."""
        for name in [topic] if topic is not None else list(self._topics):
            for number in self._topics.pop(name, ()):
                _, payload, weight = self._notes.pop(number)
                self.weight -= weight
                yield number, self.peer, name, payload


class UnclaimedNotifications:
    """The messages that arrived for topics without a subscriber.

    When the store is full, the peer that takes up most of it loses its oldest message, so that no peer can displace the
    messages of others.  A message takes up its bytes or its share of the number of messages, whichever is more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._least = max(OVERHEAD, ROOM // limit)
        self._shares: dict[Peer, _Share] = {}
        self._by_number: dict[int, _Share] = {}
        self._numbers = count()
        self._held = self._weight = 0
        # A heap of weights and shares, heaviest first, each pair in one number.  Outdated entries are skipped.
        self._heaviest: list[int] = []

    def hold(self, peer: Peer, topic: str, payload: bytes) -> int:
        """Keep one message.

        :return: the number of messages that were dropped for it.
        """
        share = self._shares.get(peer)
        number = next(self._numbers)
        if share is None:
            share = self._shares[peer] = self._by_number[number] = _Share(number, peer)
        weight = max(self._least, weigh(topic, payload))
        share.add(number, topic, payload, weight)
        self._held += 1
        self._weight += weight
        self._note(share)
        dropped = 0
        while self._held > self._limit or self._weight > ROOM:
            self._drop(self._greediest())
            dropped += 1
        return dropped

    def take(self, topic: str | None) -> Iterable[tuple[Peer, str, bytes]]:
        """Remove and return the messages of one topic, or all, in the order of arrival."""
        shares = list(self._shares.values())
        taken = sorted((note for share in shares for note in share.take(topic)), key=itemgetter(0))
        self._held -= len(taken)
        self._weight = sum(share.weight for share in shares)
        for share in shares:
            self._forget_if_empty(share)
        self._note_all()
        return (note[1:] for note in taken)

    def clear(self) -> None:
        """Forget all messages."""
        self._shares.clear()
        self._by_number.clear()
        self._heaviest.clear()
        self._held = self._weight = 0

    def _drop(self, share: _Share) -> None:
        self._weight -= share.drop_oldest()
        self._held -= 1
        self._forget_if_empty(share)
        self._note(share)

    def _forget_if_empty(self, share: _Share) -> None:
        if not share:
            del self._shares[share.peer], self._by_number[share.number]

    def _note(self, share: _Share) -> None:
        """Record that the weight of a share has changed."""
        heappush(self._heaviest, _key(share))
        if len(self._heaviest) > 64 + 4 * len(self._shares):
            self._note_all()

    def _note_all(self) -> None:
        self._heaviest = [_key(share) for share in self._shares.values()]
        heapify(self._heaviest)

    def _greediest(self) -> _Share:
        while True:
            weight, number = divmod(-self._heaviest[0], 1 << 64)
            share = self._by_number.get(number)
            if share is not None and share.weight == weight:
                return share
            heappop(self._heaviest)


def _key(share: _Share) -> int:
    return -(share.weight << 64 | share.number)
