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
from hixl_async.kv import Group, Pool, View
from hixl_async.testing import engine_pair, until

LAYERS, BLOCKS = 8, 96
GROUP = Group.attention(LAYERS, kv_heads=3, head_dim=64, dtype="bfloat16")
VIEW = View.ordered(GROUP, blocks=BLOCKS, block_tokens=16)
#: The memory of a pool: layer, keys or values, block, token, head, element.
SHAPE = (LAYERS, 2, BLOCKS, 16, 3, 64)


class Pools(NamedTuple):
    source: hx.kv.Pool
    target: hx.kv.Pool
    peer: hx.Peer


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    async with (
        hx.Engine("127.0.0.1:0", name="d") as d,
        hx.Engine(name="p") as p,
        hx.kv.Pool(d, VIEW, shuffle=1) as target,
        hx.kv.Pool(p, VIEW, access="none", shuffle=2) as source,
    ):
        yield Pools(source, target, await p.connect(d.address))
        for pool in (source, target):
            assert pool.statistics() == (BLOCKS, 0, 0, 0)


def array(pool: hx.kv.Pool) -> numpy.ndarray[Any, Any]:
    """Return the memory of a pool as an array, two bytes an element."""
    return numpy.frombuffer(memoryview(pool.regions[0]), "uint16").reshape(SHAPE)


async def test_a_request_through_threads_and_random_block_tables(pools: Pools) -> None:
    random = numpy.random.default_rng(7)
    async with pools.target.reserve(tokens=1200) as blocks, pools.source.reserve(tokens=1200) as source:
        assert len(blocks.ids) == 75
        expected = random.integers(0, 1 << 16, (LAYERS, 2, 75, 16, 3, 64), dtype=numpy.uint16)
        stream = blocks.stream()
        async with pools.source.open_stream(pools.peer, stream.ticket()) as out:

            def compute() -> None:
                for layer in random.permutation(LAYERS).tolist():
                    ready = threading.Event()
                    out.push(layer, source, ready=ready)
                    array(pools.source)[layer, :, source.ids] = expected[layer].swapaxes(0, 1)
                    ready.set()

            computing = asyncio.create_task(asyncio.to_thread(compute))
            async for layer in stream:
                got = array(pools.target)[layer, :, blocks.ids].swapaxes(0, 1)
                assert (got == expected[layer]).all()
            await computing
        others = sorted(set(range(BLOCKS)) - set(blocks.ids))
        assert not array(pools.target)[:, :, others].any()
    stats = pools.source.engine.stats()
    assert stats.transfers == LAYERS, "one transfer per layer"
    assert stats.bytes == LAYERS * 1200 * GROUP.token_bytes


async def test_requests_share_the_pools(pools: Pools) -> None:
    async def request(number: int) -> None:
        async with pools.target.reserve(blocks=1 + number % 9) as blocks:
            async with pools.source.reserve(blocks=1 + number % 9) as source:
                array(pools.source)[:, :, source.ids] = number
                stream = blocks.stream()
                async with pools.source.open_stream(pools.peer, stream.ticket()) as out:
                    for layer in range(LAYERS):
                        out.push(layer, source)
            async for layer in stream:
                assert (array(pools.target)[layer, :, blocks.ids] == number).all()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(200)))


