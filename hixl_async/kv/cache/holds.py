"""The blocks of a cache that are in use, by transfers or by the program, so that what is read is never written meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from enum import Enum

from ...errors import BusyError

__all__ = ["Hold", "Holds", "Use"]


class Use(Enum):
    """What is done with blocks meanwhile."""

    READ = "being read"
    WRITE = "being written"
    LOCK = "locked"


class Hold:
    """Some blocks in use, from `Holds.take` to `Holds.give`."""

    __slots__ = ("blocks", "ended", "use", "user")

    def __init__(self, use: Use, blocks: frozenset[int], user: str, ended: asyncio.Future[None]) -> None:
        self.use = use
        self.blocks = blocks
        #: The one who uses them, in words.
        self.user = user
        self.ended = ended

    def conflicts(self, use: Use, blocks: frozenset[int]) -> bool:
        """Return True if the blocks cannot be used so until this hold ends."""
        return (use is not self.use or use is Use.LOCK) and not self.blocks.isdisjoint(blocks)


class Holds:
    """The holds on the blocks of one cache.

    Readers do not disturb each other, and nor do writers, since the ranks of one model write different bytes of the same
    blocks.  Readers and writers exclude each other, and a lock excludes all.

    :param loop: the loop of the engine.
    :param name: the cache, in words.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._active: dict[Hold, None] = {}

    def __len__(self) -> int:
        return len(self._active)

    def take(self, use: Use, blocks: Iterable[int], user: str) -> Hold:
        """Hold blocks at once.

        :raises BusyError: if they are in use otherwise.
        """
        wanted = frozenset(blocks)
        for hold in self._conflicts(use, wanted):
            shown = ", ".join(map(str, sorted(hold.blocks & wanted)[:8]))
            raise BusyError(
                f"blocks {shown} of {self._name} are {hold.use.value} by {hold.user}; try again when that has ended"
            )
        return self._add(use, wanted, user)

    def give(self, hold: Hold) -> None:
        """End a hold; no effect if it has ended."""
        if hold in self._active:
            del self._active[hold]
            hold.ended.set_result(None)

    @asynccontextmanager
    async def lock(self, blocks: Iterable[int]) -> AsyncIterator[None]:
        """Refuse all new uses of the blocks at once, and wait until the present ones have ended."""
        wanted = frozenset(blocks)
        before = self._conflicts(Use.LOCK, wanted)
        hold = self._add(Use.LOCK, wanted, "the program")
        try:
            for other in before:
                await asyncio.wait([other.ended])
            yield
        finally:
            self.give(hold)

    async def idle(self, which: Callable[[Hold], bool] = lambda hold: True) -> None:
        """Wait until no hold is left of those that `which` selects."""
        while selected := [hold.ended for hold in self._active if which(hold)]:
            await asyncio.wait(selected)

    def _conflicts(self, use: Use, blocks: frozenset[int]) -> list[Hold]:
        return [hold for hold in self._active if hold.conflicts(use, blocks)]

    def _add(self, use: Use, blocks: frozenset[int], user: str) -> Hold:
        hold = Hold(use, blocks, user, self._loop.create_future())
        self._active[hold] = None
        return hold
