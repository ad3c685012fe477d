"""C8: a task that only awaits finished work still yields, and a drain is capped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hixl_async import Transfer
from hixl_async.testing import until

from .conftest import World


class Ticker:
    """A count of the passes of the loop."""

    def __init__(self) -> None:
        self.passes = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self.passes += 1
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


async def test_c8_awaiting_finished_work_yields(world: World) -> None:
    ticker = Ticker()
    for _ in range(2000):
        transfer = world.write()
        assert transfer.done()
        assert await transfer == 5
    ticker.stop()
    assert ticker.passes >= 2000 / 200


async def _group(world: World) -> None:
    async with world.left.group() as group:
        group.write(b"12345", world.remote[:5])


async def _coalesce(world: World) -> None:
    async with world.left.coalesce() as few:
        few.write(world.here[:5], world.remote[:5])


async def _drained(world: World) -> None:
    await world.write().drained()


async def _drained_ranges(world: World) -> None:
    world.write()
    await world.here[:5].drained()
    await world.left.drained(world.remote)


async def _room(world: World) -> None:
    await world.left.room(5)
    world.write()


async def _at_least(world: World) -> None:
    await world.write().at_least(5)


@pytest.mark.parametrize("use", [_group, _coalesce, _drained, _drained_ranges, _room, _at_least])
async def test_c8_every_await_yields(world: World, use: Callable[[World], Awaitable[None]]) -> None:
    ticker = Ticker()
    for _ in range(1000):
        await use(world)
    ticker.stop()
    assert ticker.passes >= 1000 / 200


async def test_c8_reading_a_full_queue_yields(world: World) -> None:
    async with world.right.notifications("many") as notes:
        for _ in range(1000):
            await world.left.notify(world.peer, "many")
        await until(lambda: len(notes) == 1000)
        ticker = Ticker()
        for _ in range(1000):
            await notes.get()
        ticker.stop()
    assert ticker.passes >= 1000 / 200


async def test_c8_large_finished_work_yields_more_often(world: World) -> None:
    ticker = Ticker()
    for _ in range(100):  # each takes at least 10 us; a task may go on for about 100
        transfer = world.left.write(world.here[0 : 1 << 20], world.remote[0 : 1 << 20])
        assert transfer.done()
        await transfer
    ticker.stop()
    assert ticker.passes >= 5


async def test_c8_work_that_was_waited_for_needs_no_further_yield(world: World) -> None:
    """A task that waited has let others run; another pass would only cost time."""

    async def write(transfer: Transfer) -> int:
        return await transfer

    world.plan.pending()
    for _ in range(300):
        transfer = world.write()
        coroutine = write(transfer)
        assert coroutine.send(None) is transfer
        await asyncio.wait([transfer])
        with pytest.raises(StopIteration):
            coroutine.send(None)


async def test_c8_yielding_costs_little(world: World) -> None:
    """Most awaits of finished work do not go round the loop."""
    ticker = Ticker()
    for _ in range(2000):
        await world.write()
    ticker.stop()
    assert ticker.passes <= 2000 / 50


async def test_c8_yield_in_the_middle_of_one_await(world: World) -> None:
    """The bare yield happens inside an await; the value arrives all the same, also under timeout and shield."""
    for _ in range(300):
        async with asyncio.timeout(5):
            assert await world.write() == 5
    results = [await asyncio.shield(world.write()) for _ in range(300)]
    assert results == [5] * 300


async def test_c8_a_drain_is_capped(world: World) -> None:
    world.plan.hold()
    n = 3000
    transfers: list[Transfer] = [world.write(b"x", i) for i in range(n)]
    at: list[int] = []
    for transfer in transfers:
        transfer.add_done_callback(lambda _: at.append(ticker.passes))
    world.plan.release()  # all of them are in the mailbox now
    ticker = Ticker()
    await asyncio.gather(*transfers)
    ticker.stop()
    assert len(at) == n
    # uvloop runs what a reader has scheduled in the same pass, so that two drains of 256 may fall into one.
    assert at[-1] - at[0] >= n // (2 * 256) - 1, "the loop served no other task meanwhile"
    assert max(at.count(turn) for turn in set(at)) <= 2 * 256


async def test_c8_other_tasks_run_while_many_complete(world: World) -> None:
    world.plan.hold()
    transfers = [world.write(b"x", i) for i in range(2000)]

    async def chain(transfer: Transfer) -> None:
        await transfer

    tasks = [asyncio.create_task(chain(transfer)) for transfer in transfers]
    await asyncio.sleep(0)
    ticker = Ticker()
    world.plan.release()
    await asyncio.gather(*tasks)
    ticker.stop()
    assert ticker.passes >= 2000 // (2 * 256)  # uvloop runs what a reader has scheduled in the same pass
