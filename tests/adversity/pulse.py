"""A measure of how long the loop is kept from running."""

from __future__ import annotations

import asyncio
import time
from typing import Self

__all__ = ["Pulse"]

TICK = 0.001


class Pulse:
    """A tick every millisecond, and the longest pause between two ticks, in wall time and in CPU time of this thread.

    On a shared machine wall time says little; a delay that the loop causes itself costs CPU time, or is a
    system call that blocked.  The loop's debug mode is off meanwhile, because it looks at the files of the whole stack for each
    handle that is made, some of them in each pass of the loop, and would be most of what is measured.
    """

    def __init__(self) -> None:
        #: Ticks so far.
        self.beats = 0
        #: Seconds by which the latest tick was late.
        self.worst = 0.0
        #: The most CPU seconds between two ticks.
        self.worst_cpu = 0.0
        self._loop = asyncio.get_running_loop()
        self._debug = self._loop.get_debug()
        self._timer: asyncio.TimerHandle | None = None
        self._last = self._last_cpu = 0.0

    def __str__(self) -> str:
        return f"{self.worst * 1e3:.1f} ms ({self.worst_cpu * 1e3:.1f} ms CPU) in {self.beats} ticks"

    def _beat(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self.beats:
            self.worst = max(self.worst, now - self._last - TICK)
            self.worst_cpu = max(self.worst_cpu, cpu - self._last_cpu)
        self.beats += 1
        self._last, self._last_cpu = now, cpu
        self._timer = self._loop.call_later(TICK, self._beat)

    async def __aenter__(self) -> Self:
        self._loop.set_debug(False)
        self._beat()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._loop.set_debug(self._debug)
