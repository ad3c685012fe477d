"""Pulls and pushes between two managers."""

from __future__ import annotations

import asyncio

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hixl_async as hx
from hixl_async import kv
from hixl_async.kv import BlockTable, Group, Part, View
from hixl_async.kv.cache import CacheKey, CacheKeyByIdAndIndex, CacheManager
from hixl_async.testing import engine_pair

from .conftest import Managers, fill, tokens_of
from .shapes import GROUP, LAYERS, LEFT, RIGHT, view

ORDERS = ["LPBTH", "L/PBTH", "LP/BTH", "LP/BHT", "L/BPHT", "BLPTH"]


async def test_pull_blocks(managers: Managers) -> None:
    task = managers.right.pull_blocks(LEFT, managers.target, [3, 1, 7], [5, 9, 2])
    assert [layer async for layer in task] == list(range(LAYERS))
    assert await task == 12 * GROUP.token_bytes * LAYERS
    got, expected = (
        tokens_of(cache, ids, (0, 12)) for cache, ids in ((managers.target, [5, 9, 2]), (managers.source, [3, 1, 7]))
    )
    assert (got == expected).all()
    assert not tokens_of(managers.target, [0, 1, 3, 4], (0, 16)).any()


async def test_push_blocks(managers: Managers) -> None:
    task = managers.left.push_blocks(RIGHT, managers.source, [3, 1, 7], [5, 9, 2], tokens=(1, 10), layers=[2, 1])
    assert await task == 9 * GROUP.token_bytes * 2
    assert task.landed == (2, 1)
    got, expected = (
        tokens_of(cache, ids, (1, 10), [1, 2])
        for cache, ids in ((managers.target, [5, 9, 2]), (managers.source, [3, 1, 7]))
    )
    assert (got == expected).all()
    assert not tokens_of(managers.target, [5, 9, 2], (0, 12), [0, 3]).any()
    assert not tokens_of(managers.target, [5, 9, 2], (0, 1)).any()
    assert not tokens_of(managers.target, [5, 9, 2], (10, 12)).any()


async def test_contiguous_caches_of_other_lengths_by_keys(managers: Managers) -> None:
    long, short = view("L/PBTH", blocks=3, block_tokens=32), view("LP/BHT", blocks=5, block_tokens=20)
    async with managers.left.allocate_cache(
        long, cache_keys=[CacheKey(1, 7), None, CacheKey(1, prefix_id="p")]
    ) as rows:
        mine = managers.right.allocate_cache(short)
        fill(rows, 5)
        with pytest.raises(hx.RangeError, match="tokens 0 to 20, and the peer's 0 to 32"):
            await managers.right.pull_cache(CacheKey(1, 7), mine, 3)
        await managers.right.pull_cache(CacheKey(1, 7), mine, 3, tokens=13)
        assert (tokens_of(mine, [3], (0, 13)) == tokens_of(rows, [0], (0, 13))).all()
        await managers.right.pull_cache(CacheKey(1, prefix_id="p"), mine, 3, tokens=(13, 17))
        assert (tokens_of(mine, [3], (13, 17)) == tokens_of(rows, [2], (13, 17))).all()
        await managers.right.pull_cache(CacheKeyByIdAndIndex(1, rows.cache_id, 1), mine, tokens=20)
        assert (tokens_of(mine, [0], (0, 20)) == tokens_of(rows, [1], (0, 20))).all()
        await managers.right.push_cache(CacheKeyByIdAndIndex(1, rows.cache_id, 1), mine, 3, tokens=(1, 20))
        assert (tokens_of(mine, [3], (1, 20)) == tokens_of(rows, [1], (1, 20))).all()


