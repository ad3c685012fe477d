"""Pools: reservations, closing, tickets, and malformed messages."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import subprocess
import sys
import tracemalloc
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
from hixl_async.kv import Pool, Verdict

from .conftest import LAYOUT, Pair

NUMBERS = ("version", "pool_blocks", "layers", "slot", "generation")
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
        for thing in (pair.target, blocks, stream, pair.source.open_stream(pair.to_d, blocks.ticket())):
            for act in (copy.copy, pickle.dumps):
                with pytest.raises(TypeError, match="neither pickled nor copied"):
                    act(thing)


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
    with pytest.raises(InvalidArgumentError, match="Layout"):
        Pool(pair.d, "layout", blocks=1)  # type: ignore[arg-type]
    for blocks in (0, True, "1"):
        with pytest.raises(InvalidArgumentError, match="blocks"):
            Pool(pair.d, LAYOUT, blocks=blocks, name="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="exists"):
        Pool(pair.d, LAYOUT, blocks=1, name="kv")
    pair.d.allocate("half.signals", 1)
    with pytest.raises(InvalidArgumentError, match="exists"):
        Pool(pair.d, LAYOUT, blocks=1, name="half")
    assert pair.d.regions["half"].closed, "nothing is left half made, not even for a moment"
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_a_pool_that_cannot_be_made_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hixl_async.kv.pool.Allocator", fail)
    with pytest.raises(MemoryError):
        Pool(pair.d, LAYOUT, blocks=4, name="half")
    assert pair.d.regions["half"].closed
    assert pair.d.regions["half.signals"].closed
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
            hx.kv.Pool(engine, hx.kv.Layout(4, 2, 64, "float32", 16), blocks={blocks}, shuffle={shuffle})
        except hx.HixlError as error:
            print(type(error).__name__, engine.regions)

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["DriverError" if blocks < 1 << 31 else "InvalidArgumentError", "{}"], ran.stderr


async def test_another_thread_may_only_push(pair: Pair) -> None:
    async with pair.target.reserve(blocks=1) as blocks, pair.source.reserve(blocks=1) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, blocks.ticket()) as out:  # granted before the thread asks

            def call() -> None:
                for use in (
                    lambda: pair.target.reserve(blocks=1),
                    lambda: pair.target.reserve_nowait(blocks=1),
                    lambda: pair.source.open_stream(pair.to_d, {}),
                    lambda: pair.target.aclose(),
                    lambda: blocks.ticket(),
                    lambda: blocks.stream(),
                    lambda: blocks.aclose(),
                    lambda: blocks.fenced().send(None),
                    lambda: stream.abort(),
                    lambda: stream.layer(0).send(None),
                    lambda: stream.finished().send(None),
                    lambda: stream.fenced().send(None),
                    lambda: aiter(stream).__anext__().send(None),
                    lambda: out.abort(),
                    lambda: out.finished().send(None),
                    lambda: out.aclose(),
                ):
                    with pytest.raises(WrongLoopError, match="belongs to .*event loop"):
                        use()
                for layer in range(LAYOUT.layers):
                    out.push(layer, source[layer])

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
    blocks = await pair.target.reserve(blocks=2)
    ticket = blocks.ticket(ttl=5, stall=1, timeout=9)
    assert json.loads(json.dumps(ticket)) == ticket == blocks.ticket() == blocks.stream().ticket.body()
    assert ticket["blocks"] == list(blocks.ids)
    assert ticket["generation"] < 2**53
    assert blocks.stream() is blocks.stream()
    for time in (1, *NO_TIMES):
        with pytest.raises(InvalidArgumentError, match="first call"):
            blocks.ticket(ttl=time)
    other = await pair.target.reserve(blocks=2)
    for name in ("ttl", "stall", "timeout"):
        for time in NO_TIMES:
            with pytest.raises(InvalidArgumentError, match=f"^{name} must be"):
                other.ticket(**{name: time})
    assert other.ticket()["id"] != ticket["id"]
    assert other.ticket()["generation"] != ticket["generation"]
    await other.aclose()
    await blocks.aclose()


@pytest.mark.parametrize("used", [False, True])
async def test_blocks_that_were_given_back(pair: Pair, used: bool) -> None:
    """They may be lent to another request by now."""
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream() if used else None
    await blocks.aclose()
    calls: list[Callable[[], Any]] = [blocks.ticket, blocks.stream, lambda: blocks[0], lambda: blocks.ticket(ttl=1)]
    for call in calls:
        with pytest.raises(ClosedError, match=r"given back; reserve.*pool\.reserve\(\)"):
            call()
    await blocks.fenced()
    if stream is not None:
        with pytest.raises(TicketError, match="gave its blocks back"):
            await stream.finished()


@pytest.mark.parametrize("used", [False, True])
async def test_blocks_of_a_closed_pool_grant_nothing(pair: Pair, used: bool) -> None:
    blocks = await pair.target.reserve(blocks=2)
    if used:
        blocks.ticket()
    await pair.target.aclose()
    for call in (blocks.ticket, blocks.stream):
        with pytest.raises(ClosedError, match="pool 'kv' is closed"):
            call()


async def test_a_private_pool_grants_nothing(pair: Pair) -> None:
    async with pair.source.reserve(blocks=1) as blocks:
        with pytest.raises(AccessError, match="access"):
            blocks.ticket()
        with pytest.raises(RangeError):
            blocks[4]
        for layer in (True, None, "1", 1.0):
            with pytest.raises(InvalidArgumentError, match="^layer must be a whole number"):
                blocks[layer]  # type: ignore[index]
        assert [source.layer for source in blocks] == [0, 1, 2, 3]
        await blocks.fenced()
    assert list(pair.p.regions) == ["prefill"]


async def test_leaving_revokes_an_unopened_ticket(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        ticket = blocks.ticket()
        stream = blocks.stream()
    assert pair.target.statistics() == (16, 0, 0, 0), "nothing was granted: they return at once"
    await blocks.fenced()
    with pytest.raises(TicketError, match="unknown here"):
        await pair.source.open_stream(pair.to_d, ticket)
    assert stream.outcome is not None
    assert "gave its blocks back" in stream.outcome.reason


async def test_a_ticket_without_a_producer_expires(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        ticket = blocks.ticket(ttl=0.01)
        with pytest.raises(TicketError, match="no producer opened the ticket"):
            await blocks.stream().finished()
        with pytest.raises(TicketError):
            await pair.source.open_stream(pair.to_d, ticket)


def _without(body: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in body.items() if key != name}


async def test_malformed_tickets(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        good = blocks.ticket()
        wrong = [
            None,
            [],
            "ticket",
            *(_without(good, name) for name in good),
            {**good, "version": 1},
            {**good, "more": 1},
            {**good, "blocks": []},
            {**good, "blocks": ["0"]},
            {**good, "blocks": [0, 16]},
            {**good, "blocks": [-1]},
            {**good, "blocks": [1, 1]},
            {**good, "slot": 16},
            {**good, "generation": 0},
            {**good, "generation": True},
            {**good, "generation": 1 << 53},
            {**good, "layers": 0},
            {**good, "id": 7},
            *({**good, name: number} for name in NUMBERS for number in (1 << 63, 1 << 70, 1 << 20000, -(1 << 20000))),
            *({**good, "blocks": [number]} for number in (1 << 31, 1 << 70, 1 << 20000, -(1 << 20000))),
            {**good, "pool_blocks": 1 << 70, "blocks": [1 << 69], "slot": 1 << 69},
            {**good, "pool_blocks": 0},
            {**good, "pool_blocks": 1 << 31},
        ]
        for ticket in wrong:
            with pytest.raises(TicketError, match="not a valid ticket"):
                pair.source.open_stream(pair.to_d, ticket)  # type: ignore[arg-type]
        for timeout in (None, *NO_TIMES):
            with pytest.raises(InvalidArgumentError, match="^timeout must be"):
                pair.source.open_stream(pair.to_d, good, timeout=timeout)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("layers", 1 << 34), ("layers", 1 << 50), ("layers", 3), ("pool_blocks", (1 << 31) - 1), ("generation", (1 << 53) - 1),
    ],
)  # fmt: skip
async def test_tickets_that_claim_too_much(pair: Pair, name: str, number: int) -> None:
    """No memory is allocated in proportion to a number in a ticket."""
    async with pair.target.reserve(blocks=2) as blocks:
        tracemalloc.start()
        try:
            out = pair.source.open_stream(pair.to_d, {**blocks.ticket(), name: number})
            with pytest.raises(TicketError, match="not the one that was issued"):
                await out
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


async def test_a_ticket_of_an_earlier_incarnation(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stale = {**blocks.ticket(), "incarnation": "d-0"}
        with pytest.raises(TicketError, match="no longer, peer 'd'"):
            pair.source.open_stream(pair.to_d, stale)


async def test_malformed_messages_are_refused(pair: Pair) -> None:
    for body in (
        {},
        {"say": 1},
        {"say": "sing"},
        {"say": "open"},
        {"say": "end", "id": "x", "complete": 1, "reason": ""},
    ):
        with pytest.raises(RemoteError):
            await pair.to_d.request("kv/kv", body)
    async with pair.target.reserve(blocks=1) as blocks:
        ticket = blocks.ticket()
        body = {
            "say": "open",
            "id": ticket["id"],
            "digest": "",
            "pool": "x",
            "layout": {"layers": 1},
        }
        with pytest.raises(RemoteError, match="malformed"):
            await pair.to_d.request("kv/kv", body)
        with pytest.raises(TicketError, match="another peer"):
            await pair.to_d.request("kv/kv", {"say": "end", "id": ticket["id"], "complete": True, "reason": ""})
        out = await pair.source.open_stream(pair.to_d, ticket)  # still good
        await out.aclose()
