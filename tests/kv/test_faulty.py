"""Streams over a driver with faults: late, reordered, failing and broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy
import pytest

import hixl_async as hx
from hixl_async.testing import FaultPlan, engine_pair, faulty

LAYOUT = hx.kv.Layout(layers=6, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16)
BLOCKS = 48


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
        hx.kv.Pool(pair.left, LAYOUT, blocks=BLOCKS, access="none", shuffle=1) as source,
        hx.kv.Pool(pair.right, LAYOUT, blocks=BLOCKS, shuffle=2) as target,
    ):
        yield Scene(plan, source, target, pair.peer)
        plan.clear()
        plan.release()
    for pool in (source, target):
        assert pool.statistics() == (BLOCKS, 0, 0, 0)


def array(pool: hx.kv.Pool) -> numpy.ndarray[Any, Any]:
    return pool.region.numpy("uint8", (LAYOUT.layers, 2, BLOCKS, LAYOUT.block_bytes))


async def test_late_writes_reach_no_blocks_of_other_requests(scene: Scene) -> None:
    scene.plan.late(verb="write", count=3)
    array(scene.source)[:] = 1
    source = await scene.source.reserve(blocks=8)
    async with scene.target.reserve(blocks=8) as blocks:
        out = await scene.source.open_stream(scene.peer, blocks.ticket())
        for layer in range(LAYOUT.layers):
            out.push(layer, source[layer], ready=(lambda: False) if layer > 2 else None)
        await blocks.stream().abort("the client went away")
    assert scene.target.statistics() == (BLOCKS - 8, 0, 8, 0)
    everything = asyncio.ensure_future(scene.target.reserve(blocks=BLOCKS))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(everything), 0.1)
    await source.aclose()
    assert scene.source.statistics().quarantined == 8
    scene.plan.release()
    await asyncio.wait_for(blocks.fenced(), 5)
    async with asyncio.timeout(5):
        mine = await everything
    assert scene.plan.counts.landed_late == 3
    array(scene.target)[:] = 2
    with pytest.raises(hx.StreamAbortedError, match="client went away"):
        await out.finished()
    assert (array(scene.target) == 2).all()
    await mine.aclose()


async def test_a_layer_is_complete_when_it_lands(scene: Scene) -> None:
    scene.plan.reorder(window=3, within=0.002).delay(0, 0.002, part="note", chance=0.5).delay(0, 0.002, chance=0.5)

    async def request(number: int) -> None:
        async with scene.target.reserve(blocks=3) as blocks, scene.source.reserve(blocks=3) as source:
            array(scene.source)[:, :, source.ids] = number
            async with scene.source.open_stream(scene.peer, blocks.ticket()) as out:
                for layer in range(LAYOUT.layers):
                    out.push(layer, source[layer])
                async for layer in blocks.stream():
                    assert (array(scene.target)[layer, :, blocks.ids] == number).all()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(1, 60)))


async def test_a_failed_transfer_aborts_both_sides(scene: Scene) -> None:
    scene.plan.fail("system", native=5, nth=3, verb="write")
    async with scene.target.reserve(blocks=4) as blocks, scene.source.reserve(blocks=4) as source:
        out = await scene.source.open_stream(scene.peer, blocks.ticket())
        for layer in range(3):
            out.push(layer, source[layer])
        with pytest.raises(hx.StreamAbortedError, match="layer 2 failed") as caught:
            await out.finished()
        assert isinstance(caught.value.__cause__, hx.TransferError)
        with pytest.raises(hx.StreamAbortedError, match="layer 2 failed"):
            await blocks.stream().finished()
        await blocks.fenced()
        await blocks.stream().layer(1)
        with pytest.raises(hx.StreamAbortedError):
            blocks.stream().check(2)


async def test_a_full_queue_of_the_driver_aborts(scene: Scene) -> None:
    scene.plan.busy(nth=1)
    async with scene.target.reserve(blocks=4) as blocks, scene.source.reserve(blocks=4) as source:
        out = await scene.source.open_stream(scene.peer, blocks.ticket())
        out.push(0, source[0])
        with pytest.raises(hx.StreamAbortedError, match="BusyError"):
            await out.finished()
        await blocks.fenced()


async def test_a_broken_link_ends_both_sides(scene: Scene) -> None:
    scene.plan.drop_peer(nth=2)
    async with scene.target.reserve(blocks=4) as blocks, scene.source.reserve(blocks=4) as source:
        out = await scene.source.open_stream(scene.peer, blocks.ticket())
        for layer in range(2):
            out.push(layer, source[layer])
        async with asyncio.timeout(2):
            with pytest.raises((hx.PeerLostError, hx.StreamAbortedError)):
                await out.finished()
            with pytest.raises((hx.PeerLostError, hx.StreamAbortedError)):
                await blocks.stream().finished()


@pytest.mark.parametrize("seed", range(4))
async def test_random_faults_and_aborts_leave_no_block_behind(scene: Scene, seed: int) -> None:
    random = numpy.random.default_rng(seed)
    scene.plan.delay(0, 0.003, chance=0.5).fail("system", chance=0.03, verb="write").pending(chance=0.5)

    async def request(number: int) -> None:
        abort = random.integers(0, 3)
        async with scene.source.reserve(blocks=3) as source, scene.target.reserve(blocks=3) as blocks:
            array(scene.source)[:, :, source.ids] = number
            out = await scene.source.open_stream(scene.peer, blocks.ticket())
            try:
                for layer in range(LAYOUT.layers):
                    out.push(layer, source[layer])
                    await asyncio.sleep(random.uniform(0, 0.002))
                    if abort and random.random() < 0.1:
                        await (out.abort() if abort == 1 else blocks.stream().abort())
            except hx.StreamAbortedError:
                pass
            async for layer in _until_failure(blocks.stream()):
                assert (array(scene.target)[layer, :, blocks.ids] == number).all()
            await out.aclose()
            ours, theirs = blocks.stream().outcome, out.outcome
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