async def test_a_key_names_blocks_and_their_tokens(managers: Managers) -> None:
    key = CacheKey(1, "request 9")
    managers.left.add_cache_key(key, managers.source, blocks=BlockTable([4, 6], start=8), tokens=(9, 14))
    pulled = asyncio.ensure_future(managers.left.pulled(key))
    assert (
        await managers.right.pull_blocks(key, managers.target, dst_blocks=[1, 0, 3, 2])
        == 5 * GROUP.token_bytes * LAYERS
    )
    await pulled
    got = tokens_of(managers.target, [1, 0, 3, 2], (9, 14))
    assert (got == tokens_of(managers.source, BlockTable([4, 6], 8), (9, 14))).all()
    with pytest.raises(hx.RangeError, match="the key names the tokens 9 to 14, not 9 to 15"):
        await managers.right.pull_blocks(key, managers.target, dst_blocks=[1, 0, 3, 2], tokens=(9, 15))
    managers.left.remove_cache_key(key)
    with pytest.raises(hx.TicketError, match="'request 9'.*not known here"):
        await managers.right.pull_blocks(key, managers.target, dst_blocks=[1, 0, 3, 2])


async def test_from_a_contiguous_to_a_paged_cache_and_back(managers: Managers) -> None:
    rows = managers.left.allocate_cache(view(blocks=2, block_tokens=16), cache_keys=[CacheKey(1, 0)])
    fill(rows, 3)
    await managers.right.pull_blocks(CacheKey(1, 0), managers.target, dst_blocks=[8, 2, 9, 1])
    await managers.right.push_blocks(CacheKeyByIdAndIndex(1, rows.cache_id, 1), managers.target, [8, 2, 9, 1])
    assert (tokens_of(rows, [1], (0, 16)) == tokens_of(rows, [0], (0, 16))).all()
    assert (tokens_of(managers.target, [8, 2, 9, 1], (0, 16)) == tokens_of(rows, [0], (0, 16))).all()


async def test_both_sides_pull_and_push_at_once(managers: Managers) -> None:
    other = managers.right.allocate_cache(view("BLPTH"))
    fill(other, 1)
    key = CacheKeyByIdAndIndex(2, other.cache_id)
    mine = managers.left.allocate_cache(view())

    async def one(number: int) -> None:
        await managers.right.pull_blocks(LEFT, managers.target, [number], [15 - number])
        await managers.left.pull_blocks(key, mine, [number], [15 - number])
        await managers.left.push_blocks(key, managers.source, [number], [number])

    await asyncio.gather(*map(one, range(8)))
    assert (
        tokens_of(managers.target, range(15, 7, -1), (0, 32)) == tokens_of(managers.source, range(8), (0, 32))
    ).all()
    assert (tokens_of(other, range(8), (0, 32)) == tokens_of(managers.source, range(8), (0, 32))).all()


async def test_registered_memory(managers: Managers) -> None:
    shape = view("LPBTH")
    memory = numpy.zeros(shape.tensor_bytes[0], "uint8")
    cache = managers.right.register_cache(shape, memory)
    await managers.right.pull_blocks(LEFT, cache, [1], [2])
    array = shape.array([memory], 3, "v")
    assert (array[2] == managers.source.array(3, "v")[1]).all()
    await cache.aclose()
    await cache.released()
    with pytest.raises(hx.InvalidArgumentError, match="allocate_cache"):
        managers.right.register_cache(shape, None)
    with pytest.raises(hx.RangeError, match="the views need"):
        managers.right.register_cache(shape, memory[:-1].copy())
    with pytest.raises(hx.InvalidArgumentError, match="a buffer for each of 8 tensors"):
        managers.right.register_cache(view("LP/BTH"), [memory])


