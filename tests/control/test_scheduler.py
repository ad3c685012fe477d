"""The time budget of a pass: what it lets through, in which order, and that all connections share one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest

from hixl_async import Engine
from hixl_async.control import Connection, FairScheduler
from hixl_async.control.connection import _LARGE
from hixl_async.control.scheduler import Progress

from .sides import HostFactory, Inbox, is_open, memory


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """Pieces of work that take the same time each, and the pass in which each was done."""

    def __init__(self, name: str, amount: int, cost: float, clock: Clock, done: list[str]) -> None:
        self.name, self.amount, self.cost = name, amount, cost
        self.clock, self.done = clock, done

    def step(self) -> Progress:
        if not self.amount:
            return Progress.IDLE
        self.amount -= 1
        self.clock.now += self.cost
        self.done.append(self.name)
        return Progress.MORE


async def passed(number: int) -> None:
    """Wait for exactly so many passes of the loop."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> FairScheduler:
    return FairScheduler(budget=4.0, clock=clock)


async def test_work_that_fits_is_done_at_once(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    scheduler.submit(Worker("a", 3, 1.0, clock, done).step)
    assert done == ["a"] * 3
    assert len(scheduler) == 0


async def test_one_budget_for_all(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    for name in "abc":
        scheduler.submit(Worker(name, 4, 1.0, clock, done).step)
    assert done == ["a"] * 4
    await passed(1)
    assert len(done) == 8
    await passed(1)
    assert len(done) == 12


async def test_the_rest_takes_turns(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    for name in "abc":
        scheduler.submit(Worker(name, 8, 1.0, clock, done).step)
    await passed(5)
    assert "".join(done) == "aaaa" + "abca" + "bcab" + "cabc" + "bcbc" + "bcbc"


async def test_what_takes_long_is_one_step_a_pass(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    workers = [Worker(name, 3, 30.0, clock, done) for name in "abcdefgh"]
    for worker in workers:
        scheduler.submit(worker.step)
    for expected in range(1, 25):
        assert len(done) == expected
        await passed(1)
    assert len(scheduler) == 0


async def test_a_step_that_waits_is_not_queued_twice(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    worker = Worker("a", 10, 4.0, clock, done)
    for _ in range(5):
        scheduler.submit(worker.step)
    assert len(scheduler) == 1
    assert done == ["a"]


async def test_a_step_that_is_withdrawn_does_not_run(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    one, other = Worker("a", 9, 4.0, clock, done), Worker("b", 9, 4.0, clock, done)
    scheduler.submit(one.step)
    scheduler.submit(other.step)
    scheduler.withdraw(other.step)
    scheduler.withdraw(other.step)
    await passed(20)
    assert "b" not in done


async def test_a_postponed_step_begins_the_next_pass(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []

    def large() -> Progress:
        if not scheduler.fresh:
            return Progress.POSTPONED
        done.append("large")
        clock.now += 50.0
        return Progress.IDLE

    scheduler.submit(Worker("a", 1, 1.0, clock, done).step)
    scheduler.submit(large)
    scheduler.submit(Worker("b", 1, 1.0, clock, done).step)
    assert done == ["a"]
    await passed(1)
    assert done == ["a", "large"]
    await passed(1)
    assert done == ["a", "large", "b"]


async def test_a_step_that_fails_does_not_stop_the_others(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []

    def fails() -> Progress:
        raise KeyboardInterrupt

    scheduler.submit(Worker("a", 5, 4.0, clock, done).step)
    await passed(5)
    with pytest.raises(KeyboardInterrupt):
        scheduler.submit(fails)
    scheduler.submit(Worker("b", 2, 1.0, clock, done).step)
    assert done[-2:] == ["b", "b"]


async def test_a_step_may_submit_others(scheduler: FairScheduler, clock: Clock) -> None:
    done: list[str] = []
    inner = Worker("inner", 1, 1.0, clock, done)

    def outer() -> Progress:
        scheduler.submit(inner.step)
        done.append("outer")
        return Progress.IDLE

    scheduler.submit(outer)
    assert done == ["outer", "inner"]


async def test_tasks_wait_for_their_turn(scheduler: FairScheduler, clock: Clock) -> None:
    count = 0

    async def work() -> None:
        nonlocal count
        await scheduler.turn(2.0)
        count += 1

    tasks = [asyncio.ensure_future(work()) for _ in range(7)]
    seen = []
    while count < 7:
        await passed(1)
        seen.append(count)
    assert max(b - a for a, b in zip([0, *seen], seen, strict=False)) <= 2
    await asyncio.gather(*tasks)
    cancelled = [asyncio.ensure_future(work()) for _ in range(7)]
    await passed(1)
    for task in cancelled:
        task.cancel()
    await asyncio.wait(cancelled)
    await passed(3)
    assert len(scheduler) == 0


class TestConnections:
    """The budget that connections share, whatever is sent over each of them."""

    @staticmethod
    def watch(clock: Clock) -> tuple[list[int], Callable[[], None]]:
        """Count what is taken in each pass."""
        taken = [0]
        loop = asyncio.get_running_loop()

        def tick() -> None:
            nonlocal handle
            taken.append(0)
            handle = loop.call_soon(tick)

        handle = loop.call_soon(tick)
        return taken, lambda: handle.cancel()

    @pytest.mark.parametrize("size", [10, 50_000])
    async def test_take_turns(self, listen: HostFactory, clock: Clock, size: int) -> None:
        connections, each = 8, 3
        scheduler = FairScheduler(budget=4.0, clock=clock)
        host = await listen(scheduler=scheduler)
        order: list[int] = []
        taken, stop = self.watch(clock)

        def start(number: int, theirs: Connection) -> None:
            def take(*message: object) -> None:
                clock.now += 5.0 if size > 1000 else 1.0
                taken[-1] += 1
                order.append(number)

            theirs.start(take, lambda error: None)

        pairs = [await host.pair() for _ in range(connections)]
        for mine, _ in pairs:
            for _ in range(each):
                mine.send("x", {"text": "y" * size})
        for number, (_, theirs) in enumerate(pairs):
            start(number, theirs)
        while len(order) < connections * each:
            await passed(1)
        stop()
        # A pass ends with the message that spends the rest of its budget: four of 1.0, or one of 5.0.  What is counted
        # together may lie at the end of one pass and the beginning of the next.
        assert max(taken) <= 2 * (1 if size > 1000 else 4)
        assert all(order.count(number) == each for number in range(connections))

    async def test_of_one_engine_share_its_budget(self, clock: Clock) -> None:
        """Accepted and dialled ones."""
        taken, stop = self.watch(clock)
        async with Engine("127.0.0.1:0", close_timeout=1) as engine, Engine("127.0.0.1:0") as other:
            scheduler = engine._peers.scheduler
            scheduler._budget, scheduler._clock = 4.0, clock

            def take(peer: object, body: dict[str, Any]) -> None:
                clock.now += 5.0
                taken[-1] += 1

            engine.serve("take", take)
            async with contextlib.AsyncExitStack() as stack:
                others = [await stack.enter_async_context(Engine()) for _ in range(3)]
                peers = [await one.connect(engine.address) for one in others]
                await engine.connect(other.address)
                for peer in (*peers, *other.peers):
                    for _ in range(3):
                        peer.post("take", {})
                async with asyncio.timeout(20):
                    while sum(taken) < 12:
                        await passed(1)
        stop()
        # One in each pass; what is counted together may lie at the end of one and the beginning of the next.
        assert max(taken) <= 2

    async def test_a_large_message_waits_for_a_pass_of_its_own(self, listen: HostFactory, clock: Clock) -> None:
        scheduler = FairScheduler(budget=4.0, clock=clock)
        host = await listen(scheduler=scheduler)
        mine, theirs = await host.pair()
        inbox = Inbox(theirs)
        await passed(3)
        descriptor = memory(b"sent along")
        scheduler.charge(0.5)
        mine.send("x", {"text": "y" * _LARGE}, [descriptor])
        await passed(1)
        message = await inbox.get()
        assert len(message.body["text"]) == _LARGE
        assert os.pread(message.fds[0], 10, 0) == b"sent along"
        os.close(message.fds[0])
        os.close(descriptor)

    async def test_a_large_message_that_waits_ends_with_the_connection(self, listen: HostFactory, clock: Clock) -> None:
        scheduler = FairScheduler(budget=4.0, clock=clock)
        host = await listen(scheduler=scheduler)
        mine, theirs = await host.pair()
        inbox = Inbox(theirs)
        await passed(3)
        descriptor = memory()
        scheduler.charge(0.5)
        mine.send("x", {"text": "y" * _LARGE}, [descriptor])
        theirs._pump()
        assert theirs._held is not None
        [held] = theirs._held.descriptors
        await theirs.aclose()
        assert not is_open(held)
        assert inbox.messages.empty()
        os.close(descriptor)
