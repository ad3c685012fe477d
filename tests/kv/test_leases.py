"""Leases: who is heard keeps them, however long its work takes; who is silent loses them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from passes import settle

import hixl_async as hx
from hixl_async.kv import Pool, View, shards
from hixl_async.kv.lease import GRACE, Lease
from hixl_async.testing import engine_pair

from .conftest import GROUP, LAYERS, VIEW, Pair, push_all


class Timer:
    def __init__(self, at: float, work: Callable[[], None]) -> None:
        self.at, self.work, self.cancelled = at, work, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """A loop whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, work: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + seconds, work))
        return self.timers[-1]

    @property
    def due(self) -> list[float]:
        return [timer.at for timer in self.timers if not timer.cancelled]

    def ring(self, late: float = 0.0) -> None:
        """Let the only timer ring, perhaps late."""
        (timer,) = (timer for timer in self.timers if not timer.cancelled)
        self.timers.clear()
        self.now = timer.at + late
        timer.work()


class Leased:
    def __init__(self) -> None:
        self.clock = Clock()
        self.heard_at = self.clock.now
        self.expired = 0
        self.lease = Lease(self.clock, 10.0, lambda: self.heard_at, self.expire)  # type: ignore[arg-type]
        self.lease.begin()

    def expire(self) -> None:
        self.expired += 1


def test_who_is_heard_keeps_the_lease() -> None:
    leased = Leased()
    for heard_at in (103.0, 112.0, 121.5):
        leased.heard_at = heard_at
        leased.clock.ring()
        assert leased.clock.due == [heard_at + 10]
    assert not leased.expired


def test_silence_ends_it_after_a_grace() -> None:
    leased = Leased()
    leased.clock.ring()
    assert leased.clock.due == [110 + 10 * GRACE]
    assert not leased.expired
    leased.clock.ring()
    assert leased.expired == 1
    assert leased.clock.due == []


def test_a_busy_owner_reads_first() -> None:
    """The timer of a loop that was busy rings before the loop has read what arrived meanwhile."""
    leased = Leased()
    leased.clock.ring(late=25)
    assert not leased.expired
    leased.heard_at = leased.clock.now
    leased.clock.ring()
    assert not leased.expired
    assert leased.clock.due == [leased.heard_at + 10]
    # The next silence has a grace of its own.
    leased.clock.ring()
    assert not leased.expired
    leased.clock.ring()
    assert leased.expired == 1


def test_an_end_stops_the_timer_and_a_second_beginning_changes_nothing() -> None:
    leased = Leased()
    leased.lease.begin()
    assert leased.clock.due == [110]
    leased.lease.end()
    leased.lease.end()
    assert leased.clock.due == []


# ---- streams on real engines, whose peers send signs of life

SHORT = 0.2  # seconds


async def test_pushes_that_wait_behind_a_slow_one_keep_the_lease() -> None:
    group = hx.kv.Group.attention(200, kv_heads=1, head_dim=4, dtype="float16")
    view = View.ordered(group, blocks=4, block_tokens=4)
    async with (
        engine_pair() as pair,
        Pool(pair.left, view, name="p", access="none") as p,
        Pool(pair.right, view) as d,
        p.reserve(blocks=2) as source,
        d.reserve(blocks=2) as blocks,
    ):
        stream, computed = blocks.stream(lease=SHORT), threading.Event()
        async with p.open_stream(pair.peer, stream.ticket()) as out:
            out.push(0, source, ready=computed)
            for layer in range(1, 200):
                out.push(layer, source)
            await asyncio.sleep(3 * SHORT)
            assert stream.outcome is None
            computed.set()
        assert await stream.finished() == b""
        assert len(stream.landed) == 200


async def test_a_sender_that_has_ended_waits_for_the_others_beyond_its_timeout() -> None:
    """A stage of a pipeline ends early, and the next one is still computing."""
    stages = shards(LAYERS, stages=2)
    views = [View.ordered(GROUP, blocks=4, block_tokens=4, layers=shard.layers) for shard in stages]
    async with (
        engine_pair() as pair,
        Pool(pair.left, views[0], name="one", access="none") as one,
        Pool(pair.left, views[1], name="two", access="none") as two,
        Pool(pair.right, VIEW) as target,
        target.reserve(blocks=2) as blocks,
        one.reserve(blocks=2) as left,
        two.reserve(blocks=2) as right,
    ):
        stream = blocks.stream(sources=stages, lease=SHORT)
        early = one.open_stream(pair.peer, stream.ticket(), timeout=SHORT)
        late = two.open_stream(pair.peer, stream.ticket(), timeout=SHORT)
        for layer in stages[0].layers:
            early.push(layer, left)
        ending = asyncio.ensure_future(early.finish(b"early"))
        await asyncio.sleep(3 * SHORT)
        assert not ending.done()
        for layer in stages[1].layers:
            late.push(layer, right)
        await asyncio.gather(late.finish(), ending)
        assert await stream.finished() == b"early"


# ---- the order of events, on fakes


async def test_signs_of_life_are_sent_from_the_opening_to_the_end(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream(lease=6)
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            assert pair.to_d.heartbeats == [2.0]
            push_all(out, source)
        assert pair.to_d.heartbeats == []


@pytest.mark.parametrize("way", ["refused", "aborted", "lost"])
async def test_signs_of_life_end_with_every_end(pair: Pair, way: str) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        ticket = stream.ticket()
        if way == "refused":
            await stream.abort()
        out = pair.source.open_stream(pair.to_d, ticket)
        await settle()
        if way == "aborted":
            await out.abort()
        elif way == "lost":
            pair.to_p.lose(dead=True)
            pair.to_d.lose(dead=True)
        await out.aclose()
        assert pair.to_d.heartbeats == pair.to_p.heartbeats == []
