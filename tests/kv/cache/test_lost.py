"""Peers that are killed, stopped, lost or slow in the middle of pulls and pushes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

import hixl_async as hx
from hixl_async.kv.cache import Cache, CacheManager
from hixl_async.testing import FaultPlan, PeerProcess, faulty, peer_process, until

from .conftest import fill, linked, tokens_of
from .shapes import LAYERS, LEFT, RIGHT, view

WORKER = "tests.kv.cache.worker:"


class Scene(NamedTuple):
    """Cluster 1 here, and cluster 2 in a process."""

    manager: CacheManager
    cache: Cache
    process: PeerProcess


@asynccontextmanager
async def scene(*, lease: float = 10.0, drivers: object = None) -> AsyncIterator[Scene]:
    async with (
        peer_process() as process,
        hx.Engine("127.0.0.1:0", name="here", drivers=drivers) as engine,  # type: ignore[arg-type]
        CacheManager(engine, 1, lease=lease) as manager,
    ):
        await process.run(WORKER + "manage", value=7)
        cache = manager.allocate_cache(view(), blocks_cache_key=LEFT)
        await process.run(WORKER + "link", address=engine.address)
        yield Scene(manager, cache, process)


async def test_two_processes() -> None:
    async with scene() as here:
        arrival = here.cache.expect(1)
        await here.process.run(WORKER + "push", req_id=1, layers=[0, 1, 2, 3], until=4)
        await arrival.finished()
        assert (tokens_of(here.cache, [5], (0, 4)) == 7).all()
        task = here.manager.pull_blocks(RIGHT, here.cache, [0, 1], [8, 9])
        assert [layer async for layer in task] == list(range(LAYERS))
        assert (tokens_of(here.cache, [8, 9], (0, 8)) == 7).all()
        assert await here.process.run(WORKER + "pull", wait=True) == ""
        await here.process.run(WORKER + "close")
        await until(lambda: not here.manager.links)


async def test_killing_the_peer_in_its_push() -> None:
    async with scene() as here:
        arrival = here.cache.expect(1)
        await here.process.run(WORKER + "push", req_id=1, layers=[0, 1, 2, 3], until=2)
        await arrival.layer(1)
        here.process.kill()
        with pytest.raises(hx.PeerLostError) as caught:
            await arrival.finished()
        assert caught.value.peer == "child"
        await arrival.layer(0)
        assert (tokens_of(here.cache, [5], (0, 4), [0, 1]) == 7).all()
        await arrival.drained()  # a dead process writes nothing
        async with here.cache.lock():
            pass
        with pytest.raises(hx.PeerDownError, match="cluster 2 is down"):
            here.manager.pull_blocks(RIGHT, here.cache, [0], [0])


async def test_a_stopped_process_that_pushes_keeps_its_blocks() -> None:
    async with scene() as here:
        arrival = here.cache.expect(1)
        await here.process.run(WORKER + "push", req_id=1, layers=[0, 1, 2, 3], until=2)
        await arrival.layer(1)
        here.process.stop()
        aborting = asyncio.ensure_future(arrival.abort("the client left"))
        with pytest.raises(hx.StreamAbortedError, match="the client left"):
            await arrival.finished()
        locked = asyncio.ensure_future(here.cache.lock([5]).__aenter__())
        await asyncio.wait([locked, aborting], timeout=0.05)
        assert not locked.done(), "it may still write"
        assert not aborting.done()
        with pytest.raises(hx.BusyError):
            here.manager.push_blocks(RIGHT, here.cache, [5], [0])
        here.process.resume()
        await locked
        await aborting


async def test_killing_the_peer_while_both_sides_pull() -> None:
    plan = FaultPlan()
    async with scene(drivers=faulty("shm", plan)) as here:
        plan.hold(verb="read")
        pull = here.manager.pull_blocks(RIGHT, here.cache, [3], [5])
        await until(lambda: plan.counts.holding)
        async with here.cache.lock([3]):
            assert await here.process.run(WORKER + "pull", wait=True) == "BusyError"
        await here.process.run(WORKER + "pull", wait=False)
        here.process.kill()
        with pytest.raises(hx.PeerLostError):
            await pull
        plan.clear().release()
        await pull.drained()
        async with here.cache.lock():
            pass


async def test_a_transfer_that_takes_too_long() -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan)) as pair:
        await pair.left.pull_blocks(RIGHT, pair.source, [0], [1])  # which imports the cache
        plan.hold(verb="read")
        pull = pair.left.pull_blocks(RIGHT, pair.source, [0], [1], timeout=0.3)
        await until(lambda: plan.counts.holding)
        with pytest.raises(hx.TransferTimeoutError, match="did not end within its timeout of 0.3 s"):
            await pull
        with pytest.raises(hx.TransferTimeoutError):
            await pull.layer(0)
        with pytest.raises(hx.BusyError):
            pair.left.push_blocks(RIGHT, pair.source, [1], [0])
        plan.clear().release()
        await pull.drained()
        async with pair.source.lock(), pair.target.lock():
            pass


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_a_transfer_that_fails(verb: str) -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan)) as pair:
        fill(pair.target, 1)
        before = tokens_of(pair.target, [7], (0, 4))
        plan.fail(nth=3, verb=verb)  # type: ignore[arg-type]
        if verb == "read":
            pull = pair.left.pull_blocks(RIGHT, pair.source, [7], [1])
            with pytest.raises(hx.TransferError):
                _ = [layer async for layer in pull]
            for layer in pull.landed:
                assert (tokens_of(pair.source, [1], (0, 4), [layer]) == before[layer]).all()
            return
        arrival = pair.target.expect(1)
        push = pair.left.push_blocks(RIGHT, pair.source, [1], [7], req_id=1)
        with pytest.raises(hx.TransferError):
            await push
        with pytest.raises(hx.StreamAbortedError):
            await arrival.finished()
        assert 2 not in arrival.landed
        await arrival.drained()


async def test_late_and_reordered_transfers_are_right() -> None:
    plan = FaultPlan(3)
    async with linked(faulty("shm", plan)) as pair:
        fill(pair.target, 1)
        plan.reorder(window=3, within=0.002).delay(0, 0.002, chance=0.5).delay(0, 0.002, part="note", chance=0.5)

        async def request(number: int) -> None:
            arrival = pair.target.expect(number, blocks=[number])
            push = pair.left.push_blocks(RIGHT, pair.source, [number], [number], req_id=number)
            async for layer in arrival:
                expected = tokens_of(pair.source, [number], (0, 4), [layer])
                assert (tokens_of(pair.target, [number], (0, 4), [layer]) == expected).all()
            await arrival.finished()
            await push
            pull = pair.left.pull_blocks(RIGHT, pair.source, [number], [15 - number])
            async for layer in pull:
                expected = tokens_of(pair.target, [number], (0, 4), [layer])
                assert (tokens_of(pair.source, [15 - number], (0, 4), [layer]) == expected).all()

        await asyncio.gather(*map(request, range(8)))
        plan.clear()


async def test_a_failure_that_no_one_sees_is_reported(loop_errors: list[dict[str, Any]]) -> None:
    async with linked() as pair:
        task = pair.left.push_blocks(RIGHT, pair.source, [0], [1], req_id="unexpected")
        await task.drained()
        assert task.done()
        del task
        gc.collect()
        (report,) = loop_errors
        assert "never retrieved" in report["message"]
        assert isinstance(report["exception"], hx.TicketError)
        loop_errors.clear()
