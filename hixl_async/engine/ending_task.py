"""A task that ends something, such as an engine, and goes on although all tasks of the loop are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["EndingTask"]

T = TypeVar("T")


class EndingTask(asyncio.Task[T]):
    """A task that no program can cancel, because what it leaves undone would stay undone for ever.

    Programs that shut down often cancel all tasks of the loop, and then close what is open; so does ``asyncio.run``, which
    waits for all tasks afterwards.  A cancellation therefore takes effect only `patience` seconds later, in case that a driver
    never finishes.

    The work must not use ``asyncio.timeout``, which cancels its task.

    :param work: the coroutine that ends something.
    :param patience: seconds.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._patience = patience
        self._limit: asyncio.TimerHandle | None = None
        super().__init__(work, loop=loop)
        self.add_done_callback(EndingTask._stop_timer)

    def cancel(self, msg: Any | None = None) -> bool:
        """Give the task `patience` seconds to end.

        :return: False, because the task is not cancelled yet.
        """
        if self._limit is None and not self.done():
            self._limit = self.get_loop().call_later(self._patience, self.give_up)
        return False

    def give_up(self) -> None:
        """Cancel the task now."""
        super().cancel()

    def _stop_timer(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
