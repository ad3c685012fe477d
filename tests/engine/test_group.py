"""`engine.group()`: transfers that begin together end together."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import pytest
from passes import settle

from hixl_async import Batch, ClosedError, RangeError, TransferError
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan(seed=1)


@pytest.fixture
async def slow(plan: FaultPlan) -> AsyncIterator[EnginePair]:
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        yield pair
        plan.release()


async def test_all_are_done_at_the_end(slow: EnginePair, plan: FaultPlan) -> None:
    plan.delay(0.001, 0.02)
    region, remote = await slow.region("kv", 100)
    local = slow.left.allocate("local", 100)
    memoryview(local)[:] = bytes(range(100))
    async with slow.left.group() as group:
        transfers = [group.write(local[i : i + 10], remote[i : i + 10]) for i in range(0, 80, 10)]
        transfers.append(group.submit(Batch("write", local[80:90], remote[80:90], [(0, 0, 10)])))
    assert all(transfer.result() == 10 for transfer in transfers)
    assert slow.left.stats().pinned == 0
    async with slow.left.group() as group:
        group.read(local[90:100], remote[0:10])
    assert bytes(memoryview(region)[:90]) == bytes(range(90))
    assert bytes(memoryview(local)[90:]) == bytes(range(10))


async def test_transfers_that_end_while_the_body_still_runs(slow: EnginePair, plan: FaultPlan) -> None:
    plan.pending()
    _, remote = await slow.region("kv", 10)
    async with slow.left.group() as group:
        transfer = group.write(b"x" * 10, remote)
        await until(transfer.done)
        await transfer.drained()
    assert transfer.result() == 10


async def test_the_first_failure_cancels_the_rest_and_interrupts_the_body(slow: EnginePair, plan: FaultPlan) -> None:
    plan.hold(nth=1).fail(nth=2)
    region, remote = await slow.region("kv", 10)
    task = asyncio.current_task()
    with pytest.raises(ExceptionGroup) as caught:
        async with slow.left.group() as group:
            held = group.write(b"x" * 10, remote)
            group.write(b"y" * 10, remote)
            await asyncio.Event().wait()
    assert len(caught.value.exceptions) == 1
    assert isinstance(caught.value.exceptions[0], TransferError)
    assert held.cancelled()
    assert task is not None
    assert task.cancelling() == 0
    assert bytes(memoryview(region)) == bytes(10)
    assert slow.left.stats().pinned == 0
    gc.collect()


async def test_all_failures_are_raised(slow: EnginePair, plan: FaultPlan) -> None:
    plan.fail(count=3)
    _, remote = await slow.region("kv", 10)
    with pytest.raises(ExceptionGroup) as caught:
        async with slow.left.group() as group:
            for _ in range(3):
                group.write(b"x" * 10, remote)
            time.sleep(0.02)  # noqa: ASYNC251  Until all have failed, because the first failure cancels what is still in flight
    assert len(caught.value.exceptions) == 3


async def test_an_error_of_the_body_cancels_the_transfers(slow: EnginePair, plan: FaultPlan) -> None:
    plan.hold()
    _, remote = await slow.region("kv", 10)
    with pytest.raises(ExceptionGroup) as caught:
        async with slow.left.group() as group:
            held = group.write(b"x" * 10, remote)
            raise ZeroDivisionError
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    assert held.cancelled()


async def test_a_refused_call_is_an_error_of_the_body(slow: EnginePair, plan: FaultPlan) -> None:
    plan.hold()
    _, remote = await slow.region("kv", 10)
    with pytest.raises(ExceptionGroup) as caught:
        async with slow.left.group() as group:
            held = group.write(b"x" * 10, remote)
            group.write(b"too long for that", remote)
    assert caught.group_contains(RangeError)
    assert held.cancelled()


async def test_the_block_ends_when_all_are_drained(slow: EnginePair, plan: FaultPlan) -> None:
    """Cancelled in the body, and again while it waits: outstanding bytes land first."""
    plan.late()
    region, remote = await slow.region("kv", 10)

    async def work() -> None:
        async with slow.left.group() as group:
            group.write(b"x" * 10, remote)
            await asyncio.Event().wait()

    working = asyncio.ensure_future(work())
    await settle()
    for _ in range(3):
        working.cancel()
        await settle()
        assert not working.done()
        assert slow.left.stats().pinned == 1
    plan.release()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert slow.left.stats().pinned == 0
    assert bytes(memoryview(region)) == b"x" * 10


async def test_cancelled_while_it_waits_at_the_end(slow: EnginePair, plan: FaultPlan) -> None:
    plan.hold()
    _, remote = await slow.region("kv", 10)

    async def work() -> None:
        async with slow.left.group() as group:
            group.write(b"x" * 10, remote)

    working = asyncio.ensure_future(work())
    await settle()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert slow.left.stats().pinned == 0


async def test_cancelled_from_outside_and_failed_at_once(slow: EnginePair, plan: FaultPlan) -> None:
    plan.fail()
    _, remote = await slow.region("kv", 10)

    async def work() -> None:
        async with slow.left.group() as group:
            group.write(b"x" * 10, remote)
            await asyncio.Event().wait()

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises((asyncio.CancelledError, ExceptionGroup)):
        await working
    gc.collect()


async def test_groups_in_groups(slow: EnginePair, plan: FaultPlan) -> None:
    plan.delay(0.001, 0.01)
    _, remote = await slow.region("kv", 10)
    async with slow.left.group() as outer:
        first = outer.write(b"x" * 10, remote)
        async with slow.left.group() as inner:
            second = inner.write(b"y" * 10, remote)
        assert second.result() == 10
    assert first.result() == 10


async def test_a_group_that_is_not_entered(slow: EnginePair) -> None:
    """Transfers that no exit waits for do not start."""
    _, remote = await slow.region("kv", 10)
    batch = Batch("write", slow.left.allocate("local", 10), remote)
    group = slow.left.group()
    for call in (
        lambda: group.write(b"x" * 10, remote),
        lambda: group.read(bytearray(10), remote),
        lambda: group.submit(batch),
    ):
        with pytest.raises(ClosedError, match="not entered; use 'async with engine"):
            call()
    assert slow.left.stats().transfers == 0
    async with group:
        group.submit(batch)
    with pytest.raises(ClosedError, match="entered once"):
        await group.__aenter__()


async def test_a_finished_group_is_refused(slow: EnginePair) -> None:
    _, remote = await slow.region("kv", 10)
    async with slow.left.group() as group:
        pass
    with pytest.raises(ClosedError, match="over"):
        group.write(b"x" * 10, remote)


async def test_timeout_around_a_group(slow: EnginePair, plan: FaultPlan) -> None:
    plan.hold()
    _, remote = await slow.region("kv", 10)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async with slow.left.group() as group:
                group.write(b"x" * 10, remote)
    assert slow.left.stats().pinned == 0
