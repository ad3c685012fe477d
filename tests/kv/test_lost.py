"""Resources that the program loses are closed with a warning; closing begins at the call."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from passes import settle

from hixl_async.errors import ClosedError, StreamAbortedError
from hixl_async.kv import Outcome, Pool, Reservation, Verdict

from .conftest import LAYERS, VIEW, Pair, push_all


@contextmanager
def lost(*words: str) -> Iterator[None]:
    """Expect exactly one ResourceWarning, with these words, once the garbage is collected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]
    for word in words:
        assert word in str(caught[0].message)


@contextmanager
def quiet() -> Iterator[None]:
    """Expect no warning at all, also none of coroutines that were never awaited."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


# ---- lost ----


async def test_lost_blocks_come_back(pair: Pair) -> None:
    with lost("<Blocks 2 of pool 'kv', reserved>", "(ids ", "async with pool.reserve"):
        await pair.target.reserve(blocks=2)
    await settle()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_a_task_that_is_cancelled_between_two_reservations_loses_no_blocks(pair: Pair) -> None:
    waiting = asyncio.Event()

    with lost("pool 'kv'"):
        held = await pair.target.reserve(blocks=4)

        async def one() -> None:
            first = await pair.target.reserve(blocks=4)
            waiting.set()
            second = await pair.target.reserve(blocks=10)
            await asyncio.gather(first.aclose(), second.aclose())

        task = asyncio.create_task(one())
        await waiting.wait()
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await settle()  # until then the loop's step that raised the error keeps its frames
        await held.aclose()
    async with asyncio.timeout(5), pair.target.reserve(blocks=16):
        pass


async def test_lost_blocks_are_quarantined_while_a_peer_may_write_them(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.source.reserve(blocks=2) as source:
        blocks = await pair.target.reserve(blocks=2)
        out = await pair.source.open_stream(pair.to_d, blocks.stream().ticket())
        out.push(0, source)
        with lost("pool 'kv'"):
            del blocks
        await settle()
        assert pair.target.statistics() == (14, 0, 2, 0)
        pair.p.transfers[0].land()
        pair.p.transfers[0].release()
        with pytest.raises(StreamAbortedError, match="the consumer lost its blocks"):
            await out.finish()
        await settle()
        assert pair.target.statistics() == (16, 0, 0, 0)


async def test_a_stream_keeps_its_blocks(pair: Pair) -> None:
    with quiet():
        blocks = await pair.target.reserve(blocks=2)
        stream = blocks.stream()
        layers = aiter(stream)
        del blocks, stream
        gc.collect()
        await settle()
        assert pair.target.statistics() == (14, 2, 0, 0)
    with lost("pool 'kv'"):
        del layers
    await settle()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_lost_source_blocks_stay_until_their_pushes_are_drained(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        source = await pair.source.reserve(blocks=2)
        for layer in range(LAYERS):
            pair.fill(source.ids, layer, 5)
        push_all(out, source)
        with lost("pool 'prefill'"):
            del source
        await settle()
        assert pair.source.statistics() == (14, 0, 2, 0)
        for transfer in pair.p.transfers:
            transfer.land()
            transfer.release()
        await out.finish()
        assert pair.source.statistics() == (16, 0, 0, 0)
        assert pair.layer(pair.target, blocks.ids[:1], 3)[0] == 5


async def test_blocks_that_a_thread_loses_come_back(pair: Pair) -> None:
    box = [await pair.target.reserve(blocks=2)]
    with lost("pool 'kv'"):
        thread = threading.Thread(target=box.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
    await settle()
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_blocks_that_were_closed_are_not_lost(pair: Pair) -> None:
    with quiet():
        for _ in range(2):
            blocks = await pair.target.reserve(blocks=2)
            blocks.stream()
            await blocks.aclose()
            del blocks
        other = Pool(pair.d, VIEW, name="other")
        blocks = await other.reserve(blocks=2)
        await other.aclose()
        del blocks, other


async def test_a_lost_push_stream_is_aborted(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        out.push(0, source)
        with lost("1 of 4 layers to 'd'", "async with pool.open_stream"):
            del out
        with pytest.raises(StreamAbortedError, match="the producer lost its stream"):
            await stream.finished()
        await stream.drained()


async def test_a_push_stream_that_is_lost_while_it_opens_is_aborted(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with lost("1 of 4 layers to 'd'", "async with pool.open_stream"):
            pair.source.open_stream(pair.to_d, stream.ticket()).push(0, source)
        with pytest.raises(StreamAbortedError, match="the producer lost its stream .* after 1 of 4 layers"):
            await stream.finished()
        await stream.drained()
    assert pair.p.transfers == []


async def test_a_push_stream_with_all_layers_ends_by_itself(pair: Pair) -> None:
    pair.p.hold = True
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with quiet():
            out = await pair.source.open_stream(pair.to_d, stream.ticket())
            push_all(out, source)
            del out
        for number in range(LAYERS):
            pair.p.transfers[number].land()
            pair.p.transfers[number].release()
        await stream.finished()


async def test_a_lost_pool_is_closed(pair: Pair) -> None:
    pool = Pool(pair.d, VIEW, name="other")
    with lost("<Pool 'other' of 16 blocks", "async with Pool"):
        del pool
    await settle()
    assert "kv/other" not in pair.d.handlers
    assert pair.d.regions["other"].closed
    assert pair.d.regions["other.words"].closed


async def test_a_pool_lives_as_long_as_its_blocks_and_streams(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as target:
        stream = target.stream()
        pool = Pool(pair.p, VIEW, name="other")
        with quiet():
            blocks = await pool.reserve(blocks=2)
            out = pool.open_stream(pair.to_d, stream.ticket())
            del pool
            gc.collect()
            async with out:
                push_all(out, blocks)
            await blocks.aclose()
        with lost("'other'"):
            del blocks, out
    await settle()
    assert "kv/other" not in pair.p.handlers


async def test_a_pool_that_could_not_be_made_is_not_lost(pair: Pair) -> None:
    with quiet(), pytest.raises(Exception, match="exists"):
        Pool(pair.d, VIEW, name="kv")


# ---- closing begins at the call ----


async def test_blocks_close_at_the_call(pair: Pair) -> None:
    blocks = await pair.target.reserve(blocks=2)
    with quiet():
        blocks.aclose()
        assert pair.target.statistics() == (16, 0, 0, 0)
        with pytest.raises(ClosedError):
            blocks.stream()


async def test_a_pool_closes_at_the_call(pair: Pair) -> None:
    pool = Pool(pair.d, VIEW, name="other")
    with quiet():
        pool.aclose()
        assert pool.closed
        del pool
        gc.collect()
    await settle()
    assert "kv/other" not in pair.d.handlers
    assert pair.d.regions["other"].closed


async def test_a_push_stream_closes_at_the_call(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        with quiet():
            out.aclose()
            with pytest.raises(StreamAbortedError, match="after 0 of 4 layers"):
                out.push(0, source)
        with pytest.raises(StreamAbortedError, match="after 0 of 4 layers"):
            await stream.finished()


@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_a_stream_aborts_at_the_call(pair: Pair, side: str) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        out = await pair.source.open_stream(pair.to_d, stream.ticket())
        with quiet():
            (out if side == "producer" else stream).abort("enough")
        for end, finished in ((out, out.finish), (stream, stream.finished)):
            with pytest.raises(StreamAbortedError, match="enough"):
                await finished()
            assert await end.abort() == await asyncio.create_task(end.abort()) == Outcome(Verdict.ABORTED, "enough")


async def test_closing_can_be_awaited_in_every_way(pair: Pair) -> None:
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for way in (asyncio.create_task, asyncio.ensure_future, group.create_task, asyncio.shield, asyncio.gather):
            blocks = await pair.target.reserve(blocks=2)
            await way(blocks.aclose())  # type: ignore[operator]
            pool = Pool(pair.d, VIEW, name="other")
            await way(pool.aclose())  # type: ignore[operator]
            assert "kv/other" not in pair.d.handlers
            await asyncio.wait_for(pool.aclose(), 1)


async def test_cancelling_the_wait_for_a_pool_does_not_stop_its_closing(pair: Pair) -> None:
    pair.p.hold = True
    blocks = await pair.target.reserve(blocks=2)
    stream = blocks.stream()
    out = await pair.source.open_stream(pair.to_d, stream.ticket())
    source = await pair.source.reserve(blocks=2)
    out.push(0, source)
    closing = asyncio.create_task(pair.target.aclose())
    await settle()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    pair.p.transfers[0].release()
    await pair.target.aclose()
    assert pair.d.handlers == {}
    await out.aclose()
    await source.aclose()


async def test_closing_a_stream_that_could_not_be_opened_does_not_wait(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        first = await pair.source.open_stream(pair.to_d, stream.ticket())
        second = pair.source.open_stream(pair.to_d, stream.ticket())
        with pytest.raises(Exception, match="in use"):
            await second
        async with asyncio.timeout(5):
            await second.aclose()
        assert pair.source._registry.outgoing, "the first one is still known"
        await first.aclose()


# ---- used before it is reserved ----


@pytest.mark.parametrize("use", ["stream", "ids", "share", "extend", "trim", "aclose", "item"])
async def test_a_reservation_that_was_not_awaited_names_the_remedy(pair: Pair, use: str) -> None:
    reservation = pair.target.reserve(blocks=1)
    with pytest.raises(ClosedError, match=r"await pool\.reserve\(\.\.\.\).*async with pool\.reserve"):
        reservation[:1] if use == "item" else getattr(reservation, use)  # type: ignore[index]
    with pytest.raises(AttributeError, match="'Reservation' object has no attribute 'ticket'"):
        reservation.ticket  # type: ignore[attr-defined]  # noqa: B018
    assert isinstance(reservation, Reservation)
    assert pair.target.statistics().reserved == 0
