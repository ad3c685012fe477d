"""Programs that cancel all tasks of the loop, as asyncio.run does, and then close their engines: nothing stays half closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from passes import settle

from hixl_async import Engine, HixlError, PeerState
from hixl_async.control import close_descriptors
from hixl_async.engine.ending_task import EndingTask
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until

#: What ends a connection, in addition to the close of the engines.
ENDS: dict[str, Callable[[EnginePair], Any]] = {
    "peer": lambda pair: pair.peer.aclose(),
    "engine": lambda pair: pair.left.aclose(),
    "other side": lambda pair: pair.right.aclose(),
    "both": lambda pair: (pair.left.aclose(), pair.right.aclose()),
    "nothing": lambda pair: None,
}


def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def assert_closed(pair: EnginePair) -> None:
    """Close both engines, the left one first, and use the link in between."""
    await pair.left.aclose()
    assert pair.peer.state is PeerState.DOWN
    assert pair.left.peers == ()
    with contextlib.suppress(HixlError):
        await pair.right.notify(pair.back, "t", b"x")  # rings the doorbell of a link that is gone
    await settle(3)
    await pair.right.aclose()
    for engine in (pair.left, pair.right):
        assert engine.closed
        assert engine.driver_stats() == {"shm": {}}, "the driver is open"
        assert engine.stats().peers == engine.stats().pinned == 0


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("end", ENDS)
async def test_closing_goes_on_when_all_tasks_are_cancelled(end: str, ticks: int) -> None:
    async with engine_pair(close_timeout=30) as pair:
        ENDS[end](pair)
        await settle(ticks)
        cancel_all_tasks()
        await settle(1)
        async with asyncio.timeout(10):
            await assert_closed(pair)


async def test_the_wait_for_a_close_is_not_cancelled_with_the_tasks() -> None:
    async with engine_pair(close_timeout=30) as pair:
        region, remote = await pair.region("kv", 4096)
        closing = [region.aclose(), pair.left.aclose()]
        await settle(1)
        cancel_all_tasks()
        await settle(1)
        async with asyncio.timeout(10):
            await asyncio.gather(*closing)
        assert not remote.alive


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("end", ENDS)
async def test_the_core_is_safe_although_closing_is_cut_short(
    end: str, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link is polled, and none is left, once its driver is closed, whatever the tasks of the engine have done."""
    async with engine_pair(close_timeout=0.1) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(EndingTask, "cancel", asyncio.Task.cancel)
            ENDS[end](pair)
            await settle(ticks)
            cancel_all_tasks()
            await settle(1)
        for engine in (pair.left, pair.right):
            if engine._closing is not None and engine._closing.cancelled():
                engine._closing = engine._ending_task(engine._close())  # what no program can do
        await assert_closed(pair)


async def test_a_driver_closes_after_its_last_link(loop_errors: list[Any]) -> None:
    async with engine_pair() as pair:
        (driver,) = pair.left._drivers.values()
        (link,) = pair.peer._links
        driver.close()
        assert driver.stats()["links"] == 1
        await pair.peer.aclose()
        assert driver.stats() == {}
        with pytest.raises(HixlError):
            link.message(b"")
    assert [context["message"] for context in loop_errors] == ["<Driver 'shm'> could not be shut down"]  # it is closed
    loop_errors.clear()


async def test_links_are_stopped_before_their_driver_is_closed() -> None:
    """Even those of which no peer takes care."""
    async with engine_pair() as pair:
        left: Engine = pair.left
        driver = left._drivers["shm"]
        link, _, fds = driver.link_new(99, "nobody")
        close_descriptors(fds)
        link.watch()
        await left.aclose()
        assert driver.stats() == {}
        with pytest.raises(HixlError, match="is down"):
            link.watch()


async def test_a_task_that_never_ends_is_cancelled_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.1) as pair:
        _, remote = await pair.region("kv", 64)
        plan.late()
        transfer = pair.left.write(bytes(64), remote)
        ending = EndingTask(pair.peer._wind_down(), asyncio.get_running_loop(), 0.01)
        await settle(3)
        assert ending.cancel() is False
        assert not ending.done()
        with pytest.raises(asyncio.CancelledError):
            await ending
        plan.release()
        await until(lambda: pair.left.stats().pinned == 0)
        with contextlib.suppress(HixlError):
            await transfer


async def test_a_task_that_ended_is_not_cancelled() -> None:
    ended: list[int] = []

    async def end() -> int:
        await asyncio.sleep(0)
        ended.append(1)
        return 7

    task = EndingTask(end(), asyncio.get_running_loop(), 30)
    task.cancel()
    task.cancel()
    assert await task == 7
    assert ended == [1]
    task.cancel()
    assert not task.cancelled()
