"""engine.group(): transfers that begin and end together."""

from __future__ import annotations

import asyncio

import pytest

from hixl_async import ClosedError, RangeError, Transfer, TransferError

from .conftest import World


async def test_leaving_waits_for_all(world: World) -> None:
    world.plan.delay(0.005)
    async with world.left.group() as group:
        transfers = [group.write(bytes([i + 1]), world.remote[i : i + 1]) for i in range(20)]
        into = bytearray(4)
        transfers.append(group.read(into, world.remote[0:4]))
        transfers.append(group.submit(world.batch([(0, 100, 8)])))
    assert all(transfer.done() for transfer in transfers)
    assert world.left.stats().pinned == 0
    assert world.landed[:20] == bytes(range(1, 21))


async def test_empty_group(world: World) -> None:
    async with world.left.group():
        pass


async def test_the_first_failure_cancels_the_rest(world: World) -> None:
    world.plan.fail(nth=3).hold()
    transfers: list[Transfer] = []

    async def body() -> None:
        async with world.left.group() as group:
            transfers.extend(group.write(b"x", world.remote[i : i + 1]) for i in range(5))
            world.plan.release(3)
            await asyncio.sleep(5)

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert [type(error) for error in caught.value.exceptions] == [TransferError]
    assert [transfer.cancelled() for transfer in transfers] == [True, True, False, True, True]
    assert world.left.stats().pinned == 0
    assert world.landed[:5] == bytes(5)
    assert asyncio.current_task().cancelling() == 0


async def test_all_failures_are_raised_together(world: World) -> None:
    world.plan.hold().fail("system", native=1)

    async def body() -> None:
        async with world.left.group() as group:
            for i in range(3):
                group.write(b"x", world.remote[i : i + 1])
            world.plan.release()

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert 1 <= len(caught.value.exceptions) <= 3
    assert all(isinstance(error, TransferError) for error in caught.value.exceptions)


async def test_an_error_of_the_body_cancels(world: World) -> None:
    world.plan.hold()
    transfers: list[Transfer] = []

    async def body() -> None:
        async with world.left.group() as group:
            transfers.append(group.write(b"x", world.remote[0:1]))
            raise LookupError("the body's own")

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert [str(error) for error in caught.value.exceptions] == ["the body's own"]
    assert transfers[0].cancelled()
    assert world.left.stats().pinned == 0


async def test_leaving_waits_for_memory_not_for_outcomes(world: World) -> None:
    world.plan.late()

    async def body() -> None:
        async with world.left.group() as group:
            group.write(b"x", world.remote[0:1])
            raise LookupError

    task = asyncio.create_task(body())
    await asyncio.sleep(0.01)
    assert not task.done(), "the memory is still pinned"
    world.plan.release()
    with pytest.raises(ExceptionGroup):
        await task
    assert world.left.stats().pinned == 0


async def test_cancelling_the_task_cancels_the_transfers(world: World) -> None:
    world.plan.hold()
    started = asyncio.Event()

    async def body() -> None:
        async with world.left.group() as group:
            group.write(b"x", world.remote[0:1])
            started.set()
            await asyncio.sleep(5)

    task = asyncio.create_task(body())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.left.stats().pinned == 0
    assert world.left.stats().in_flight == 0


async def test_timeout_around_a_group(world: World) -> None:
    world.plan.hold()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02), world.left.group() as group:
            group.write(b"x", world.remote[0:1])
    assert world.left.stats().pinned == 0


async def test_a_refused_call_in_the_body(world: World) -> None:
    async def body() -> None:
        async with world.left.group() as group:
            group.write(b"x", world.remote[0:1])
            group.write(b"x", world.remote[0:2])

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert [type(error) for error in caught.value.exceptions] == [RangeError]
    await world.works()


async def test_a_finished_group_takes_no_transfers(world: World) -> None:
    async with world.left.group() as group:
        group.write(b"x", world.remote[0:1])
    for call in (group.write, group.read):
        with pytest.raises(ClosedError, match="over"):
            call(bytearray(1), world.remote[0:1])
    with pytest.raises(ClosedError, match="over"):
        group.submit(world.batch([(0, 0, 8)]))
