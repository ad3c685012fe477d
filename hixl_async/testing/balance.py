"""A leak check: the resources of a process before and after."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from ..engine import engine as _engine

__all__ = ["BalanceSheet", "until"]

_PROC = Path("/proc/self")
_SHM = Path("/dev/shm")
_NUMBERS = re.compile(r":?\[\d+\]|\d+")


class BalanceSheet:
    """A snapshot of the resources of this process, to be compared with its resources later.

    It counts, over all open engines, transfers in flight, pinned slots, regions, remote regions and peers; and of this process
    the descriptors, the threads (Python's and native ones), the mappings of memfds, and the names in /dev/shm that contain its
    id, or that belong to the package and contain no process's id.  Only increases are reported.

    ::

        async with BalanceSheet():
            async with engine_pair() as pair:
                ...

    :param ignore: the prefixes of rows that are not compared, for example ``"thread asyncio"``.
    """

    def __init__(self, *, ignore: Iterable[str] = ()) -> None:
        self._ignore = tuple(ignore)
        self._before = _take()

    def differences(self) -> list[str]:
        """Return a line for each resource that has increased since the snapshot."""
        after = _take()
        return [
            f"{row}: {self._before[row]} before, {count} now"
            for row, count in sorted(after.items())
            if count > self._before[row] and not (self._ignore and row.startswith(self._ignore))
        ]

    def check(self) -> None:
        """Compare the resources with the snapshot.

        :raises AssertionError: if a resource has increased; the message lists all increases.
        """
        found = self.differences()
        if found:
            # Unreachable cycles are not a leak, but only their collection shows that.
            gc.collect()
            found = self.differences()
        if found:
            raise AssertionError("left over:\n  " + "\n  ".join(found))

    async def settle(self, timeout: float = 5.0) -> None:
        """Wait until no resource has increased.

        :param timeout: the most seconds to wait.
        :raises AssertionError: if a resource has still increased then; the message lists all increases.
        """
        if not self.differences():
            return
        gc.collect()
        try:
            await until(lambda: not self.differences(), timeout=timeout)
        except TimeoutError:
            self.check()

    def settle_blocking(self, timeout: float = 5.0) -> None:
        """Block the thread until no resource has increased; for use outside of an event loop.

        :param timeout: the most seconds to wait.
        :raises AssertionError: if a resource has still increased then; the message lists all increases.
        """
        if not self.differences():
            return
        gc.collect()
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while self.differences():
            if time.monotonic() >= deadline:
                self.check()
                return
            pause.wait(0.01)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A test that failed already should show its own error.
        if error is None:
            await self.settle()


async def until(condition: Callable[[], object], *, timeout: float = 30.0, what: str = "the condition") -> None:
    """Wait until a condition is true; the loop runs meanwhile.

    :param condition: a function that returns a true value once the condition is true; called often.
    :param timeout: real seconds, also where the loop's clock is a virtual one.
    :param what: a description of the condition, for the error.
    :raises TimeoutError: if the condition did not become true in time.
    """
    deadline = time.monotonic() + timeout
    pause = 0.0
    virtual = hasattr(asyncio.get_running_loop(), "advance")
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not become true within {timeout:g} s")
        await asyncio.sleep(0 if virtual else pause)
        pause = min(pause + 0.0005, 0.02)


def _take() -> Counter[str]:
    rows: Counter[str] = Counter()
    for engine in list(_engine._engines):
        stats = engine.stats()
        for name in ("in_flight", "pinned", "regions", "remote_regions", "peers"):
            rows[name] += getattr(stats, name)
        rows["open engines"] += 1
    rows.update(_descriptors())
    rows.update(_threads())
    rows.update(_mappings())
    rows.update(_names())
    return rows


def _descriptors() -> Iterable[str]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the listing's own
        # Listeners keep a spare descriptor of /dev/null, to accept connections when descriptors are exhausted.
        if not target.startswith("/proc/") and target != "/dev/null":
            yield f"descriptor {_NUMBERS.sub('', target)}"


def _threads() -> Iterable[str]:
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        name = python.get(int(task))
        if name is None:
            try:
                name = f"native {(_PROC / 'task' / task / 'comm').read_text().strip()}"
            except OSError:
                continue  # it ended meanwhile
        yield f"thread {_NUMBERS.sub('', name)}"


def _mappings() -> Iterable[str]:
    # Most lines are about libraries; a search of the bytes passes over them fast.
    for name in re.findall(rb"/memfd:.*", (_PROC / "maps").read_bytes()):
        yield f"mapping {name.decode()}"


def _names() -> Iterable[str]:
    for name in os.listdir(_SHM) if _SHM.is_dir() else ():
        numbers = re.findall(r"\d+", name)
        # A name of the package that contains another process's id belongs to that process, for example to a test worker.
        if str(os.getpid()) in numbers or ("hixl" in name and not numbers):
            yield f"name {_SHM / name}"
