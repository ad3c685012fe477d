"""The state that a pool's parts share: its engine, its memory, and its tasks."""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..core.event_poller import EventPoller
from ..errors import ClosedError, EngineForkedError, WrongLoopError
from .layout import Layout

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.region import Region

__all__ = ["PoolContext"]


class PoolContext:
    """The part of a pool that its streams and reservations refer to, instead of the `Pool` itself.

    The engine, which serves the streams' messages, therefore does not keep a `Pool` alive that the program has lost.
    """

    def __init__(self, engine: Engine, name: str, layout: Layout, blocks: int, region: Region) -> None:
        self.engine = engine
        self.loop: asyncio.AbstractEventLoop = engine.loop
        #: The thread of the loop.
        self.thread = threading.get_ident()
        self.name = name
        self.layout = layout
        #: The size of the pool in blocks.
        self.blocks = blocks
        #: The region that holds the blocks.
        self.region = region
        self.poller = EventPoller(self.loop)
        #: The lock of the holds on reserved blocks, which pushing threads share with the loop.
        self.lock = threading.Lock()
        #: True once the pool refuses new work.
        self.closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def check_usable(self) -> None:
        """Return if the caller may use the pool.

        :raises EngineForkedError: if the pool was made before fork().
        :raises WrongLoopError: if another event loop runs here, or none.
        :raises ClosedError: if the pool is closed.
        """
        self.check_thread()
        if running_loop() is not self.loop:
            raise self._wrong_loop()
        if self.closed:
            raise ClosedError(f"pool {self.name!r} is closed")

    def check_thread(self) -> None:
        """Return if the caller is on the thread of the engine's event loop, which need not run.

        :raises EngineForkedError: if the pool was made before fork().
        :raises WrongLoopError: on another thread.
        """
        if self.engine.forked:
            raise EngineForkedError(
                f"pool {self.name!r} was made before fork(); open one in each process, with an engine of its own"
            )
        if threading.get_ident() != self.thread:
            raise self._wrong_loop()

    def _wrong_loop(self) -> WrongLoopError:
        return WrongLoopError(f"pool {self.name!r} belongs to its engine's event loop; only push() is legal elsewhere")

    def __str__(self) -> str:
        return f"{self.name!r} of engine {self.engine.name!r}"

    @property
    def tasks(self) -> int:
        """The number of tasks that work for the pool."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that works for the pool until it is closed."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel_tasks(self) -> None:
        """Cancel all tasks of the pool, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def clean_up(self, work: Callable[..., object], *args: object) -> bool:
        """Have the loop close a resource that the program has lost; for finalizers.

        A finalizer runs in any thread and in the middle of any call, and so cannot close the resource itself.

        :return: False if there is nothing to do, because the pool is closed, or belongs to another process.
        """
        if self.closed or self.engine.forked:
            return False
        with suppress(RuntimeError):  # the loop is closed, and nothing of the engine works any more
            self.loop.call_soon_threadsafe(work, *args)
        return True
