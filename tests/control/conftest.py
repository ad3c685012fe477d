"""Listeners for tests of the control protocol, and a watch on how long the loop is kept busy."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from .sides import Host, HostFactory


@pytest.fixture(scope="session", autouse=True)
def resolver_threads() -> None:
    """Start the threads that uvloop keeps from its first lookup of a name, so that no test seems to leak them."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        loop = uvloop.new_event_loop()
        loop.run_until_complete(loop.getaddrinfo("localhost", 0))
        loop.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run tests that look for stalls when no other test runs."""
    if "stalls" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.serial)


@pytest_asyncio.fixture
async def listen() -> AsyncIterator[HostFactory]:
    """``await listen(...)`` starts a `Host`, which is closed in the end; no task may be left then."""
    hosts: list[Host] = []
    tasks = asyncio.all_tasks()

    async def open_host(*args: Any, **options: Any) -> Host:
        host = await Host.open(*args, **options)
        hosts.append(host)
        return host

    yield open_host
    for host in hosts:
        await host.aclose()
    left = asyncio.all_tasks() - tasks - {asyncio.current_task()}
    assert not left, f"tasks left running: {left}"


class Stalls:
    """The most CPU time of this thread that the loop spent between two of its passes."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.thread_time()  # not what other processes take meanwhile
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self._handle = asyncio.get_running_loop().call_later(0.0005, self._tick)

    def reset(self) -> None:
        self.longest = 0.0
        self._last = time.thread_time()

    def stop(self) -> None:
        self._handle.cancel()


@pytest_asyncio.fixture
async def stalls() -> AsyncIterator[Stalls]:
    # Debug mode takes milliseconds to note where each task was made, and a collection of all that pytest has a tenth of
    # a second.
    asyncio.get_running_loop().set_debug(False)
    gc.disable()
    watch = Stalls()
    yield watch
    watch.stop()
    gc.enable()
