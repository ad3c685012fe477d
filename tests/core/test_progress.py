"""How much has landed: polled and awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hixl_async import InvalidArgumentError, TransferError
from hixl_async.testing import FaultPlan, engine_pair, faulty

from .conftest import World

MIB = 1 << 20


async def test_at_least_while_it_runs(world: World) -> None:
    world.plan.stall(0.5, nth=1)
    transfer = world.left.write(world.here[:1000], world.remote[:1000])
    assert await transfer.at_least(0) == 500
    assert await transfer.at_least(500) == 500
    rest = asyncio.create_task(transfer.at_least(501))
    await asyncio.sleep(0.01)
    assert not rest.done()
    world.plan.release()
    assert await rest == 1000
    assert await transfer == 1000
    assert await transfer.at_least(1000) == 1000


async def test_at_least_of_a_large_one() -> None:
    """Real copies on real threads: reported bytes have landed."""
    async with engine_pair() as pair:
        there, remote = await pair.region("kv", 64 * MIB)
        here = pair.left.allocate("here", 64 * MIB)
        memoryview(here)[:] = b"\x01" * (64 * MIB)
        pair.peer.limit_bandwidth(200 * MIB)
        transfer = pair.left.write(here, remote)
        landed = await transfer.at_least(8 * MIB)
        assert 8 * MIB <= landed < 64 * MIB
        assert not transfer.done()
        assert bytes(memoryview(there)).count(1) >= landed
        pair.peer.limit_bandwidth(None)
        assert await transfer == await transfer.at_least(64 * MIB) == 64 * MIB


async def test_at_least_of_a_finished_one(world: World) -> None:
    transfer = world.write()
    assert transfer.done()
    assert await transfer.at_least(5) == await transfer.at_least(1) == 5


async def test_at_least_of_one_that_fails(world: World) -> None:
    world.plan.hold(nth=1)
    world.plan.fail("system", nth=1)
    transfer = world.write()
    waiting = asyncio.create_task(transfer.at_least(5))
    await asyncio.sleep(0)
    world.plan.release()
    with pytest.raises(TransferError):
        await waiting


async def test_at_least_of_one_that_is_cancelled(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    waiting = asyncio.create_task(transfer.at_least(5))
    await asyncio.sleep(0)
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    world.plan.release()


async def test_a_waiter_may_give_up(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await transfer.at_least(1)
    assert not transfer.done()
    world.plan.release()
    assert await transfer == 5


@pytest.mark.parametrize("nbytes", [-1, 6, 1.5, "1", None])
async def test_more_bytes_than_the_transfer_has(world: World, nbytes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"0\.\.5"):
        await world.write().at_least(nbytes)


async def test_a_paced_link_is_polled_rarely() -> None:
    """The polling interval follows the rate, so that waiting costs next to nothing."""
    async with engine_pair(drivers=faulty("shm", FaultPlan(1).bandwidth(20 * MIB))) as pair:
        _, remote = await pair.region("kv", 4 * MIB)
        transfer = pair.left.write(bytes(4 * MIB), remote)
        looks = 0

        loop = asyncio.get_running_loop()
        before = loop.time()
        original = loop.call_later

        def call_later(delay: float, callback: Any, *arguments: Any, **more: Any) -> Any:
            nonlocal looks
            looks += "_end_wait" in repr(callback)
            return original(delay, callback, *arguments, **more)

        try:
            loop.call_later = call_later  # type: ignore[method-assign]
        except AttributeError:
            pytest.skip("the methods of this loop cannot be replaced")
        try:
            assert await transfer.at_least(3 * MIB) >= 3 * MIB
        finally:
            loop.call_later = original  # type: ignore[method-assign]
        assert looks <= 25 + (loop.time() - before) / 0.05
        await transfer