async def test_stages_of_a_pipeline_bring_the_layers_that_both_hold(managers: Managers) -> None:
    first = managers.left.allocate_cache(view(layers=[0, 1]))
    second = managers.left.allocate_cache(view(layers=[2, 3]))
    for number, stage in enumerate((first, second)):
        fill(stage, number)
        await managers.right.pull_blocks(CacheKeyByIdAndIndex(1, stage.cache_id), managers.target, [3], [4])
        layers = stage.view.shard.layers
        assert (tokens_of(managers.target, [4], (0, 4), layers) == tokens_of(stage, [3], (0, 4))).all()
    with pytest.raises(hx.RangeError, match="does not hold layer 2"):
        await managers.right.pull_blocks(CacheKeyByIdAndIndex(1, first.cache_id), managers.target, [3], [4], layers=[2])
    strangers = managers.right.allocate_cache(view(layers=[3]))
    with pytest.raises(hx.LayoutMismatchError, match="no layer in common"):
        await managers.right.pull_blocks(CacheKeyByIdAndIndex(1, first.cache_id), strangers, [3], [4])


async def test_ranks_pull_the_heads_that_they_hold(managers: Managers) -> None:
    for rank in range(2):
        cache = managers.right.allocate_cache(view("LPBHT", rank=rank, ranks=2))
        await managers.right.pull_blocks(LEFT, cache, [1, 2], [6, 5])
        expected = tokens_of(managers.source, [1, 2], (0, 8))[:, :, :, rank : rank + 1]
        assert (tokens_of(cache, [6, 5], (0, 8)) == expected).all()
        whole = managers.right.allocate_cache(view("BLPTH"))
        await managers.right.pull_blocks(LEFT, whole, [1, 2], [6, 5])
        assert (tokens_of(whole, [6, 5], (0, 8)) == tokens_of(managers.source, [1, 2], (0, 8))).all()
    strangers = managers.left.allocate_cache(view(rank=1, ranks=2))
    with pytest.raises(hx.LayoutMismatchError, match="no heads in common"):
        await managers.right.pull_blocks(
            CacheKeyByIdAndIndex(1, strangers.cache_id),
            managers.right.allocate_cache(view(rank=0, ranks=2)),
            [1],
            [1],
        )


async def test_any_number_of_tensors_per_layer(managers: Managers) -> None:
    group = Group(
        3, [Part("latent", 1, 16, "float32", replicated=True), Part("scale", 1, 2, "float16", replicated=True)]
    )
    here = managers.left.allocate_cache(View.ordered(group, "LP/BTH", blocks=4, block_tokens=4))
    there = managers.right.allocate_cache(View.ordered(group, "BLPTH", blocks=2, block_tokens=8))
    for layer in range(3):
        here.array(layer, "latent")[:] = layer + 1
        here.array(layer, "scale")[:] = layer + 7
    await managers.right.pull_blocks(CacheKeyByIdAndIndex(1, here.cache_id), there, [2, 0], [1])
    for layer in range(3):
        assert (there.array(layer, "latent")[1] == layer + 1).all()
        assert (there.array(layer, "scale")[1] == layer + 7).all()
        assert not there.array(layer, "latent")[0].any()


async def test_caches_of_other_groups_do_not_fit(managers: Managers) -> None:
    other = Group.attention(LAYERS, kv_heads=2, head_dim=8, dtype="float16")
    cache = managers.right.allocate_cache(View.ordered(other, blocks=4, block_tokens=4))
    for task in (
        managers.right.pull_blocks(LEFT, cache, [0], [0]),
        managers.right.push_blocks(LEFT, cache, [1], [1]),
    ):
        source, target = ("float32", "float16") if "pull" in repr(task) else ("float16", "float32")
        with pytest.raises(
            hx.LayoutMismatchError, match=f"dtype is '{source}' at the source and '{target}' at the target"
        ):
            await task


async def test_caches_that_come_and_go_are_found_anew(managers: Managers) -> None:
    for number in range(3):
        cache = managers.left.allocate_cache(view(), cache_keys=[CacheKey(1, 0)])
        fill(cache, number)
        await managers.right.pull_cache(CacheKey(1, 0), managers.target, 7)
        assert (tokens_of(managers.target, [7], (0, 4)) == tokens_of(cache, [0], (0, 4))).all()
        await cache.aclose()


