"""What protects blocks that are in use, and what happens to pulls whose blocks are not kept."""

from __future__ import annotations

import asyncio

import pytest

import hixl_async as hx
from hixl_async.kv import Group, View
from hixl_async.kv.cache import CacheKey, CacheManager
from hixl_async.kv.cache.holds import Holds, Use
from hixl_async.testing import FaultPlan, faulty, until

from .conftest import Managers, fill, linked, tokens_of
from .shapes import LEFT, RIGHT, view


async def test_readers_share_and_writers_share_but_not_with_each_other() -> None:
    holds = Holds(asyncio.get_running_loop(), "cache 0")
    reader = holds.take(Use.READ, [1, 2], "a pull")
    holds.give(holds.take(Use.READ, [2, 3], "another"))
    with pytest.raises(hx.BusyError, match="blocks 2 of cache 0 are being read by a pull"):
        holds.take(Use.WRITE, [2, 3], "a push")
    writer = holds.take(Use.WRITE, [3, 4], "a push")
    holds.give(holds.take(Use.WRITE, [4, 5], "another"))
    with pytest.raises(hx.BusyError, match="being written"):
        holds.take(Use.READ, [4], "a pull")
    holds.give(reader)
    holds.give(reader)
    holds.give(writer)
    assert len(holds) == 0


async def test_a_lock_refuses_at_once_and_waits_for_those_before_it() -> None:
    holds = Holds(asyncio.get_running_loop(), "cache 0")
    reader = holds.take(Use.READ, [1], "a pull")
    order = []

    async def locked(name: str, blocks: list[int]) -> None:
        async with holds.lock(blocks):
            order.append(name)

    tasks = [asyncio.ensure_future(locked(name, blocks)) for name, blocks in (("a", [1, 2]), ("b", [2]), ("c", [3]))]
    await tasks[2]
    with pytest.raises(hx.BusyError, match="locked by the program"):
        holds.take(Use.READ, [1], "another")
    assert order == ["c"]
    given_up = asyncio.ensure_future(locked("d", [1]))
    await asyncio.wait([given_up], timeout=0.01)
    given_up.cancel()
    holds.give(reader)
    await asyncio.gather(*tasks[:2])
    assert order == ["c", "a", "b"]
    await asyncio.wait([given_up])
    holds.give(holds.take(Use.READ, [1], "another"))


async def test_the_program_locks_blocks_that_it_writes(managers: Managers) -> None:
    async with managers.source.lock([3]):
        with pytest.raises(hx.BusyError, match="blocks 3 of cache 0 of cluster 1 are locked"):
            await managers.right.pull_blocks(LEFT, managers.target, [2, 3], [0, 1])
        with pytest.raises(hx.BusyError, match="are locked"):
            managers.left.push_blocks(RIGHT, managers.source, [3], [0])
        await managers.right.pull_blocks(LEFT, managers.target, [2], [0])
    await managers.right.pull_blocks(LEFT, managers.target, [2, 3], [0, 1])
    async with managers.source.lock():
        with pytest.raises(hx.BusyError):
            await managers.right.pull_blocks(LEFT, managers.target, [9], [0])
    with pytest.raises(hx.RangeError, match="block 16 does not exist"):
        managers.source.lock([16])


async def test_a_pull_keeps_the_owner_from_writing() -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan)) as pair:
        fill(pair.target, 4)
        plan.hold(verb="read")
        pull = pair.left.pull_blocks(RIGHT, pair.source, [3], [5])
        await until(lambda: plan.counts.holding)
        expected = tokens_of(pair.target, [3], (0, 4))
        locked = asyncio.ensure_future(pair.target.lock([3]).__aenter__())
        await asyncio.wait([locked], timeout=0.02)
        assert not locked.done()
        with pytest.raises(hx.BusyError, match="being written"):
            pair.left.push_blocks(RIGHT, pair.source, [5], [0])
        plan.clear().release()
        await pull
        await locked
        assert (tokens_of(pair.source, [5], (0, 4)) == expected).all()


