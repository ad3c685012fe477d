"""Signs of life: sent while a lease depends on them, by one timer for all leases of a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hixl_async import InvalidArgumentError
from hixl_async.engine.heartbeats import Heartbeats
from hixl_async.testing import engine_pair, until


class Timer:
    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self.seconds, self.work, self.cancelled = seconds, work, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """A loop as far as timers need it: each runs when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []
        self.sent = 0
        self.heartbeats = Heartbeats(self, self.send)  # type: ignore[arg-type]

    def call_later(self, seconds: float, work: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, work))
        return self.timers[-1]

    def send(self) -> None:
        self.sent += 1

    @property
    def pending(self) -> list[float]:
        return [timer.seconds for timer in self.timers if not timer.cancelled]

    def ring(self) -> None:
        """Let the only timer ring."""
        (timer,) = (timer for timer in self.timers if not timer.cancelled)
        self.timers.remove(timer)
        timer.work()


def test_the_shortest_interval_counts_and_one_timer_serves_all() -> None:
    clock = Clock()
    for interval in (3.0, 1.0, 2.0, 1.0):
        clock.heartbeats.begin(interval)
        assert len(clock.pending) == 1
    assert clock.pending == [1.0]
    clock.ring()
    assert (clock.sent, clock.pending) == (1, [1.0])
    clock.heartbeats.end(1.0)
    clock.heartbeats.end(1.0)
    clock.ring()
    assert (clock.sent, clock.pending) == (2, [2.0])


def test_leases_that_come_and_go_do_not_postpone_it() -> None:
    clock = Clock()
    clock.heartbeats.begin(1.0)
    first = clock.timers[0]
    for _ in range(3):
        clock.heartbeats.begin(1.0)
        clock.heartbeats.end(1.0)
    assert clock.timers == [first]
    assert not first.cancelled


def test_nothing_is_sent_once_no_lease_depends_on_it() -> None:
    clock = Clock()
    clock.heartbeats.begin(1.0)
    clock.heartbeats.end(1.0)
    assert clock.pending == []
    with pytest.raises(InvalidArgumentError, match="interval must be that of a call to undo, not 1"):
        clock.heartbeats.end(1.0)


def test_nothing_is_sent_to_a_peer_that_is_down() -> None:
    clock = Clock()
    clock.heartbeats.begin(1.0)
    clock.heartbeats.stop()
    clock.heartbeats.begin(0.5)
    assert clock.pending == []
    clock.heartbeats.end(0.5)
    clock.heartbeats.end(1.0)


async def test_the_other_side_hears_them() -> None:
    async with engine_pair() as pair:
        before = pair.back.heard_at
        pair.peer.begin_heartbeats(0.001)
        pair.peer.begin_heartbeats(60)
        await until(lambda: pair.back.heard_at > before)
        pair.peer.end_heartbeats(0.001)
        pair.peer.end_heartbeats(60)


async def test_any_message_counts() -> None:
    async with engine_pair() as pair:
        before = pair.back.heard_at
        while pair.back.heard_at == before:  # clocks tick in steps
            pair.peer.post("nobody", {})
            await asyncio.sleep(0)


@pytest.mark.parametrize("interval", [0, -1, True, "1", float("inf"), float("nan")])
async def test_intervals_that_are_none(interval: object) -> None:
    async with engine_pair() as pair:
        for call in (pair.peer.begin_heartbeats, pair.peer.end_heartbeats):
            with pytest.raises(InvalidArgumentError, match="interval must be a positive number of seconds"):
                call(interval)  # type: ignore[arg-type]