@st.composite
def shapes(draw: st.DrawFn) -> tuple[View, BlockTable, int]:
    """Return a view, a random table of blocks, and the tokens from its first position on that it holds."""
    size, blocks = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    ids = draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=blocks, unique=True))
    start = draw(st.integers(0, 6))
    ranks = draw(st.integers(1, 2))
    return (
        view(draw(st.sampled_from(ORDERS)), blocks, size, rank=draw(st.integers(0, ranks - 1)), ranks=ranks),
        BlockTable(ids, start),
        start + size * len(ids),
    )


def test_random_caches_against_an_oracle(runner: asyncio.Runner) -> None:
    """Every byte of the tokens is there, and no other byte is touched, whichever side moves them."""

    async def begin() -> tuple[CacheManager, CacheManager]:
        left, right = CacheManager(pair.left, 1), CacheManager(pair.right, 2)
        await left.link_clusters({2: pair.right.address})
        return left, right

    entering = engine_pair()
    pair = runner.run(entering.__aenter__())
    left, right = runner.run(begin())

    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    @given(shapes(), shapes(), st.sampled_from(["pull", "push"]), st.data())
    def check(
        here: tuple[View, BlockTable, int], there: tuple[View, BlockTable, int], verb: str, data: st.DataObject
    ) -> None:
        first, end = max(here[1].start, there[1].start), min(here[2], there[2])
        if first >= end:
            return
        tokens = (data.draw(st.integers(first, end - 1)), end)
        ours, theirs = ({*view.shard.heads(GROUP.parts[0])} for view in (here[0], there[0]))
        common = sorted(ours & theirs)
        if common:
            runner.run(move(here, there, verb, tokens, common))

    async def move(
        here: tuple[View, BlockTable, int],
        there: tuple[View, BlockTable, int],
        verb: str,
        tokens: tuple[int, int],
        common: list[int],
    ) -> None:
        async with left.allocate_cache(here[0]) as source, right.allocate_cache(there[0]) as target:
            fill(source, 1), fill(target, 2)
            expected = tokens_of(target, range(there[0].blocks), (0, there[0].blocks * there[0].block_tokens))
            moved = tokens_of(source, here[1], tokens)
            ours, theirs = here[0].shard.heads(GROUP.parts[0]).start, there[0].shard.heads(GROUP.parts[0]).start
            for position in range(*tokens):
                index, offset = divmod(position - there[1].start, there[0].block_tokens)
                place = there[1].ids[index] * there[0].block_tokens + offset
                for head in common:
                    expected[:, :, place, head - theirs] = moved[:, :, position - tokens[0], head - ours]
            if verb == "pull":
                key = CacheKeyByIdAndIndex(1, source.cache_id)
                await right.pull_blocks(key, target, here[1], there[1], tokens=tokens)
            else:
                key = CacheKeyByIdAndIndex(2, target.cache_id)
                await left.push_blocks(key, source, here[1], there[1], tokens=tokens)
            got = tokens_of(target, range(there[0].blocks), (0, there[0].blocks * there[0].block_tokens))
            assert (got == expected).all()

    async def end() -> None:
        await left.aclose()
        await right.aclose()

    try:
        check()
    finally:
        runner.run(end())
        runner.run(entering.__aexit__(None, None, None))


async def test_the_engine_closes_before_its_manager(managers: Managers) -> None:
    engine = hx.Engine("127.0.0.1:0", name="third")
    await engine.open()
    manager = CacheManager(engine, 3)
    cache = manager.allocate_cache(view(), blocks_cache_key=kv.cache.BlocksCacheKey(3))
    await manager.link_clusters({2: managers.right.engine.address})
    push = manager.push_blocks(RIGHT, cache, [0], [0], ready=lambda layer: False)
    await engine.aclose()
    with pytest.raises(hx.HixlError):
        await push
    await manager.aclose()
    assert cache.closed
