"""A loop whose clock the test moves, so that timeouts pass without waiting."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

__all__ = ["VirtualClockLoop"]

_Ts = TypeVarTuple("_Ts")


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on which time stands still until `advance` is awaited; input and output are real.

    ::

        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            runner.run(main())

        transfer = engine.write(data, remote[0:4096], timeout=30)       # of an engine whose plan holds it
        await asyncio.get_running_loop().advance(30)
        assert isinstance(transfer.exception(), TransferTimeoutError)

    Other timers, such as those of a fault plan's delays, run in real time.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._whens: list[float] = []
        super().__init__()

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback, as asyncio's loops do, and remember the time for `advance`.

        :param when: virtual seconds, as `time` returns them.
        :param callback: called with `args` in `context`.
        :param args: the arguments of `callback`.
        :param context: the context to run `callback` in; default: a copy of the current one.
        :return: the timer, which can be cancelled.
        """
        heapq.heappush(self._whens, when)
        return super().call_at(when, callback, *args, context=context)

    async def advance(self, seconds: float) -> None:
        """Move the clock, and stop at every timer on the way, so that each runs at its own time.

        :param seconds: the seconds by which the clock is moved.
        """
        end = self._now + seconds
        while self._whens and self._whens[0] <= end:
            self._now = max(self._now, heapq.heappop(self._whens))
            await self._run_due()
        self._now = end
        await self._run_due()

    @staticmethod
    async def _run_due() -> None:
        # Timers that are due run after the callbacks that are ready already, and tasks that they wake in the pass after that.
        for _ in range(3):
            await asyncio.sleep(0)
