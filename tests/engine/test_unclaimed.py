"""Unclaimed notifications: bounded, fair, and as fast with thousands of peers as with one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async.engine.unclaimed import OVERHEAD, ROOM, UnclaimedNotifications

PEERS: list[Any] = ["a", "b", "c", "d"]


class Model:
    """The same store, as simple as possible."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.notes: list[tuple[str, str, bytes]] = []
        self.since: dict[str, int] = {}  # since when each peer holds anything
        self.clock = 0

    def weight(self, peer: str) -> int:
        return sum(self._of(topic, payload) for sender, topic, payload in self.notes if sender == peer)

    def _of(self, topic: str, payload: bytes) -> int:
        return max(ROOM // self.limit, OVERHEAD + len(topic) + len(payload))

    def hold(self, peer: str, topic: str, payload: bytes) -> int:
        if not any(sender == peer for sender, _, _ in self.notes):
            self.since[peer] = self.clock
        self.clock += 1
        self.notes.append((peer, topic, payload))
        dropped = 0
        while len(self.notes) > self.limit or sum(map(self.weight, {sender for sender, _, _ in self.notes})) > ROOM:
            greediest = max(
                (sender for sender, _, _ in self.notes), key=lambda peer: (self.weight(peer), self.since[peer])
            )
            self.notes.remove(next(note for note in self.notes if note[0] == greediest))
            dropped += 1
        return dropped

    def take(self, topic: str | None) -> list[tuple[str, str, bytes]]:
        taken = [note for note in self.notes if topic in (None, note[1])]
        self.notes = [note for note in self.notes if note not in taken]
        return taken


@given(
    st.integers(1, 12),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(PEERS), st.sampled_from("xyz"), st.sampled_from([0, 1 << 10, 2 << 20, 9 << 20])),
            st.sampled_from(["x", "y", None]),
        ),
        max_size=60,
    ),
)
def test_it_equals_the_simple_model(limit: int, steps: list[Any]) -> None:
    unclaimed, model = UnclaimedNotifications(limit), Model(limit)
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            peer, topic, size = step
            payload = b"%d" % number + bytes(size)
            assert unclaimed.hold(peer, topic, payload) == model.hold(peer, topic, payload)
        else:
            assert list(unclaimed.take(step)) == model.take(step)
    assert list(unclaimed.take(None)) == model.take(None)


@pytest.mark.parametrize(("size", "number"), [(0, 6000), (60_000, 400)])
def test_a_flood_pushes_out_nothing_of_others(size: int, number: int) -> None:
    """Whether the room or the number of messages runs out."""
    unclaimed = UnclaimedNotifications(4096)
    for n in range(64):
        assert unclaimed.hold(PEERS[0], "theirs", b"%d" % n + bytes(60_000)) == 0
    dropped = sum(unclaimed.hold(PEERS[1], "flood", bytes(size)) for _ in range(number))
    assert dropped > 0
    assert len(list(unclaimed.take("theirs"))) == 64
    assert len(list(unclaimed.take("flood"))) == number - dropped


def test_thousands_of_peers_cost_no_more() -> None:
    """Peers that left may have messages here too; searching all of them for each message would hold up the loop."""
    unclaimed = UnclaimedNotifications(4096)
    for n in range(4000):
        unclaimed.hold(n, "once", b"")  # type: ignore[arg-type]
    looks = 0

    class Counting(dict[int, Any]):
        def get(self, number: int, default: Any = None) -> Any:
            nonlocal looks
            looks += 1
            return super().get(number, default)

    unclaimed._by_number = Counting(unclaimed._by_number)
    dropped = sum(unclaimed.hold(PEERS[0], "flood", b"") for _ in range(10_000))
    assert dropped > 9000
    assert looks < 4 * dropped
    assert len(unclaimed._heaviest) < 5 * 4096


def test_it_costs_the_garbage_collector_nothing() -> None:
    """Notifications that are never read must not make each full collection longer."""
    unclaimed = UnclaimedNotifications(4096)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(4000):
        unclaimed.hold(PEERS[0], "topic", b"%d" % number)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
