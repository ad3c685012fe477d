"""Proof that nothing leaked: what a process holds before and after."""

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
    """A snapshot of what this process holds, to be compared with what it holds later.

    It counts, over all open engines, in-flight transfers, pinned slots, regions, remote regions and peers; and of this
    process the descriptors, the threads (Python's and native ones), the mappings of memfds, and the names in /dev/shm: those
    that bear its id, and those of the package that bear no process's id.  Less than before is no imbalance.

    ::

        async with BalanceSheet():
            async with engine_pair() as pair:
                ...

    :param ignore: prefixes of rows not to be compared, for example ``"thread asyncio"``.
    """

    def __init__(self, *, ignore: Iterable[str] = ()) -> None:
        self._ignore = tuple(ignore)
        self._before = _take()

    def differences(self) -> list[str]:
        """Return a line for each thing that there is more of than at the snapshot."""
        after = _take()
        return [
            f"{row}: {self._before[row]} before, {count} now"
            for row, count in sorted(after.items())
            if count > self._before[row] and not (self._ignore and row.startswith(self._ignore))
        ]

    def check(self) -> None:
        """Compare now with the snapshot.

        :raises AssertionError: if there is more of anything than before; the message lists it.
        """
        found = self.differences()
        if found:
            # Unreachable cycles are no leak, but only their collection shows that.
            gc.collect()
            found = self.differences()
        if found:
            raise AssertionError("left over:\n  " + "\n  ".join(found))

    async def settle(self, timeout: float = 5.0) -> None:
        """Wait until everything is back, then `check`.

        :param timeout: the most seconds to wait.
        :raises AssertionError: if there is more of anything than before; the message lists it.
        """
        if self.differences():
            gc.collect()
        try:
            await until(lambda: not self.differences(), timeout=timeout)
        except TimeoutError:
            self.check()

    def settle_blocking(self, timeout: float = 5.0) -> None:
        """Do as `settle` outside of an event loop; the thread blocks meanwhile.

        :param timeout: the most seconds to wait.
        :raises AssertionError: if there is more of anything than before; the message lists it.
        """
        if self.differences():
            gc.collect()
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while self.differences() and time.monotonic() < deadline:
            pause.wait(0.01)
        self.check()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A test that failed already should show its own error.
        if error is None:
            await self.settle()


async def until(condition: Callable[[], object], *, timeout: float = 30.0, what: str = "the condition") -> None:
    """Wait until a condition is true; the loop runs meanwhile.

    :param condition: called often.
    :param timeout: real seconds, also where the loop's clock is a virtual one.
    :param what: the condition in words, for the error.
    :raises TimeoutError: if it did not come true in time.
    """
    deadline = time.monotonic() + timeout
    pause = 0.0
    virtual = hasattr(asyncio.get_running_loop(), "advance")
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come true within {timeout:g} s")
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
        # Loops keep a spare /dev/null for the day on which descriptors run out.
        if not target.startswith("/proc/") and target != "/dev/null":
            yield f"descriptor {_NUMBERS.sub('', target)}"


def _threads() -> Iterable[str]:
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        try:
            comm = (_PROC / "task" / task / "comm").read_text().strip()
        except OSError:
            continue  # it ended meanwhile
        yield f"thread {_NUMBERS.sub('', python.get(int(task), f'native {comm}'))}"


def _mappings() -> Iterable[str]:
    for line in (_PROC / "maps").read_text().splitlines():
        if "/memfd:" in line:
            yield f"mapping {line[line.index('/memfd:') :]}"


def _names() -> Iterable[str]:
    for name in os.listdir(_SHM) if _SHM.is_dir() else ():
        numbers = re.findall(r"\d+", name)
        # A name of the package that bears another process's id is that process's, for example another test worker's.
        if str(os.getpid()) in numbers or ("hixl" in name and not numbers):
            yield f"name {_SHM / name}"
