"""The caches of a manager and their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidArgumentError
from ...types import Access, AccessLike
from ..memory import make_regions
from ..plan import BlockTable
from ..shapes import View
from ..target import region_names, words_name
from ..words import WORD
from .cache import Cache, store_of
from .context import ManagerContext
from .index import KeyIndex
from .keys import BlocksCacheKey, CacheKey
from .place import Place, check_tokens
from .remote import cache_name
from .store import CacheStore

if TYPE_CHECKING:
    from ...engine.peer import Peer

__all__ = ["Caches"]

#: The most expected pushes into one cache that have not ended.
ROWS = 1024


class Caches:
    """The part of a `CacheManager` that makes caches, and gives them keys.

    :param context: the context of the manager.
    :param index: its caches and keys.
    """

    def __init__(self, context: ManagerContext, index: KeyIndex) -> None:
        self._context = context
        self._index = index

    def allocate_cache(
        self,
        view: View,
        *,
        cache_keys: Sequence[CacheKey | None] = (),
        blocks_cache_key: BlocksCacheKey | None = None,
        access: AccessLike = "read-write",
        grant: Callable[[Peer], AccessLike] | None = None,
    ) -> Cache:
        """Make a cache in new memory.

        :param view: how it lies in memory; a contiguous cache has a block for each row, of the longest sequence.
        :param cache_keys: the keys of the rows, in order; None for a row without one.
        :param blocks_cache_key: the key of the whole cache, of whose blocks each call names some.
        :param access: the most that any peer can be given: ``"none"``, ``"read"`` (pulls), ``"write"`` (pushes) or
            ``"read-write"``.
        :param grant: called with each peer, returns the access that it is given; `access` limits it.
        :return: the cache; close it with `Cache.aclose`, or by ``async with``.
        :raises InvalidArgumentError: if an argument is malformed, or a key exists.
        :raises RangeError: if there are more keys than rows.
        :raises DriverError: if there is not enough memory.
        :raises ClosedError: if the manager is closed.
        """
        return self._make(view, None, cache_keys, blocks_cache_key, access, grant)

    def register_cache(
        self,
        view: View,
        memory: Any,
        *,
        cache_keys: Sequence[CacheKey | None] = (),
        blocks_cache_key: BlocksCacheKey | None = None,
        access: AccessLike = "read-write",
        grant: Callable[[Peer], AccessLike] | None = None,
    ) -> Cache:
        """Make a cache of memory that exists.

        :param view: how it lies in memory.
        :param memory: for each tensor of the view a contiguous buffer, a tensor, or an object that numpy can import by DLPack;
            not in a sequence if there is only one.
        :param cache_keys: the keys of the rows, in order; None for a row without one.
        :param blocks_cache_key: the key of the whole cache, of whose blocks each call names some.
        :param access: the most that any peer can be given.
        :param grant: called with each peer, returns the access that it is given; `access` limits it.
        :return: the cache; close it, and await `Cache.released` before using the memory for other things.
        :raises InvalidArgumentError: if an argument is malformed, or a key exists.
        :raises RangeError: if a buffer is too small, or there are more keys than rows.
        :raises BufferTypeError: if a buffer is not contiguous, or is read-only and `access` lets peers write.
        :raises ClosedError: if the manager is closed.
        """
        if memory is None:
            raise InvalidArgumentError("memory must be a buffer for each tensor; allocate_cache() makes new memory")
        return self._make(view, memory, cache_keys, blocks_cache_key, access, grant)

    def _make(
        self,
        view: View,
        memory: Any,
        cache_keys: Sequence[CacheKey | None],
        blocks_cache_key: BlocksCacheKey | None,
        access: AccessLike,
        grant: Callable[[Peer], AccessLike] | None,
    ) -> Cache:
        context = self._context
        context.check_usable()
        if not isinstance(view, View):
            raise InvalidArgumentError(f"view must be a hixl_async.kv.View, not {view!r}")
        name = cache_name(context.name, number := next(context.numbers))
        names, sizes = region_names(name, len(view.tensor_bytes)), list(view.tensor_bytes)
        regions = make_regions(context.engine, names, sizes, memory, access, grant)
        words = None
        try:
            if Access.parse(access) & Access.WRITE:
                size = ROWS * len(view.shard.layers) * WORD
                words = self._context.engine.allocate(words_name(name), size, access="write", grant=grant)
        except BaseException:
            for region in regions:
                region.revoke()
            raise
        buffers = memory if isinstance(memory, list | tuple) else [memory] * len(regions)
        store = CacheStore(context, number, view, regions, words, buffers, self._index.forget)
        self._index.caches[number] = store
        cache = Cache(store)
        try:
            for row, key in enumerate(cache_keys):
                if key is not None:
                    self.add_cache_key(key, cache, row)
            if blocks_cache_key is not None:
                self._add_key(blocks_cache_key, store, None)
        except BaseException:
            store.close(0)
            raise
        return cache

    def add_cache_key(
        self,
        key: CacheKey,
        cache: Cache,
        batch_index: int | None = None,
        *,
        blocks: Iterable[int] | BlockTable | None = None,
        tokens: int | tuple[int, int] | None = None,
    ) -> None:
        """Let a key name a row, or blocks, of a cache, so that peers need not know which.

        :param key: the key.
        :param cache: the cache.
        :param batch_index: the row; exactly one of `batch_index` and `blocks` is given.
        :param blocks: the block ids, in the order of the tokens.
        :param tokens: how many tokens are there, or the range of their positions; transfers by the key move these.
        :raises InvalidArgumentError: if the key exists, or an argument is malformed.
        :raises RangeError: if the cache has no such block, or the blocks do not hold the tokens.
        :raises ClosedError: if the cache or the manager is closed.
        """
        store = store_of("cache", cache)
        if (batch_index is None) == (blocks is None):
            raise InvalidArgumentError("pass either batch_index=... or blocks=...")
        rows: Any = [batch_index] if blocks is None else blocks
        place = Place.of("blocks", rows, check_tokens(tokens))
        place.touched(store.view)
        if not isinstance(key, CacheKey):
            raise InvalidArgumentError(f"key must be a CacheKey, not {key!r}")
        self._add_key(key, store, place)

    def _add_key(self, key: CacheKey | BlocksCacheKey, store: CacheStore, place: Place | None) -> None:
        self._context.check_usable()
        store.check_open()
        if key.cluster_id != self._context.cluster:
            raise InvalidArgumentError(f"{key} is of another cluster; this one is {self._context.cluster}")
        self._index.add(key, store, place)

    def remove_cache_key(self, key: CacheKey | BlocksCacheKey) -> None:
        """Let a key name nothing from now on; pulls that have begun may end, and `Cache.lock` waits for them.

        :param key: the key.
        :raises TicketError: if there is no such key.
        """
        self._index.remove(key)

    async def pulled(self, key: CacheKey) -> None:
        """Wait until a peer has pulled what the key names, for example to use the blocks again.

        :param key: the key.
        :raises TicketError: if there is no such key.
        :raises ClosedError: if the key is removed, or its cache closed, before.
        """
        await self._index.pulled(key)
