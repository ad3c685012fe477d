"""Waiting for named events, and for work that has begun."""

from __future__ import annotations

import asyncio
import gc

import pytest

from hixl_async.engine.started import Started
from hixl_async.engine.waiters import Waiters


async def test_waiters_are_woken_by_key_and_in_order() -> None:
    waiters, woken = Waiters(asyncio.get_running_loop()), []

    async def wait(key: str, number: int) -> None:
        await waiters.wait(key)
        woken.append(number)

    tasks = [asyncio.create_task(wait(key, number)) for number, key in enumerate("abaab")]
    await asyncio.sleep(0)
    assert len(waiters) == 2
    tasks[2].cancel()
    await asyncio.sleep(0)
    waiters.wake("a", "no such key")
    await asyncio.gather(tasks[0], tasks[3])
    assert woken == [0, 3]
    waiters.wake_all()
    await asyncio.gather(tasks[1], tasks[4])
    assert woken == [0, 3, 1, 4]
    assert not waiters


async def test_the_last_waiter_leaves_no_key_behind() -> None:
    waiters = Waiters(asyncio.get_running_loop())
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await waiters.wait("key")
        assert not waiters


class Work:
    """Work that begins at the call."""

    def __init__(self) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waits = 0

    def start(self) -> Started[int]:
        return Started(self._wait)

    async def _wait(self) -> int:
        self.waits += 1
        return await asyncio.shield(self.done)


async def test_started_work_need_not_be_awaited() -> None:
    work = Work()
    work.start().close()
    del work
    gc.collect()


async def test_started_work_is_awaited_by_any_number_of_tasks() -> None:
    work = Work()
    started = work.start()
    one, two = asyncio.create_task(work.start()), asyncio.ensure_future(started)
    await asyncio.sleep(0)
    two.cancel()
    work.done.set_result(7)
    assert await started == await started == await one == 7
    assert two.cancelled()
    assert work.waits == 4


async def test_a_wait_that_is_cancelled_before_it_begins() -> None:
    work = Work()
    task = asyncio.create_task(work.start())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not work.done.done()


def test_a_runner_takes_started_work(runner: asyncio.Runner) -> None:
    async def main() -> Started[int]:
        work = Work()
        work.done.set_result(7)
        return work.start()

    assert runner.run(runner.run(main())) == 7
