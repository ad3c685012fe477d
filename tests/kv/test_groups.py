"""Pools of several groups of layers: hybrid models, whose groups have block tables of their own and may share tensors."""

from __future__ import annotations

import asyncio

import numpy
import pytest
from passes import settle

from hixl_async.errors import InvalidArgumentError, LayoutMismatchError, RangeError, StreamAbortedError
from hixl_async.kv import Blocks, Group, Part, Pool, Shard, View
from hixl_async.testing import engine_pair

from .conftest import Pair

WINDOW = 6
FULL = Group.attention([0, 2, 4], kv_heads=2, head_dim=8, dtype="float16")
LOCAL = Group.attention([1, 3, 5], kv_heads=2, head_dim=8, dtype="float16", window=WINDOW)
TOKENS = 21


def views(order: str = "L/PBTH", block_tokens: int = 4, rank: int = 0, ranks: int = 1) -> list[View]:
    """Return views of both groups; a layer of each is in the same tensor, and a block belongs to one of them."""
    return [
        View.ordered(group, order, blocks=16, block_tokens=block_tokens, rank=rank, ranks=ranks)
        for group in (FULL, LOCAL)
    ]


def fill(pool: Pool, blocks: list[Blocks]) -> None:
    """Give each token of each layer a number of its own."""
    for one in blocks:
        view = pool.views[one.group]
        for layer in view.shard.layers:
            for number, part in enumerate(view.group.parts):
                array = pool.array(layer, part.name, "uint16")
                for place in range(one.tokens):
                    block, token = one.ids[place // view.block_tokens], place % view.block_tokens
                    for index, head in enumerate(view.shard.heads(part)):
                        array[block, token, index] = value(layer, number, one.start + place, head)


def value(layer: int, part: int, position: int, head: int) -> int:
    return 1 + head + 2 * (part + 2 * (layer + 6 * position))


def check(pool: Pool, blocks: list[Blocks], tokens: list[tuple[int, int]]) -> None:
    """Check that the tokens are there, and nothing else."""
    written = 0
    for one, (first, last) in zip(blocks, tokens, strict=True):
        view = pool.views[one.group]
        for layer in view.shard.layers:
            for number, part in enumerate(view.group.parts):
                array = pool.array(layer, part.name, "uint16")
                for position in range(first, last):
                    block, token = divmod(position - one.start, view.block_tokens)
                    for index, head in enumerate(view.shard.heads(part)):
                        assert (array[one.ids[block], token, index] == value(layer, number, position, head)).all()
                        written += part.dim
    memory = [numpy.frombuffer(memoryview(region), "uint16") for region in pool.regions]
    assert sum(map(numpy.count_nonzero, memory)) == written


async def test_groups_share_tensors_and_not_blocks(pair: Pair) -> None:
    async with Pool(pair.d, views(), name="hybrid", shuffle=3) as target, Pool(pair.p, views(), name="there") as source:
        tail = LOCAL.tail(TOKENS)
        assert tail == (16, 21)
        assert [region.name for region in target.regions] == ["hybrid.0", "hybrid.1", "hybrid.2"]
        counts, starts = [TOKENS, TOKENS - 16], [0, 16]
        async with (
            target.reserve(tokens=counts, group=[0, 1], start=starts) as blocks,
            source.reserve(tokens=counts, group=[0, 1], start=starts) as mine,
        ):
            assert [(len(one), one.group, one.start) for one in blocks] == [(6, 0, 0), (2, 1, 16)]
            assert not set(blocks[0].ids) & set(blocks[1].ids)
            fill(source, mine)
            stream = target.stream(blocks, tokens=[(0, TOKENS), tail])
            async with source.open_stream(pair.to_d, stream.ticket()) as out:
                for layer in range(6):
                    out.push(layer, mine[layer % 2])
                await stream.layer(1)
                assert stream.progress() == dict.fromkeys(range(6), TOKENS)
            assert sorted([layer async for layer in stream]) == list(range(6))
            await stream.finished()
            check(target, blocks, [(0, TOKENS), tail])
            assert target.statistics() == (8, 8, 0, 0)


async def test_groups_of_other_sizes_and_ranks() -> None:
    """On real engines: two ranks with blocks of 4 tokens stream to one with blocks of 8, in chunks."""
    async with (
        engine_pair() as pair,
        Pool(pair.right, views("BLPTH", 8), name="hybrid", shuffle=3) as target,
        Pool(pair.left, views(rank=0, ranks=2), name="r0", access="none") as left,
        Pool(pair.left, views("LP/BHT", rank=1, ranks=2), name="r1", access="none") as right,
        target.reserve(tokens=[TOKENS, 5], group=[0, 1], start=[0, 16]) as blocks,
        left.reserve(tokens=[TOKENS, TOKENS], group=[0, 1]) as mine,
        right.reserve(tokens=[TOKENS, TOKENS], group=[0, 1]) as theirs,
    ):
        layers = range(6)
        tokens = [(0, TOKENS), (16, TOKENS)]
        stream = target.stream(blocks, tokens=tokens, sources=[Shard(rank, 2, layers) for rank in (0, 1)])
        outs = [pool.open_stream(pair.peer, stream.ticket()) for pool in (left, right)]
        for pool, out, source in zip((left, right), outs, (mine, theirs), strict=True):
            fill(pool, source)
            for layer in layers:
                group = layer % 2
                first, last = tokens[group]
                out.push(layer, source[group], tokens=(first, last - 2))
                out.push(layer, source[group], tokens=(last - 2, last))
        await asyncio.gather(stream.finished(), *(out.finish() for out in outs))
        check(target, blocks, tokens)


async def test_a_layer_comes_from_blocks_of_its_group(pair: Pair) -> None:
    async with (
        Pool(pair.d, views(), name="hybrid") as target,
        Pool(pair.p, views(), name="there") as source,
        target.reserve(blocks=[2, 2], group=[0, 1]) as blocks,
        source.reserve(blocks=[2, 2], group=[0, 1]) as mine,
    ):
        stream = target.stream(blocks)
        async with source.open_stream(pair.to_d, stream.ticket()) as out:
            with pytest.raises(
                InvalidArgumentError, match=r"layer 1 belongs to group 1, and the source blocks to group 0; .* group=1"
            ):
                out.push(1, mine[0])
            with pytest.raises(RangeError, match="layer 6 does not exist: pool 'there' holds the layers 0 to 5"):
                out.push(6, mine[0])
            for layer in range(6):
                out.push(layer, mine[layer % 2])
        await stream.finished()


async def test_a_stream_fills_blocks_of_each_group(pair: Pair) -> None:
    async with (
        Pool(pair.d, views(), name="hybrid") as target,
        target.reserve(blocks=[2, 2], group=[0, 1]) as (one, two),
    ):
        for wrong in ([one], [two, one], [one, one], [one, two, two]):
            with pytest.raises(
                InvalidArgumentError, match="a stream fills blocks of each of the pool's 2 groups, in order"
            ):
                target.stream(wrong)
        with pytest.raises(InvalidArgumentError, match=r"use pool\.stream\(\[\.\.\.\]\)"):
            one.stream()
        with pytest.raises(RangeError, match="the blocks hold the tokens 0 to 8, not 4 to 9"):
            target.stream([one, two], tokens=[(0, 8), (4, 9)])
        stream = target.stream([one, two])
        await one.aclose()
        assert stream.outcome is not None, "each of the blocks ends it"
        await stream.drained()
        await two.extend(blocks=3)


async def test_blocks_of_both_groups_are_quarantined(pair: Pair) -> None:
    pair.p.hold = True
    async with (
        Pool(pair.d, views(), name="hybrid") as target,
        Pool(pair.p, views(), name="there") as source,
        source.reserve(blocks=[2, 2], group=[0, 1]) as mine,
    ):
        blocks = await target.reserve(blocks=[2, 2], group=[0, 1])
        stream = target.stream(blocks)
        out = await source.open_stream(pair.to_d, stream.ticket())
        out.push(1, mine[1])
        await blocks[0].aclose()
        assert target.statistics() == (12, 2, 2, 0)
        await blocks[1].aclose()
        assert target.statistics() == (12, 0, 4, 0)
        with pytest.raises(StreamAbortedError, match="gave its blocks back"):
            await stream.finished()
        await settle()
        pair.p.transfers[0].release()
        await stream.drained()
        assert target.statistics() == (16, 0, 0, 0)
        await out.aclose()


async def test_groups_that_differ(pair: Pair) -> None:
    other = Group.attention([1, 3, 5], kv_heads=2, head_dim=8, dtype="float16", window=WINDOW + 1)
    wide = [views()[0], View.ordered(other, "L/PBTH", blocks=16, block_tokens=4)]
    async with (
        Pool(pair.d, views(), name="hybrid") as target,
        Pool(pair.p, wide, name="wide") as source,
        target.reserve(blocks=[2, 2], group=[0, 1]) as blocks,
    ):
        with pytest.raises(LayoutMismatchError, match="the consumer's cache has 2 groups of layers and this pool 1"):
            pair.source.open_stream(pair.to_d, target.stream(blocks).ticket())
    async with Pool(pair.d, views(), name="hybrid") as target, target.reserve(blocks=[2, 2], group=[0, 1]) as blocks:
        stream = target.stream(blocks)
        async with Pool(pair.p, wide, name="wide") as source:
            with pytest.raises(LayoutMismatchError, match="the layers or the window of the group are not the same"):
                await source.open_stream(pair.to_d, stream.ticket())
        with pytest.raises(LayoutMismatchError, match="the window"):
            await stream.finished()


def test_views_that_share_a_tensor_agree_on_its_blocks() -> None:
    scaled = Group([1, 3, 5], [Part("k", 2, 8, "float16"), Part("v", 2, 8, "float16"), Part("scale", 2, 1, "float32")])
    odd = View.ordered(scaled, "L/BPTH", blocks=16, block_tokens=4)
    even = View.ordered(FULL, "L/BPTH", blocks=16, block_tokens=4)
    assert odd.strides[0].block != even.strides[0].block
    with pytest.raises(
        InvalidArgumentError, match="two views share a tensor in which a block of the one would overlap"
    ):
        Pool(object(), [even, odd])  # type: ignore[arg-type]
