"""The return value of ``aclose`` of an engine, a peer or a region, whose closing has begun with the call."""

from __future__ import annotations

import asyncio
import warnings
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable
from typing import Any

from .started import Started

__all__ = ["Closing"]


class Closing(Started[None]):
    """The closing of a resource; awaiting it waits for the end, but is not required.

    Cancelling the wait does not stop the closing.  Where no loop is running, as in ``runner.run(engine.aclose())``, the closing
    begins with the wait.

    :param what: the object that is closed, for warnings.
    :param begin: begins to close it, and returns a future to wait for, or None if there is nothing to wait for.
    """

    __slots__ = ("_end", "_pending", "_what")

    def __init__(self, what: object, begin: Callable[[], asyncio.Future[Any] | None]) -> None:
        super().__init__(self._over)
        self._what = what
        self._pending: Callable[[], asyncio.Future[Any] | None] | None = begin
        self._end: asyncio.Future[Any] | None = None
        if running_loop() is not None:
            self._start()

    def __del__(self) -> None:
        if self._pending is not None:
            text = (
                f"{self._what!r} was not closed: no loop was running when aclose() was called, and it was never awaited"
            )
            warnings.warn(text, RuntimeWarning, source=self, stacklevel=2)

    def _start(self) -> None:
        begin, self._pending = self._pending, None
        self._what = None  # a task that is over may be kept, and what is closed should not be
        if begin is not None:
            self._end = begin()

    async def _over(self) -> None:
        self._start()
        if self._end is not None:
            await asyncio.shield(self._end)
