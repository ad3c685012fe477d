"""What ``aclose`` returns: the end of a resource, which has begun with the call."""

from __future__ import annotations

import asyncio
import warnings
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

__all__ = ["Closing"]


class Closing(Coroutine[Any, Any, None]):
    """The end of a resource that is under way; await it to wait for the end, or leave it.

    It takes the place of a coroutine wherever one is taken, such as ``asyncio.create_task``, but it need not be awaited.
    Cancelling the wait does not stop the end.  Where no loop is running, as in ``runner.run(engine.aclose())``, the end begins
    with the wait.

    :param what: what is closed, for warnings.
    :param begin: begins the end, and returns what to wait for, or None if there is nothing to wait for.
    """

    __slots__ = ("_begin", "_end", "_steps", "_what")

    def __init__(self, what: object, begin: Callable[[], asyncio.Future[Any] | None]) -> None:
        self._what = what
        self._steps: Generator[Any, None, None] | None = None
        self._begin: Callable[[], asyncio.Future[Any] | None] | None = begin
        self._end: asyncio.Future[Any] | None = None
        if running_loop() is not None:
            self._start()

    def __del__(self) -> None:
        if self._begin is not None:
            text = (
                f"{self._what!r} was not closed: no loop was running when aclose() was called, and it was never awaited"
            )
            warnings.warn(text, RuntimeWarning, source=self, stacklevel=2)

    def _start(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._end = begin()

    def __await__(self) -> Generator[Any, None, None]:
        self._start()
        if self._end is not None:
            yield from asyncio.shield(self._end).__await__()

    def send(self, value: Any) -> Any:
        """Continue the wait; called by a task."""
        return self._started().send(value)

    def throw(self, kind: Any, value: BaseException | object = None, trace: TracebackType | None = None) -> Any:
        """Raise an exception in the wait; called by a task."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        return self._started().throw(error if trace is None else error.with_traceback(trace))

    def close(self) -> None:
        """End the wait; called by a task."""
        self._started().close()

    def _started(self) -> Generator[Any, None, None]:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps
