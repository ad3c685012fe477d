"""Two pools on two real engines in one process."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy
import pytest

import hixl_async as hx
from hixl_async import Engine, InvalidArgumentError, RangeError
from hixl_async.kv import Layout, Pool
from hixl_async.testing import engine_pair, until

LAYOUT = hx.kv.Layout(layers=8, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
BLOCKS = 96


class Pools(NamedTuple):
    source: hx.kv.Pool
    target: hx.kv.Pool
    peer: hx.Peer


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    async with (
        hx.Engine("127.0.0.1:0", name="d") as d,
        hx.Engine(name="p") as p,
        hx.kv.Pool(d, LAYOUT, blocks=BLOCKS, shuffle=1) as target,
        hx.kv.Pool(p, LAYOUT, blocks=BLOCKS, access="none", shuffle=2) as source,
    ):
        yield Pools(source, target, await p.connect(d.address))
        for pool in (source, target):
            assert pool.statistics() == (BLOCKS, 0, 0, 0)


def array(pool: hx.kv.Pool) -> numpy.ndarray[Any, Any]:
    """The pool as an array of the layout's shape, two bytes an element."""
    return pool.region.numpy("uint16", LAYOUT.shape(pool.blocks))


async def test_a_request_through_threads_and_random_block_tables(pools: Pools) -> None:
    random = numpy.random.default_rng(7)
    async with pools.target.reserve(tokens=1200) as blocks, pools.source.reserve(tokens=1200) as source:
        assert len(blocks.ids) == 75
        expected = random.integers(0, 1 << 16, LAYOUT.shape(75), dtype=numpy.uint16)
        async with pools.source.open_stream(pools.peer, blocks.ticket()) as out:

            def compute() -> None:
                for layer in random.permutation(LAYOUT.layers).tolist():
                    ready = threading.Event()
                    out.push(layer, source[layer], ready=ready)
                    array(pools.source)[layer, :, source.ids] = expected[layer].swapaxes(0, 1)
                    ready.set()

            computing = asyncio.create_task(asyncio.to_thread(compute))
            async for layer in blocks.stream():
                got = array(pools.target)[layer, :, blocks.ids].swapaxes(0, 1)
                assert (got == expected[layer]).all()
            await computing
        others = sorted(set(range(BLOCKS)) - set(blocks.ids))
        assert not array(pools.target)[:, :, others].any()
    stats = pools.source.engine.stats()
    assert stats.transfers == LAYOUT.layers, "one transfer per layer"
    assert stats.bytes == LAYOUT.pool_bytes(75)


async def test_requests_share_the_pools(pools: Pools) -> None:
    async def request(number: int) -> None:
        async with pools.target.reserve(blocks=1 + number % 9) as blocks:
            async with pools.source.reserve(blocks=1 + number % 9) as source:
                array(pools.source)[:, :, source.ids] = number
                async with pools.source.open_stream(pools.peer, blocks.ticket()) as out:
                    for layer in range(LAYOUT.layers):
                        out.push(layer, source[layer])
            async for layer in blocks.stream():
                assert (array(pools.target)[layer, :, blocks.ids] == number).all()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(200)))


async def test_a_pool_that_is_refused_leaves_its_name_free(pools: Pools) -> None:
    engine = pools.target.engine
    with pytest.raises(RangeError, match="memory has 10 bytes"):
        Pool(engine, LAYOUT, blocks=1, name="own", memory=bytearray(10))
    memory = bytearray(LAYOUT.pool_bytes(1))
    engine.allocate("own.signals", 8)
    with pytest.raises(InvalidArgumentError, match=r"'own\.signals' exists already"):
        Pool(engine, LAYOUT, blocks=1, name="own", memory=memory)
    await engine.regions["own.signals"].aclose()
    async with Pool(engine, LAYOUT, blocks=1, name="own", memory=memory) as pool:
        assert pool.region.size == len(memory)


async def test_a_private_pool_cannot_be_reached(pools: Pools) -> None:
    back = next(peer for peer in pools.target.engine.peers if peer.name == "p")
    assert "kv" not in back.regions
    assert set(pools.peer.regions) == {"kv", "kv.signals"}


async def test_aborts_at_random_moments(pools: Pools) -> None:
    random = numpy.random.default_rng(3)

    async def request(number: int) -> None:
        when, who = int(random.integers(0, 12)), number % 3
        async with pools.target.reserve(blocks=4) as blocks, pools.source.reserve(blocks=4) as source:
            stream = blocks.stream()
            out = await pools.source.open_stream(pools.peer, blocks.ticket())
            for layer in range(LAYOUT.layers):
                if layer == when and who:
                    await (stream.abort("d") if who == 1 else out.abort("p"))
                    break
                out.push(layer, source[layer])
                await asyncio.sleep(0)
            await out.aclose()
            await blocks.fenced()
        mine, theirs = out.outcome, stream.outcome
        assert mine is not None
        assert theirs is not None
        assert mine.verdict is theirs.verdict

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(100)))
    assert pools.target.statistics().quarantined == 0


async def test_leaving_at_random_moments_returns_every_block(pools: Pools) -> None:
    async def request(number: int) -> None:
        async with pools.source.reserve(blocks=4) as source:
            async with pools.target.reserve(blocks=4) as blocks:
                out = await pools.source.open_stream(pools.peer, blocks.ticket())
                for layer in range(number % LAYOUT.layers):
                    out.push(layer, source[layer])
            await out.aclose()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(60)))
        async with pools.target.reserve(blocks=BLOCKS), pools.source.reserve(blocks=BLOCKS):
            pass


