"""What ``aclose`` of an engine, a peer or a region returns: the end of it, which has begun with the call."""

from __future__ import annotations

import asyncio
import warnings
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable
from typing import Any

from .started import Started

__all__ = ["Closing"]


class Closing(Started[None]):
    """The end of a resource that is under way; await it to wait for the end, or leave it.

    Cancelling the wait does not stop the end.  Where no loop is running, as in ``runner.run(engine.aclose())``, the end begins
    with the wait.

    :param what: what is closed, for warnings.
    :param begin: begins the end, and returns what to wait for, or None if there is nothing to wait for.
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
        if begin is not None:
            self._end = begin()

    async def _over(self) -> None:
        self._start()
        if self._end is not None:
            await asyncio.shield(self._end)
