"""Pools: reservations, closing, tickets, and malformed messages."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import subprocess
import sys
import tracemalloc
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from passes import settle

from hixl_async.errors import (
    AccessError,
    BusyError,
    ClosedError,
    InvalidArgumentError,
    RangeError,
    RemoteError,
    TicketError,
    WrongLoopError,
)
from hixl_async.kv import Group, Pool, Verdict, View

from .conftest import GROUP, VIEW, Pair, push_all

NO_TIMES: list[Any] = [0, -1, float("nan"), float("inf"), 10**400, True, "x", numpy.zeros(3)]


async def test_blocks_are_lent_and_return(pair: Pair) -> None:
    async with pair.target.reserve(tokens=9) as blocks:
        assert len(blocks.ids) == 3
        assert pair.target.statistics() == (13, 3, 0, 0)
        assert "reserved" in repr(blocks)
    await blocks.aclose()
    assert pair.target.statistics() == (16, 0, 0, 0)
    blocks = await pair.target.reserve(blocks=16)
    assert sorted(blocks.ids) == list(range(16))
    assert blocks.ids != tuple(range(16)), "shuffled"
    await blocks.aclose()


async def test_nothing_of_a_pool_can_be_copied(pair: Pair) -> None:
    """A copy would give the blocks back a second time."""
    async with pair.target.reserve(blocks=1) as blocks:
        stream = blocks.stream()
        out = pair.source.open_stream(pair.to_d, stream.ticket())
        for thing in (pair.target, blocks, stream, out):
            for act in (copy.copy, pickle.dumps):
                with pytest.raises(TypeError, match="neither pickled nor copied"):
                    act(thing)
        await out.aclose()


async def test_a_closed_pool_leaves_no_callback_behind(pair: Pair) -> None:
    assert len(pair.d.close_callbacks) == 1
    await pair.target.aclose()
    assert not pair.d.close_callbacks


async def test_a_reservation_is_entered_once(pair: Pair) -> None:
    reservation = pair.target.reserve(blocks=1)
    async with reservation:
        pass
    with pytest.raises(ClosedError, match="once"):
        await reservation.__aenter__()


async def test_waiting_is_fair_and_all_or_nothing(pair: Pair) -> None:
    order: list[int] = []

    async def use(count: int) -> None:
        async with pair.target.reserve(blocks=count):
            order.append(count)
            await settle()

    held = await pair.target.reserve(blocks=12)
    tasks = [asyncio.create_task(use(count)) for count in (10, 3, 2)]
    await settle()
    assert pair.target.statistics() == (4, 12, 0, 3), "3 and 2 would fit, but 10 came first"
    with pytest.raises(BusyError, match="3 requests wait") as caught:
        pair.target.reserve_nowait(blocks=1)
    assert caught.value.retryable
    await held.aclose()
    await asyncio.gather(*tasks)
    assert order == [10, 3, 2]


async def test_cancelling_a_waiter_loses_nothing(pair: Pair) -> None:
    held = await pair.target.reserve(blocks=12)
    first = asyncio.ensure_future(pair.target.reserve(blocks=10))
    second = asyncio.ensure_future(pair.target.reserve(blocks=4))
    await settle()
    first.cancel()
    blocks = await second
    await blocks.aclose()

    # Cancelled in the moment of the grant: the blocks go to the next in the queue.
    third = asyncio.ensure_future(pair.target.reserve(blocks=16))
    fourth = asyncio.ensure_future(pair.target.reserve(blocks=16))
    await settle()
    await held.aclose()
    third.cancel()
    await (await fourth).aclose()
    assert third.cancelled()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_a_timeout_on_a_reservation(pair: Pair) -> None:
    async with pair.target.reserve(blocks=16):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pair.target.reserve(blocks=1)
    assert pair.target.statistics().waiting == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"blocks": 17}, RangeError, "can never lend 17 blocks: it has 16"),
        ({"tokens": 65}, RangeError, "17 blocks for 65 tokens"),
        ({"blocks": 0}, InvalidArgumentError, "positive"),
        ({"tokens": -1}, InvalidArgumentError, "positive"),
        ({"tokens": 1.5}, InvalidArgumentError, "positive"),
        ({}, InvalidArgumentError, "either"),
        ({"tokens": 1, "blocks": 1}, InvalidArgumentError, "either"),
    ],
)
async def test_impossible_requests_raise_at_once(
    pair: Pair, arguments: dict[str, int], error: type[Exception], words: str
) -> None:
    for reserve in (pair.target.reserve, pair.target.reserve_nowait):
        with pytest.raises(error, match=words):
            reserve(**arguments)
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_wrong_pools_are_refused(pair: Pair) -> None:
    other = View.ordered(Group.attention([4, 5, 6, 7], 2, 8, "float16"), blocks=16, block_tokens=4)
    overlapping = View.ordered(Group.attention([7], 2, 8, "float16"), blocks=16, block_tokens=8)
    few = View.ordered(Group.attention([7], 2, 8, "float16"), blocks=8, block_tokens=8)
    half = View.ordered(Group.attention([7], 2, 8, "float16"), blocks=16, block_tokens=8, rank=1, ranks=2)
    for views, message in (
        ("view", "views must be a hixl_async.kv.View, or a sequence of them"),
        ([], "views must be"),
        ([VIEW, None], "views must be"),
        (GROUP, "views must be"),
        ([VIEW, few], "the same number of blocks, and the same rank"),
        ([VIEW, half], "the same number of blocks, and the same rank"),
        ([VIEW, VIEW], "a layer is in two views"),
        ([VIEW, overlapping], "two views share a tensor in which a block of the one would overlap other blocks"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            Pool(pair.d, views, name="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="exists"):
        Pool(pair.d, VIEW, name="kv")
    for streams in (0, True, "1"):
        with pytest.raises(InvalidArgumentError, match="^streams must be"):
            Pool(pair.d, [VIEW, other], name="some", streams=streams)  # type: ignore[arg-type]
    pair.d.allocate("half.words", 1)
    with pytest.raises(InvalidArgumentError, match="exists"):
        Pool(pair.d, VIEW, name="half")
    assert pair.d.regions["half"].closed, "nothing is left half made, not even for a moment"
    pair.d.allocate("tensors.3", 1)
    with pytest.raises(InvalidArgumentError, match="exists"):
        Pool(pair.d, View.ordered(GROUP, "L/PBTH", blocks=16, block_tokens=4), name="tensors")
    assert all(pair.d.regions[f"tensors.{number}"].closed for number in range(3))
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_a_pool_that_cannot_be_made_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hixl_async.kv.pool.Lender", fail)
    with pytest.raises(MemoryError):
        Pool(pair.d, VIEW, name="half")
    assert pair.d.regions["half"].closed
    assert pair.d.regions["half.words"].closed
    assert list(pair.d.handlers) == ["kv/kv"]


@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("blocks", [(1 << 31) - 1, 1 << 31, 1 << 40])
def test_a_pool_beyond_all_memory_fails_at_once(blocks: int, shuffle: int | None) -> None:
    """Its memory is allocated before any bookkeeping."""
    program = f"""
