"""Work that begins at the call, and can be awaited afterwards."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["Started"]

T = TypeVar("T")


class Started(Coroutine[Any, Any, T]):
    """The rest of work that has begun already: awaiting it only waits for the end.

    This is what a plain ``def aclose(self)`` returns. ``await``, ``asyncio.gather`` and ``asyncio.create_task`` take it like a
    coroutine, but no warning follows if it is never awaited, because the work is done all the same.

    :param wait: a coroutine function that waits for the end, called when the object is awaited; cancelling it must not cancel
        the work.
    """

    __slots__ = ("_wait", "_waiting")

    def __init__(self, wait: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._wait = wait
        self._waiting: Coroutine[Any, Any, T] | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    # A task drives it by the rest.

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
