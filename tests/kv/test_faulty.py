"""Streams over a driver with faults: late, reordered, failing and broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy
import pytest

import hixl_async as hx
from hixl_async.testing import FaultPlan, engine_pair, faulty

LAYERS, BLOCKS = 6, 48
GROUP = hx.kv.Group.attention(LAYERS, kv_heads=2, head_dim=128, dtype="uint8")
VIEW = hx.kv.View.ordered(GROUP, blocks=BLOCKS, block_tokens=16)


class Scene(NamedTuple):
    """A producer whose driver follows `plan`, and a consumer."""

    plan: FaultPlan
    source: hx.kv.Pool
    target: hx.kv.Pool
    peer: hx.Peer


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    plan = FaultPlan(seed=11)
    async with (
        engine_pair(drivers=faulty("shm", plan)) as pair,
        hx.kv.Pool(pair.left, VIEW, access="none", shuffle=1) as source,
        hx.kv.Pool(pair.right, VIEW, shuffle=2) as target,
    ):
        yield Scene(plan, source, target, pair.peer)
        plan.clear()
        plan.release()
    for pool in (source, target):
        assert pool.statistics() == (BLOCKS, 0, 0, 0)


def array(pool: hx.kv.Pool) -> numpy.ndarray[Any, Any]:
    """Return a pool as an array: layer, keys or values, block, bytes."""
    return numpy.frombuffer(memoryview(pool.regions[0]), "uint8").reshape(LAYERS, 2, BLOCKS, -1)


async def test_late_writes_reach_no_blocks_of_other_requests(scene: Scene) -> None:
    scene.plan.late(verb="write", count=3)
    array(scene.source)[:] = 1
    source = await scene.source.reserve(blocks=8)
    async with scene.target.reserve(blocks=8) as blocks:
        stream = blocks.stream()
        out = await scene.source.open_stream(scene.peer, stream.ticket())
        for layer in range(LAYERS):
            out.push(layer, source, ready=(lambda: False) if layer > 2 else None)
        await stream.abort("the client went away")
    assert scene.target.statistics() == (BLOCKS - 8, 0, 8, 0)
    everything = asyncio.ensure_future(scene.target.reserve(blocks=BLOCKS))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(everything), 0.1)
    await source.aclose()
    assert scene.source.statistics().quarantined == 8
    scene.plan.release()
    await asyncio.wait_for(stream.drained(), 5)
    async with asyncio.timeout(5):
        mine = await everything
    assert scene.plan.counts.landed_late == 3
    array(scene.target)[:] = 2
    with pytest.raises(hx.StreamAbortedError, match="client went away"):
        await out.finish()
    assert (array(scene.target) == 2).all()
    await mine.aclose()


async def test_a_layer_is_complete_when_it_lands(scene: Scene) -> None:
    scene.plan.reorder(window=3, within=0.002).delay(0, 0.002, part="note", chance=0.5).delay(0, 0.002, chance=0.5)

    async def request(number: int) -> None:
        async with scene.target.reserve(blocks=3) as blocks, scene.source.reserve(blocks=3) as source:
            array(scene.source)[:, :, source.ids] = number
            stream = blocks.stream()
            async with scene.source.open_stream(scene.peer, stream.ticket()) as out:
                for layer in range(LAYERS):
                    out.push(layer, source)
                async for layer in stream:
                    assert (array(scene.target)[layer, :, blocks.ids] == number).all()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(1, 60)))


async def test_a_failed_transfer_aborts_both_sides(scene: Scene) -> None:
    scene.plan.fail("system", native=5, nth=3, verb="write")
    async with scene.target.reserve(blocks=4) as blocks, scene.source.reserve(blocks=4) as source:
        stream = blocks.stream()
        out = await scene.source.open_stream(scene.peer, stream.ticket())
        for layer in range(3):
            out.push(layer, source)
        with pytest.raises(hx.StreamAbortedError, match="layer 2 failed") as caught:
            await out.finish()
        assert isinstance(caught.value.__cause__, hx.TransferError)
        with pytest.raises(hx.StreamAbortedError, match="layer 2 failed"):
            await stream.finished()
        await stream.drained()
        await stream.layer(1)
        with pytest.raises(hx.StreamAbortedError):
            stream.check(2)


async def test_a_full_queue_of_the_driver_aborts(scene: Scene) -> None:
    scene.plan.busy(nth=1)
    async with scene.target.reserve(blocks=4) as blocks, scene.source.reserve(blocks=4) as source:
        stream = blocks.stream()
        out = await scene.source.open_stream(scene.peer, stream.ticket())
        out.push(0, source)
        with pytest.raises(hx.StreamAbortedError, match="BusyError"):
            await out.finish()
        await stream.drained()


async def test_a_broken_link_ends_both_sides(scene: Scene) -> None:
    scene.plan.drop_peer(nth=2)
    async with scene.target.reserve(blocks=4) as blocks, scene.source.reserve(blocks=4) as source:
        stream = blocks.stream()
        out = await scene.source.open_stream(scene.peer, stream.ticket())
        for layer in range(2):
            out.push(layer, source)
        async with asyncio.timeout(2):
            with pytest.raises((hx.PeerLostError, hx.StreamAbortedError)):
                await out.finish()
            with pytest.raises((hx.PeerLostError, hx.StreamAbortedError)):
                await stream.finished()


@pytest.mark.parametrize("seed", range(4))
async def test_random_faults_and_aborts_leave_no_block_behind(scene: Scene, seed: int) -> None:
    random = numpy.random.default_rng(seed)
    scene.plan.delay(0, 0.003, chance=0.5).fail("system", chance=0.03, verb="write").pending(chance=0.5)

    async def request(number: int) -> None:
        abort = random.integers(0, 3)
        async with scene.source.reserve(blocks=3) as source, scene.target.reserve(blocks=3) as blocks:
            array(scene.source)[:, :, source.ids] = number
            stream = blocks.stream()
            out = await scene.source.open_stream(scene.peer, stream.ticket())
            try:
                for layer in range(LAYERS):
                    out.push(layer, source)
                    await asyncio.sleep(random.uniform(0, 0.002))
                    if abort and random.random() < 0.1:
                        await (out.abort() if abort == 1 else stream.abort())
            except hx.StreamAbortedError:
                pass
            async for layer in _until_failure(stream):
                assert (array(scene.target)[layer, :, blocks.ids] == number).all()
            await out.aclose()
            ours, theirs = stream.outcome, out.outcome
            assert ours is not None
            assert theirs is not None
            assert ours.verdict is theirs.verdict

    async with asyncio.timeout(40):
        await asyncio.gather(*(request(number) for number in range(1, 100)))
        async with scene.target.reserve(blocks=BLOCKS), scene.source.reserve(blocks=BLOCKS):
            pass


async def _until_failure(stream: hx.kv.LayerStream) -> AsyncIterator[int]:
    layers = aiter(stream)
    while True:
        try:
            yield await anext(layers)
        except (StopAsyncIteration, hx.StreamAbortedError):
            return