import asyncio, resource
import hixl_async as hx

async def main():
    async with hx.Engine() as engine:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            group = hx.kv.Group.attention(4, 2, 64, "float32")
            hx.kv.Pool(engine, hx.kv.View.ordered(group, blocks={blocks}, block_tokens=16), shuffle={shuffle})
        except hx.HixlError as error:
            print(type(error).__name__, engine.regions)

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["DriverError" if blocks < 1 << 31 else "InvalidArgumentError", "{}"], ran.stderr


async def test_another_thread_may_only_push(pair: Pair) -> None:
    async with pair.target.reserve(blocks=1) as blocks, pair.source.reserve(blocks=1) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:

            def call() -> None:
                for use in (
                    lambda: pair.target.reserve(blocks=1),
                    lambda: pair.target.reserve_nowait(blocks=1),
                    lambda: pair.source.open_stream(pair.to_d, {}),
                    lambda: pair.target.aclose(),
                    lambda: pair.target.stream([blocks]),
                    lambda: blocks.stream(),
                    lambda: blocks.share(),
                    lambda: blocks[:1],
                    lambda: blocks + blocks,
                    lambda: blocks.trim(blocks=1),
                    lambda: blocks.extend_nowait(blocks=2),
                    lambda: blocks.extend(blocks=2).send(None),
                    lambda: blocks.aclose(),
                    lambda: stream.abort(),
                    lambda: stream.layer(0).send(None),
                    lambda: stream.finished().send(None),
                    lambda: stream.drained().send(None),
                    lambda: aiter(stream).__anext__().send(None),
                    lambda: out.abort(),
                    lambda: out.finish().send(None),
                    lambda: out.opened().send(None),
                    lambda: out.drained().send(None),
                    lambda: out.aclose(),
                ):
                    with pytest.raises(WrongLoopError, match="belongs to .*event loop"):
                        use()
                push_all(out, source)

            await asyncio.to_thread(call)
        assert stream.outcome is not None
        assert stream.outcome.verdict is Verdict.FINISHED


