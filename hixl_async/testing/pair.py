"""Two connected engines in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from ..engine.config import Drivers
from ..engine.engine import Engine
from ..engine.peer import Peer
from ..engine.region import Region, RemoteRegion
from ..types import AccessLike

__all__ = ["EnginePair", "engine_pair"]


class EnginePair(NamedTuple):
    """Two connected engines, and the view that each has of the other."""

    #: The engine that connected; it has the drivers that `engine_pair` was given.
    left: Engine
    #: The engine that listens.
    right: Engine
    #: The right engine as the left one sees it.
    peer: Peer
    #: The left engine as the right one sees it.
    back: Peer

    async def region(
        self, name: str = "region", size: int = 1 << 16, *, access: AccessLike = "read-write"
    ) -> tuple[Region, RemoteRegion]:
        """Allocate a region in the right engine, and import it in the left one.

        :param name: unique in the right engine.
        :param size: bytes.
        :param access: the access of the left engine: ``"read"``, ``"write"`` or ``"read-write"``.
        :return: the region of the right engine, and the remote region that the left engine sees.
        :raises InvalidArgumentError: if an argument is malformed or the name is taken.
        :raises DriverError: if there is not enough memory.
        """
        region = self.right.allocate(name, size, access=access)
        return region, await self.peer.region(name)


@asynccontextmanager
async def engine_pair(
    drivers: Drivers | None = None, *, other: Drivers | None = None, **settings: Any
) -> AsyncIterator[EnginePair]:
    """Open two engines and connect them; close both at the end.

    ::

        async with engine_pair(drivers=faulty("shm", plan)) as pair:
            region, remote = await pair.region("kv", 4096)
            await pair.left.write(b"hello", remote[0:5])

    :param drivers: the drivers of the left engine, as for `Engine`: names, or a mapping of names to options.
    :param other: the drivers of the right engine; default: the same drivers, without their options and so without faults.
    :param settings: other arguments of `Engine`, for both engines.
    :return: an async context manager of the `EnginePair`.
    :raises HixlError: on entering, if an engine cannot be opened, or they cannot connect.
    """
    if other is None and drivers is not None:
        other = list(drivers)
    async with (
        Engine("127.0.0.1:0", name="right", drivers=other, **settings) as right,
        Engine("127.0.0.1:0", name="left", drivers=drivers, **settings) as left,
    ):
        accepted = right.accepted()
        peer = await left.connect(right.address)
        back = await anext(accepted)
        accepted.close()
        yield EnginePair(left, right, peer, back)
