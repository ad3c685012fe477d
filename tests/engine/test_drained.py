"""`drained`: when memory may be used again, asked by transfer, by range and by buffer, also for handles that are lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable

import numpy
import pytest
from passes import settle

from hixl_async import Batch, BufferTypeError, Region, RemoteRegion, TransferTimeoutError
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan(seed=1).late(verb="transfer")


@pytest.fixture
async def held(plan: FaultPlan) -> AsyncIterator[EnginePair]:
    """A pair whose transfers from left to right land when the plan releases them, cancelled or not."""
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        yield pair
        plan.release()


async def both(pair: EnginePair) -> tuple[Region, RemoteRegion]:
    _, remote = await pair.region("kv", 4096)
    return pair.left.allocate("local", 4096), remote


async def waits(what: Awaitable[object]) -> asyncio.Future[object]:
    future = asyncio.ensure_future(what)
    await settle()
    assert not future.done()
    return future


async def test_by_transfer(held: EnginePair, plan: FaultPlan) -> None:
    local, remote = await both(held)
    transfer = held.left.write(local, remote)
    waiting = await waits(transfer.drained())
    assert transfer.cancel()
    await settle()
    assert transfer.cancelled()
    assert not waiting.done()
    assert held.left.stats().pinned == 1
    assert held.left.stats().in_flight == 0
    plan.release()
    await waiting
    assert held.left.stats().pinned == 0
    await transfer.drained()


async def test_a_timeout_fires_before_the_memory_is_drained(held: EnginePair, plan: FaultPlan) -> None:
    """The wait ends, the pin does not."""
    local, remote = await both(held)
    transfer = held.left.write(local, remote, timeout=0.05)
    with pytest.raises(TransferTimeoutError, match=r"did not finish within its timeout of 0\.05 s.*drained"):
        await transfer
    waiting = await waits(local.drained())
    plan.release()
    await waiting


async def test_wait_for_cancels_the_wait_only(held: EnginePair, plan: FaultPlan) -> None:
    buffer = bytearray(b"x" * 64)
    region, remote = await held.region("kv", 64)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held.left.write(buffer, remote), 0.05)
    with pytest.raises(BufferError):
        buffer.append(1)
    waiting = await waits(held.left.drained(buffer))
    plan.release()
    await waiting
    assert bytes(memoryview(region)) == b"x" * 64, "it was late, as this plan has it, and landed"
    buffer.append(1)


async def test_by_range(held: EnginePair, plan: FaultPlan) -> None:
    local, remote = await both(held)
    transfer = held.left.write(local[1000:2000], remote[0:1000])
    for free in (local[0:1000], local[2000:4096], remote[1000:2000]):
        await free.drained()
    waiting = [
        await waits(where.drained())
        for where in (local, local[1999:2000], local[0:1001], remote, remote[999:1000], local[1200:1300])
    ]
    waiting.append(await waits(held.left.drained(local[1000:1001])))
    plan.release()
    await asyncio.gather(*waiting)
    assert transfer.done()


async def test_by_buffer_and_by_region_are_the_same_memory(held: EnginePair, plan: FaultPlan) -> None:
    local, remote = await both(held)
    view = local.numpy("uint8")
    by_region = held.left.write(local[0:100], remote[0:100])
    waiting = [await waits(held.left.drained(view)), await waits(held.left.drained(memoryview(local)[50:60]))]
    await held.left.drained(view[100:])
    by_view = held.left.write(view[200:300], remote[0:100])
    waiting.append(await waits(local[250:260].drained()))
    await held.left.drained(local[300:400])
    twice = held.left.register("same", view[200:300])
    waiting.append(await waits(twice.drained()))
    plan.release()
    await asyncio.gather(*waiting, by_region, by_view)


async def test_lost_handles(held: EnginePair, plan: FaultPlan) -> None:
    """A transfer in flight needs no handle."""
    array = numpy.full(64, 7, "uint8")
    region, remote = await held.region("kv", 64)
    held.left.write(array, remote)
    gc.collect()
    waiting = await waits(held.left.drained(array))
    del array
    gc.collect()
    plan.release()
    await waiting
    assert bytes(memoryview(region)) == b"\7" * 64


async def test_batches(held: EnginePair, plan: FaultPlan) -> None:
    local, remote = await both(held)
    other = held.left.register("other", bytearray(100))
    batch = Batch("write", [(local[0:10], remote[0:10]), (other[50:60], remote[20:30])])
    transfer = held.left.submit(batch)
    await asyncio.gather(local[10:4096].drained(), other[0:50].drained(), remote[10:20].drained())
    waiting = [await waits(where.drained()) for where in (local[9:10], other[59:60], remote[20:21])]
    plan.release()
    await asyncio.gather(transfer, *waiting)


async def test_cancelling_the_wait_changes_nothing(held: EnginePair, plan: FaultPlan) -> None:
    local, remote = await both(held)
    transfer = held.left.write(local, remote)
    first, second = await waits(local.drained()), await waits(local.drained())
    first.cancel()
    await settle()
    plan.release()
    await second
    assert await transfer == 4096


async def test_objects_without_memory_are_refused(held: EnginePair) -> None:
    for wrong in (7, "text", numpy.zeros((4, 4))[:, 1]):
        with pytest.raises(BufferTypeError):
            held.left.drained(wrong)
    await held.left.drained(b"never used")
