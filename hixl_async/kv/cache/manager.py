"""The manager of the caches of one engine."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...core.unpicklable import unpicklable
from ...engine.arguments import positive_seconds, seconds_or_zero
from ...engine.started import Started
from ...errors import HixlError, InvalidArgumentError, WaitTimeoutError
from ...types import Address
from ..pins import Pins
from .cache import CLOSE_TIMEOUT
from .caches import Caches
from .context import ManagerContext
from .copies import Copies
from .index import KeyIndex
from .keys import BlocksCacheKey
from .links import Links
from .owner import Owner
from .roles import Duty, Role
from .transfers import Transfers

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.peer import Peer

__all__ = ["CacheManager"]


class CacheManager(Caches, Transfers, Copies):
    """The caches of one engine under keys, which pull from each other and push to each other; an async context manager.

    ::

        async with CacheManager(engine, 1) as manager:
            cache = manager.allocate_cache(view)
            await manager.link_clusters({2: "127.0.0.1:18515"})
            await manager.pull_blocks(BlocksCacheKey(2), cache, [0, 1, 2], [7, 5, 4])

    :param engine: the engine that holds the memory.
    :param cluster_id: the id of this side, which no other manager that is linked with it may have.
    :param role: ``"prompt"`` (pushes, and serves pulls), ``"decoder"`` (pulls, and accepts pushes) or ``"mix"`` (both).
    :param name: the name of the manager, the same on both sides of a link.
    :param lease: seconds after which blocks that a peer pulls are taken back if nothing is heard of the peer; its pull fails.
    :raises InvalidArgumentError: if an argument is malformed, or the engine has a manager of that name.
    :raises ClosedError: if the engine is closed.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    _complete = False  # True once `__init__` has succeeded

    def __init__(
        self,
        engine: Engine,
        cluster_id: int,
        *,
        role: Role | str = Role.MIX,
        name: str = "cache",
        lease: float = 10.0,
    ) -> None:
        if not hasattr(engine, "allocate"):
            raise InvalidArgumentError(f"engine must be a hixl_async.Engine, not {engine!r}")
        BlocksCacheKey(cluster_id)  # which checks it
        seconds = positive_seconds("lease", lease)
        context = ManagerContext(engine, name, cluster_id, Role.parse(role), seconds)
        context.check_usable()
        Caches.__init__(self, context, KeyIndex(context.loop))
        Transfers.__init__(self, context, Links(context))
        Copies.__init__(self, context)
        #: The engine that holds the memory.
        self.engine = engine
        self._pins = Pins(engine, name)
        try:
            self._owner = Owner(context, self._index, self._links, self._pins)
        except BaseException:
            self._pins.close()
            raise
        self._closing: asyncio.Task[None] | None = None
        engine.add_close_callback(context.refuse_work)
        self._complete = True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._index.caches)} caches, {len(self._links.peers)} links"
        return f"<CacheManager {self._context}, {self.role.value}, {state}>"

    @property
    def cluster_id(self) -> int:
        """The id of this side."""
        return self._context.cluster

    @property
    def closed(self) -> bool:
        """True once `aclose` was called, or the engine closes."""
        return self._context.closed

    # ---- links ----

    @property
    def links(self) -> dict[int, Peer]:
        """The linked clusters: the peer of each by its id."""
        return dict(self._links.peers)

    async def link_clusters(self, clusters: Mapping[int, str | Address], *, timeout: float = 3.0) -> None:
        """Link with clusters, all at once: connect to each address, and learn which cluster is there.

        A link works in both directions.  What has been linked stays linked if another fails.

        :param clusters: the address at which the engine of each cluster listens, ``"host:port"``, by cluster id.
        :param timeout: seconds for each.
        :raises InvalidArgumentError: if another cluster is at an address, or a cluster is linked already at another one.
        :raises ConnectError: if no engine answers there in time.
        :raises ClosedError: if the manager is closed.
        :raises HixlError: like ``engine.connect``; the first failure.
        """
        self._context.check_usable()
        seconds = positive_seconds("timeout", timeout)
        ends = [self._links.link(cluster, address, seconds) for cluster, address in clusters.items()]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def unlink_clusters(self, clusters: Iterable[int]) -> None:
        """End the links with clusters on both sides; transfers that have begun go on, and the engines stay connected.

        :param clusters: the ids.
        :raises InvalidArgumentError: if a cluster is not linked.
        :raises ClosedError: if the manager is closed.
        """
        self._context.check_usable()
        for cluster in list(clusters):
            self._links.unlink(cluster)

    # ---- roles ----

    @property
    def role(self) -> Role:
        """The role."""
        return self._context.role

    async def switch_role(self, role: Role | str, *, timeout: float | None = None) -> None:
        """Take another role at the call, and wait until what only the old one did has ended; links and caches stay.

        New work of the old role is refused at once, and so are pushes of expected requests that have not begun.

        :param role: ``"prompt"``, ``"decoder"`` or ``"mix"``.
        :param timeout: seconds to wait; default: no limit.
        :raises WaitTimeoutError: if work of the old role has not ended by then; it goes on, and the role stays the new one.
        :raises InvalidArgumentError: if `role` is none of these words.
        :raises ClosedError: if the manager is closed.
        """
        self._context.check_usable()
        seconds = None if timeout is None else positive_seconds("timeout", timeout)
        self._context.role = Role.parse(role)
        if not self.role.allows(Duty.ACCEPT_PUSHES):
            for store in self._index.caches.values():
                store.refuse_pushes(f"{self._context} has become a {self.role.value}")
        old = [one.released for one in self._context.running.values() if not self.role.allows(one.duty)]
        old += [served.hold.ended for served in self._owner.served if not self.role.allows(served.duty)]
        if old and (await asyncio.wait(old, timeout=seconds))[1]:
            raise WaitTimeoutError(f"transfers of the old role had not ended within {seconds:g} s")

    # ---- life ----

    def aclose(self, *, timeout: float = CLOSE_TIMEOUT) -> Coroutine[Any, Any, None]:
        """Close the manager at the call: stop its transfers, refuse those of peers, close the caches.  Idempotent.

        :param timeout: seconds to wait for transfers of peers; those that have not ended by then fail there.
        :return: an awaitable that waits until the manager is closed.
        :raises InvalidArgumentError: if `timeout` is neither a positive number nor 0.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._context.check_thread()
        seconds = seconds_or_zero("timeout", timeout)
        self._context.refuse_work()
        if self._closing is None:
            self._closing = self._context.loop.create_task(self._close(seconds))
        return Started(self._wait_closed)

    async def _wait_closed(self) -> None:
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _close(self, timeout: float) -> None:
        for cluster in self.links:
            with suppress(HixlError):  # the peer learns of it when it uses the link
                self._links.unlink(cluster)
        stores = list(self._index.caches.values())
        for store in stores:
            store.close(timeout)
        await asyncio.gather(*(store.closed() for store in stores))
        self._owner.close()
        if tasks := self._context.tasks:
            await asyncio.wait(tasks, timeout=timeout)
        for task in self._context.tasks:
            task.cancel()
        self._pins.close()

    async def __aenter__(self) -> CacheManager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._complete and not self.closed and not self.engine.forked:
            message = f"{self!r} was never closed; use 'async with CacheManager(...) as manager'"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)
