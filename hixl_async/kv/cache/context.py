"""The state that the parts of a cache manager share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from ...core import in_flight
from ...core.event_poller import EventPoller
from ...errors import ClosedError
from .roles import Duty, Role

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.peer import Peer

__all__ = ["ManagerContext", "Running"]


class Running(Protocol):
    """A pull or push of ours that has not given its blocks back."""

    @property
    def duty(self) -> Duty: ...
    @property
    def released(self) -> asyncio.Future[None]: ...
    def stop(self, reason: str) -> None: ...


class ManagerContext:
    """What the parts of a manager refer to, instead of the `CacheManager` itself.

    :param engine: the engine that holds the memory.
    :param name: the name of the manager.
    :param cluster: the cluster that it is.
    :param role: its role.
    :param lease: seconds without a sign of life after which blocks that a peer pulls are taken back.
    """

    def __init__(self, engine: Engine, name: str, cluster: int, role: Role, lease: float) -> None:
        self.engine = engine
        self.loop: asyncio.AbstractEventLoop = engine.loop
        self.name = name
        self.cluster = cluster
        self.role = role
        self.lease = lease
        self.poller = EventPoller(self.loop)
        #: Numbers of caches, and of holds.
        self.numbers = itertools.count()
        self.holds = itertools.count()
        #: Our pulls and pushes, by the peer and the number of the hold.
        self.running: dict[tuple[Peer, int], Running] = {}
        self.closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def __str__(self) -> str:
        return f"cluster {self.cluster}"

    def check_usable(self) -> None:
        """Return if the caller may use the manager.

        :raises WrongLoopError: if called outside of the engine's event loop.
        :raises EngineForkedError: if the engine was opened before fork().
        :raises ClosedError: if the manager or the engine is closed.
        """
        in_flight.must_be_open(self.engine)
        if self.closed:
            raise ClosedError(f"the cache manager of {self} is closed")

    def check_thread(self) -> None:
        """Return if the caller is on the thread of the engine's event loop.

        :raises WrongLoopError: if it is not.
        """
        in_flight.must_be_on_thread(self.engine)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that the manager's end waits for."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def tasks(self) -> tuple[asyncio.Task[Any], ...]:
        """The tasks that work for the manager."""
        return tuple(self._tasks)

    def refuse_work(self) -> None:
        """Refuse new work, and stop our pulls and pushes; idempotent."""
        if not self.closed:
            self.closed = True
            self.engine.remove_close_callback(self.refuse_work)
            for running in list(self.running.values()):
                running.stop("the cache manager was closed")
