"""Driver threads and the loop's thread, and what runs on each: C3, C4."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from hixl_async import ClosedError, Subscription, Transfer
from hixl_async.core import in_flight

from .conftest import World, gil_kept


def wait_for_post(world: World, before: int) -> None:
    """Spin, keeping the GIL, until a driver's thread has posted to the mailbox."""
    deadline = time.monotonic() + 5
    while world.left.stats().wakeups == before:
        assert time.monotonic() < deadline, "no thread of the driver got anywhere"


# -- C3: driver threads hold no GIL


async def test_c3_driver_threads_need_no_gil(world: World) -> None:
    await asyncio.sleep(0)
    before = world.left.stats().wakeups
    world.plan.pending(nth=1)
    with gil_kept():
        transfer = world.write()
        wait_for_post(world, before)
    assert not transfer.done(), "only the loop resolves"
    assert await transfer == 5


async def test_c3_copy_threads_need_no_gil(world: World) -> None:
    before = world.left.stats().wakeups
    world.here.numpy()[:] = 7
    with gil_kept():
        transfer = world.left.write(world.here, world.remote)
        assert not transfer.done()
        wait_for_post(world, before)
    assert await transfer == len(world.here)
    assert world.landed == b"\x07" * len(world.here)


# -- C4: awaitables are resolved on the loop's thread; directly only where no task is current


async def test_c4_everything_runs_on_the_loops_thread(world: World) -> None:
    seen = []
    world.plan.pending()

    async def wait() -> None:
        await world.write()
        seen.append(threading.get_ident())

    transfer = world.write()
    transfer.add_done_callback(lambda _: seen.append(threading.get_ident()))
    await asyncio.gather(wait(), transfer)
    await asyncio.sleep(0)
    assert seen == [threading.get_ident()] * 2


async def test_c4_no_task_is_entered_from_within_another(world: World) -> None:
    steps = []
    world.plan.hold(nth=1)
    transfer = world.write()

    async def wait() -> None:
        await transfer
        steps.append("resumed")

    waiter = asyncio.create_task(wait())
    await asyncio.sleep(0)
    world.plan.release()
    assert not transfer.done()
    in_flight.drain(world.left)  # a task is current: this one
    assert transfer.done()
    assert steps == []
    steps.append("drained")
    await waiter
    assert steps == ["drained", "resumed"]


async def test_c4_resumed_directly_from_the_drain(world: World) -> None:
    loop = asyncio.get_running_loop()
    world.plan.hold(nth=1)
    transfer = world.write()
    steps = []

    async def wait() -> None:
        await transfer
        steps.append(asyncio.current_task().get_name())

    waiter = asyncio.create_task(wait(), name="waiter")
    await asyncio.sleep(0)
    world.plan.release()
    done = loop.create_future()

    def drain() -> None:
        in_flight.drain(world.left)
        steps.append("drained")
        done.set_result(None)

    loop.call_soon(drain)
    await done
    await waiter
    assert steps == ["waiter", "drained"]
    assert asyncio.current_task() is not waiter


@pytest.mark.parametrize("ending", ["task", "transfer", "subscription", "drain"])
async def test_c4_tasks_that_a_resumed_task_wakes_are_resumed_by_the_loop(world: World, ending: str) -> None:
    """It runs inside of the drain, but a task is current: itself."""
    world.plan.hold(count=3)
    first, second, third = world.write(), world.write(), world.write()
    subscription = world.left.notifications("never")
    steps: list[str] = []

    async def victim() -> None:
        with contextlib.suppress(asyncio.CancelledError, ClosedError):
            await (subscription.get() if ending == "subscription" else second)
        steps.append("victim")

    async def canceller(other: asyncio.Task[None]) -> None:
        await first
        if ending == "task":
            other.cancel()
        elif ending == "transfer":
            second.cancel()
        elif ending == "subscription":
            subscription.close()
        else:
            world.plan.release()
            in_flight.drain(world.left)
        steps.append("canceller")

    one = asyncio.create_task(victim())
    other = asyncio.create_task(canceller(one))
    await asyncio.sleep(0)
    world.plan.release(1)
    asyncio.get_running_loop().call_soon(in_flight.drain, world.left)
    async with asyncio.timeout(5):
        await asyncio.gather(one, other)
    assert steps == ["canceller", "victim"]
    world.plan.release()
    await asyncio.wait([third])
    subscription.close()


async def test_c4_callbacks_never_run_inside_the_call_that_ends_it(world: World) -> None:
    called = []
    world.plan.hold(nth=1)
    transfer = world.write()
    transfer.add_done_callback(called.append)
    transfer.cancel()
    assert called == []
    await asyncio.sleep(0)
    assert called == [transfer]


async def test_c4_a_task_that_awaits_more_than_one_at_a_time(world: World) -> None:
    """Resuming directly, a task may submit again, await again and end, many times within one drain."""
    world.plan.pending()

    async def chain(i: int) -> int:
        for step in range(20):
            assert await world.write(bytes([step]), i) == 1
        return i

    assert await asyncio.gather(*(chain(i) for i in range(50))) == list(range(50))
    assert world.landed[:50] == b"\x13" * 50


async def test_a_context_that_is_entered_already(world: World) -> None:
    """The task's wake-up cannot run directly in a context that is in use; it comes through call_soon."""
    import contextvars

    world.plan.hold(nth=1)
    transfer = world.write()
    context = contextvars.copy_context()

    async def wait() -> int:
        return await transfer

    waiter = asyncio.get_running_loop().create_task(wait(), context=context)
    await asyncio.sleep(0)
    world.plan.release()
    asyncio.get_running_loop().call_soon(context.run, in_flight.drain, world.left)
    assert await waiter == 5


# -- an exception that ends the loop loses nothing


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_through_a_resumed_task_loses_nothing(runner: asyncio.Runner, kind: type[BaseException]) -> None:
    from hixl_async.testing import FaultPlan, engine_pair, faulty

    plan = FaultPlan(1)
    loop = runner.get_loop()
    context = engine_pair(drivers=faulty("shm", plan))
    pair = loop.run_until_complete(context.__aenter__())
    region, remote = loop.run_until_complete(pair.region("kv", 4096))
    transfers: list[Transfer] = []

    async def interrupted() -> None:
        try:
            await transfers[0]
        finally:
            raise kind

    async def start() -> asyncio.Task[None]:
        plan.hold()
        transfers.extend(pair.left.write(b"x", remote[i : i + 1]) for i in range(600))
        task = asyncio.create_task(interrupted())
        await asyncio.sleep(0)
        return task

    async def release() -> None:
        plan.release()
        await asyncio.sleep(5)

    task = loop.run_until_complete(start())
    with pytest.raises(kind):
        loop.run_until_complete(release())
    assert task.done()
    assert isinstance(task.exception(), kind)

    async def rest() -> int:
        async with asyncio.timeout(5):
            return sum(await asyncio.gather(*transfers))

    assert loop.run_until_complete(rest()) == 600
    assert pair.left.stats().pinned == 0
    assert bytes(memoryview(region)[:600]) == b"x" * 600
    loop.run_until_complete(context.__aexit__(None, None, None))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_through_a_resumed_subscription_loses_nothing(
    runner: asyncio.Runner, kind: type[BaseException]
) -> None:
    """A reader of notifications is resumed at once too; what it raises must not cost the notifications behind."""
    from hixl_async.testing import engine_pair

    loop = runner.get_loop()
    context = engine_pair()
    pair = loop.run_until_complete(context.__aenter__())

    async def interrupted(notes: Subscription) -> None:
        await notes.get()
        raise kind

    async def storm() -> None:
        for i in range(600):
            pair.left.notify(pair.peer, "topic", b"%d" % i)
        await asyncio.sleep(5)

    async def subscribe() -> Subscription:
        return pair.right.notifications("topic")

    notes = loop.run_until_complete(subscribe())
    task = loop.create_task(interrupted(notes))
    with pytest.raises(kind):
        loop.run_until_complete(storm())
    assert isinstance(task.exception(), kind)

    async def rest() -> list[bytes]:
        async with asyncio.timeout(5):
            return [(await notes.get()).payload for _ in range(599)]

    assert loop.run_until_complete(rest()) == [b"%d" % i for i in range(1, 600)]
    loop.run_until_complete(context.__aexit__(None, None, None))
