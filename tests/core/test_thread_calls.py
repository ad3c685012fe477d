"""Calls from other threads to the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hixl_async.core.thread_calls import ThreadCalls
from hixl_async.errors import ClosedError

THREADS, CALLS = 4, 2000


@pytest.fixture
async def calls() -> AsyncIterator[ThreadCalls]:
    calls = ThreadCalls(asyncio.get_running_loop())
    yield calls
    calls.close()


async def test_every_call_arrives_and_those_of_one_thread_in_order(calls: ThreadCalls) -> None:
    loop_thread, done = threading.get_ident(), asyncio.Event()
    found: list[tuple[int, int]] = []

    def arrive(thread: int, number: int) -> None:
        assert threading.get_ident() == loop_thread
        found.append((thread, number))
        if len(found) == THREADS * CALLS:
            done.set()

    def work(thread: int) -> None:
        for number in range(CALLS):
            calls.call(lambda number=number: arrive(thread, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(20):
        await done.wait()
    for thread in threads:
        thread.join()
    for thread in range(THREADS):
        assert [number for one, number in found if one == thread] == list(range(CALLS))


async def test_a_call_wakes_an_idle_loop(calls: ThreadCalls) -> None:
    called = asyncio.Event()
    timer = threading.Timer(0.02, calls.call, (called.set,))
    timer.start()
    async with asyncio.timeout(20):
        await called.wait()
    timer.join()


async def test_a_call_that_raises_is_reported_and_the_others_follow(
    calls: ThreadCalls, loop_errors: list[dict[str, Any]]
) -> None:
    called = asyncio.Event()
    calls.call(lambda: 1 // 0)
    calls.call(called.set)
    await called.wait()
    (context,) = loop_errors
    assert isinstance(context["exception"], ZeroDivisionError)
    loop_errors.clear()


async def test_what_a_call_adds_comes_in_a_later_pass(calls: ThreadCalls) -> None:
    """Otherwise a call that adds itself would keep the loop."""
    seen: list[str] = []

    def first() -> None:
        calls.call(lambda: seen.append("second"))
        asyncio.get_running_loop().call_soon(seen.append, "between")

    calls.call(first)
    while "second" not in seen:
        await asyncio.sleep(0)
    assert seen == ["between", "second"]


async def test_closing_makes_the_calls_that_wait() -> None:
    calls, seen = ThreadCalls(asyncio.get_running_loop()), []
    calls.call(lambda: seen.append(1))
    calls.close()
    assert seen == [1]
    calls.close()
    with pytest.raises(ClosedError, match="the engine's event loop is closed"):
        calls.call(lambda: None)


def test_a_loop_that_was_closed(runner: asyncio.Runner) -> None:
    async def make() -> ThreadCalls:
        return ThreadCalls(asyncio.get_running_loop())

    calls = runner.run(make())
    runner.close()
    with pytest.raises(ClosedError, match="the engine's event loop is closed"):
        calls.call(lambda: None)
    calls.close()