async def test_a_closed_pool(pair: Pair) -> None:
    held = await pair.target.reserve(blocks=16)
    stream = held.stream()
    waiter = asyncio.ensure_future(pair.target.reserve(blocks=1))
    await settle()
    await asyncio.gather(pair.target.aclose(), pair.target.aclose())
    with pytest.raises(ClosedError):
        await waiter
    with pytest.raises(ClosedError):
        pair.target.reserve(blocks=1)
    assert stream.outcome is not None
    assert stream.outcome.verdict is Verdict.VOID
    await held.aclose()
    assert pair.target.closed
    assert pair.d.handlers == {}


async def test_a_malformed_timeout_closes_nothing(pair: Pair) -> None:
    for timeout in (None, False, *NO_TIMES[1:]):
        with pytest.raises(InvalidArgumentError, match="^timeout must be"):
            await pair.target.aclose(timeout=timeout)
    assert not pair.target.closed
    async with pair.target.reserve(blocks=16):
        pass
    await pair.target.aclose(timeout=0)
    assert pair.d.handlers == {}


async def test_tickets(pair: Pair) -> None:
    blocks, other = await pair.target.reserve(blocks=2), await pair.target.reserve(blocks=2)
    for name in ("ttl", "lease", "timeout"):
        for time in NO_TIMES:
            with pytest.raises(InvalidArgumentError, match=f"^{name} must be"):
                blocks.stream(**{name: time})
    one, two = blocks.stream(ttl=5, lease=1, timeout=9), other.stream()
    ticket = one.ticket()
    assert json.loads(json.dumps(ticket)) == ticket == one.ticket()
    assert ticket["generation"] < 1 << 40
    assert two.ticket()["id"] != ticket["id"]
    assert two.ticket()["generation"] != ticket["generation"]
    assert two.ticket()["rows"] != ticket["rows"]
    await other.aclose()
    await blocks.aclose()


@pytest.mark.parametrize("used", [False, True])
async def test_blocks_that_were_given_back(pair: Pair, used: bool) -> None:
    """They may be lent to another request by now."""
    blocks, other = await pair.target.reserve(blocks=2), await pair.target.reserve(blocks=1)
    stream = blocks.stream() if used else None
    await blocks.aclose()
    calls: list[Callable[[], Any]] = [
        blocks.stream,
        blocks.share,
        lambda: blocks[:1],
        lambda: blocks + other,
        lambda: other + blocks,
        lambda: blocks.trim(blocks=1),
        lambda: blocks.extend_nowait(blocks=3),
        lambda: pair.target.stream([blocks]),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=r"given back; reserve.*pool\.reserve\(\)"):
            call()
    with pytest.raises(ClosedError, match="given back"):
        await blocks.extend(blocks=3)
    if stream is not None:
        await stream.drained()
        with pytest.raises(TicketError, match="gave its blocks back"):
            await stream.finished()
        with pytest.raises(TicketError, match="gave its blocks back"):
            stream.ticket()
    await other.aclose()


@pytest.mark.parametrize("used", [False, True])
async def test_blocks_of_a_closed_pool_grant_nothing(pair: Pair, used: bool) -> None:
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream() if used else None
    await pair.target.aclose()
    with pytest.raises(ClosedError, match="pool 'kv' is closed"):
        blocks.stream()
    if stream is not None:
        with pytest.raises(TicketError, match="closed its pool"):
            stream.ticket()


