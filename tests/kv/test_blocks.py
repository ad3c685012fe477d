"""Blocks as counted references: slices, sums, growing and shrinking, and what is refused while peers write."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import settle

from hixl_async.errors import BusyError, ClosedError, InvalidArgumentError, RangeError, StreamAbortedError
from hixl_async.kv import Blocks, Group, Pool, View

from .conftest import LAYERS, VIEW, Pair, push_all

# ---- references ----


async def test_slices_are_references(pair: Pair) -> None:
    blocks = await pair.target.reserve(blocks=5, start=8)
    ids = blocks.ids
    middle, tail = blocks[1:4], blocks[-2:]
    assert (middle.ids, middle.start, middle.tokens, len(middle)) == (ids[1:4], 12, 12, 3)
    assert (tail.ids, tail.start) == (ids[3:], 20)
    inner = middle[1:2]
    assert (inner.ids, inner.start) == (ids[2:3], 16)
    assert pair.target.statistics() == (11, 5, 0, 0), "no further blocks"
    await blocks.aclose()
    assert pair.target.statistics() == (12, 4, 0, 0), "the first block had no other reference"
    await middle.aclose()
    assert pair.target.statistics() == (13, 3, 0, 0)
    await inner.aclose()
    assert pair.target.statistics() == (14, 2, 0, 0)
    await tail.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_sums_are_references(pair: Pair) -> None:
    prefix, rest = await pair.target.reserve(blocks=2), await pair.target.reserve(blocks=3)
    whole = prefix + rest
    assert (whole.ids, whole.start, whole.tokens) == (prefix.ids + rest.ids, 0, 20)
    other = prefix.share()
    assert other.ids == prefix.ids
    await asyncio.gather(prefix.aclose(), rest.aclose())
    assert pair.target.statistics() == (11, 5, 0, 0)
    await whole.aclose()
    assert pair.target.statistics() == (14, 2, 0, 0)
    await other.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (1, InvalidArgumentError, r"part must be a slice of blocks, such as blocks\[2:5\], not 1"),
        ("x", InvalidArgumentError, "part must be a slice of blocks"),
        (slice(0, 2, 2), InvalidArgumentError, "part must be a slice of blocks"),
        (slice(0, 2, -1), InvalidArgumentError, "part must be a slice of blocks"),
        (slice("a", "b"), InvalidArgumentError, "part must be a slice of whole numbers"),
        (slice(0.0, 1), InvalidArgumentError, "part must be a slice of whole numbers"),
        (slice(2, 2), RangeError, "names none of 3 blocks"),
        (slice(3, None), RangeError, "names none of 3 blocks"),
    ],
    ids=str,
)
async def test_slices_that_name_nothing(pair: Pair, part: Any, error: type[Exception], message: str) -> None:
    async with pair.target.reserve(blocks=3) as blocks:
        with pytest.raises(error, match=message):
            blocks[part]


async def test_sums_that_make_no_sense(pair: Pair) -> None:
    other = View.ordered(Group.attention([4, 5, 6, 7], 2, 8, "float16"), blocks=16, block_tokens=4)
    async with (
        Pool(pair.d, [VIEW, other], name="other") as pool,
        pool.reserve(blocks=[1, 1], group=[0, 1]) as (one, two),
        pair.target.reserve(blocks=1) as three,
    ):
        for wrong in (two, three):
            with pytest.raises(InvalidArgumentError, match="the same pool and the same group"):
                one + wrong
        with pytest.raises(InvalidArgumentError, match=f"block {one.ids[0]} is in both"):
            one + one
        with pytest.raises(TypeError, match="unsupported operand"):
            one + 1  # type: ignore[operator]
        assert pool.statistics() == (14, 2, 0, 0)


# ---- growing and shrinking ----


async def test_extend_and_trim(pair: Pair) -> None:
    async with pair.target.reserve(tokens=5) as blocks:
        ids = blocks.ids
        await blocks.extend(tokens=8)
        assert blocks.ids == ids, "they hold so many already"
        await blocks.extend(tokens=9)
        blocks.extend_nowait(blocks=4)
        assert (blocks.ids[:2], blocks.tokens) == (ids, 16)
        assert pair.target.statistics() == (12, 4, 0, 0)
        blocks.trim(tokens=17)
        assert len(blocks) == 4
        blocks.trim(tokens=5)
        assert blocks.ids == ids
        blocks.trim(blocks=1)
        assert pair.target.statistics() == (15, 1, 0, 0)
        for call in (blocks.extend_nowait, blocks.trim):
            for wrong in ({}, {"tokens": 1, "blocks": 1}, {"tokens": 0}, {"blocks": 1.5}):
                with pytest.raises(InvalidArgumentError):
                    call(**wrong)  # type: ignore[arg-type]
        with pytest.raises(RangeError, match="can never lend 17 blocks: it has 16"):
            await blocks.extend(blocks=17)
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_extending_waits_for_its_turn(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        held = await pair.target.reserve(blocks=12)
        with pytest.raises(BusyError, match="cannot lend 3 blocks now: 2 are free and 0 requests wait"):
            blocks.extend_nowait(blocks=5)
        extending = asyncio.create_task(blocks.extend(blocks=5))
        later = asyncio.ensure_future(pair.target.reserve(blocks=1))
        await settle()
        assert not later.done(), "first come, first served"
        cancelled = asyncio.create_task(blocks.extend(blocks=9))
        await settle()
        cancelled.cancel()
        await held.aclose()
        await extending
        assert len(blocks) == 5
        await (await later).aclose()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_tasks_that_extend_the_same_blocks(pair: Pair) -> None:
    """Each finds what it asked for, and no more is lent."""
    async with pair.target.reserve(blocks=2) as blocks:
        held = await pair.target.reserve(blocks=13)
        extending = [asyncio.create_task(blocks.extend(blocks=count)) for count in (4, 6, 4)]
        await settle()
        blocks.trim(blocks=1)
        await held.aclose()
        await asyncio.gather(*extending)
        assert len(blocks) == 6
        assert pair.target.statistics() == (10, 6, 0, 0)


@pytest.mark.parametrize("what", ["blocks", "pool"])
async def test_blocks_that_are_closed_while_they_wait_for_more(pair: Pair, what: str) -> None:
    blocks, held = await pair.target.reserve(blocks=2), await pair.target.reserve(blocks=13)
    extending = asyncio.create_task(blocks.extend(blocks=4))
    await settle()
    await (blocks if what == "blocks" else pair.target).aclose()
    await held.aclose()
    with pytest.raises(ClosedError, match="given back" if what == "blocks" else "pool 'kv' was closed"):
        await extending
    await blocks.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)


# ---- several at once ----


async def test_several_reservations_are_all_or_nothing(pair: Pair) -> None:
    held = await pair.target.reserve(blocks=11)
    several = asyncio.ensure_future(pair.target.reserve(tokens=[9, 1, 8]))
    single = asyncio.ensure_future(pair.target.reserve(blocks=1))
    await settle()
    assert pair.target.statistics() == (5, 11, 0, 2), "three of them would fit, but not all"
    await held.aclose()
    one, two, three = await several
    assert [len(blocks) for blocks in (one, two, three)] == [3, 1, 2]
    assert len({*one.ids, *two.ids, *three.ids}) == 6
    await (await single).aclose()
    await asyncio.gather(one.aclose(), two.aclose(), three.aclose())
    async with pair.target.reserve(blocks=[3, 2], start=[4, 16]) as lent:
        assert [(len(blocks), blocks.start) for blocks in lent] == [(3, 4), (2, 16)]
        await lent[0].aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_cancelling_several_reservations_loses_nothing(pair: Pair) -> None:
    async with pair.target.reserve(blocks=12):
        waiting = asyncio.ensure_future(pair.target.reserve(blocks=[3, 2]))
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pair.target.statistics() == (4, 12, 0, 0)


async def test_a_thousand_random_reservations_of_50_tasks_all_finish(pair: Pair) -> None:
    """On a pool of 16 blocks, where most have to wait; a third is cancelled, and some grow, shrink and are shared."""
    random, lent = Random(7), Counter[int]()

    async def use(blocks: list[Blocks]) -> None:
        ids = [block for one in blocks for block in one.ids]
        lent.update(ids)
        assert max(lent.values()) == 1, "a block was lent twice"
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        lent.subtract(ids)
        one = random.choice(blocks)
        with suppress(BusyError):
            one.extend_nowait(blocks=len(one) + 1)
        one.trim(blocks=1)
        async with one.share():
            for held in blocks:
                await held.aclose()

    async def work() -> int:
        finished = 0
        for _ in range(20):
            numbers = [random.randrange(1, 5) for _ in range(random.randrange(1, 5))]
            reserving = asyncio.ensure_future(pair.target.reserve(blocks=numbers, priority=random.randrange(3)))
            if random.random() < 1 / 3:
                await asyncio.sleep(0)
                reserving.cancel()
            with suppress(asyncio.CancelledError):
                await use(await reserving)
            finished += 1
        return finished

    assert sum(await asyncio.gather(*(work() for _ in range(50)))) == 1000
    assert pair.target.statistics() == (16, 0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocks": [9, 8]}, RangeError, "can never lend 17 blocks at once: it has 16"),
        ({"blocks": []}, InvalidArgumentError, "reserve at least one"),
        ({"blocks": [1, 0]}, InvalidArgumentError, "blocks must be a positive integer"),
        ({"tokens": [1, None]}, InvalidArgumentError, "either tokens|tokens must be"),
        ({"tokens": [1], "blocks": [1]}, InvalidArgumentError, "either"),
        ({"blocks": [1, 1], "group": [0]}, InvalidArgumentError, "with a group and a start for each"),
        ({"blocks": 1, "group": 1}, RangeError, "group 1 does not exist: the pool has 1"),
        ({"blocks": 1, "group": -1}, RangeError, "group -1 does not exist"),
        ({"blocks": 1, "start": -1}, InvalidArgumentError, "start must be a position from 0 on"),
        ({"blocks": 1, "start": 0.5}, InvalidArgumentError, "start must be a whole number"),
        ({"blocks": 1, "priority": None}, InvalidArgumentError, "priority must be a whole number"),
        ({"blocks": "12"}, InvalidArgumentError, "blocks must be a positive integer"),
    ],
    ids=str,
)
async def test_impossible_reservations(
    pair: Pair, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pair.target.reserve(**arguments)
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_higher_priorities_go_first(pair: Pair) -> None:
    order: list[str] = []

    async def use(name: str, priority: int) -> None:
        async with pair.target.reserve(blocks=8, priority=priority):
            order.append(name)

    held = await pair.target.reserve(blocks=12)
    tasks = []
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5)):
        tasks.append(asyncio.create_task(use(name, priority)))
        await settle()
    with pytest.raises(BusyError):
        pair.target.reserve_nowait(blocks=1, priority=5)
    urgent = pair.target.reserve_nowait(blocks=1, priority=6)
    await asyncio.gather(urgent.aclose(), held.aclose())
    await asyncio.gather(*tasks)
    assert order == ["c", "e", "a", "d", "b"]


# ---- while peers write ----

Use = Callable[[Blocks, Blocks], object]
SHARING: dict[str, Use] = {
    "slice": lambda blocks, _: blocks[1:],
    "share": lambda blocks, _: blocks.share(),
    "sum": lambda blocks, other: blocks + other,
    "reverse sum": lambda blocks, other: other + blocks,
    "stream": lambda blocks, _: blocks.stream(),
}


@pytest.mark.parametrize("use", SHARING)
async def test_blocks_that_are_being_written_are_not_shared(pair: Pair, use: str) -> None:
    """The reader of a shared block would see it change."""
    pair.p.hold = True
    async with pair.source.reserve(blocks=3) as source, pair.target.reserve(blocks=1) as other:
        blocks = await pair.target.reserve(blocks=3)
        stream = blocks.stream()
        with pytest.raises(BusyError, match=r"being written by a stream; .* when `await stream.drained\(\)` returns"):
            SHARING[use](blocks, other)
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        push_all(out, source)
        with pytest.raises(StreamAbortedError):
            await stream.abort()
            await stream.finished()
        with pytest.raises(BusyError, match="being written"):
            SHARING[use](blocks, other)
        await settle()
        for transfer in pair.p.transfers:
            transfer.release()
        await stream.drained()
        again = SHARING[use](blocks, other)
        if isinstance(again, Blocks):
            await again.aclose()
        await blocks.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_blocks_grow_and_shrink_while_they_are_written(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.source.reserve(blocks=3) as source, pair.target.reserve(blocks=3) as blocks:
        ids, stream = blocks.ids, blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
            await pair.p.reaches(LAYERS)
            await blocks.extend(blocks=5)
            assert blocks.ids[:3] == ids
            assert pair.target.statistics() == (11, 5, 0, 0)
            blocks.trim(blocks=2)
            assert pair.target.statistics() == (13, 2, 1, 0), "the third may still be written"
            with pytest.raises(BusyError, match="being written"):
                blocks.share()
            for transfer in pair.p.transfers:
                transfer.land()
                transfer.release()
        await stream.finished()
        assert pair.target.statistics() == (14, 2, 0, 0)
        assert pair.layer(pair.target, blocks.ids, 3) == pair.layer(pair.source, source.ids[:2], 3)


async def test_shared_blocks_are_not_written(pair: Pair) -> None:
    async with pair.target.reserve(blocks=3) as blocks:
        prefix = blocks[:2]
        with pytest.raises(
            BusyError, match=r"blocks \d+, \d+ are shared with other Blocks, whose tokens a stream would"
        ):
            blocks.stream()
        with pytest.raises(BusyError, match=rf"block {blocks.ids[1]} is shared with other Blocks"):
            blocks.stream(tokens=(4, 12))
        await blocks.stream(tokens=(8, 12)).abort()  # only the blocks that are written matter
        await prefix.aclose()
        await blocks.stream().abort()


async def test_a_shared_prefix_is_read_while_its_rest_is_written(pair: Pair) -> None:
    """Two requests that have a prefix in common: only what is missing travels."""
    async with pair.target.reserve(blocks=2) as prefix, pair.source.reserve(blocks=4) as source:
        for layer in range(LAYERS):
            pair.fill(source.ids, layer, 9)
        for _ in range(2):
            async with pair.target.reserve(blocks=2) as rest:
                whole = prefix + rest
            async with whole:
                stream = whole.stream(tokens=(8, 15))
                reader = prefix.share()  # not a block that is being written
                async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                    push_all(out, source)
                await stream.finished()
                assert pair.target.array(3, "k")[list(whole.ids[2:])].reshape(8, -1)[:7].any(axis=1).all()
                assert not pair.target.array(3, "k")[list(prefix.ids)].any()
                await reader.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_a_shared_block_is_quarantined_with_its_last_reference(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=3) as blocks:
        stream = blocks.stream()
        source = await pair.source.reserve(blocks=3)
        tail = source[1:]
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
            await pair.p.reaches(LAYERS)
            await source.aclose()
            assert pair.source.statistics() == (13, 2, 1, 0), "the tail is still in use"
            again = tail.share()
            await tail.aclose()
            assert pair.source.statistics() == (13, 2, 1, 0)
            await again.aclose()
            assert pair.source.statistics() == (13, 0, 3, 0)
            for transfer in pair.p.transfers:
                transfer.land()
                transfer.release()
        assert pair.source.statistics() == (16, 0, 0, 0)


async def test_closing_a_reference_ends_no_other_stream(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
        await stream.finished()
        async with blocks.share() as other:
            second = other.ids
        assert second == blocks.ids
        again = blocks.stream()
        assert again.outcome is None
        async with pair.source.open_stream(pair.to_d, again.ticket()) as out:
            push_all(out, source)
        await again.finished()


# ---- against a count of references ----


STEPS = st.tuples(
    st.sampled_from(["reserve", "slice", "add", "extend", "trim", "close"]),
    *(st.integers(0, 20) for _ in range(2)),
    st.integers(1, 6),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=15))
async def test_a_block_is_free_when_it_has_no_reference(pair: Pair, steps: list[tuple[str, int, int, int]]) -> None:
    lent = [await pair.target.reserve(blocks=2)]
    for act, one, two, count in steps:
        blocks, other = lent[one % len(lent)], lent[two % len(lent)]
        try:
            if act == "reserve":
                lent.append(pair.target.reserve_nowait(blocks=count, start=two))
            elif act == "slice":
                lent.append(blocks[two % 3 : count])
            elif act == "add":
                lent.append(blocks + other)
            elif act == "extend":
                blocks.extend_nowait(blocks=count)
            elif act == "trim":
                blocks.trim(blocks=count)
            elif len(lent) > 1:
                lent.remove(blocks)
                await blocks.aclose()
        except BusyError:
            assert count > pair.target.statistics().free
        except RangeError:
            assert act == "slice"
            assert min(count, len(blocks)) <= two % 3
        except InvalidArgumentError:
            assert act == "add"
            assert set(blocks.ids) & set(other.ids)
        references = Counter(block for each in lent for block in each.ids)
        assert pair.target.statistics() == (16 - len(references), len(references), 0, 0)
        assert all(len(set(each.ids)) == len(each) for each in lent)
    for blocks in lent:
        await blocks.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)
