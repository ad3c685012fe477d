"""Every test runs on asyncio and on uvloop, and must leave no descriptor and no unexpected error of the loop behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from .sides import Host, HostFactory


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    import uvloop

    uvloop.new_event_loop().close()  # opens a pipe for signals, once per process, which is no leak
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def _descriptors() -> dict[str, str]:
    result = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            result[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that listdir used
            continue
    return result


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = _descriptors()
    yield
    gc.collect()
    for thread in threading.enumerate():  # closes descriptors that could block
        if thread.daemon and "close_descriptors" in thread.name:
            thread.join(10)
    leaked = {fd: name for fd, name in _descriptors().items() if before.get(fd) != name}
    assert not leaked, f"descriptors left open: {leaked}"


@pytest_asyncio.fixture
async def loop_errors() -> AsyncIterator[list[dict[str, Any]]]:
    """What reached the loop's exception handler; a test that expects something clears the list.

    The loop must also be rid of tasks in the end.
    """
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    tasks = asyncio.all_tasks()
    yield errors
    left = asyncio.all_tasks() - tasks - {asyncio.current_task()}
    assert not left, f"tasks left running: {left}"
    assert not errors


@pytest_asyncio.fixture
async def listen(loop_errors: list[dict[str, Any]]) -> AsyncIterator[HostFactory]:
    """``await listen(...)`` starts a `Host`, which is closed in the end."""
    hosts: list[Host] = []

    async def open_host(*args: Any, **options: Any) -> Host:
        host = await Host.open(*args, **options)
        hosts.append(host)
        return host

    yield open_host
    for host in hosts:
        await host.aclose()


class Stalls:
    """The most of our own time that the loop spent on anything between two turns of its own."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.thread_time()  # not what other processes take meanwhile
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self._handle = asyncio.get_running_loop().call_later(0.0005, self._tick)

    def stop(self) -> None:
        self._handle.cancel()


@pytest_asyncio.fixture
async def stalls() -> AsyncIterator[Stalls]:
    watch = Stalls()
    yield watch
    watch.stop()
