"""Work that begins with the call, and can be awaited afterwards."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["Started", "already_over"]

T = TypeVar("T")


class Started(Coroutine[Any, Any, T]):
    """The end of work that has begun already: awaiting it only waits for the end.

    A plain ``def aclose(self)`` returns it.  ``await``, ``asyncio.gather`` and ``asyncio.create_task`` take it like a
    coroutine, but no warning follows if it is never awaited, because the work is done all the same.  It can be awaited any
    number of times, and be given to one task.

    :param wait: a coroutine function that waits for the end, called when the object is awaited; cancelling it must not cancel
        the work.
    """

    __slots__ = ("_wait", "_waiting")

    def __init__(self, wait: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._wait = wait
        self._waiting: Coroutine[Any, Any, T] | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    # A task uses the other methods of a coroutine.

    def send(self, value: Any) -> Any:
        return self._begin().send(value)

    def throw(self, *error: Any) -> Any:
        return self._begin().throw(*error)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.close()

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._waiting is None:
            self._waiting = self._wait()
        return self._waiting


async def already_over() -> None:
    """Wait for nothing: the wait for work that is over when the call returns."""
