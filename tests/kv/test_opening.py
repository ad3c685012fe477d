"""Streams whose producer goes on before its consumer has answered, or before the ticket is there."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from passes import settle

from hixl_async.errors import (
    BusyError,
    ClosedError,
    HixlError,
    InvalidArgumentError,
    LayoutMismatchError,
    PeerDownError,
    RangeError,
    StreamAbortedError,
    TicketError,
)
from hixl_async.kv import Blocks, Group, LayerStream, Outcome, Pool, PushStream, Verdict, View

from .conftest import LAYERS, Pair, push_all

Body = dict[str, Any]


class Later:
    """An awaitable that is neither a future nor a coroutine."""

    def __init__(self, ticket: asyncio.Future[Body]) -> None:
        self._ticket = ticket

    def __await__(self) -> Generator[Any, None, Body]:
        return self._ticket.__await__()


async def asked(ticket: asyncio.Future[Body]) -> Body:
    return await ticket


AWAITABLES: dict[str, Callable[[asyncio.Future[Body]], Awaitable[Body]]] = {
    "future": lambda ticket: ticket,
    "task": lambda ticket: asyncio.ensure_future(asked(ticket)),
    "coroutine": asked,
    "other": Later,
}


def sent(pair: Pair) -> list[int]:
    """Return the layers in the order in which they were sent."""
    return [transfer.signal[0].start // 8 % LAYERS for transfer in pair.p.transfers]


# ---- pushes before the answer ----


async def test_layers_that_are_pushed_before_the_answer_leave_with_it(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        pair.to_p.running = False  # the consumer does not read its messages yet
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            async with pair.source.reserve(blocks=2) as source:
                for layer in range(LAYERS):
                    pair.fill(source.ids, layer, layer + 1)
                out.push(3, source)
                await asyncio.to_thread(push_all, out, source, [0, 1, 2])
            assert pair.source.statistics().quarantined == 2, "the queue holds them"
            await settle()
            assert pair.p.transfers == []
            assert not stream.landed
            pair.to_p.resume()
            await out.opened()
            assert sorted([layer async for layer in stream]) == [0, 1, 2, 3]
            assert sent(pair) == [3, 0, 1, 2]
            await out.opened()  # it still is
        assert await stream.finished() == b""
        assert pair.layer(pair.target, blocks.ids[:1], 2)[0] == 3
    assert pair.source.statistics() == (16, 0, 0, 0)


async def test_marks_are_not_asked_before_the_answer(pair: Pair) -> None:
    asked = []
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        pair.to_p.running = False
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for layer in range(LAYERS):
                out.push(layer, source, ready=lambda layer=layer: asked.append(layer) or True)
            await settle()
            assert asked == []
            assert pair.source._context.poller.idle
            pair.to_p.resume()
        assert asked == list(range(LAYERS))
        await stream.finished()


async def test_wrong_pushes_are_refused_before_the_answer(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            out.push(0, source)
            with pytest.raises(InvalidArgumentError, match="all of layer 0 was pushed before"):
                out.push(0, source)
            with pytest.raises(RangeError, match="not within those of the ticket, 0 to 8"):
                out.push(1, source, tokens=(0, 9))
            with pytest.raises(RangeError, match="layer 4 does not exist"):
                out.push(4, source)
            push_all(out, source, [1, 2, 3])
        await stream.finished()


async def test_a_refused_opening_sends_nothing_that_was_pushed(pair: Pair) -> None:
    other = View.ordered(Group.attention(LAYERS, 1, 8, "float16"), blocks=16, block_tokens=4)
    async with (
        Pool(pair.p, other, name="other", access="none") as pool,
        pair.target.reserve(blocks=2) as blocks,
        pool.reserve(blocks=2) as source,
    ):
        stream = blocks.stream()
        with pytest.raises(LayoutMismatchError, match="heads is 1 at the source and 2 at the target"):
            async with pool.open_stream(pair.to_d, stream.ticket()) as out:
                push_all(out, source)
        check_void(out, source, LayoutMismatchError)
        with pytest.raises(LayoutMismatchError):
            await stream.finished()
        await stream.drained()
    assert pair.p.transfers == []


def check_void(out: PushStream, source: Blocks, error: type[HixlError]) -> None:
    """Check that a stream that could not be opened takes nothing more."""
    assert out.outcome is not None
    assert out.outcome.verdict is Verdict.VOID
    with pytest.raises(error):
        out.push(3, source)


# ---- tickets that come later ----


@pytest.mark.parametrize("kind", AWAITABLES)
async def test_a_ticket_may_come_later(pair: Pair, kind: str) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        ticket: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        async with pair.source.open_stream(pair.to_d, AWAITABLES[kind](ticket)) as out:
            assert out.ticket is None
            push_all(out, source, [2, 0])
            await settle()
            assert pair.to_d.sent == []
            ticket.set_result(stream.ticket())
            await out.opened()
            assert out.ticket is not None
            assert out.ticket.body() == stream.ticket()
            push_all(out, source, [1, 3])
        assert sent(pair) == [2, 0, 1, 3]
        assert await stream.finished() == b""


async def test_a_stream_is_left_before_its_ticket_is_there(pair: Pair) -> None:
    """What was pushed until then is sent, and leaving waits for it."""
    async with pair.target.reserve(tokens=10) as blocks, pair.source.reserve(tokens=10) as source:
        stream = blocks.stream()
        ticket: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        async def produce() -> None:
            async with pair.source.open_stream(pair.to_d, ticket) as out:
                push_all(out, source)
            assert out.outcome == Outcome(Verdict.FINISHED)

        producing = asyncio.create_task(produce())
        await asyncio.sleep(0)  # it pushes, and begins to leave
        ticket.set_result(stream.ticket())
        await producing
        assert await stream.finished() == b""
        assert stream.landed == tuple(range(LAYERS))


async def test_a_finish_before_the_ticket_is_there(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        ticket: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        out = pair.source.open_stream(pair.to_d, ticket)
        push_all(out, source)
        finishing = asyncio.create_task(out.finish(b"token"))
        await settle()
        assert not finishing.done()
        ticket.set_result(stream.ticket())
        await finishing
        assert await stream.finished() == b"token"


async def test_a_stream_that_is_left_too_early_is_aborted_once_its_ticket_is_there(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        ticket: asyncio.Future[Body] = asyncio.get_running_loop().create_future()

        async def produce() -> None:
            async with pair.source.open_stream(pair.to_d, ticket) as out:
                push_all(out, source, [0, 1])

        producing = asyncio.create_task(produce())
        await settle()
        ticket.set_result(stream.ticket())
        for end in (producing, stream.finished()):
            with pytest.raises(StreamAbortedError, match="the producer closed the stream after 2 of 4 layers"):
                await end


@pytest.mark.parametrize(
    ("push", "error", "message"),
    [
        ({"tokens": (0, 12)}, RangeError, "tokens 0 to 12 are not within those of the ticket, 4 to 12"),
        ({"tokens": (6, 8)}, InvalidArgumentError, "those from 4 are next"),
        ({"tokens": (4, 13)}, RangeError, "not within those of the ticket"),
    ],
)
async def test_what_was_pushed_too_early_does_not_fit_the_ticket(
    pair: Pair, push: dict[str, Any], error: type[HixlError], message: str
) -> None:
    async with pair.target.reserve(blocks=3) as blocks, pair.source.reserve(blocks=4) as source:
        stream = blocks.stream(tokens=(4, 12), ttl=0.05)
        ticket: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        out = pair.source.open_stream(pair.to_d, ticket)
        out.push(0, source, **push)
        ticket.set_result(stream.ticket())
        with pytest.raises(error, match=message):
            await out
        check_void(out, source, error)
        with pytest.raises(TicketError, match="no producer opened the ticket"):
            await stream.finished()
    assert pair.to_d.sent == []


def busy() -> Body:
    raise BusyError("no room")


FAILURES: dict[str, tuple[Callable[[], Body], type[HixlError], str]] = {
    "error": (lambda: {}["x"], TicketError, "there is no ticket: KeyError: 'x'"),
    "typed error": (busy, BusyError, "no room"),
    "no ticket": (dict, TicketError, "this is not a valid ticket"),
    "nothing": (lambda: None, TicketError, "this is not a valid ticket: a ticket is a dict"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_ticket_that_does_not_come(pair: Pair, failure: str) -> None:
    answer, error, message = FAILURES[failure]

    async def ask() -> Body:
        await settle()
        return answer()

    async with pair.source.reserve(blocks=2) as source:
        out = pair.source.open_stream(pair.to_d, ask())
        push_all(out, source)
        waiting = [asyncio.ensure_future(wait) for wait in (out, out.opened(), out.finish())]
        for one in waiting:
            with pytest.raises(error, match=message) as caught:
                await one
        if failure == "error":
            assert isinstance(caught.value.__cause__, KeyError)
        check_void(out, source, error)
        with pytest.raises(error, match=message):
            async with out:
                pass
        assert out.outcome == await out.abort()
    assert pair.source.statistics() == (16, 0, 0, 0)
    assert pair.to_d.sent == []


async def test_a_ticket_that_is_cancelled(pair: Pair) -> None:
    ticket: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    async with pair.source.reserve(blocks=2) as source:
        out = pair.source.open_stream(pair.to_d, ticket)
        push_all(out, source)
        await settle()
        ticket.cancel()
        for call in (out.opened, out.finish):
            with pytest.raises(TicketError, match="aborted before it was open: the ticket's awaitable was cancelled"):
                await call()
        await out.drained()
    assert pair.source.statistics() == (16, 0, 0, 0)


# ---- streams that end while they open ----


async def abort(pair: Pair, out: PushStream) -> None:
    await out.abort("enough")


async def leave(pair: Pair, out: PushStream) -> None:
    async def failing() -> None:
        async with out:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()


async def close_pool(pair: Pair, out: PushStream) -> None:
    await pair.source.aclose()


async def lose_peer(pair: Pair, out: PushStream) -> None:
    pair.to_d.lose(dead=True)
    pair.to_p.lose(dead=True)


ENDS: dict[str, tuple[Callable[[Pair, PushStream], Awaitable[None]], type[HixlError], str]] = {
    "abort": (abort, TicketError, "enough"),
    "exception": (leave, TicketError, "the producer failed: ZeroDivisionError"),
    "pool": (close_pool, TicketError, "the producer closed its pool"),
    "peer": (lose_peer, PeerDownError, "the peer is lost"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", AWAITABLES)
@pytest.mark.parametrize("begun", [True, False])
async def test_a_stream_that_ends_before_its_ticket_is_there(pair: Pair, kind: str, end: str, begun: bool) -> None:
    """Nothing waits for a ticket that may never come."""
    act, error, message = ENDS[end]
    ticket: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    source = await pair.source.reserve(blocks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also for a coroutine that was never awaited
        out = pair.source.open_stream(pair.to_d, AWAITABLES[kind](ticket))
        push_all(out, source, [0, 1])
        if begun:
            await settle()
        waiting = asyncio.ensure_future(out)
        async with asyncio.timeout(5):
            await act(pair, out)
            with pytest.raises(error, match=message):
                await waiting
            await out.drained()
        check_void(out, source, error)
        with pytest.raises(error, match=message):
            await out.finish()
        await settle()
        assert ticket.cancelled() or not begun
        await source.aclose()
        gc.collect()
    assert pair.source.statistics() == (16, 0, 0, 0)
    assert pair.to_d.sent == []


@pytest.mark.parametrize("end", ENDS)
async def test_a_stream_that_ends_before_the_answer(pair: Pair, end: str) -> None:
    act, error, message = ENDS[end]
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        source = await pair.source.reserve(blocks=2)
        pair.to_p.running = False
        out = pair.source.open_stream(pair.to_d, stream.ticket())
        push_all(out, source, [0, 1])
        await settle()
        ending = asyncio.ensure_future(act(pair, out))
        await settle()
        pair.to_p.resume()
        await ending
        with pytest.raises(error, match=message):
            await out
        await source.aclose()
        await out.drained()
        assert pair.source.statistics() == (16, 0, 0, 0)
        if end == "peer":
            assert stream.outcome is None, "it never heard of the producer, whose ticket is still good"
            await stream.abort()
        else:
            with pytest.raises(StreamAbortedError, match=message):
                await stream.finished()
        await stream.drained()
    assert pair.p.transfers == []
    assert pair.target.statistics() == (16, 0, 0, 0)


@pytest.mark.parametrize("end", ["abort", "blocks", "pool", "expiry"])
async def test_a_consumer_that_ends_before_it_is_asked(pair: Pair, end: str) -> None:
    async with pair.source.reserve(blocks=2) as source:
        blocks = await pair.target.reserve(blocks=2)
        stream: LayerStream = blocks.stream(ttl=0.01 if end == "expiry" else None)
        out = pair.source.open_stream(pair.to_d, stream.ticket())
        push_all(out, source)
        pair.to_p.running = False
        if end == "abort":
            await stream.abort("enough")
        elif end == "blocks":
            await blocks.aclose()
        elif end == "pool":
            await pair.target.aclose()
        with pytest.raises(TicketError):
            await stream.finished()
        pair.to_p.resume()
        with pytest.raises(TicketError):
            await out
        check_void(out, source, TicketError)
        with pytest.raises(TicketError):
            await out.finish()
        await blocks.aclose()
    assert pair.p.transfers == []
    assert pair.target.statistics() == pair.source.statistics() == (16, 0, 0, 0)


async def test_a_closed_pool_opens_nothing(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        ticket = blocks.stream().ticket()
        await pair.source.aclose()
        with pytest.raises(ClosedError, match="pool 'prefill' is closed"):
            pair.source.open_stream(pair.to_d, ticket)
