"""Timeouts of transfers, and the check for work that makes no progress."""

from __future__ import annotations

import asyncio
import time

import pytest

from hixl_async import TransferState, TransferTimeoutError
from hixl_async.testing import FaultPlan, engine_pair, faulty

from .conftest import World


async def test_timeout(world: World) -> None:
    world.plan.hold(nth=1)
    before = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"did not finish within its timeout of 0\.05 s") as caught:
        await world.write(timeout=0.05)
    assert 0.045 < time.monotonic() - before < 1
    assert caught.value.retryable
    assert caught.value.peer == "right"
    assert "await transfer.drained()" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


async def test_timeout_that_is_met(world: World) -> None:
    world.plan.delay(0.01, nth=1)
    assert await world.write(timeout=5) == 5
    assert await world.write(timeout=0.001) == 5, "done inside the call"
    await asyncio.sleep(0.01)
    assert world.left.stats().failed == 0


async def test_timeout_holds_although_there_is_progress(world: World) -> None:
    world.plan.bandwidth(1e6)
    with pytest.raises(TransferTimeoutError, match="timeout"):
        await world.left.write(world.here[0:500_000], world.remote[0:500_000], timeout=0.05)


async def test_timeout_of_a_batch_and_a_read(world: World) -> None:
    world.plan.hold()
    with pytest.raises(TransferTimeoutError):
        await world.left.submit(world.batch([(0, 0, 8)]), timeout=0.01)
    with pytest.raises(TransferTimeoutError):
        await world.left.read(bytearray(8), world.remote[0:8], timeout=0.01)


async def test_timeout_of_a_cancelled_transfer_does_nothing(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write(timeout=0.01)
    transfer.cancel()
    await asyncio.sleep(0.02)
    assert transfer.state is TransferState.CANCELLED


async def test_many_timeouts_at_once(world: World) -> None:
    world.plan.late()
    transfers = [world.write(b"x", i, timeout=0.01 + i * 1e-5) for i in range(200)]
    outcomes = await asyncio.gather(*transfers, return_exceptions=True)
    assert all(isinstance(outcome, TransferTimeoutError) for outcome in outcomes)
    assert world.left.stats().pinned == 200
    world.plan.release()
    await world.left.drained(world.remote)
    assert world.landed[:200] == b"x" * 200


# -- stall


async def test_stall() -> None:
    plan = FaultPlan(1).hold()
    async with engine_pair(drivers=faulty("shm", plan), stall=0.1) as pair:
        _, remote = await pair.region()
        before = time.monotonic()
        with pytest.raises(TransferTimeoutError, match=r"made no progress for 0\.1 s"):
            await pair.left.write(b"x", remote[0:1])
        assert 0.09 < time.monotonic() - before < 2


async def test_stall_after_some_progress() -> None:
    plan = FaultPlan(1).stall(0.5)
    async with engine_pair(drivers=faulty("shm", plan), stall=0.1) as pair:
        region, remote = await pair.region("kv", 1000)
        transfer = pair.left.write(b"x" * 1000, remote)
        assert transfer.progress() == 500
        with pytest.raises(TransferTimeoutError, match="no progress"):
            await transfer
        assert bytes(memoryview(region)) == b"x" * 500 + bytes(500)


async def test_slow_is_not_stalled() -> None:
    plan = FaultPlan(1).bandwidth(1e6)
    async with engine_pair(drivers=faulty("shm", plan), stall=0.1) as pair:
        _, remote = await pair.region("kv", 300_000)
        data = bytes(100_000)
        transfers = [pair.left.write(data, remote[i : i + 100_000]) for i in (0, 100_000, 200_000)]
        seen = 0
        while not transfers[0].done():
            progress = transfers[0].progress()
            assert progress >= seen
            seen = progress
            await asyncio.sleep(0.01)
        assert 0 < seen <= 100_000
        assert await asyncio.gather(*transfers) == [100_000] * 3


async def test_stall_check_rests_when_nothing_is_in_flight() -> None:
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan), stall=0.08) as pair:
        _, remote = await pair.region()
        plan.delay(0.01, nth=1)
        await pair.left.write(b"x", remote[0:1])
        await asyncio.sleep(0.05)
        plan.hold(nth=1)
        with pytest.raises(TransferTimeoutError):
            await pair.left.write(b"x", remote[0:1])


async def test_stall_of_many_reports_each() -> None:
    plan = FaultPlan(1).late()
    async with engine_pair(drivers=faulty("shm", plan), stall=0.05) as pair:
        _, remote = await pair.region()
        transfers = [pair.left.write(b"x", remote[i : i + 1]) for i in range(20)]
        outcomes = await asyncio.gather(*transfers, return_exceptions=True)
        assert all(isinstance(outcome, TransferTimeoutError) for outcome in outcomes)
        stats = pair.left.stats()
        assert (stats.in_flight, stats.pinned) == (0, 20)
        plan.release()
        await pair.left.drained(remote)
