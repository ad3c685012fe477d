"""Streams between two pools on fake engines: the tests decide the order of events."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy
import pytest
from passes import settle

from hixl_async.errors import (
    BusyError,
    ClosedError,
    InvalidArgumentError,
    LayoutMismatchError,
    PeerLostError,
    RangeError,
    StreamAbortedError,
    TicketError,
    TransferError,
    TransferTimeoutError,
    WaitTimeoutError,
)
from hixl_async.kv import Group, Pool, Verdict, View, window
from hixl_async.kv.words import pack_word

from .conftest import VIEW, Pair, push_all


async def collect(stream: Any) -> list[int]:
    return [layer async for layer in stream]


async def test_layers_land_in_any_order_and_byte_for_byte(pair: Pair) -> None:
    async with pair.target.reserve(tokens=11) as blocks, pair.source.reserve(tokens=11) as source:
        stream = blocks.stream()
        iterating = asyncio.create_task(collect(stream))
        waiting = asyncio.create_task(stream.layer(1))
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for layer in (2, 0, 3, 1):
                pair.fill(source.ids, layer, 10 * layer + 1)
                out.push(layer, source)
                await settle()
                assert stream.landed[-1] == layer
                expected = pair.layer(pair.source, source.ids, layer)
                assert pair.layer(pair.target, blocks.ids, layer) == expected
        await waiting
        assert await iterating == [2, 0, 3, 1]
        assert await stream.finished() == b""
        await out.drained()
        assert out.outcome == stream.outcome
        assert out.outcome is not None
        assert out.outcome.verdict is Verdict.FINISHED
        await stream.drained()
        assert "4 of 4 layers" in repr(stream)
        assert "4 of 4 layers" in repr(out)
    written = sum(
        bool(pair.layer(pair.target, (block,), layer).strip(b"\0")) for block in range(16) for layer in range(4)
    )
    assert written == 3 * 4, "no other block was touched"


async def test_fewer_source_blocks_fill_the_first_target_blocks(pair: Pair) -> None:
    async with pair.target.reserve(blocks=5) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for layer in range(4):
                pair.fill(source.ids, layer, 7)
                out.push(layer, source)
        await stream.finished()
        assert pair.layer(pair.target, blocks.ids[:2], 3) == pair.layer(pair.source, source.ids, 3)
        assert not any(pair.layer(pair.target, blocks.ids[2:], 3))


async def test_late_and_many_subscribers_see_all_layers(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        early = [asyncio.create_task(collect(stream)) for _ in range(2)]
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
        assert [await task for task in early] == [[0, 1, 2, 3]] * 2
        assert await collect(stream) == [0, 1, 2, 3]
        await stream.layer(2)


async def test_cancelling_one_step_of_an_iteration_loses_no_layer(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        layers = aiter(stream)
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(layers)
            push_all(out, source)
        assert [layer async for layer in layers] == [0, 1, 2, 3]
        with pytest.raises(StopAsyncIteration):
            await anext(layers)


async def test_the_end_counts_even_if_no_signal_was_seen(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            pair.to_p.signals.clear()
            push_all(out, source)
        assert len(await collect(stream)) == 4


async def test_reading_a_layer_before_it_landed_raises(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(BusyError, match=r"await stream.layer\(2\)"):
            stream.check(2)
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
            await pair.p.reaches(4)
            for layer in (0, 1, 3):
                pair.p.transfers[layer].land()
                await stream.layer(layer)
                stream.check(layer)
            with pytest.raises(BusyError):
                stream.check(2)
            pair.p.transfers[2].land()
            await stream.layer(2)
            stream.check(2)
            for transfer in pair.p.transfers:
                transfer.release()
        for wrong in (-1, 4):
            with pytest.raises(RangeError):
                stream.check(wrong)
            with pytest.raises(RangeError):
                await stream.layer(wrong)


async def test_no_signal_without_its_data(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(StreamAbortedError, match="layer 1 failed: boom") as caught:
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                out.push(0, source)
                out.push(1, source)
                await pair.p.reaches(2)
                pair.p.transfers[1].write()
                pair.p.transfers[1].fail(TransferError("boom"))
                pair.p.transfers[0].release()
                pair.p.transfers[1].release()
                await out.finish()
        assert isinstance(caught.value.__cause__, TransferError)
        with pytest.raises(StreamAbortedError, match="boom"):
            await stream.layer(1)
        assert stream.landed == ()


async def test_words_of_other_generations_are_ignored(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        assert out.ticket is not None
        (row,), generation = out.ticket.rows, out.ticket.generation
        words = memoryview(pair.d.regions["kv.words"]).cast("Q")
        others = pack_word(generation - 1, 8, True), pack_word(generation + 1, 8, True), 2**64 - 1, 1
        for layer, word in enumerate(others):
            words[row * 4 + layer] = word
        pair.to_p.signalled()
        await settle()
        assert stream.landed == ()
        assert stream.progress() == dict.fromkeys(range(4), 0)
        words[row * 4 + 2] = pack_word(generation, 8, True)
        pair.to_p.signalled()
        await settle()
        assert stream.landed == (2,)
        await out.aclose()


# ---- wrong use ----


async def test_wrong_pushes(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            out.push(0, source)
            with pytest.raises(InvalidArgumentError, match="all of layer 0 was pushed before"):
                out.push(0, source)
            with pytest.raises(RangeError, match="layer 4 does not exist: pool 'prefill' holds the layers 0 to 3"):
                out.push(4, source)
            for layer in ("a", None, 1.0, True):
                with pytest.raises(InvalidArgumentError, match="^layer must be a whole number"):
                    out.push(layer, source)  # type: ignore[arg-type]
                with pytest.raises(InvalidArgumentError, match="^layer must be a whole number"):
                    stream.check(layer)  # type: ignore[arg-type]
                with pytest.raises(InvalidArgumentError, match="^layer must be a whole number"):
                    stream.waiting_for(layer)  # type: ignore[arg-type]
                with pytest.raises(InvalidArgumentError, match="^layer must be a whole number"):
                    await stream.layer(layer)  # type: ignore[arg-type]
            for end in (out, stream):
                with pytest.raises(InvalidArgumentError, match="^reason must be a string"):
                    await end.abort(None)  # type: ignore[arg-type]
            for wrong in ([1, 2], None, "x", source.ids):
                with pytest.raises(InvalidArgumentError, match="source must be reserved blocks, not "):
                    out.push(1, wrong)  # type: ignore[arg-type]
            with pytest.raises(
                InvalidArgumentError, match="belong to pool 'kv' of engine 'd', the stream to pool '.*' of engine 'p'"
            ):
                out.push(1, blocks)
            with pytest.raises(InvalidArgumentError, match="ready must be"):
                out.push(1, source, ready=3)  # type: ignore[arg-type]
            async with pair.source.reserve(blocks=2, start=8) as beyond:
                with pytest.raises(
                    RangeError, match="tokens 0 to 8 are not within|hold the tokens 8 to 16, not 0 to 8"
                ):
                    out.push(1, beyond)
            async with pair.source.reserve(blocks=1) as gone:
                pass
            with pytest.raises(ClosedError, match="given back"):
                out.push(1, gone)
            for layer in (1, 2, 3):
                out.push(numpy.int64(layer), source)  # type: ignore[arg-type]
        with pytest.raises(ClosedError, match="the stream was finished"):
            out.push(3, source)
        await stream.finished()


async def test_more_source_blocks_than_the_ticket_names(pair: Pair) -> None:
    """The rest of them is not sent."""
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=3) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for layer in range(4):
                pair.fill(source.ids, layer, 5)
            push_all(out, source)
        await stream.finished()
        assert pair.layer(pair.target, blocks.ids, 3) == pair.layer(pair.source, source.ids[:2], 3)
        others = [block for block in range(16) if block not in blocks.ids]
        assert not any(pair.layer(pair.target, others, 3))


async def test_leaving_without_all_layers_aborts(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(StreamAbortedError, match="after 1 of 4 layers"):
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                out.push(0, source)
                await stream.layer(0)
        with pytest.raises(StreamAbortedError, match="after 1 of 4 layers"):
            out.push(1, source)
        with pytest.raises(StreamAbortedError, match="after 1 of 4 layers"):
            await stream.finished()
        await stream.layer(0)
        await stream.drained()


async def test_an_exception_inside_aborts_and_is_raised_unchanged(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(ZeroDivisionError):
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                out.push(0, source)
                out.push(1, source, ready=lambda: False)
                await stream.layer(0)
                raise ZeroDivisionError("in batch 3 of 5")
        with pytest.raises(StreamAbortedError, match="ZeroDivisionError: in batch 3 of 5"):
            await stream.finished()
        await stream.drained()
    assert len(pair.p.transfers) == 1


async def test_layouts_that_differ(pair: Pair) -> None:
    other = Group.attention(4, kv_heads=1, head_dim=8, dtype="float32")
    pool = Pool(pair.p, View.ordered(other, blocks=16, block_tokens=4), name="other", access="none")
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        with pytest.raises(
            LayoutMismatchError, match="heads is 1 at the source and 2 at the target; .* 'float32' .* 'float16'"
        ):
            await pool.open_stream(pair.to_d, stream.ticket())
        with pytest.raises(LayoutMismatchError, match="heads is 1 at the source"):
            await stream.finished()
        await stream.drained()
    assert pair.target.statistics().free == 16
    await pool.aclose()


async def test_a_ticket_works_once_and_the_first_stream_is_unaffected(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        ticket = stream.ticket()
        other = Pool(pair.p, VIEW, name="other", access="none")
        async with pair.source.open_stream(pair.to_d, ticket) as out:
            with pytest.raises(TicketError, match="in use here"):
                await pair.source.open_stream(pair.to_d, ticket)
            with pytest.raises(TicketError, match="used before"):
                await other.open_stream(pair.to_d, ticket)
            push_all(out, source)
        await stream.finished()
        for pool in (pair.source, other):
            with pytest.raises(TicketError, match="unknown here"):
                await pool.open_stream(pair.to_d, ticket)
        await other.aclose()


async def test_a_pool_that_was_closed_meanwhile(pair: Pair) -> None:
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream()
    ticket = stream.ticket()
    await pair.target.aclose()
    with pytest.raises(TicketError, match="has no pool 'kv' any more"):
        await pair.source.open_stream(pair.to_d, ticket)


# ---- aborts ----


async def test_aborted_blocks_are_not_lent_while_a_late_write_may_come(pair: Pair) -> None:
    pair.p.hold = True
    source = await pair.source.reserve(blocks=2)
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream()
    out = await pair.source.open_stream(pair.to_d, stream.ticket())
    for layer in range(4):
        out.push(layer, source, ready=(lambda: False) if layer == 3 else None)
    outcome = await stream.abort("client went away")
    assert outcome.verdict is Verdict.ABORTED
    assert await stream.abort("again") == outcome
    with pytest.raises(StreamAbortedError, match="client went away"):
        await stream.layer(0)
    await blocks.aclose()
    await settle()
    assert pair.target.statistics() == (14, 0, 2, 0)
    with pytest.raises(StreamAbortedError, match="client went away"):
        out.push(3, source)
    assert all(transfer.cancelled() for transfer in pair.p.transfers)
    assert len(pair.p.transfers) == 3, "what had not started never starts"
    fenced = asyncio.create_task(stream.drained())
    pair.fill(source.ids, 2, 99)
    pair.p.transfers[2].land()  # late, and harmless
    await settle()
    assert not fenced.done()
    waiter = asyncio.ensure_future(pair.target.reserve(blocks=16))
    for transfer in pair.p.transfers:
        assert not waiter.done()
        transfer.release()
        await settle()
    await fenced
    everything = await waiter
    await everything.aclose()
    await source.aclose()
    with pytest.raises(StreamAbortedError):
        await out.finish()


async def test_both_sides_abort_at_once(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        out.push(0, source)
        mine, theirs = asyncio.create_task(out.abort("p")), asyncio.create_task(stream.abort("d"))
        await settle()
        pair.p.transfers[0].release()
        assert (await mine).verdict is (await theirs).verdict is Verdict.ABORTED
        assert out.outcome == stream.outcome
        await stream.drained()


async def test_blocks_that_are_closed_after_the_last_layer_has_landed_are_finished(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.source.reserve(blocks=2) as source:
        blocks = await pair.target.reserve(blocks=2)
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        push_all(out, source)
        for transfer in pair.p.transfers:
            transfer.write()
            transfer.store()
        mine = asyncio.create_task(out.abort("too late"))
        await settle()
        assert all(transfer.cancelled() for transfer in pair.p.transfers)
        await blocks.aclose()
        assert stream.outcome is not None
        assert stream.outcome.verdict is Verdict.FINISHED
        assert (await stream.abort("also too late")).verdict is Verdict.FINISHED
        assert pair.target.statistics().free == 16, "each byte is written once, so that none can follow"
        for transfer in pair.p.transfers:
            transfer.release()
        assert (await mine).verdict is Verdict.FINISHED
        assert await stream.finished() == b""


@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_an_abort_between_the_last_layer_and_the_end(pair: Pair, side: str) -> None:
    """The stream is finished by the ends of its producers, which bring the payload, and not by its layers."""
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        push_all(out, source)
        assert await collect(stream) == [0, 1, 2, 3]
        assert stream.outcome is None
        await (out if side == "producer" else stream).abort("no token was chosen")
        for end in (out.finish(), stream.finished()):
            with pytest.raises(StreamAbortedError, match="no token was chosen"):
                await end
        await stream.layer(3)  # what has landed can be read
        with pytest.raises(StreamAbortedError, match="no token was chosen"):
            await collect(stream)
        await stream.drained()


async def test_an_abort_while_the_producer_opens(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        pair.to_d.running = False
        opening = asyncio.ensure_future(pair.source.open_stream(pair.to_d, stream.ticket()))
        await settle()
        await stream.abort("never mind")
        pair.to_d.resume()
        with pytest.raises(TicketError, match="aborted before it was open: never mind"):
            await opening
        await stream.drained()


async def test_cancelling_the_wait_for_the_opening_cancels_only_the_wait(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        pair.to_p.running = False
        out = pair.source.open_stream(pair.to_d, stream.ticket())
        opening = asyncio.ensure_future(out)
        await settle()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        pair.to_p.resume()
        async with out:
            push_all(out, source)
        await stream.finished()


async def test_opening_is_bounded(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        pair.to_p.running = False
        with pytest.raises(WaitTimeoutError):
            await pair.source.open_stream(pair.to_d, stream.ticket(), timeout=0.01)
        pair.to_p.resume()
        with pytest.raises(StreamAbortedError, match="could not open"):
            await stream.finished()
        await stream.drained()


async def test_leaving_an_open_stream_quarantines_until_the_acknowledgement(pair: Pair) -> None:
    pair.p.hold = True
    source = await pair.source.reserve(blocks=2)
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        out.push(0, source)
    assert pair.target.statistics() == (14, 0, 2, 0)
    await settle()
    pair.p.transfers[0].release()
    with pytest.raises(StreamAbortedError, match="gave its blocks back"):
        await out.finish()
    await settle()
    assert pair.target.statistics() == (16, 0, 0, 0)
    await source.aclose()


async def test_source_blocks_stay_until_the_last_layer_is_drained(pair: Pair) -> None:
    pair.p.hold = True
    ready = threading.Event()
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        async with pair.source.reserve(blocks=2) as source:
            for layer in range(4):
                pair.fill(source.ids, layer, layer + 1)
                out.push(layer, source, ready=ready if layer > 1 else None)
        assert pair.source.statistics() == (14, 0, 2, 0), "leaving did not wait"
        ready.set()
        await pair.p.reaches(4)
        for transfer in pair.p.transfers:
            transfer.land()
        await settle()
        assert pair.source.statistics() == (14, 0, 2, 0), "landed, but not drained"
        for transfer in pair.p.transfers:
            transfer.release()
        await out.finish()
        assert pair.source.statistics() == (16, 0, 0, 0)
        for layer in range(4):
            assert pair.layer(pair.target, blocks.ids[:1], layer)[0] == layer + 1


# ---- timeouts and losses ----


async def test_an_expired_lease_fails_the_stream_but_returns_no_block(pair: Pair) -> None:
    pair.p.hold = True
    source = await pair.source.reserve(blocks=2)
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(lease=0.05)
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        out.push(0, source)
        pair.to_d.running = False  # the producer's process is stopped
        with pytest.raises(TransferTimeoutError, match="silent for 0.05 s"):
            await collect(stream)
    assert pair.target.statistics() == (14, 0, 2, 0)
    pair.p.transfers[0].land()  # it goes on, and finishes its copy
    pair.to_d.resume()
    await settle()
    assert pair.target.statistics() == (14, 0, 2, 0)
    pair.p.transfers[0].release()
    await settle()
    assert pair.target.statistics() == (16, 0, 0, 0)
    assert (await out.abort()).verdict is Verdict.ABORTED
    await source.aclose()


async def test_landings_renew_the_lease(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream(lease=0.2)
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            for layer in range(4):
                await asyncio.sleep(0.08)
                out.push(layer, source)
                pair.p.transfers[layer].land()
                pair.p.transfers[layer].release()
        await stream.finished()


async def test_a_late_timer_of_the_lease_reads_the_words_first(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream(lease=0.05)
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            pair.to_p.signals.clear()  # changes of the words go unnoticed
            push_all(out, source)
            pair.p.transfers[0].store()
            await asyncio.sleep(0.07)
            assert stream.landed == (0,)
            assert stream.outcome is None
            for transfer in pair.p.transfers:
                transfer.land()
                transfer.release()
        await stream.finished()


async def test_a_timeout_holds_whatever_the_progress(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream(timeout=0.05)
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        out.push(0, source)
        with pytest.raises(TransferTimeoutError, match="its timeout"):
            await stream.finished()
        await stream.drained()
        with pytest.raises(StreamAbortedError, match="its timeout"):
            await out.finish()


@pytest.mark.parametrize("dead", [True, False])
async def test_a_lost_producer(pair: Pair, dead: bool) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        out.push(0, source)
        pair.p.transfers[0].land()
        out.push(1, source)
        pair.to_p.lose(dead=dead)
        with pytest.raises(PeerLostError) as caught:
            await stream.finished()
        assert caught.value.confirmed_dead is dead
        await stream.layer(0)
        pair.to_d.lose(dead=False)
        await settle()
        for transfer in pair.p.transfers:
            transfer.release()
        with pytest.raises(PeerLostError):
            await out.finish()
    assert pair.target.statistics() == ((16, 0, 0, 0) if dead else (14, 0, 2, 0))
    if not dead:
        pair.to_p.harmless.set()
        await settle()
        assert pair.target.statistics() == (16, 0, 0, 0)


async def test_closing_the_pool_of_a_lost_producer(pair: Pair) -> None:
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream()
    out = await pair.source.open_stream(pair.to_d, stream.ticket())
    pair.to_p.lose(dead=False)
    fenced = asyncio.create_task(stream.drained())
    await settle()
    await pair.target.aclose()
    with pytest.raises(ClosedError):
        await fenced
    pair.to_d.lose(dead=False)
    await out.aclose()


async def test_a_lost_consumer(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(PeerLostError):
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                out.push(0, source)
                out.push(1, source, ready=lambda: False)
                await pair.p.reaches(1)
                pair.to_d.lose(dead=True)
                with pytest.raises(PeerLostError):
                    out.push(2, source)
                await settle()
                assert pair.p.transfers[0].cancelled()
                pair.p.transfers[0].release()
        pair.to_p.lose(dead=True)


async def test_the_producers_exit_is_bounded_if_nothing_drains(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        source = await pair.source.reserve(blocks=2)
        with pytest.raises(TransferTimeoutError, match=r"transfers were not drained within 0.02 s"):
            async with pair.source.open_stream(pair.to_d, stream.ticket(), timeout=0.02) as out:
                push_all(out, source)
                await pair.p.reaches(4)
                await out.abort()
        await source.aclose()
        assert pair.source.statistics().quarantined == 2
        for transfer in pair.p.transfers:
            transfer.release()
        await stream.drained()
        await settle()
        assert pair.source.statistics().quarantined == 0


async def test_the_producers_exit_is_bounded_if_the_consumer_is_stopped(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(TransferTimeoutError, match="did not decide the end"):
            async with pair.source.open_stream(pair.to_d, stream.ticket(), timeout=0.02) as out:
                await out.opened()
                pair.to_p.running = False
                push_all(out, source)
        pair.to_p.resume()
        await stream.finished()


async def test_closing_the_pool_waits_for_streams_only_so_long(pair: Pair) -> None:
    pair.p.hold = True
    source = await pair.source.reserve(blocks=2)
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream()
    out = await pair.source.open_stream(pair.to_d, stream.ticket())
    out.push(0, source)
    pair.to_d.running = False
    fenced = asyncio.create_task(stream.drained())
    await pair.target.aclose(timeout=0.02)
    with pytest.raises(ClosedError, match="pool was closed before"):
        await fenced
    assert pair.target.statistics() == (16, 0, 0, 0)
    pair.to_d.resume()
    await settle()
    await pair.source.aclose(timeout=0.02)
    with pytest.raises(StreamAbortedError):
        await out.finish()


# ---- ready marks and threads ----


class DeviceEvent:
    """A stand-in for ``torch.npu.Event``: `query` returns True once the device has come so far."""

    def __init__(self) -> None:
        self.done, self.queries = False, 0

    def query(self) -> bool:
        self.queries += 1
        return self.done


async def test_layers_do_not_share_the_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once would land together, at the end; so only as many are in flight as keep the link busy."""
    monkeypatch.setattr(window, "WINDOW", 0)
    pair.p.hold = True
    async with pair.target.reserve(tokens=11) as blocks, pair.source.reserve(tokens=11) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            for number, layer in enumerate((3, 1, 0, 2)):
                pair.fill(source.ids, layer, layer + 1)
                out.push(layer, source)
                assert len(pair.p.transfers) == min(number + 1, 2)
            for number, started in enumerate((3, 4, 4, 4)):
                pair.p.transfers[number].land()
                pair.p.transfers[number].release()
                await settle()
                assert len(pair.p.transfers) == started
        assert stream.landed == (3, 1, 0, 2)
        for layer in range(4):
            assert pair.layer(pair.target, blocks.ids, layer) == pair.layer(pair.source, source.ids, layer)


