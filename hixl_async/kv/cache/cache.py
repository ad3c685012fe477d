"""One cache of a manager, as the program sees it."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from ...core.sealed import Sealed
from ...core.unpicklable import unpicklable
from ...engine.arguments import positive_seconds, seconds_or_zero, whole_number
from ...engine.started import Started
from ...errors import AccessError, InvalidArgumentError, RangeError
from ..shapes import Shard, View
from .arrival import Arrival
from .expectation import Expectation
from .keys import Identifier, identifier
from .roles import Duty
from .store import CacheStore

if TYPE_CHECKING:
    from numpy import ndarray

    from ...engine.region import Region

__all__ = ["CLOSE_TIMEOUT", "Cache", "store_of"]

#: The default seconds that closing waits for the transfers of the cache.
CLOSE_TIMEOUT = 5.0


class Cache(Sealed, maker="manager.allocate_cache() and manager.register_cache()"):
    """A contiguous or a paged cache, an async context manager.

    A contiguous cache is a view with a block per row of the batch, whose `block_tokens` are the longest sequence; its rows are
    the blocks in every call.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        view = self.view
        state = ", closed" if self.closed else f", {len(self._store.holds)} transfers"
        return f"<Cache {self.cache_id} of {view.blocks} blocks of {view.block_tokens} tokens{state}>"

    @property
    def cache_id(self) -> int:
        """The number of the cache, by which peers may name it."""
        return self._store.number

    @property
    def view(self) -> View:
        """The description of how the cache lies in memory."""
        return self._store.view

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the tensors."""
        return self._store.regions

    @property
    def closed(self) -> bool:
        """True once `aclose` was called."""
        return self._store.closing is not None

    def array(self, layer: int, part: str, dtype: Any = None) -> ndarray[Any, Any]:
        """Return one part of a layer as a numpy array, without a copy; not for device memory.

        :param layer: the number of the layer.
        :param part: the name of the part, for example ``"k"``.
        :param dtype: the numpy dtype of an element; default: that of the part, or an unsigned integer of its size if numpy has
            no such type.
        :return: an array of the shape (blocks, block_tokens, heads, dim); it keeps the memory mapped.
        :raises RangeError: if the cache does not hold the layer.
        :raises InvalidArgumentError: if the layer has no such part, `dtype` has another size, or the memory is on a device.
        """
        return self.view.array(self._store.buffers(), whole_number("layer", layer), part, dtype)

    # ---- what is in use ----

    def lock(self, blocks: Iterable[int] | None = None) -> AbstractAsyncContextManager[None]:
        """Keep transfers away from some blocks while the program writes them: ``async with cache.lock([3]):``.

        New transfers of the blocks, of peers and of this side, are refused at once with `BusyError`; entering waits until those
        under way have ended.  Without a lock, a peer that pulls blocks while the program writes them gets a mixture.

        :param blocks: the block ids, or rows of a contiguous cache; default: all.
        :return: an async context manager.
        :raises RangeError: if the cache has no such block.
        :raises ClosedError: if the cache is closed.
        """
        self._store.check_open()
        wanted = range(self.view.blocks) if blocks is None else [whole_number("blocks", block) for block in blocks]
        for block in wanted:
            if not 0 <= block < self.view.blocks:
                raise RangeError(f"block {block} does not exist: the cache has {self.view.blocks}")
        return self._store.holds.lock(wanted)

    # ---- what is expected ----

    def expect(
        self,
        req_id: Identifier,
        *,
        blocks: Iterable[int] | None = None,
        layers: Sequence[int] | None = None,
        sources: Sequence[Shard] = (),
        timeout: float = 60.0,
    ) -> Arrival:
        """Accept the pushes of a request, and tell the program when its layers have landed.

        A push that names a request is refused with `TicketError` unless the request is expected.

        :param req_id: the request, which its writers give as ``push_blocks(..., req_id=)``.
        :param blocks: the only blocks, or rows, that the pushes may name; default: any.
        :param layers: the layers that are expected; default: all of the cache.
        :param sources: what each writer holds, if several together bring the heads of a layer: ``kv.shards(...)``.  Of parts
            that several hold alike, only one writes each.
        :param timeout: seconds from now until which all have to arrive.
        :return: the layers as they land.
        :raises InvalidArgumentError: if an argument is malformed, or the request is expected already.
        :raises RangeError: if the cache does not hold a layer.
        :raises LayoutMismatchError: if the sources do not hold all that the cache needs.
        :raises AccessError: if no peer may write the cache, or the manager's role accepts no pushes.
        :raises ClosedError: if the cache or the manager is closed.
        """
        store, context = self._store, self._store.context
        context.check_usable()
        store.check_open()
        context.role.check(Duty.ACCEPT_PUSHES, str(context))
        if store.words is None:
            raise AccessError(f"cache {self.cache_id} was made with an access that lets no peer write")
        if identifier("req_id", req_id) in store.expectations:
            raise InvalidArgumentError(f"request {req_id!r} is expected already")
        wanted = tuple(self.view.shard.layers if layers is None else layers)
        if strange := set(wanted) - set(store.places):
            raise RangeError(f"the cache does not hold layer {min(strange)}")
        seconds = positive_seconds("timeout", timeout)

        def forget(expectation: Expectation) -> None:
            del store.expectations[expectation.req_id]

        expectation = Expectation(context.loop, req_id, self.view, blocks, wanted, sources, seconds, forget)
        store.expectations[req_id] = expectation
        return Arrival(expectation)

    # ---- life ----

    def aclose(self, *, timeout: float = CLOSE_TIMEOUT) -> Coroutine[Any, Any, None]:
        """Close the cache at the call: its keys name nothing any more, and no transfer of it can begin.  Idempotent.

        Transfers under way may end, for `timeout` seconds; those of peers that have not ended by then fail there.  Until a peer
        can no longer touch it, the memory stays pinned; wait for `released` before using registered memory for other things.

        :param timeout: seconds.
        :return: an awaitable that waits until the cache is closed.
        :raises InvalidArgumentError: if `timeout` is neither a positive number nor 0.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._store.context.check_thread()
        self._store.close(seconds_or_zero("timeout", timeout))
        return Started(self._store.closed)

    async def released(self) -> None:
        """Wait until no peer and no transfer can touch the memory, after `aclose`; this may never happen if a peer hangs."""
        for region in self.regions:
            await region.released()

    async def __aenter__(self) -> Cache:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def store_of(name: str, cache: object) -> CacheStore:
    """Return the state of a cache that the program names.

    :param name: the argument.
    :raises InvalidArgumentError: if it is not a cache.
    """
    if not isinstance(cache, Cache):
        raise InvalidArgumentError(f"{name} must be a hixl_async.kv.cache.Cache, not {cache!r}")
    return cache._store
