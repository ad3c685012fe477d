"""Expected pushes, layer by layer, and the synchronisers of those who push."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import hixl_async as hx
from hixl_async import kv
from hixl_async.kv.cache import CacheKeyByIdAndIndex
from hixl_async.testing import FaultPlan, faulty, until

from .conftest import Managers, fill, linked, tokens_of
from .shapes import LAYERS, LEFT, RIGHT, view


async def test_layers_arrive_as_they_are_computed(managers: Managers) -> None:
    computed = [threading.Event() for _ in range(LAYERS)]
    arrival = managers.target.expect(17, blocks=[5, 9])
    push = managers.left.push_blocks(RIGHT, managers.source, [3, 1], [5, 9], req_id=17, ready=dict(enumerate(computed)))
    landing = aiter(arrival)
    for layer, event in enumerate(computed):
        waiting = asyncio.ensure_future(anext(landing))
        pushed = asyncio.ensure_future(push.layer(layer))
        await asyncio.wait([waiting, pushed], timeout=0.01)
        assert not waiting.done()
        assert not pushed.done()
        fill(managers.source, layer)  # only now is the layer computed
        expected = tokens_of(managers.source, [3, 1], (0, 8), [layer])
        event.set()
        assert await waiting == layer
        await pushed
        assert (tokens_of(managers.target, [5, 9], (0, 8), [layer]) == expected).all()
    await arrival.finished()
    assert arrival.landed == push.landed == tuple(range(LAYERS))
    assert await push == sum(2 * 4 * 2 * 2 * 8 * 4 for _ in range(LAYERS))


def by_function(done: list[asyncio.Event]) -> Callable[[int], Any]:
    return lambda layer: done[layer].is_set()


def by_coroutine(done: list[asyncio.Event]) -> Callable[[int], Any]:
    async def wait(layer: int) -> None:
        await done[layer].wait()

    return wait


@pytest.mark.parametrize("kind", [by_function, by_coroutine])
async def test_a_synchroniser_is_a_function_of_the_layer(
    managers: Managers, kind: Callable[[list[asyncio.Event]], Callable[[int], Any]]
) -> None:
    done = [asyncio.Event() for _ in range(LAYERS)]
    arrival = managers.target.expect("r")
    push = managers.left.push_blocks(
        RIGHT, managers.source, [0], [1], layers=[2, 0, 3, 1], req_id="r", ready=kind(done)
    )
    done[0].set(), done[3].set()  # 2 comes first, in the order of `layers`
    await asyncio.wait([push._operation.task], timeout=0.01)
    assert push.landed == ()
    done[2].set()
    await arrival.layer(3)
    await push.layer(3)
    assert set(arrival.landed) == {2, 0, 3}
    assert push.landed == (2, 0, 3)
    done[1].set()
    await arrival.finished()
    await push


async def test_a_synchroniser_that_fails_ends_the_push_on_both_sides(managers: Managers) -> None:
    def ready(layer: int) -> bool:
        if layer == 2:
            raise ZeroDivisionError("the computation failed")
        return True

    arrival = managers.target.expect(1)
    push = managers.left.push_blocks(RIGHT, managers.source, [0], [1], req_id=1, ready=ready)
    with pytest.raises(hx.StreamAbortedError, match="the computation failed"):
        await arrival.finished()
    await arrival.layer(1)
    with pytest.raises(ZeroDivisionError):
        await push
    with pytest.raises(hx.InvalidArgumentError, match="no mark of layer 1"):
        await managers.left.push_blocks(RIGHT, managers.source, [0], [1], ready={0: None})
    with pytest.raises(hx.InvalidArgumentError, match="ready must be None, a mapping"):
        managers.left.push_blocks(RIGHT, managers.source, [0], [1], ready=[None])  # type: ignore[arg-type]


async def test_chunks_of_a_request(managers: Managers) -> None:
    arrival = managers.target.expect(1, blocks=[4, 2, 0])
    await managers.left.push_blocks(RIGHT, managers.source, [1, 2, 3], [4, 2, 0], tokens=(0, 5), req_id=1, last=False)
    assert arrival.landed == ()
    await managers.left.push_blocks(RIGHT, managers.source, [1, 2, 3], [4, 2, 0], tokens=(5, 11), req_id=1)
    await arrival.finished()
    assert (tokens_of(managers.target, [4, 2, 0], (0, 11)) == tokens_of(managers.source, [1, 2, 3], (0, 11))).all()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_several_ranks_bring_the_heads_of_a_layer(managers: Managers, replicas: int) -> None:
    ranks = 2 * replicas  # with four ranks two hold each head, and one of them sends it
    target = managers.right.allocate_cache(view("BLPTH"))
    key = CacheKeyByIdAndIndex(2, target.cache_id)
    sources = kv.shards(LAYERS, ranks=ranks)
    arrival = target.expect(1, sources=sources)
    for rank, shard in enumerate(sources):
        cache = managers.left.allocate_cache(view(rank=rank, ranks=ranks))
        head = shard.heads(cache.view.group.parts[0]).start
        for layer in range(LAYERS):
            cache.array(layer, "k")[:], cache.array(layer, "v")[:] = 10 + head, 20 + head
        await managers.left.push_blocks(key, cache, [3], [7], req_id=1)
        await until(lambda: not managers.right._owner.served)
        assert (len(arrival.landed) == LAYERS) == (rank >= replicas)
        assert arrival.waiting_for(0) == (() if rank >= replicas else (replicas,))
        assert (arrival._expectation.landings.ended) == (rank == ranks - 1), "all have to push, also who owes nothing"
    await arrival.finished()
    assert (target.array(2, "k")[7, :, 0] == 10).all()
    assert (target.array(2, "v")[7, :, 1] == 21).all()
    assert managers.left.engine.stats().bytes == 4 * 2 * 2 * 8 * 4 * LAYERS, "each head was sent once"


async def test_one_writer_must_hold_all_heads(managers: Managers) -> None:
    arrival = managers.target.expect(1)
    half = managers.left.allocate_cache(view(rank=1, ranks=2))
    with pytest.raises(hx.LayoutMismatchError, match="1 of the 2 heads"):
        await managers.left.push_blocks(RIGHT, half, [0], [1], req_id=1)
    await managers.left.push_blocks(RIGHT, half, [0], [1])  # which no one waits for
    with pytest.raises(hx.LayoutMismatchError, match="the senders hold"):
        managers.target.expect(2, sources=[half.view.shard])
    ours = managers.target.expect(3, sources=kv.shards(LAYERS, ranks=2))
    with pytest.raises(hx.TicketError, match="rank 0 of 1 is not a source"):
        await managers.left.push_blocks(RIGHT, managers.source, [0], [1], req_id=3)
    await arrival.abort(), await ours.abort()


async def test_stages_bring_their_layers_to_one_arrival(managers: Managers) -> None:
    arrival = managers.target.expect(1)
    for layers in ([2, 3], [0, 1]):
        stage = managers.left.allocate_cache(view(layers=layers))
        await managers.left.push_blocks(RIGHT, stage, [0], [1], req_id=1)
    await arrival.finished()
    assert set(arrival.landed[:2]) == {2, 3}


async def test_only_what_is_expected_may_come(managers: Managers) -> None:
    push, source = managers.left.push_blocks, managers.source
    with pytest.raises(hx.TicketError, match="request 1 is not expected here"):
        await push(RIGHT, source, [0], [1], req_id=1)
    arrival = managers.target.expect(1, blocks=[1, 2], layers=[0, 1])
    with pytest.raises(hx.RangeError, match="expects nothing in block 3"):
        await push(RIGHT, source, [0], [3], req_id=1)
    await push(RIGHT, source, [0], [1], req_id=1, layers=[0])
    with pytest.raises(hx.RangeError, match="layer 2 is not"):
        await arrival.layer(2)
    with pytest.raises(hx.RangeError, match="layer 3 is not"):
        arrival.waiting_for(3)
    assert arrival.waiting_for(1) == (0,)
    await push(RIGHT, source, [0], [2], req_id=1, layers=[1, 2])
    await arrival.finished()
    with pytest.raises(hx.TicketError, match="request 1 is not expected here: it has ended"):
        await push(RIGHT, source, [0], [1], req_id=1)


async def test_an_arrival_that_comes_too_late(managers: Managers) -> None:
    arrival = managers.target.expect(1, timeout=0.3)
    push = managers.left.push_blocks(RIGHT, managers.source, [0], [1], req_id=1, ready=lambda layer: layer == 0)
    with pytest.raises(hx.TransferTimeoutError, match="did not arrive within 0.3 s"):
        await arrival.layer(1)
    assert arrival.landed == (0,)
    with pytest.raises(hx.StreamAbortedError, match="did not arrive"):
        await push
    await arrival.drained()
    assert len(managers.target._store.holds) == 0


async def test_the_receiver_aborts_and_the_blocks_are_fenced() -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan)) as pair:
        arrival = pair.target.expect(1)
        plan.late(verb="write")
        push = pair.left.push_blocks(RIGHT, pair.source, [0], [1], req_id=1)
        await until(lambda: plan.counts.late == LAYERS)
        drained = asyncio.ensure_future(arrival.abort("the client left"))
        with pytest.raises(hx.StreamAbortedError, match="the client left"):
            await arrival.finished()
        with pytest.raises(hx.StreamAbortedError, match="the client left"):
            await push
        locked = asyncio.ensure_future(pair.target.lock([1]).__aenter__())
        await asyncio.wait([drained, locked], timeout=0.05)
        assert not drained.done(), "the writes may still land"
        assert not locked.done()
        plan.clear().release()
        await drained
        await locked
        assert (tokens_of(pair.target, [1], (0, 4)) == tokens_of(pair.source, [0], (0, 4))).all(), "they did"


async def test_the_sender_aborts(managers: Managers) -> None:
    arrival = managers.target.expect(1)
    push = managers.left.push_blocks(RIGHT, managers.source, [0], [1], req_id=1, ready=lambda layer: layer < 2)
    await arrival.layer(1)
    await push.abort("prefill failed")
    with pytest.raises(hx.StreamAbortedError, match="prefill failed"):
        await push
    with pytest.raises(hx.StreamAbortedError, match="prefill failed"):
        _ = [layer async for layer in arrival]
    await arrival.drained()


async def test_cancelling_the_wait_cancels_the_transfer(managers: Managers) -> None:
    arrival = managers.target.expect(1)
    push = managers.left.push_blocks(RIGHT, managers.source, [0], [1], req_id=1, ready=lambda layer: False)

    async def wait() -> int:
        return await push

    task = asyncio.ensure_future(wait())
    await asyncio.wait([task], timeout=0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert push.done()
    await push.drained()
    with pytest.raises(hx.StreamAbortedError, match="cancelled"):
        await arrival.finished()
    early = managers.right.pull_blocks(LEFT, managers.target, [0], [0])
    early._operation.task.cancel()  # before its first step
    with pytest.raises(asyncio.CancelledError):
        await early
    await early.drained()
    with pytest.raises(asyncio.CancelledError):
        await early.layer(0)