async def test_layers_wait_for_their_events_in_order(pair: Pair) -> None:
    events = [DeviceEvent() for _ in range(4)]
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            for layer in range(4):
                out.push(layer, source, ready=events[layer])
            events[1].done = True
            await asyncio.sleep(0.02)
            assert stream.landed == (), "first in, first out"
            assert events[1].queries == 0
            assert 4 < events[0].queries < 60, "backs off to 1 ms"
            events[0].done = True
            await stream.layer(1)
            assert stream.landed == (0, 1)
            events[2].done = events[3].done = True
        assert await collect(stream) == [0, 1, 2, 3]
    assert pair.source._context.poller.idle


async def test_every_kind_of_mark(pair: Pair) -> None:
    flag, thread_flag, asked = asyncio.Event(), threading.Event(), []
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            out.push(0, source, ready=None)
            out.push(1, source, ready=flag)
            out.push(2, source, ready=thread_flag)
            out.push(3, source, ready=lambda: asked.append(1) or len(asked) > 3)
            flag.set()
            thread_flag.set()
        assert len(asked) == 4
        await stream.finished()


async def test_a_mark_that_raises_aborts_the_stream(pair: Pair) -> None:
    def broken() -> bool:
        raise ValueError("device lost")

    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(StreamAbortedError, match="layer 0 could not be pushed: ValueError: device lost"):
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                out.push(0, source, ready=broken)
                await out.finish()
        with pytest.raises(StreamAbortedError, match="device lost"):
            await stream.finished()