async def test_layouts_that_differ(pools: Pools) -> None:
    other = hx.kv.Layout(layers=8, kv_heads=8, head_dim=64, dtype="bfloat16", block_tokens=16)
    async with (
        hx.kv.Pool(pools.source.engine, other, blocks=4, name="other", access="none") as pool,
        pools.target.reserve(blocks=2) as blocks,
    ):
        with pytest.raises(hx.LayoutMismatchError, match=r"kv_heads \(3 and 8\)"):
            await pool.open_stream(pools.peer, blocks.ticket())
        with pytest.raises(hx.LayoutMismatchError):
            await blocks.stream().finished()


async def test_a_ticket_of_a_restarted_engine() -> None:
    async with hx.Engine(name="p") as p, hx.kv.Pool(p, LAYOUT, blocks=4, access="none") as source:
        async with hx.Engine("127.0.0.1:0", name="d") as d, hx.kv.Pool(d, LAYOUT, blocks=4) as target:
            address = d.address
            async with target.reserve(blocks=1) as blocks:
                old = blocks.ticket()
        async with hx.Engine(address, name="d") as d, hx.kv.Pool(d, LAYOUT, blocks=4) as target:
            peer = await p.connect(address)
            with pytest.raises(hx.TicketError, match="no longer"):
                source.open_stream(peer, old)


async def test_both_pools_may_be_source_and_target() -> None:
    async def send(source: hx.kv.Pool, target: hx.kv.Pool, value: int) -> None:
        peer = await source.engine.connect(target.engine.address)
        async with target.reserve(blocks=4) as blocks, source.reserve(blocks=4) as mine:
            array(source)[:, :, mine.ids] = value
            async with source.open_stream(peer, blocks.ticket()) as out:
                for layer in range(LAYOUT.layers):
                    out.push(layer, mine[layer])
            await blocks.stream().finished()
            assert (array(target)[:, :, blocks.ids] == value).all()

    async with (
        hx.Engine("127.0.0.1:0", name="a") as a,
        hx.Engine("127.0.0.1:0", name="b") as b,
        hx.kv.Pool(a, LAYOUT, blocks=8) as left,
        hx.kv.Pool(b, LAYOUT, blocks=8) as right,
    ):
        await asyncio.gather(send(left, right, 1), send(right, left, 2))


async def test_no_byte_comes_after_the_fence() -> None:
    large = hx.kv.Layout(layers=4, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=128)
    async with (
        hx.Engine("127.0.0.1:0", name="d") as d,
        hx.Engine(name="p") as p,
        hx.kv.Pool(d, large, blocks=16) as target,
        hx.kv.Pool(p, large, blocks=16, access="none") as source,
    ):
        peer = await p.connect(d.address)
        view = target.region.numpy("uint8", (4, 2, 16, large.block_bytes))
        source.region.numpy("uint8")[:] = 1
        for _ in range(5):
            async with source.reserve(blocks=16) as mine:
                blocks = await target.reserve(blocks=16)
                out = await source.open_stream(peer, blocks.ticket())
                for layer in range(4):
                    out.push(layer, mine[layer])
                await blocks.stream().abort("enough")
                await blocks.aclose()
                async with target.reserve(blocks=16):  # as soon as the pool lends them again
                    view[:] = 2
                    await out.aclose()
                    assert (view == 2).all()


async def test_lost_blocks_come_back(pools: Pools) -> None:
    async def lose() -> None:
        blocks, source = await pools.target.reserve(blocks=4), await pools.source.reserve(blocks=4)
        out = await pools.source.open_stream(pools.peer, blocks.ticket())
        out.push(0, source[0])
        Pool(pools.target.engine, LAYOUT, blocks=1, name="lost")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await lose()
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning] * 4
    async with asyncio.timeout(5):
        async with pools.target.reserve(blocks=BLOCKS), pools.source.reserve(blocks=BLOCKS):
            pass
    await until(lambda: set(pools.target.engine.regions) == {"kv", "kv.signals"})


# ---- invalid calls ----


async def test_a_peer_of_another_engine() -> None:
    async with engine_pair() as one, engine_pair() as two:
        layout = Layout(layers=1, kv_heads=1, head_dim=8, dtype="uint8", block_tokens=4)
        target = Pool(one.right, layout, blocks=2)
        source, foreign = Pool(one.left, layout, blocks=2), Pool(two.left, layout, blocks=2)
        async with target.reserve(blocks=1) as blocks, source.reserve(blocks=1) as data:
            ticket = blocks.ticket()
            for peer in (None, "peer", one.left):
                with pytest.raises(InvalidArgumentError, match="peer"):
                    source.open_stream(peer, ticket)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="another engine"):
                foreign.open_stream(one.peer, ticket)
            # Nothing was sent: the ticket is still good.
            async with source.open_stream(one.peer, ticket) as out:
                out.push(0, data[0])
            for layer in ("x", None, 1.5):
                with pytest.raises(InvalidArgumentError, match="layer must be a whole number"):
                    data[layer]
        for pool in (target, source, foreign):
            await pool.aclose()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"blocks": 1 << 33}, "blocks"),
        ({"blocks": 1 << 50}, "blocks"),
        ({"blocks": 2, "shuffle": []}, "shuffle"),
        ({"blocks": 2, "name": 7}, "name"),
        ({"blocks": 2, "engine": None}, "engine"),
    ],
)
async def test_impossible_pools(options: dict[str, Any], word: str) -> None:
    async with Engine() as engine:
        layout = Layout(layers=1, kv_heads=1, head_dim=8, dtype="uint8", block_tokens=4)
        with pytest.raises(InvalidArgumentError, match=word):
            Pool(**{"engine": engine, "layout": layout, **options})
        assert engine.stats().regions == 0
