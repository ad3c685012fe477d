"""Layers that are pushed in chunks of their tokens, as a prefill computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import settle

from hixl_async.errors import BusyError, ClosedError, InvalidArgumentError, RangeError, StreamAbortedError
from hixl_async.kv import Blocks, Group, LayerStream, Pool, PushStream, View
from hixl_async.testing import FaultPlan, engine_pair, faulty

from .conftest import LAYERS, Pair


def tokens_of(pool: Pool, blocks: Blocks, layer: int) -> list[int]:
    """Return the first byte of the keys of each token."""
    return [int(value) & 0xFF for value in pool.array(layer, "k", "uint16")[list(blocks.ids), :, 0, 0].reshape(-1)]


def number(pool: Pool, blocks: Blocks) -> None:
    """Number the tokens of all layers from 1."""
    for layer in range(LAYERS):
        for part in ("k", "v"):
            array = pool.array(layer, part, "uint16")
            for position in range(blocks.tokens):
                array[blocks.ids[position // 4], position % 4] = (position + 1) * 257


def push(out: PushStream, source: Blocks, first: int, last: int, layers: Sequence[int] = range(LAYERS)) -> None:
    for layer in layers:
        out.push(layer, source, tokens=(first, last))


async def test_chunks_land_in_order(pair: Pair) -> None:
    async with pair.target.reserve(tokens=11) as blocks, pair.source.reserve(tokens=11) as source:
        number(pair.source, source)
        stream = blocks.stream(tokens=(0, 11))
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for (first, last), landed in (((0, 3), ()), ((3, 4), ()), ((4, 9), ()), ((9, 11), (0, 1, 2, 3))):
                waiting = asyncio.create_task(stream.layer(2, tokens=last))
                await settle()
                assert not waiting.done()
                push(out, source, first, last)
                await waiting
                assert stream.progress() == dict.fromkeys(range(LAYERS), last)
                assert stream.landed == landed
                expected = [*range(1, last + 1), *[0] * (12 - last)]
                assert tokens_of(pair.target, blocks, 1) == expected
            assert "4 of 4 layers" in repr(out)
        assert await stream.finished() == b""
        assert "4 of 4 layers" in repr(stream)


async def test_one_opening_and_one_end_however_many_chunks(pair: Pair) -> None:
    async with pair.target.reserve(tokens=64) as blocks, pair.source.reserve(tokens=64) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for first in range(0, 64, 2):
                push(out, source, first, first + 2)
        await stream.finished()
    assert [body["say"] for body in pair.to_d.sent] == ["open", "end"]
    assert pair.to_p.sent == [], "the outcome is the reply to the end"
    assert len(pair.p.transfers) == 32 * LAYERS


async def test_a_layer_that_is_asked_for_some_tokens(pair: Pair) -> None:
    async with pair.target.reserve(tokens=12, start=20) as blocks, pair.source.reserve(tokens=12, start=20) as source:
        stream = blocks.stream(tokens=(21, 30))
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        assert stream.progress() == dict.fromkeys(range(LAYERS), 21)
        await stream.layer(0, tokens=21)  # those before are not of this stream
        push(out, source, 21, 25)
        await stream.layer(0, tokens=25)
        stream.check(3, tokens=23)
        for call in (stream.check, stream.layer):
            for wrong in (1.5, "x", True):
                with pytest.raises(InvalidArgumentError, match="tokens must be a whole number"):
                    await call(0, tokens=wrong)  # type: ignore[arg-type,misc]
        for tokens in (26, None):
            with pytest.raises(BusyError, match=r"await stream\.layer\(0"):
                stream.check(0, tokens=tokens)
        waiting = asyncio.create_task(stream.layer(0, tokens=28))
        await out.abort("enough")
        with pytest.raises(StreamAbortedError, match="enough"):
            await waiting
        await stream.layer(0, tokens=25)  # what has landed can be read
        with pytest.raises(StreamAbortedError, match="enough"):
            stream.check(0, tokens=26)
        await stream.drained()


async def test_the_last_chunk_may_come_before_the_last_token(pair: Pair) -> None:
    """A ticket names room for more tokens than there are."""
    async with pair.target.reserve(tokens=12) as blocks, pair.source.reserve(tokens=12) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for layer in range(LAYERS):
                out.push(layer, source, tokens=(0, 5))
                out.push(layer, source, tokens=(5, 7), last=True)
                with pytest.raises(InvalidArgumentError, match=f"all of layer {layer} was pushed before"):
                    out.push(layer, source, tokens=(7, 8))
        assert [layer async for layer in stream] == list(range(LAYERS))
        await stream.finished()
        assert stream.progress() == dict.fromkeys(range(LAYERS), 7)
        await stream.layer(0, tokens=12)  # no more will come


async def test_a_layer_of_which_not_all_was_pushed_aborts(pair: Pair) -> None:
    async with pair.target.reserve(tokens=12) as blocks, pair.source.reserve(tokens=12) as source:
        stream = blocks.stream()
        with pytest.raises(StreamAbortedError, match="after 3 of 4 layers"):
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                push(out, source, 0, 12, [0, 1, 2])
                out.push(3, source, tokens=(0, 11), last=False)
                await stream.layer(3, tokens=11)
        with pytest.raises(StreamAbortedError, match="after 3 of 4 layers"):
            await stream.finished()


async def test_chunks_that_make_no_sense(pair: Pair) -> None:
    async with pair.target.reserve(tokens=12) as blocks, pair.source.reserve(tokens=12) as source:
        stream = blocks.stream(tokens=(2, 10))
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for tokens in (7, "ab", (1,), (1, 2, 3), (1.5, 3), (3, 3), (-1, 3), (4, 3), [2, 3], (True, 3)):
                with pytest.raises(InvalidArgumentError, match="tokens must"):
                    out.push(0, source, tokens=tokens)  # type: ignore[arg-type]
            for first, last in ((0, 4), (2, 11), (10, 12)):
                with pytest.raises(
                    RangeError, match=f"tokens {first} to {last} are not within those of the ticket, 2 to 10"
                ):
                    out.push(0, source, tokens=(first, last))
            with pytest.raises(InvalidArgumentError, match="from 3 of layer 0 were pushed where those from 2 are next"):
                out.push(0, source, tokens=(3, 5))
            push(out, source, 2, 5)
            for first in (2, 4, 6):
                with pytest.raises(InvalidArgumentError, match=f"from {first} of layer 0 .* those from 5 are next"):
                    out.push(0, source, tokens=(first, 8))
            with pytest.raises(InvalidArgumentError, match="tokens from 2 of layer 0 .* from 5 are next"):
                out.push(0, source)
            tail = source[1:2]
            with pytest.raises(RangeError, match="the source blocks hold the tokens 4 to 8, not 5 to 9"):
                out.push(0, tail, tokens=(5, 9))
            push(out, tail, 5, 8)
            push(out, source, 8, 10)
            await tail.aclose()
        with pytest.raises(ClosedError, match="finished"):
            push(out, source, 10, 12)
        await stream.finished()


async def test_a_chunk_comes_from_any_blocks_that_hold_it(pair: Pair) -> None:
    """The chunks of a prefill may have blocks of their own, which return to the pool chunk by chunk."""
    async with pair.target.reserve(tokens=12) as blocks:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for start in (0, 4, 8):
                async with pair.source.reserve(blocks=1, start=start) as chunk:
                    for layer in range(LAYERS):
                        pair.fill(chunk.ids, layer, start + 1)
                    push(out, chunk, start, start + 4)
        await stream.finished()
        assert tokens_of(pair.target, blocks, 3) == [1] * 4 + [5] * 4 + [9] * 4


async def test_one_chunk_of_a_layer_is_in_flight(pair: Pair) -> None:
    """Drivers may reorder transfers, and the word of a layer says how many tokens have landed."""
    pair.p.hold = True
    async with pair.target.reserve(tokens=12) as blocks, pair.source.reserve(tokens=12) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            push(out, source, 0, 4, [0, 1])
            push(out, source, 4, 12, [0, 1])
            push(out, source, 0, 12, [2, 3])
            assert len(pair.p.transfers) == 2, "the second chunk of layer 0 waits, and what was pushed after it, too"
            pair.p.transfers[1].land()
            await settle()
            assert stream.progress() == {0: 0, 1: 4, 2: 0, 3: 0}
            assert len(pair.p.transfers) == 2
            pair.p.transfers[0].land()
            await settle()
            assert len(pair.p.transfers) == 6
            for transfer in pair.p.transfers:
                transfer.land()
                transfer.release()
        await stream.finished()


async def test_a_chunk_that_fails_ends_the_stream(pair: Pair) -> None:
    """What landed before stays readable."""
    pair.p.hold = True
    async with pair.target.reserve(tokens=12) as blocks, pair.source.reserve(tokens=12) as source:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        push(out, source, 0, 4, [0])
        pair.p.transfers[0].land()
        push(out, source, 4, 8, [0])
        await pair.p.reaches(2)
        pair.p.transfers[1].fail(RuntimeError("boom"))
        for transfer in pair.p.transfers:
            transfer.release()
        with pytest.raises(StreamAbortedError, match="the transfer of layer 0 failed: boom"):
            await out.finish()
        with pytest.raises(StreamAbortedError, match="boom"):
            await stream.layer(0, tokens=5)
        assert stream.progress()[0] == 4
        await stream.layer(0, tokens=4)


async def test_chunks_renew_the_lease(pair: Pair) -> None:
    async with pair.target.reserve(tokens=12) as blocks, pair.source.reserve(tokens=12) as source:
        stream = blocks.stream(lease=0.2)
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for first in range(0, 12, 4):
                await asyncio.sleep(0.08)
                push(out, source, first, first + 4, [0])
            push(out, source, 0, 12, [1, 2, 3])
        await stream.finished()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[int, int]]]]:
    """The first position, the one after the last, and the chunks of each layer."""
    first, last = draw(st.sets(st.integers(0, 20), min_size=2, max_size=2).map(sorted))
    inner = st.sets(st.integers(first, last), max_size=3)
    return first, last, [list(pairwise(sorted({first, last, *draw(inner)}))) for _ in range(LAYERS)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts(), st.integers(0, 1 << 20))
async def test_chunks_in_any_order_of_landing(
    pair: Pair, chosen: tuple[int, int, list[list[tuple[int, int]]]], seed: int
) -> None:
    """Whatever has landed according to `progress` is there, and what was pushed is there at the end."""
    (first, last, chunks), random = chosen, Random(seed)
    pair.p.hold, pair.p.transfers = True, []
    async with pair.target.reserve(tokens=last) as blocks, pair.source.reserve(tokens=last) as source:
        number(pair.source, source)
        for layer in range(LAYERS):
            pair.target.array(layer, "k")[...] = 0
        stream = blocks.stream(tokens=(first, last))
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        try:
            while any(chunks) or not all(transfer.done() for transfer in pair.p.transfers):
                flying = [transfer for transfer in pair.p.transfers if not transfer.done()]
                left = [layer for layer in range(LAYERS) if chunks[layer]]
                if left and (not flying or random.random() < 0.5):
                    layer = random.choice(left)
                    out.push(layer, source, tokens=chunks[layer].pop(0))
                else:
                    random.choice(flying).land()
                    await settle()
                for layer, end in stream.progress().items():
                    found = tokens_of(pair.target, blocks, layer)
                    assert found[first:end] == list(range(first + 1, end + 1))
                    assert not any(found[:first])
        finally:
            for transfer in pair.p.transfers:
                transfer.release()
            await out.aclose()
        await stream.finished()
        assert stream.progress() == dict.fromkeys(range(LAYERS), last)


async def test_chunks_over_a_driver_that_reorders() -> None:
    """On real engines: a request in chunks of random sizes, computed while the chunks before are in flight."""
    group = Group.attention(LAYERS, kv_heads=2, head_dim=64, dtype="float32")
    here = View.ordered(group, "L/PBTH", blocks=40, block_tokens=4)
    there = View.ordered(group, "BLPTH", blocks=12, block_tokens=16)
    plan = FaultPlan(seed=5).reorder(window=3, within=0.002).delay(0, 0.002, chance=0.5)
    random = numpy.random.default_rng(5)
    async with (
        engine_pair(drivers=faulty("shm", plan)) as pair,
        Pool(pair.left, here, access="none", shuffle=1) as source,
        Pool(pair.right, there, shuffle=2) as target,
    ):
        for _ in range(6):
            tokens = int(random.integers(1, 150))
            expected = random.random((LAYERS, 2, tokens, 2, 64), dtype=numpy.float32)
            cuts = sorted({0, tokens, *random.integers(0, tokens + 1, 4).tolist()})
            async with target.reserve(tokens=tokens) as blocks, source.reserve(tokens=tokens) as mine:
                stream = blocks.stream(tokens=(0, tokens))

                async def read(stream: LayerStream, blocks: Blocks, expected: numpy.ndarray) -> None:  # type: ignore[type-arg]
                    async for layer in stream:
                        for number, part in enumerate(("k", "v")):
                            got = target.array(layer, part)[list(blocks.ids)].reshape(-1, 2, 64)
                            assert (got[: len(expected[0, 0])] == expected[layer, number]).all()

                reading = asyncio.create_task(read(stream, blocks, expected))
                async with source.open_stream(pair.peer, stream.ticket()) as out:
                    for first, last in pairwise(cuts):
                        for layer in range(LAYERS):
                            for number, part in enumerate(("k", "v")):
                                for token in range(first, last):
                                    place = mine.ids[token // 4], token % 4
                                    source.array(layer, part)[place] = expected[layer, number, token]
                            out.push(layer, mine, tokens=(first, last))
                        await asyncio.sleep(0)
                await reading
                await stream.finished()
        plan.clear()
        plan.release()
