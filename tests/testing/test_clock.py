"""Timeouts on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from hixl_async import TransferTimeoutError
from hixl_async.testing import FaultPlan, VirtualClockLoop, engine_pair, faulty, until


def run(main: Coroutine[Any, Any, None]) -> None:
    before = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualClockLoop, debug=True) as runner:
        runner.run(main)
    assert time.monotonic() - before < 10, "it waited for real"


def clock() -> VirtualClockLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    return loop


def test_time_stands_still_until_it_is_moved() -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(3600))
        for _ in range(10):
            await asyncio.sleep(0)
        assert clock().time() == 0
        await clock().advance(3599)
        assert not task.done()
        await clock().advance(1)
        assert task.done()
        assert clock().time() == 3600

    run(main())


def test_timers_run_in_order_each_at_its_own_time() -> None:
    async def main() -> None:
        seen: list[tuple[str, float]] = []
        loop = clock()
        loop.call_later(3, lambda: seen.append(("c", loop.time())))
        loop.call_later(
            1, lambda: (seen.append(("a", loop.time())), loop.call_later(1, lambda: seen.append(("b", loop.time()))))
        )
        loop.call_later(2.5, lambda: seen.append(("never", loop.time()))).cancel()
        await loop.advance(10)
        assert seen == [("a", 1), ("b", 2), ("c", 3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.gather(loop.advance(6), loop.create_future())

    run(main())


def test_a_timeout_of_an_hour() -> None:
    async def main() -> None:
        plan = FaultPlan(1).hold()
        async with engine_pair(drivers=faulty("shm", plan), stall=1e6) as pair:
            _, remote = await pair.region()
            transfer = pair.left.write(b"x", remote[0:1], timeout=3600)
            await clock().advance(3599)
            assert not transfer.done()
            await clock().advance(1)
            assert isinstance(transfer.exception(), TransferTimeoutError)
            await transfer.drained()

    run(main())


def test_the_stall_check() -> None:
    async def main() -> None:
        plan = FaultPlan(1).late()
        async with engine_pair(drivers=faulty("shm", plan), stall=10.0) as pair:
            _, remote = await pair.region()
            transfer = pair.left.write(b"x", remote[0:1])
            await clock().advance(9)
            assert not transfer.done()
            await clock().advance(3)
            assert isinstance(transfer.exception(), TransferTimeoutError)
            assert pair.left.stats().pinned == 1
            plan.release()
            await transfer.drained()

    run(main())


def test_input_and_output_are_real() -> None:
    async def main() -> None:
        plan = FaultPlan(1).delay(0.01).pending()
        async with engine_pair(drivers=faulty("shm", plan)) as pair:
            _, remote = await pair.region()
            assert await pair.left.write(b"x", remote[0:1]) == 1
            transfer = pair.left.write(b"x", remote[0:1])
            await until(transfer.done)

    run(main())
