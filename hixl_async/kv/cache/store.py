"""One cache of a manager, as its transfers know it: its memory, what is in use of it, and what is expected in it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...core.memory import LocalSlice
from ...errors import ClosedError, TicketError
from ...types import Access
from ..placed import Placed
from ..shapes import View
from ..words import WordTable
from .context import ManagerContext
from .expectation import Expectation
from .holds import Holds
from .keys import Identifier

if TYPE_CHECKING:
    from ...engine.peer import Peer
    from ...engine.region import Region

__all__ = ["CacheStore"]


class CacheStore:
    """The state of a cache, from its making until its memory is released.

    :param context: the context of the manager.
    :param number: the number of the cache.
    :param view: how it lies in memory.
    :param regions: the regions of the tensors.
    :param words: the region of the words that say which layers have landed; None if no peer may write.
    :param memory: the program's memory of each tensor, or None where it is the engine's.
    :param forget: called once, when the cache begins to close.
    """

    def __init__(
        self,
        context: ManagerContext,
        number: int,
        view: View,
        regions: Sequence[Region],
        words: Region | None,
        memory: Sequence[Any],
        forget: Callable[[CacheStore], None],
    ) -> None:
        self.context = context
        self.number = number
        self.view = view
        self.regions = tuple(regions)
        self.placed = Placed[LocalSlice](view, regions)
        self.memory = tuple(memory)
        self.holds = Holds(context.loop, f"cache {number} of {context}")
        #: The index of each layer's word in a row.
        self.places = {layer: place for place, layer in enumerate(sorted(view.shard.layers))}
        self._words_region = words
        self.words = None if words is None else WordTable(memoryview(words), len(self.places))
        #: The numbers in the words of the pushes, each another.
        self.generations = itertools.count(1 + secrets.randbits(39))
        self.expectations: dict[Identifier, Expectation] = {}
        self.closing: asyncio.Task[None] | None = None
        self._forget = forget

    def buffers(self) -> list[memoryview]:
        """Return the memory of the tensors, which must be on the host."""
        return [memoryview(region) for region in self.regions]

    def readable_by(self, peer: Peer) -> bool:
        """Return True if a peer may pull from the cache."""
        return bool(self.regions[0].access_for(peer) & Access.READ)

    def writable_by(self, peer: Peer) -> bool:
        """Return True if a peer may push to the cache."""
        return self._words_region is not None and bool(self._words_region.access_for(peer) & Access.WRITE)

    def check_open(self) -> None:
        """Return if the cache can be used.

        :raises ClosedError: if it is closed.
        """
        if self.closing is not None:
            raise ClosedError(f"cache {self.number} is closed")

    def expected(self, req_id: Identifier) -> Expectation:
        """Return the expectation of a request.

        :raises TicketError: if there is none.
        """
        if req_id not in self.expectations:
            raise TicketError(
                f"request {req_id!r} is not expected here: it has ended, or cache.expect() was not called"
            )
        return self.expectations[req_id]

    def refuse_pushes(self, reason: str) -> None:
        """Let no expected push begin any more."""
        for expectation in list(self.expectations.values()):
            expectation.refuse(reason)

    def close(self, timeout: float) -> None:
        """Begin to close the cache, and give its transfers so many seconds; idempotent."""
        if self.closing is None:
            self.closing = self.context.loop.create_task(self._close(timeout))
            self._forget(self)
            for expectation in list(self.expectations.values()):
                expectation.close()

    async def closed(self) -> None:
        """Wait until the cache is closed."""
        assert self.closing is not None
        await asyncio.shield(self.closing)

    async def _close(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.holds.idle()
        if self.words is not None:
            self.words.close()
            self.words = None
        regions = [*self.regions, *([] if self._words_region is None else [self._words_region])]
        for region in regions:
            region.revoke()
        for region in regions:
            await region.aclose()