async def test_a_private_pool_grants_nothing(pair: Pair) -> None:
    async with pair.source.reserve(blocks=1) as blocks:
        with pytest.raises(AccessError, match="access"):
            blocks.stream()
    assert list(pair.p.regions) == ["prefill"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda blocks, _: blocks.stream(tokens=(0, 9)), RangeError, "the blocks hold the tokens 0 to 8, not 0 to 9"),
        (lambda blocks, _: blocks.stream(tokens=(4, 4)), InvalidArgumentError, "at least one position"),
        (lambda blocks, _: blocks.stream(tokens=(-1, 4)), InvalidArgumentError, "at least one position"),
        (lambda blocks, _: blocks.stream(tokens=8), InvalidArgumentError, "tokens must be a pair of positions"),
        (lambda blocks, _: blocks.stream(tokens=(0, 1.5)), InvalidArgumentError, "tokens must be a whole number"),
        (lambda blocks, _: blocks.stream(sources=[7]), InvalidArgumentError, "different hixl_async.kv.Shard"),
        (
            lambda blocks, _: blocks.stream(sources=[VIEW.shard] * 2),
            InvalidArgumentError,
            "different hixl_async.kv.Shard",
        ),
        (lambda blocks, pool: pool.stream([]), InvalidArgumentError, "of each of the pool's 1 groups"),
        (lambda blocks, pool: pool.stream([blocks, blocks]), InvalidArgumentError, "of each of the pool's 1 groups"),
        (lambda blocks, pool: pool.stream(["x"]), InvalidArgumentError, "blocks must be Blocks of this pool"),
        (lambda blocks, pool: pool.stream([blocks], tokens=[]), InvalidArgumentError, "a pair of positions for each"),
    ],
)
async def test_impossible_streams(
    pair: Pair, make: Callable[[Any, Pool], object], error: type[Exception], message: str
) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        with pytest.raises(error, match=message):
            make(blocks, pair.target)
        async with pair.source.reserve(blocks=1) as foreign:
            with pytest.raises(InvalidArgumentError, match="blocks must be Blocks of this pool"):
                pair.target.stream([foreign])
        await blocks.stream().abort()  # nothing of the refused one remains


async def test_streams_are_limited(pair: Pair) -> None:
    """Each sender has words of its own, of which the pool has so many."""
    pool = Pool(pair.d, VIEW, name="small", streams=2)
    async with pool.reserve(blocks=1) as one, pool.reserve(blocks=1) as two, pool.reserve(blocks=1) as three:
        first = one.stream()
        two.stream()
        with pytest.raises(BusyError, match="2 of the pool's 2 rows of words are in use"):
            three.stream()
        await first.abort()
        three.stream()  # the blocks of the refused one were not marked as being written
    await pool.aclose()


