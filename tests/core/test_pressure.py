"""A bound on the bytes in flight, and waiting for room below it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from passes import settle

from hixl_async import BusyError, ClosedError, Engine, InvalidArgumentError
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty

KIB = 1 << 10


class Narrow:
    """A pair whose left engine may have 100 KiB in flight; every write is held until released."""

    def __init__(self, pair: EnginePair, plan: FaultPlan, remote: Any) -> None:
        self.pair, self.plan, self.remote = pair, plan, remote
        self.engine: Engine = pair.left

    def write(self, kib: int) -> Any:
        return self.engine.write(bytes(kib * KIB), self.remote[: kib * KIB])


@pytest.fixture
async def narrow() -> AsyncIterator[Narrow]:
    plan = FaultPlan(1).hold()
    async with engine_pair(drivers=faulty("shm", plan), max_bytes_in_flight=100 * KIB) as pair:
        _, remote = await pair.region("kv", 1 << 20)
        yield Narrow(pair, plan, remote)
        plan.clear()
        plan.release()


async def test_more_than_the_bound_is_refused(narrow: Narrow) -> None:
    first = narrow.write(60)
    with pytest.raises(BusyError, match=r"61440 of at most 102400 bytes.*room") as caught:
        narrow.write(41)
    assert caught.value.retryable
    second = narrow.write(40)
    assert narrow.engine.stats().bytes_in_flight == 100 * KIB
    with pytest.raises(BusyError):
        narrow.write(1)
    narrow.plan.release()
    assert await first + await second == 100 * KIB
    assert narrow.engine.stats().bytes_in_flight == 0


async def test_a_transfer_larger_than_the_bound_goes_alone(narrow: Narrow) -> None:
    large = narrow.write(300)
    with pytest.raises(BusyError):
        narrow.write(1)
    waiting = asyncio.ensure_future(narrow.engine.room(300 * KIB))
    await settle()
    assert not waiting.done()
    narrow.plan.release()
    await large
    await waiting


async def test_pinned_bytes_count_although_the_outcome_is_known(narrow: Narrow) -> None:
    """A cancelled transfer may still move its bytes."""
    narrow.plan.clear()
    narrow.plan.late()
    first = narrow.write(80)
    assert first.cancel()
    with pytest.raises(BusyError):
        narrow.write(40)
    narrow.plan.release()
    await first.drained()
    narrow.plan.clear()
    assert await narrow.write(40) == 40 * KIB


async def test_room_is_given_in_order(narrow: Narrow) -> None:
    """A waiter for much room is not overtaken by waiters for little."""
    order: list[str] = []

    async def send(name: str, kib: int) -> Any:
        await narrow.engine.room(kib * KIB)
        order.append(name)
        return narrow.write(kib)  # fits, or raises

    first = narrow.write(90)
    tasks = [asyncio.create_task(send(name, kib)) for name, kib in [("b", 80), ("c", 10), ("d", 10), ("e", 30)]]
    await settle()
    assert order == []
    narrow.plan.release()
    await first
    await settle()
    assert order == ["b", "c", "d"]
    narrow.plan.release()
    for task in tasks:
        transfer = await task
        narrow.plan.release()
        await transfer
    assert order == ["b", "c", "d", "e"]


async def test_a_waiter_that_gives_up(narrow: Narrow) -> None:
    first = narrow.write(90)
    impatient, patient = (asyncio.create_task(narrow.engine.room(kib * KIB)) for kib in (100, 50))
    await settle()
    impatient.cancel()
    narrow.plan.release()
    await first
    await patient
    await asyncio.wait([impatient])
    assert impatient.cancelled()
    async with asyncio.timeout(5):
        await narrow.engine.room(100 * KIB)  # the budget that was not used is available again


async def test_room_at_once(narrow: Narrow) -> None:
    await narrow.engine.room()
    await narrow.engine.room(1 << 40)
    narrow.write(50)
    await narrow.engine.room(50 * KIB)


async def test_without_a_bound(narrow: Narrow) -> None:
    async with Engine() as engine:
        assert engine.config.max_bytes_in_flight is None
        await engine.room(1 << 50)


@pytest.mark.parametrize("nbytes", [-1, 1 << 62, "1", 1.5, None])
async def test_room_for_a_malformed_number(narrow: Narrow, nbytes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="nbytes"):
        await narrow.engine.room(nbytes)


@pytest.mark.parametrize("most", [0, -1, 1.5, "1", True, 1 << 62])
def test_a_malformed_bound(most: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_bytes_in_flight"):
        Engine(max_bytes_in_flight=most)


async def test_waiting_ends_with_the_engine(narrow: Narrow) -> None:
    narrow.write(100)
    waiting = asyncio.create_task(narrow.engine.room(1))
    await settle()
    closing = asyncio.create_task(narrow.engine.aclose())
    with pytest.raises(ClosedError):
        await waiting
    narrow.plan.release()
    await closing


async def test_a_waiter_that_gives_up_lets_the_next_in(narrow: Narrow) -> None:
    held = narrow.write(60)
    large = asyncio.ensure_future(narrow.engine.room(50 * KIB))
    await settle()
    small = asyncio.ensure_future(narrow.engine.room(30 * KIB))
    await settle()
    assert not small.done(), "first come, first served"
    large.cancel()
    await settle()
    assert small.done()
    narrow.plan.clear()
    narrow.plan.release()
    assert await held == 60 * KIB