@pytest.mark.parametrize("order", ["LPBTH", "L/PBTH", "LP/BHT"])
async def test_a_pool_over_memory_of_the_program(pools: Pools, order: str) -> None:
    engine, view = pools.target.engine, View.ordered(GROUP, order, blocks=2, block_tokens=16)
    sizes = view.tensor_bytes
    names = ["own"] if len(sizes) == 1 else [f"own.{number}" for number in range(len(sizes))]
    memory: Any = [bytearray(size + 8) for size in sizes]
    small = [*memory[:-1], bytearray(10)]
    with pytest.raises(RangeError, match=rf"memory of region '{names[-1]}' has 10 bytes; the views need {sizes[-1]}"):
        Pool(engine, view, name="own", memory=small)
    with pytest.raises(InvalidArgumentError, match=f"a buffer for each of {len(sizes)} tensors, not {len(sizes) + 1}"):
        Pool(engine, view, name="own", memory=[*memory, bytearray(10)])
    engine.allocate("own.words", 8)
    with pytest.raises(InvalidArgumentError, match=r"'own\.words' exists already"):
        Pool(engine, view, name="own", memory=memory)
    await engine.regions["own.words"].aclose()
    async with Pool(engine, view, name="own", memory=memory[0] if len(sizes) == 1 else memory) as pool:
        assert [region.name for region in pool.regions] == names
        assert [region.size for region in pool.regions] == [size + 8 for size in sizes]
        pool.array(7, "v")[1, 15, 2, 63] = 0x1234
        place = view.places[7][1]
        strides = view.strides[1]
        offset = place.offset + strides.block + 15 * strides.token + 2 * strides.head + 63 * 2
        assert memory[place.tensor][offset : offset + 2] == (0x1234).to_bytes(2, "little")


async def test_a_private_pool_cannot_be_reached(pools: Pools) -> None:
    back = next(peer for peer in pools.target.engine.peers if peer.name == "p")
    assert "kv" not in back.regions
    assert set(pools.peer.regions) == {"kv", "kv.words"}


async def test_aborts_at_random_moments(pools: Pools) -> None:
    random = numpy.random.default_rng(3)

    async def request(number: int) -> None:
        when, who = int(random.integers(0, 12)), number % 3
        async with pools.target.reserve(blocks=4) as blocks, pools.source.reserve(blocks=4) as source:
            stream = blocks.stream()
            out = await pools.source.open_stream(pools.peer, stream.ticket())
            for layer in range(LAYERS):
                if layer == when and who:
                    await (stream.abort("d") if who == 1 else out.abort("p"))
                    break
                out.push(layer, source)
                await asyncio.sleep(0)
            await out.aclose()
            await stream.drained()
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
                stream = blocks.stream()
                out = await pools.source.open_stream(pools.peer, stream.ticket())
                for layer in range(number % LAYERS):
                    out.push(layer, source)
            await out.aclose()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(60)))
        async with pools.target.reserve(blocks=BLOCKS), pools.source.reserve(blocks=BLOCKS):
            pass


async def test_layouts_that_differ(pools: Pools) -> None:
    other = View.ordered(Group.attention(8, kv_heads=8, head_dim=64, dtype="bfloat16"), blocks=4, block_tokens=16)
    async with (
        hx.kv.Pool(pools.source.engine, other, name="other", access="none") as pool,
        pools.target.reserve(blocks=2) as blocks,
    ):
        stream = blocks.stream()
        with pytest.raises(hx.LayoutMismatchError, match="heads is 8 at the source and 3 at the target"):
            await pool.open_stream(pools.peer, stream.ticket())
        with pytest.raises(hx.LayoutMismatchError):
            await stream.finished()


async def test_a_ticket_of_a_restarted_engine() -> None:
    async with hx.Engine(name="p") as p, hx.kv.Pool(p, VIEW, access="none") as source:
        async with hx.Engine("127.0.0.1:0", name="d") as d, hx.kv.Pool(d, VIEW) as target:
            address = d.address
            async with target.reserve(blocks=1) as blocks:
                old = blocks.stream().ticket()
        async with hx.Engine(address, name="d") as d, hx.kv.Pool(d, VIEW) as target:
            peer = await p.connect(address)
            with pytest.raises(hx.TicketError, match="no longer"):
                source.open_stream(peer, old)


