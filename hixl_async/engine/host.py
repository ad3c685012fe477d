"""The interface of an engine to its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from .._core import Core
from ..control import Identity
from ..core.link import Driver
from .config import EngineConfig
from .region import Region

__all__ = ["Handler", "Host"]

#: The type of a service's handler for any peer: it gets the peer and the request's body, and returns the answer's body.
Handler = Callable[[Any, dict[str, Any]], dict[str, Any] | Awaitable[dict[str, Any] | None] | None]


class Host(NamedTuple):
    """The functions of the engine that its peers may call."""

    #: The engine; its loop exists once it is open.
    core: Core
    config: EngineConfig
    #: Return the identity that the engine announces.
    identity: Callable[[], Identity]
    #: Raise unless the engine is open, and called from its loop.
    check_open: Callable[[], None]
    #: Raise in a foreign loop or a forked child; a closed engine is fine.
    check: Callable[[], None]
    #: Start a task that the engine's end waits for.
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    #: Start a task that ends something; see `EndingTask`.
    spawn_ending: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    #: Return the drivers that the engine shares with a peer, by the names of the peer's drivers and True if it is on this host.
    shared_drivers: Callable[[Sequence[str], bool], list[Driver]]
    #: Return the region with a number, or None.
    region: Callable[[int], Region | None]
    #: Return all regions.
    regions: Callable[[], list[Region]]
    #: Return the handler of a service, or None.
    handler: Callable[[str], Handler | None]
