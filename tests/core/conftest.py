"""A pair of engines, the left one under a fault plan that starts empty, and a region on each side."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hixl_async import Batch, Engine, Peer, Region, RemoteRegion, Transfer
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until

SIZE = 2 << 20


@dataclass
class World:
    """``here`` belongs to the left engine, ``there`` to the right one, and ``remote`` is what the left sees of it."""

    pair: EnginePair
    plan: FaultPlan
    here: Region
    there: Region
    remote: RemoteRegion

    @property
    def left(self) -> Engine:
        return self.pair.left

    @property
    def right(self) -> Engine:
        return self.pair.right

    @property
    def peer(self) -> Peer:
        return self.pair.peer

    @property
    def landed(self) -> bytes:
        """Return the contents of the right engine's region."""
        return bytes(memoryview(self.there))

    def write(self, data: Any = b"hello", start: int = 0, **options: Any) -> Transfer:
        """Write from the left engine into the right one's region."""
        return self.left.write(data, self.remote[start : start + len(data)], **options)

    def batch(self, rows: Any, verb: str = "write") -> Batch:
        return Batch(verb, self.here, self.remote, rows)

    async def works(self) -> None:
        """Assert that the engine goes on working, and that nothing is left of what was tried before."""
        self.plan.clear()
        before = self.left.stats()
        assert before.in_flight == before.pinned == 0
        assert await self.write(b"still works", 1000) == 11
        assert self.landed[1000:1011] == b"still works"
        after = self.left.stats()
        assert after.transfers == before.transfers + 1
        assert after.in_flight == after.pinned == 0


WorldMaker = Callable[..., Any]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan), stall=30.0, close_timeout=2.0) as pair:
        there, remote = await pair.region("there", SIZE)
        made = World(pair, plan, pair.left.allocate("here", SIZE, access="read"), there, remote)
        yield made
        plan.release()
        await until(lambda: pair.left.stats().pinned == 0, what="the release of everything")


@contextmanager
def gil_kept() -> Iterator[None]:
    """Keep the GIL with the running thread until it releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