async def test_both_pools_may_be_source_and_target() -> None:
    async def send(source: hx.kv.Pool, target: hx.kv.Pool, value: int) -> None:
        peer = await source.engine.connect(target.engine.address)
        async with target.reserve(blocks=4) as blocks, source.reserve(blocks=4) as mine:
            array(source)[:, :, mine.ids] = value
            stream = blocks.stream()
            async with source.open_stream(peer, stream.ticket()) as out:
                for layer in range(LAYERS):
                    out.push(layer, mine)
            await stream.finished()
            assert (array(target)[:, :, blocks.ids] == value).all()

    async with (
        hx.Engine("127.0.0.1:0", name="a") as a,
        hx.Engine("127.0.0.1:0", name="b") as b,
        hx.kv.Pool(a, VIEW) as left,
        hx.kv.Pool(b, VIEW) as right,
    ):
        await asyncio.gather(send(left, right, 1), send(right, left, 2))


async def test_no_byte_comes_after_the_fence() -> None:
    large = View.ordered(Group.attention(4, kv_heads=8, head_dim=128, dtype="bfloat16"), blocks=16, block_tokens=128)
    async with (
        hx.Engine("127.0.0.1:0", name="d") as d,
        hx.Engine(name="p") as p,
        hx.kv.Pool(d, large) as target,
        hx.kv.Pool(p, large, access="none") as source,
    ):
        peer = await p.connect(d.address)
        memory = numpy.frombuffer(memoryview(target.regions[0]), "uint8")
        numpy.frombuffer(memoryview(source.regions[0]), "uint8")[:] = 1
        for _ in range(5):
            async with source.reserve(blocks=16) as mine:
                blocks = await target.reserve(blocks=16)
                stream = blocks.stream()
                out = await source.open_stream(peer, stream.ticket())
                for layer in range(4):
                    out.push(layer, mine)
                await stream.abort("enough")
                await blocks.aclose()
                async with target.reserve(blocks=16):  # as soon as the pool lends them again
                    memory[:] = 2
                    await out.aclose()
                    assert (memory == 2).all()


async def test_lost_blocks_come_back(pools: Pools) -> None:
    async def lose() -> None:
        blocks, source = await pools.target.reserve(blocks=4), await pools.source.reserve(blocks=4)
        stream = blocks.stream()
        out = await pools.source.open_stream(pools.peer, stream.ticket())
        out.push(0, source)
        Pool(pools.target.engine, View.ordered(GROUP, blocks=1, block_tokens=16), name="lost")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await lose()
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning] * 4
    async with asyncio.timeout(5):
        async with pools.target.reserve(blocks=BLOCKS), pools.source.reserve(blocks=BLOCKS):
            pass
    await until(lambda: set(pools.target.engine.regions) == {"kv", "kv.words"})


# ---- invalid calls ----


async def test_a_peer_of_another_engine() -> None:
    async with engine_pair() as one, engine_pair() as two:
        view = View.ordered(Group.attention(1, kv_heads=1, head_dim=8, dtype="uint8"), blocks=2, block_tokens=4)
        target, source, foreign = Pool(one.right, view), Pool(one.left, view), Pool(two.left, view)
        async with target.reserve(blocks=1) as blocks, source.reserve(blocks=1) as data:
            ticket = blocks.stream().ticket()
            for peer in (None, "peer", one.left):
                with pytest.raises(InvalidArgumentError, match="peer"):
                    source.open_stream(peer, ticket)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="another engine"):
                foreign.open_stream(one.peer, ticket)
            # Nothing was sent: the ticket is still good.
            async with source.open_stream(one.peer, ticket) as out:
                out.push(0, data)
        for pool in (target, source, foreign):
            await pool.aclose()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"views": View.ordered(GROUP, blocks=1 << 33, block_tokens=1)}, "blocks"),
        ({"views": View.ordered(GROUP, blocks=1 << 50, block_tokens=1)}, "blocks"),
        ({"shuffle": []}, "shuffle"),
        ({"name": 7}, "name"),
        ({"engine": None}, "engine"),
        ({"memory": []}, "memory"),
    ],
    ids=str,
)
async def test_impossible_pools(options: dict[str, Any], word: str) -> None:
    async with Engine() as engine:
        with pytest.raises(InvalidArgumentError, match=word):
            Pool(**{"engine": engine, "views": VIEW, **options})
        assert engine.stats().regions == 0