async def test_leaving_revokes_an_unopened_ticket(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        ticket = stream.ticket()
    assert pair.target.statistics() == (16, 0, 0, 0), "nothing was granted: they return at once"
    await stream.drained()
    with pytest.raises(TicketError, match="unknown here"):
        await pair.source.open_stream(pair.to_d, ticket)
    assert stream.outcome is not None
    assert "gave its blocks back" in stream.outcome.reason


async def test_a_ticket_without_a_producer_expires(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(ttl=0.01)
        ticket = stream.ticket()
        with pytest.raises(TicketError, match="no producer opened the ticket"):
            await stream.finished()
        with pytest.raises(TicketError):
            await pair.source.open_stream(pair.to_d, ticket)


def _without(body: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in body.items() if key != name}


def _packed(data: bytes) -> str:
    return b64encode(zlib.compress(data)).decode()


async def test_malformed_tickets(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        good = stream.ticket()
        ((ids, *positions),) = good["slices"]
        huge = (1 << 63, 1 << 70, 1 << 20000, -(1 << 20000))
        wrong = [
            None,
            [],
            "ticket",
            *(_without(good, name) for name in good),
            {**good, "version": 2},
            {**good, "more": 1},
            *({**good, "slices": slices} for slices in ([], "x", [7], [[]], [[ids]], [[ids, *positions]] * 65)),
            *({**good, "slices": [[text, *positions]]} for text in ("", "?", "AAAA", _packed(b""), _packed(b"123"))),
            {**good, "slices": [[_packed(b"\0" * 8), *positions]]},  # a block twice
            {**good, "slices": [[_packed(b"\xff" * 4), *positions]]},  # block -1
            {**good, "slices": [[_packed(b"\0\0\0\x7f" * 2), *positions]]},  # beyond all pools
            {**good, "slices": [[_packed(b"\0" * ((1 << 22) + 4)), *positions]]},  # too many
            {**good, "slices": [[b64encode(b64decode(ids) + b"more").decode(), *positions]]},
            *({**good, "slices": [[ids, *numbers]]} for numbers in ([0, 0, 0], [0, 2, 1], [1, 0, 8], [-1, 0, 8])),
            *({**good, "slices": [[ids, 0, True, 8]]}, {**good, "slices": [[ids, 0, 0, 1 << 23]]}),
            *({**good, "slices": [[ids, 0, 0, number]]} for number in huge),
            *({**good, "rows": rows} for rows in ([], [0, 1], ["0"], [-1], [True], [1 << 31])),
            *({**good, "rows": [number]} for number in huge),
            *({**good, "sources": [shard]} for shard in (7, [], [0, 1], [1, 1, [0]], [-1, 1, [0]], [0, 1, ["0"]])),
            {**good, "sources": [[0, 2, [0]], [1, 2, [0]]]},  # with one row
            *({**good, "sources": [[0, number, [0]]]} for number in huge),
            {**good, "generation": 0},
            {**good, "generation": True},
            {**good, "generation": 1 << 40},
            {**good, "id": 7},
            *({**good, name: number} for name in ("version", "generation") for number in huge),
        ]
        for ticket in wrong:
            with pytest.raises(TicketError, match="not a valid ticket"):
                pair.source.open_stream(pair.to_d, ticket)  # type: ignore[arg-type]
        for timeout in (None, *NO_TIMES):
            with pytest.raises(InvalidArgumentError, match="^timeout must be"):
                pair.source.open_stream(pair.to_d, good, timeout=timeout)


@pytest.mark.parametrize(
    "claim",
    [
        {"slices": [[_packed(b"\1\0\0\0" * 1000), 0, 0, (1 << 23) - 1]]},
        {"slices": [[_packed(b"\1\0\0\0"), (1 << 62) - 2, (1 << 62) - 2, (1 << 62) - 1]]},
        {"sources": [[0, (1 << 31) - 1, [(1 << 62) - 1]]]},
        {"rows": [(1 << 31) - 1]},
        {"generation": (1 << 40) - 1},
    ],
    ids=str,
)
async def test_tickets_that_claim_too_much(pair: Pair, claim: dict[str, Any]) -> None:
    """No memory is allocated in proportion to a number in a ticket."""
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        ticket = {**stream.ticket(), **claim}
        tracemalloc.start()
        try:
            with pytest.raises(TicketError, match="not the one that was issued|does not name this pool"):
                await pair.source.open_stream(pair.to_d, ticket)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


async def test_a_small_ticket_of_huge_lists_is_refused_early(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        bomb = {**blocks.stream().ticket(), "slices": [[_packed(b"\0" * (64 << 20)), 0, 0, 8]]}
        tracemalloc.start()
        try:
            with pytest.raises(TicketError, match="at most 1048576 block ids"):
                pair.source.open_stream(pair.to_d, bomb)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()


async def test_a_ticket_of_an_earlier_incarnation(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stale = {**blocks.stream().ticket(), "incarnation": "d-0"}
        with pytest.raises(TicketError, match="no longer, peer 'd'"):
            pair.source.open_stream(pair.to_d, stale)


async def test_malformed_messages_are_refused(pair: Pair) -> None:
    end: dict[str, Any] = {"say": "end", "id": "x", "sender": 0, "complete": True, "reason": "", "payload": ""}
    for body in (
        {},
        {"say": 1},
        {"say": "sing"},
        {"say": "open"},
        {"say": "decision", "id": "x", "finished": 1, "reason": ""},
        {**end, "complete": 1},
        {**end, "sender": True},
        {**end, "payload": "?"},
        {**end, "payload": None},
    ):
        with pytest.raises(RemoteError):
            await pair.to_d.request("kv/kv", body)
    async with pair.target.reserve(blocks=1) as blocks:
        ticket = blocks.stream().ticket()
        opening: dict[str, Any] = {
            "say": "open",
            "id": ticket["id"],
            "digest": "",
            "pool": "x",
            "sender": 0,
            "cache": [[0, 1, [0, 1, 2, 3]], []],
        }
        for groups in ([7], [[[0], None, []]], [[["0"], None, [["k", 2, 8, "float16", False]]]], [[[-1], 0, []]]):
            with pytest.raises(RemoteError, match="malformed|out of range"):
                await pair.to_d.request("kv/kv", {**opening, "cache": [[0, 1, [0, 1, 2, 3]], groups]})
        for shard in ([], [0, 0, []], [0, 1, [True]], [0, 1, [1 << 62]]):
            with pytest.raises(RemoteError, match="shard"):
                await pair.to_d.request("kv/kv", {**opening, "cache": [shard, []]})
        for sender in (0, 1, -1, 1 << 70):
            with pytest.raises(TicketError, match="another peer"):
                await pair.to_d.request("kv/kv", {**end, "id": ticket["id"], "sender": sender})
        assert await pair.to_d.request("kv/kv", {"say": "decision", "id": "x", "finished": True, "reason": ""}) == {}
        out = await pair.source.open_stream(pair.to_d, ticket)  # still good
        await out.aclose()
