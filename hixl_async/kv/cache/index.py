"""The keys of a manager's caches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ClosedError, InvalidArgumentError, TicketError
from ..plan import BlockTable
from .keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, Key
from .place import Place

if TYPE_CHECKING:
    from .store import CacheStore

__all__ = ["Found", "KeyIndex"]


class _Entry(NamedTuple):
    cache: CacheStore
    #: None for a whole paged cache.
    place: Place | None
    #: Done once a peer has pulled the place.
    pulled: asyncio.Future[None]


class Found(NamedTuple):
    """What a key names."""

    cache: CacheStore
    place: Place
    #: To be resolved when a peer has pulled it; None if the key is not of a request or a prefix.
    pulled: asyncio.Future[None] | None


class KeyIndex:
    """The caches of a manager by number and by key.

    :param loop: the loop of the engine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.caches: dict[int, CacheStore] = {}
        self._entries: dict[CacheKey | BlocksCacheKey, _Entry] = {}

    def add(self, key: CacheKey | BlocksCacheKey, cache: CacheStore, place: Place | None) -> None:
        """Let a key name a place in a cache.

        :raises InvalidArgumentError: if it names one already.
        """
        if key in self._entries:
            raise InvalidArgumentError(f"{key} exists already; remove it first")
        self._entries[key] = _Entry(cache, place, self._loop.create_future())

    def remove(self, key: CacheKey | BlocksCacheKey) -> None:
        """Let a key name nothing; those who wait until it is pulled get an error.

        :raises TicketError: if there is no such key.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            raise TicketError(f"{key} is not known here: it was removed, or never added")
        if not entry.pulled.done():
            entry.pulled.set_exception(ClosedError(f"{key} was removed before a peer had pulled it"))
            entry.pulled.exception()  # retrieved, because no task may be waiting for it

    def forget(self, cache: CacheStore) -> None:
        """Forget a cache and its keys."""
        del self.caches[cache.number]
        for key in [key for key, entry in self._entries.items() if entry.cache is cache]:
            self.remove(key)

    async def pulled(self, key: CacheKey) -> None:
        """Wait until a peer has pulled what the key names.

        :raises TicketError: if there is no such key.
        :raises ClosedError: if it is removed first.
        """
        if key not in self._entries:
            raise TicketError(f"{key} is not known here: it was removed, or never added")
        await asyncio.shield(self._entries[key].pulled)

    def find(self, key: Key, place: Place | None) -> Found:
        """Return what a key and a place name together.

        :raises TicketError: if nothing has the key.
        :raises InvalidArgumentError: if the place is missing, or both name one.
        """
        if isinstance(key, CacheKeyByIdAndIndex):
            if key.cache_id not in self.caches:
                raise TicketError(f"{key} is not known here: the cache was closed, or never made")
            row = Place(BlockTable([key.batch_index])) if place is None else place
            return Found(self.caches[key.cache_id], row, None)
        entry = self._entries.get(key)
        if entry is None:
            raise TicketError(f"{key} is not known here: it was removed, or not added yet")
        if (entry.place is None) == (place is None):
            what = "names a whole cache; name its blocks" if place is None else "names its blocks; name no others"
            raise InvalidArgumentError(f"{key} {what}")
        if entry.place is None:
            assert place is not None
            return Found(entry.cache, place, None)
        return Found(entry.cache, entry.place, entry.pulled)
