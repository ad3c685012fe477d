"""What ``aclose`` returns: the end of a resource, which has begun with the call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any

__all__ = ["Closing"]


class Closing(Coroutine[Any, Any, None]):
    """The end of a resource that is under way; await it to wait for the end, or leave it.

    It takes the place of a coroutine wherever one is taken, such as ``asyncio.create_task``, but it need not be awaited.
    Cancelling the wait does not stop the end.

    :param end: the task that ends the resource, or None if there is nothing to wait for.
    """

    __slots__ = ("_end", "_steps")

    def __init__(self, end: asyncio.Future[Any] | None) -> None:
        self._end = end
        self._steps: Generator[Any, None, None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
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
