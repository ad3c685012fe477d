"""A Transfer is a future: all that asyncio does with a future works with a Transfer."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import types
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hixl_async import Transfer, TransferError, TransferState, TransferTimeoutError

from .conftest import World

OUTCOMES = ["inline", "pending", "held"]


@asynccontextmanager
async def started(world: World, when: str) -> AsyncIterator[Transfer]:
    """A write of 5 bytes that is done already, done soon, or done once the loop has gone round a few times."""
    loop = asyncio.get_running_loop()
    if when == "pending":
        world.plan.pending(nth=1)
    elif when == "held":
        world.plan.hold(nth=1)
        loop.call_soon(loop.call_soon, world.plan.release)
    transfer = world.write()
    assert transfer.done() is (when == "inline")
    yield transfer
    assert transfer.done()


@pytest.mark.parametrize("when", OUTCOMES)
async def test_await(world: World, when: str) -> None:
    async with started(world, when) as transfer:
        assert await transfer == 5
        assert await transfer == 5, "as often as one likes"
    assert transfer.result() == 5
    assert transfer.exception() is None
    assert transfer.state is TransferState.DONE
    assert not transfer.cancelled()
    assert not transfer.cancel()


@pytest.mark.parametrize("when", OUTCOMES)
async def test_gather(world: World, when: str) -> None:
    async with started(world, when) as one, started(world, when) as two:
        assert await asyncio.gather(one, two, asyncio.sleep(0, "and a coroutine")) == [5, 5, "and a coroutine"]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("forgiving", [True, False])
async def test_gather_of_a_cancelled_one(world: World, early: bool, forgiving: bool) -> None:
    world.plan.hold()
    one, two = world.write(), world.write()
    if early:
        one.cancel("enough")
    gathering = asyncio.gather(one, two, return_exceptions=forgiving)
    await asyncio.sleep(0)
    one.cancel("enough")
    if forgiving:
        world.plan.release()
        async with asyncio.timeout(5):
            error, done = await gathering
        assert isinstance(error, asyncio.CancelledError)
        assert (error.args, done) == (("enough",), 5)
    else:
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await gathering
        assert not two.done()


@pytest.mark.parametrize("forgiving", [True, False])
async def test_gather_that_is_cancelled(world: World, forgiving: bool) -> None:
    world.plan.hold()
    transfers = [world.write() for _ in range(3)]
    gathering = asyncio.gather(*transfers, return_exceptions=forgiving)
    await asyncio.sleep(0)
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await gathering
    assert all(transfer.cancelled() for transfer in transfers)


async def test_gather_that_takes_too_long(world: World) -> None:
    world.plan.hold()
    transfers = [world.write() for _ in range(3)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await asyncio.gather(*transfers)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.gather(world.write(), world.write()), 0.02)
    assert all(transfer.cancelled() for transfer in transfers)


@pytest.mark.parametrize("when", OUTCOMES)
async def test_wait(world: World, when: str) -> None:
    async with started(world, when) as one, started(world, when) as two:
        done, pending = await asyncio.wait([one, two])
        assert (done, pending) == ({one, two}, set())
    world.plan.hold(nth=1)
    three = world.write()
    done, pending = await asyncio.wait([one, three], return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({one}, {three})
    done, pending = await asyncio.wait([three], timeout=0.01)
    assert (done, pending) == (set(), {three})
    assert not three.done(), "wait cancels nothing"


@pytest.mark.parametrize("when", OUTCOMES)
async def test_wait_for(world: World, when: str) -> None:
    async with started(world, when) as transfer:
        assert await asyncio.wait_for(transfer, 5) == 5
    world.plan.hold(nth=1)
    transfer = world.write()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(transfer, 0.01)
    assert transfer.cancelled()


@pytest.mark.parametrize("when", OUTCOMES)
async def test_timeout(world: World, when: str) -> None:
    async with started(world, when) as transfer, asyncio.timeout(5):
        assert await transfer == 5
    world.plan.hold(nth=1)
    transfer = world.write()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await transfer
    assert transfer.cancelled()


@pytest.mark.parametrize("when", OUTCOMES)
async def test_shield(world: World, when: str) -> None:
    async with started(world, when) as transfer:
        assert await asyncio.shield(transfer) == 5
    world.plan.hold(nth=1)
    transfer = world.write()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.shield(transfer)
    assert not transfer.done()
    world.plan.release()
    assert await transfer == 5


async def test_as_completed(world: World) -> None:
    world.plan.hold()
    slow, fast = world.write(b"1", 0), world.write(b"22", 8)
    world.plan.release(2)
    asyncio.get_running_loop().call_later(0.01, world.plan.release)
    assert [await next_done for next_done in asyncio.as_completed([slow, fast, world.write(b"333", 16)])] == [2, 1, 3]


@pytest.mark.parametrize("when", OUTCOMES)
async def test_ensure_future_and_friends(world: World, when: str) -> None:
    async with started(world, when) as transfer:
        assert asyncio.ensure_future(transfer) is transfer
        assert asyncio.isfuture(transfer)
        assert not asyncio.iscoroutine(transfer), "or asyncio.wait would refuse it"
        assert inspect.isawaitable(transfer)
        assert transfer.get_loop() is asyncio.get_running_loop()
        assert await transfer == 5


async def test_run_until_complete_takes_one(world: World) -> None:
    world.plan.pending(nth=1)
    waiter = asyncio.wait_for(asyncio.shield(world.write()), 5)
    assert await waiter == 5


async def test_task_group_through_a_coroutine(world: World) -> None:
    world.plan.pending()

    async def one(i: int) -> int:
        return await world.write(bytes([i]), i)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(10)]
    assert [task.result() for task in tasks] == [1] * 10


# -- done before it is awaited


async def test_done_before_await_needs_no_loop(world: World) -> None:
    async def write() -> int:
        return await world.write()

    coroutine = write()
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    assert stopped.value.value == 5


async def test_old_style_generators(world: World) -> None:
    @types.coroutine
    def old() -> Generator[Any, Any, int]:
        return (yield from world.write())

    assert await old() == 5
    world.plan.pending(nth=1)
    assert await old() == 5
    world.plan.fail(nth=1)
    with pytest.raises(TransferError):
        await old()


async def test_next_by_hand(world: World) -> None:
    with pytest.raises(StopIteration) as stopped:
        next(iter(world.write()))
    assert stopped.value.value == 5
    world.plan.hold(nth=2)
    world.plan.fail(nth=1)
    failed, held = world.write(), world.write()
    await asyncio.wait([failed])
    with pytest.raises(TransferError):
        next(iter(failed))
    assert next(iter(held)) is held
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        next(iter(held))


# -- outcome


async def test_an_outcome_that_is_not_known_yet(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    assert not transfer.done()
    assert transfer.state is TransferState.ACTIVE
    with pytest.raises(asyncio.InvalidStateError):
        transfer.result()
    with pytest.raises(asyncio.InvalidStateError):
        transfer.exception()


async def test_failure(world: World) -> None:
    world.plan.fail("system", native=5, nth=1)
    transfer = world.write()
    with pytest.raises(TransferError) as caught:
        await transfer
    assert transfer.exception() is caught.value
    with pytest.raises(TransferError):
        transfer.result()
    with pytest.raises(TransferError):
        await transfer
    assert transfer.state is TransferState.FAILED
    assert not transfer.cancelled()


async def test_cancelled(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    assert transfer.cancel("a message, as with futures")
    assert transfer.done()
    assert transfer.cancelled()
    assert transfer.state is TransferState.CANCELLED
    for call in (transfer.result, transfer.exception):
        with pytest.raises(asyncio.CancelledError):
            call()
    with pytest.raises(asyncio.CancelledError):
        await transfer


async def test_the_driver_may_cancel(world: World) -> None:
    world.plan.fail("cancelled", nth=1)
    with pytest.raises(asyncio.CancelledError):
        await world.write()


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        ("timeout", "TransferTimeoutError", True),
        ("link", "PeerLostError", True),
        *(
            (status, "TransferError", False)
            for status in ("system", "rights", "range", "busy", "protocol", "invalid", "nomem", "unsupported")
        ),
    ],
)
async def test_every_status_has_its_exception(world: World, status: Any, kind: str, retryable: bool) -> None:
    import hixl_async

    world.plan.fail(status, nth=1)
    transfer = world.write()
    with pytest.raises(TransferError, match="contents of its target are undefined") as caught:
        await transfer
    assert type(caught.value) is getattr(hixl_async, kind)
    assert caught.value.retryable is retryable
    assert caught.value.peer == "right"
    assert "'right'" in str(caught.value)


# -- callbacks


async def test_callbacks_run_in_order_through_the_loop(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    called: list[Any] = []
    for i in range(4):
        transfer.add_done_callback(lambda done, i=i: called.append((i, done)))
    transfer.cancel()
    assert called == []
    await asyncio.sleep(0)
    assert called == [(i, transfer) for i in range(4)]
    transfer.add_done_callback(lambda done: called.append("late"))
    assert len(called) == 4
    await asyncio.sleep(0)
    assert called[-1] == "late"


async def test_a_waiting_task_and_callbacks(world: World) -> None:
    world.plan.pending(nth=1)
    transfer = world.write()
    called: list[str] = []

    async def wait() -> None:
        await transfer
        called.append("task")

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    transfer.add_done_callback(lambda _: called.append("callback"))
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert sorted(called) == ["callback", "task", "task", "task"]


async def test_remove_done_callback(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    called: list[str] = []

    def one(_: Transfer) -> None:
        called.append("one")

    def two(_: Transfer) -> None:
        called.append("two")

    for fn in (one, two, one, two, one):
        transfer.add_done_callback(fn)
    assert transfer.remove_done_callback(one) == 3
    assert transfer.remove_done_callback(one) == 0
    transfer.cancel()
    await asyncio.sleep(0)
    assert called == ["two", "two"]


async def test_bound_methods_compare_equal(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    called: list[Transfer] = []
    transfer.add_done_callback(called.append)
    assert transfer.remove_done_callback(called.append) == 1
    transfer.cancel()
    await asyncio.sleep(0)
    assert called == []


async def test_callback_context(world: World) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[str] = []
    world.plan.hold(nth=1)
    transfer = world.write()
    own = contextvars.copy_context()
    own.run(variable.set, "own")
    variable.set("current")
    transfer.add_done_callback(lambda _: seen.append(variable.get()))
    transfer.add_done_callback(lambda _: seen.append(variable.get()), context=own)
    variable.set("changed later")
    transfer.cancel()
    await asyncio.sleep(0)
    assert seen == ["current", "own"]


async def test_a_resumed_task_sees_its_own_context(world: World) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    world.plan.pending()

    async def wait(i: int) -> tuple[int, int]:
        variable.set(i)
        await world.write(b"x", i)
        return i, variable.get()

    for i, seen in await asyncio.gather(*(wait(i) for i in range(20))):
        assert i == seen


async def test_a_failing_callback_reaches_the_exception_handler(
    world: World, loop_errors: list[dict[str, Any]]
) -> None:
    world.plan.pending(nth=1)
    transfer = world.write()
    called: list[str] = []
    transfer.add_done_callback(lambda _: 1 // 0)
    transfer.add_done_callback(lambda _: called.append("the next one"))
    await transfer
    await asyncio.sleep(0)
    assert called == ["the next one"]
    assert isinstance(loop_errors.pop()["exception"], ZeroDivisionError)


# -- failures that are never retrieved


@pytest.mark.parametrize("how", ["fault", "timeout"])
async def test_unretrieved_failure_is_reported(world: World, loop_errors: list[dict[str, Any]], how: str) -> None:
    if how == "fault":
        world.plan.fail(nth=1)
        transfer = world.write()
    else:
        world.plan.hold(nth=1)
        transfer = world.write(timeout=0.01)
    await asyncio.wait([transfer])
    await transfer.drained()
    assert loop_errors == []
    del transfer
    gc.collect()
    (context,) = loop_errors
    loop_errors.clear()
    assert "never retrieved" in context["message"]
    assert "write to 'right'" in context["message"]
    assert isinstance(context["exception"], TransferError if how == "fault" else TransferTimeoutError)


@pytest.mark.parametrize("how", ["await", "exception", "result", "gather"])
async def test_a_retrieved_failure_is_not_reported(world: World, loop_errors: list[dict[str, Any]], how: str) -> None:
    world.plan.fail(nth=1)
    transfer = world.write()
    if how == "await":
        with pytest.raises(TransferError):
            await transfer
    elif how == "gather":
        await asyncio.gather(transfer, return_exceptions=True)
    else:
        await asyncio.wait([transfer])
        if how == "result":
            with pytest.raises(TransferError):
                transfer.result()
        else:
            transfer.exception()
    del transfer
    gc.collect()
    assert loop_errors == []


async def test_cancellation_is_not_a_failure(world: World, loop_errors: list[dict[str, Any]]) -> None:
    world.plan.hold(nth=1)
    world.write().cancel()
    await asyncio.sleep(0)
    gc.collect()
    assert loop_errors == []


async def test_repr(world: World) -> None:
    world.plan.late(nth=1)
    transfer = world.write()
    assert repr(transfer) == "<Transfer write to 'right' of 5 bytes, active pinned>"
    transfer.cancel()
    assert repr(transfer) == "<Transfer write to 'right' of 5 bytes, cancelled pinned>"
    world.plan.release()
    await transfer.drained()
    assert repr(transfer) == "<Transfer write to 'right' of 5 bytes, cancelled>"
    assert "read from 'right'" in repr(world.left.read(bytearray(3), world.remote[0:3]))