async def test_a_silent_peer_loses_its_blocks_and_never_gets_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the peer's process had been stopped between two reads: the owner goes on, and the peer's pull fails."""
    plan = FaultPlan()
    async with linked(faulty("shm", plan), lease=0.05) as pair:
        plan.hold(verb="read")
        monkeypatch.setattr(hx.Peer, "begin_heartbeats", lambda *_: None)
        monkeypatch.setattr(hx.Peer, "end_heartbeats", lambda *_: None)
        pair.right.add_cache_key(CacheKey(2, 1), pair.target, 3)
        pull = pair.left.pull_cache(CacheKey(2, 1), pair.source, 5)
        await until(lambda: plan.counts.holding)
        async with pair.target.lock([3]):
            fill(pair.target, 9)  # other data
            plan.clear().release()
            with pytest.raises(hx.StreamAbortedError, match="did not keep its blocks for this pull until layer 0"):
                await pull
        assert pull.landed == ()
        waiting = asyncio.ensure_future(pair.right.pulled(CacheKey(2, 1)))
        await asyncio.wait([waiting], timeout=0.01)
        assert not waiting.done(), "no one has pulled it"
        await pair.left.pull_cache(CacheKey(2, 1), pair.source, 5)
        await waiting


async def test_heartbeats_keep_the_blocks_of_a_slow_pull() -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan), lease=0.06) as pair:
        plan.hold(verb="read")
        pull = pair.left.pull_blocks(RIGHT, pair.source, [3], [5])
        await until(lambda: plan.counts.holding)
        locked = asyncio.ensure_future(pair.target.lock([3]).__aenter__())
        heard = set()
        (back,) = pair.right.engine.peers
        # So many signs of life take longer than the lease.
        await until(lambda: heard.add(back.heard_at) or len(heard) > 6)  # type: ignore[func-returns-value]
        assert not locked.done()
        plan.clear().release()
        await pull
        await locked


async def test_a_cache_that_is_freed(managers: Managers) -> None:
    cache = managers.left.allocate_cache(view(), cache_keys=[CacheKey(1, 1)])
    waiting = asyncio.ensure_future(managers.left.pulled(CacheKey(1, 1)))
    await asyncio.wait([waiting], timeout=0.01)
    await managers.right.pull_cache(CacheKey(1, 1), managers.target)
    await waiting
    await cache.aclose()
    for call in (
        lambda: managers.left.push_blocks(RIGHT, cache, [0], [0]),
        cache.lock,
        lambda: cache.expect(1),
        lambda: managers.left.add_cache_key(CacheKey(1, 2), cache, 0),
    ):
        with pytest.raises(hx.ClosedError, match="is closed"):
            call()
    with pytest.raises(hx.TicketError, match="not known here"):
        await managers.right.pull_cache(CacheKey(1, 1), managers.target)
    with pytest.raises(hx.TicketError, match="not known here"):
        await managers.left.pulled(CacheKey(1, 1))


async def test_closing_a_cache_waits_for_pulls_that_have_begun() -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan)) as pair:
        cache = pair.right.allocate_cache(view(), cache_keys=[CacheKey(2, 1)])
        fill(cache, 6)
        expected = tokens_of(cache, [0], (0, 4))
        plan.hold(verb="read")
        pull = pair.left.pull_cache(CacheKey(2, 1), pair.source)
        await until(lambda: plan.counts.holding)
        closing = asyncio.ensure_future(cache.aclose())
        await asyncio.wait([closing], timeout=0.02)
        assert not closing.done()
        plan.clear().release()
        await pull
        await closing
        assert (tokens_of(pair.source, [0], (0, 4)) == expected).all()


async def test_a_cache_that_is_freed_in_a_pull_without_waiting() -> None:
    plan = FaultPlan()
    group = Group.attention(12, kv_heads=2, head_dim=8, dtype="float32")
    shape = View.ordered(group, "LP/BTH", blocks=4, block_tokens=4)
    async with linked(faulty("shm", plan)) as pair:
        cache, mine = pair.right.allocate_cache(shape, cache_keys=[CacheKey(2, 1)]), pair.left.allocate_cache(shape)
        fill(cache)
        expected = tokens_of(cache, [0], (0, 4))
        plan.hold(nth=1, verb="read")
        pull = pair.left.pull_cache(CacheKey(2, 1), mine)
        await until(lambda: plan.counts.holding)
        closing = asyncio.ensure_future(cache.aclose(timeout=0))
        [remotes] = pair.left._remotes._caches.values()
        await until(lambda: not remotes[cache.cache_id].alive)
        plan.clear().release()
        with pytest.raises(hx.StreamAbortedError, match="the peer closed its cache meanwhile"):
            await pull
        assert 0 < len(pull.landed) < 12
        for layer in pull.landed:
            assert (tokens_of(mine, [0], (0, 4), [layer]) == expected[layer]).all()
        await closing


async def test_closing_the_owner_in_a_pull(managers: Managers) -> None:
    third = hx.Engine("127.0.0.1:0", name="third")
    await third.open()
    manager = CacheManager(third, 3)
    cache = manager.allocate_cache(view(), cache_keys=[CacheKey(3, 1)])
    await managers.left.link_clusters({3: third.address})
    await managers.left.pull_cache(CacheKey(3, 1), managers.source)
    await manager.aclose()
    assert cache.closed
    with pytest.raises(hx.InvalidArgumentError, match="not linked with cluster 3"):
        managers.left.pull_cache(CacheKey(3, 1), managers.source)
    await third.aclose()