async def test_an_unready_stream_does_not_hold_up_another(pair: Pair) -> None:
    reserve = pair.target.reserve
    async with reserve(blocks=2) as one, reserve(blocks=2) as two, pair.source.reserve(blocks=2) as source:
        stuck = await pair.source.open_stream(pair.to_d, one.stream().ticket())
        stuck.push(0, source, ready=lambda: False)
        stream = two.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
        await stream.finished()
        await stuck.aclose()


async def test_push_from_the_compute_thread_wakes_the_loop_once_per_burst(pair: Pair) -> None:
    wakes, context = [], pair.source._context
    calls = context.thread_calls

    class Calls:
        def call(self, callback: Any) -> None:
            wakes.append(callback)
            calls.call(callback)

    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            await out.opened()
            context.thread_calls = Calls()  # type: ignore[assignment]

            def compute() -> None:
                for layer in range(4):
                    pair.fill(source.ids, layer, layer + 1)
                    out.push(layer, source)

            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()  # the loop cannot run meanwhile: one burst
            context.thread_calls = calls
            assert len(wakes) == 1
            assert pair.p.transfers == []
        await stream.finished()
        for layer in range(4):
            assert pair.layer(pair.target, blocks.ids[:1], layer)[0] == layer + 1


async def test_many_streams_with_pushes_from_threads(pair: Pair) -> None:
    async def request(number: int) -> None:
        async with pair.target.reserve(blocks=3) as blocks, pair.source.reserve(blocks=3) as source:
            stream = blocks.stream()
            for layer in range(4):
                pair.fill(source.ids, layer, number)
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:

                def compute() -> None:
                    for layer in (3, 1, 2, 0):
                        out.push(layer, source)

                await asyncio.to_thread(compute)
            async for layer in stream:
                assert pair.layer(pair.target, blocks.ids, layer) == pair.layer(pair.source, source.ids, layer)

    await asyncio.gather(*(request(number) for number in range(100)))
