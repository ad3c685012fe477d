"""A paged KV cache in one region of an engine, which lends blocks and opens streams."""

from __future__ import annotations

import asyncio
import random
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from ..core.unpicklable import unpicklable
from ..engine.arguments import positive_number, positive_seconds, seconds_or_zero, whole_number
from ..engine.started import Started
from ..errors import AccessError, InvalidArgumentError
from ..types import Access, AccessLike, PeerState
from .blocks import Blocks
from .context import PoolContext
from .fields import REGION_BYTES
from .grant import grant, offer, pull
from .lender import Lender
from .memory import make_regions
from .offer import Offer
from .pins import Pins
from .producer import Producer
from .push import PushStream
from .registry import StreamRegistry
from .reservation import Part, Reservation, parts_of
from .shapes import Shard, View, overlap
from .stream import LayerStream
from .target import region_names, tensor_bytes, words_name
from .ticket import POOL_BLOCKS
from .words import WORD, WordTable

if TYPE_CHECKING:
    from numpy import ndarray

    from ..engine.engine import Engine
    from ..engine.peer import Peer
    from ..engine.region import Region
    from .lender import PoolStatistics

__all__ = ["Pool"]

#: The default seconds that closing a pool waits for the peers of open streams.
CLOSE_TIMEOUT = 5.0

# Closing tasks of pools, because the loop keeps only weak references to tasks.
_closings: set[asyncio.Task[None]] = set()


class Pool:
    """A paged KV cache that is lent block by block; an async context manager.

    A pool is closed with a ResourceWarning when the last reference to it is dropped.

    :param engine: the engine that holds the memory.
    :param views: how the cache lies in memory: a view, or one for each group of layers.  The views of several groups have the
        same number of blocks, whose ids they share, and may share tensors in which each block has the same bytes in all.
    :param name: the name of the pool.  Its regions are called after it: ``name`` for a single tensor, ``name + ".0"`` and so on
        for several; in writable pools also ``name + ".words"``.
    :param access: the most that any peer can be given: ``"none"`` (for a pool that is only a source of pushes), ``"read"``,
        ``"write"`` or ``"read-write"``.
    :param grant: called with each peer, returns the access that it is given; `access` limits it.
    :param shuffle: the seed of a random order in which blocks are lent; by default the lowest free ids are lent first.
    :param memory: the memory of the blocks: for each tensor of the views a contiguous buffer, a tensor, or an object that numpy
        can import by DLPack, of at least the tensor's size; not in a sequence if there is only one.  Default: new memory.
    :param streams: the most streams into the pool that are not drained, where one with several senders counts once for each;
        default: as many as blocks.
    :raises InvalidArgumentError: if an argument is malformed, or the engine has a region of that name.
    :raises BufferTypeError: if `memory` is not contiguous, or is read-only and `access` lets peers write.
    :raises RangeError: if `memory` is too small.
    :raises BusyError: if the engine exports as many regions as it can.
    :raises DriverError: if there is not enough memory.
    :raises ClosedError: if the engine is closed.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    _complete = False  # True once `__init__` has succeeded

    def __init__(
        self,
        engine: Engine,
        views: View | Sequence[View],
        *,
        name: str = "kv",
        access: AccessLike = "write",
        grant: Callable[[Peer], AccessLike] | None = None,
        shuffle: int | None = None,
        memory: Any = None,
        streams: int | None = None,
    ) -> None:
        self._views = _check_views(views)
        if not hasattr(engine, "allocate"):
            raise InvalidArgumentError(f"engine must be a hixl_async.Engine, not {engine!r}")
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name must be a string, not {name!r}")
        seed = None if shuffle is None else whole_number("shuffle", shuffle)
        rows = self.blocks if streams is None else positive_number("streams", streams)
        self._engine = engine
        self._name = name
        self._closing: asyncio.Task[None] | None = None
        self._regions: tuple[Region, ...] = ()
        self._words_region: Region | None = None
        self._pins: Pins | None = None
        words: WordTable | None = None
        context: PoolContext | None = None
        try:
            # First, because a machine without enough memory must fail here, and not after other allocations.
            sizes = tensor_bytes(self.views)
            self._regions = make_regions(engine, region_names(name, len(sizes)), sizes, memory, access, grant)
            self._context = context = PoolContext(engine, name, self.views, self.regions)
            layers = len(self._context.groups)
            if Access.parse(access) & Access.READ:
                self._pins = Pins(engine, name, grant)
            if Access.parse(access) & Access.WRITE:
                self._words_region = engine.allocate(
                    words_name(name), rows * layers * WORD, access="write", grant=grant
                )
                words = WordTable(memoryview(self._words_region), layers)
            self._lender = Lender(self._context, _shuffled(self.blocks, seed))
            self._registry = StreamRegistry(self._context, self._lender, words, self._pins)
        except BaseException:
            if words is not None:
                words.close()
            if self._pins is not None:
                self._pins.close()
            if context is not None:
                context.thread_calls.close()
            self._revoke_regions()
            raise
        self._writable = words is not None
        self._on_engine_close = _closer(weakref.ref(self))
        engine.add_close_callback(self._on_engine_close)
        self._complete = True

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} of {self.blocks} blocks, {self.statistics()}>"

    def __del__(self) -> None:
        if self._complete and self._context.clean_up(self._begin_closing, CLOSE_TIMEOUT):
            message = f"{self!r} was never closed; use 'async with Pool(...) as pool'"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    @property
    def engine(self) -> Engine:
        """The engine that holds the memory."""
        return self._engine

    @property
    def name(self) -> str:
        """The name of the pool in tickets."""
        return self._name

    @property
    def views(self) -> tuple[View, ...]:
        """What the pool holds, a view for each group."""
        return self._views

    @property
    def blocks(self) -> int:
        """The size in blocks."""
        return self._views[0].blocks

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the tensors."""
        return self._regions

    @property
    def closed(self) -> bool:
        """True once `aclose` was called."""
        return self._context.closed

    def array(self, layer: int, part: str, dtype: Any = None) -> ndarray[Any, Any]:
        """Return one part of a layer as a numpy array, without a copy; not for device memory.

        :param layer: the number of the layer.
        :param part: the name of the part, for example ``"k"``.
        :param dtype: the numpy dtype of an element; default: that of the part, or an unsigned integer of its size if numpy has
            no such type.
        :return: an array of the shape (blocks, block_tokens, heads, dim); it keeps the memory mapped.
        :raises RangeError: if the pool does not hold the layer.
        :raises InvalidArgumentError: if the layer has no such part, `dtype` has another size, or the memory is on a device.
        """
        view = self.views[self._context.group_of(whole_number("layer", layer))]
        return view.array([memoryview(region) for region in self.regions], layer, part, dtype)

    def statistics(self) -> PoolStatistics:
        """Return the numbers of blocks in each state, and of waiting requests."""
        return self._lender.statistics()

    # ---- reservations ----

    @overload
    def reserve(
        self, *, tokens: int | None = None, blocks: int | None = None, group: int = 0, start: int = 0, priority: int = 0
    ) -> Reservation[Blocks]: ...
    @overload
    def reserve(
        self,
        *,
        tokens: Sequence[int],
        group: int | Sequence[int] = 0,
        start: int | Sequence[int] = 0,
        priority: int = 0,
    ) -> Reservation[list[Blocks]]: ...
    @overload
    def reserve(
        self,
        *,
        blocks: Sequence[int],
        group: int | Sequence[int] = 0,
        start: int | Sequence[int] = 0,
        priority: int = 0,
    ) -> Reservation[list[Blocks]]: ...

    def reserve(
        self,
        *,
        tokens: int | Sequence[int] | None = None,
        blocks: int | Sequence[int] | None = None,
        group: int | Sequence[int] = 0,
        start: int | Sequence[int] = 0,
        priority: int = 0,
    ) -> Reservation[Any]:
        """Reserve blocks for so many tokens, or so many blocks: all or nothing.

        Requests of a higher priority go first, and within one priority those that came first.  A sequence of numbers makes
        several reservations at once, of which either all or none are fulfilled, so that tasks which need several cannot wait
        for each other.

        :param tokens: the number of tokens that the blocks have to hold, or a sequence of such numbers.
        :param blocks: the number of blocks, or a sequence of such numbers.
        :param group: the index of the view that the blocks belong to; with a sequence of numbers it may be one of as many.
        :param start: the position in the sequence of the first token of the first block; likewise.
        :param priority: any whole number.
        :return: a `Reservation`: await it, or enter it with ``async with``, for the blocks, or the list of them; it joins the
            queue at that moment.  Cancelling the wait leaks no blocks.
        :raises InvalidArgumentError: if not exactly one of `tokens` and `blocks` is given, or a number is malformed.
        :raises RangeError: if the pool is smaller than that, or has no such group.
        :raises ClosedError: if the pool is closed, at the call or while waiting.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        parts, several = parts_of(self._context, tokens, blocks, group, start)
        return Reservation(partial(self._reserve, parts, several, whole_number("priority", priority)))

    def reserve_nowait(
        self, *, tokens: int | None = None, blocks: int | None = None, group: int = 0, start: int = 0, priority: int = 0
    ) -> Blocks:
        """Reserve blocks like `reserve`, but raise where that would have to wait.

        :param tokens: the number of tokens that the blocks have to hold.
        :param blocks: the number of blocks.
        :param group: the index of the view that the blocks belong to.
        :param start: the position in the sequence of the first token of the first block.
        :param priority: any whole number.
        :return: the blocks, to be closed by the caller.
        :raises InvalidArgumentError: if not exactly one of `tokens` and `blocks` is given, or a number is malformed.
        :raises RangeError: if the pool is smaller than that, or has no such group.
        :raises ClosedError: if the pool is closed.
        :raises BusyError: if too few blocks are free, or other requests go first.
        """
        (part,), _ = parts_of(self._context, [tokens] if tokens is not None else None, blocks, group, start)
        return self._lend(self._lender.take_now(part.blocks, whole_number("priority", priority)), part)

    async def _reserve(self, parts: list[Part], several: bool, priority: int) -> Any:
        self._context.check_usable()
        ids = await self._lender.take(sum(part.blocks for part in parts), priority)
        lent, taken = [], 0
        for part in parts:
            lent.append(self._lend(ids[taken : taken + part.blocks], part))
            taken += part.blocks
        return lent if several else lent[0]

    def _lend(self, ids: tuple[int, ...], part: Part) -> Blocks:
        return Blocks(self._lender.loan(ids, part.group, part.start), self._lender, self)

    # ---- streams ----

    def stream(
        self,
        blocks: Sequence[Blocks],
        *,
        tokens: Sequence[tuple[int, int]] | None = None,
        sources: Sequence[Shard] | None = None,
        ttl: float | None = None,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> LayerStream:
        """Let producers fill blocks of several groups once; like ``blocks.stream()``, which serves pools of one group.

        :param blocks: blocks of each group, in the order of the views.
        :param tokens: for each group the position in the sequence of the first token to be brought, and the one after the last;
            default: all that the blocks can hold.
        :param sources: what each producer holds, if there are several.
        :param ttl: seconds within which a producer has to open the ticket; default 60.
        :param lease: seconds without hearing of a producer after which the open stream fails; default 10.
        :param timeout: seconds from now after which the stream fails, whatever its progress; default: no limit.
        :return: the stream.
        :raises InvalidArgumentError: if an argument is malformed, or `blocks` does not have blocks of each group.
        :raises HixlError: like ``Blocks.stream``.
        """
        self._context.check_usable()
        if not self._writable:
            raise AccessError(f"pool {self.name!r} was made with an access that lets no peer write; use access='write'")
        return grant(self._context, self._registry, blocks, tokens, sources, (ttl, lease, timeout))

    def offer(
        self,
        blocks: Sequence[Blocks],
        *,
        tokens: Sequence[tuple[int, int]] | None = None,
        readers: int = 1,
        ttl: float | None = None,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> Offer:
        """Let other pools read blocks of several groups; like ``blocks.offer()``, which serves pools of one group.

        :param blocks: blocks of each group, in the order of the views.
        :param tokens: for each group the position in the sequence of the first token that is offered, and the one after the
            last; default: all that the blocks can hold.
        :param readers: the number of pools that will read them.
        :param ttl: seconds within which all readers have to use the ticket; default 60.
        :param lease: seconds without hearing of a reader after which it loses its claim to the blocks; default 10.
        :param timeout: seconds from now after which the offer fails, whatever its progress; default: no limit.
        :return: the offer.
        :raises InvalidArgumentError: if an argument is malformed, or `blocks` does not have blocks of each group.
        :raises HixlError: like ``Blocks.offer``.
        """
        self._context.check_usable()
        if self._pins is None:
            raise AccessError(f"pool {self.name!r} was made with an access that lets no peer read; use access='read'")
        return Offer(offer(self._context, self._registry, blocks, tokens, readers, (ttl, lease, timeout)), self)

    def pull(
        self,
        blocks: Sequence[Blocks],
        sources: Sequence[tuple[Peer, dict[str, Any]]],
        *,
        tokens: Sequence[tuple[int, int]] | None = None,
        timeout: float | None = None,
    ) -> LayerStream:
        """Fill blocks of several groups, or from several owners; like ``blocks.pull()``.

        :param blocks: blocks of each group, in the order of the views.
        :param sources: the owners, each with the ticket of its offer; each layer, and each head, is read from one that has it.
        :param tokens: for each group the position in the sequence of the first token to be read, and the one after the last;
            default: all that the blocks can hold.
        :param timeout: seconds from now after which the stream fails, whatever its progress; default: no limit.
        :return: the stream of the layers that land.
        :raises LayoutMismatchError: if the owners do not hold all that this pool needs.
        :raises InvalidArgumentError: if an argument is malformed, or `blocks` does not have blocks of each group.
        :raises HixlError: like ``Blocks.pull``.
        """
        self._context.check_usable()
        for peer, _ in sources:
            self._check_peer(peer)
        return pull(self._context, self._registry, blocks, sources, tokens, timeout)

    def _check_peer(self, peer: Peer) -> None:
        if not hasattr(peer, "identity"):
            raise InvalidArgumentError(f"peer must be a peer of the pool's engine, not {peer!r}")
        if peer.state is PeerState.UP and peer not in self.engine.peers:
            raise InvalidArgumentError(f"{peer!r} is a peer of another engine than the pool's; connect this one to it")

    def open_stream(
        self, peer: Peer, ticket: dict[str, Any] | Awaitable[dict[str, Any]], *, timeout: float = 10.0
    ) -> PushStream:
        """Open a stream of this pool's blocks into those of a consumer's ticket, and return at once.

        Layers can be pushed before the consumer has answered, and before the ticket is there, so that computing them need not
        wait.  None is written before the consumer has accepted the ticket.

        :param peer: the consumer, a connected peer of the pool's engine.
        :param ticket: the dict that the consumer's ``stream.ticket()`` returned, or an awaitable of it, such as a task that
            asks the consumer for it.
        :param timeout: seconds for opening, and also for the end: from the last landing until all is drained and decided.
        :return: the stream: enter it with ``async with``; or await it, which waits until the ticket is accepted.
        :raises TicketError: if the ticket is malformed, or was issued by another engine or an earlier incarnation of it.
        :raises LayoutMismatchError: if the consumer's cache has other groups of layers.
        :raises InvalidArgumentError: if `timeout` is not a positive number, or `peer` is not a peer of the pool's engine.
        :raises ClosedError: if the pool is closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._context.check_usable()
        self._check_peer(peer)
        timeout = positive_seconds("timeout", timeout)
        return PushStream(Producer(self._context, peer, ticket, timeout, self._registry), self)

    # ---- life ----

    def aclose(self, *, timeout: float = CLOSE_TIMEOUT) -> Coroutine[Any, Any, None]:
        """Close the pool at the call: refuse new work, end all streams, take all blocks back, close the regions.  Idempotent.

        :param timeout: seconds to wait for the peers of open streams; after that the regions are closed without them.  The
            engine keeps memory that they may still write pinned.  With ``memory=``, await ``region.released()`` of
            each of `regions` before using the memory for other things.
        :return: an awaitable that waits until the pool is closed.
        :raises InvalidArgumentError: if `timeout` is neither a positive number nor 0; nothing is closed then.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._context.check_thread()
        self._begin_closing(seconds_or_zero("timeout", timeout))
        return Started(self._wait_closed)

    def _begin_closing(self, timeout: float) -> None:
        self._refuse_work()
        if self._closing is None:
            self._closing = self.engine.loop.create_task(self._close(timeout))
            _closings.add(self._closing)
            self._closing.add_done_callback(_closings.discard)

    async def _wait_closed(self) -> None:
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _refuse_work(self) -> None:
        """Refuse new work, and end the waits for blocks and all streams."""
        if self.closed:
            return
        self._context.closed = True
        self.engine.remove_close_callback(self._on_engine_close)
        self._lender.refuse()
        for arrivals in self._registry.arrivals():
            arrivals.leave("the consumer closed its pool")
        for offering in list(self._registry.offers.values()):
            offering.stop("the owner closed its pool")
        for producer in list(self._registry.producers):
            producer.stop("the producer closed its pool")

    async def _close(self, timeout: float) -> None:
        registry = self._registry
        arrivals, offers, producers = registry.arrivals(), list(registry.offers.values()), list(registry.producers)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(
                    *(stream.ended() for stream in arrivals),
                    *(offering.ended() for offering in offers),
                    *(push.ended() for push in producers),
                )
        for stream in arrivals:
            stream.cut()
        for offering in offers:
            offering.cut()
        await self._context.cancel_tasks()
        self._context.thread_calls.close()
        self._registry.close()
        self._lender.take_back()
        await self._close_regions()

    def _revoke_regions(self) -> None:
        """Free the names of the regions at once; memory that is in use stays pinned until its last use ends."""
        for region in self._all_regions():
            region.revoke()

    async def _close_regions(self) -> None:
        self._revoke_regions()
        for region in self._all_regions():
            await region.aclose()

    def _all_regions(self) -> list[Region]:
        return [*self.regions, *([] if self._words_region is None else [self._words_region])]

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _closer(pool: weakref.ref[Pool]) -> Callable[[], None]:
    """Return a callback that ends the pool when its engine closes, and does not keep it alive."""

    def close() -> None:
        if (alive := pool()) is not None:
            alive._refuse_work()

    return close


def _shuffled(blocks: int, seed: int | None) -> list[int] | None:
    """Return the block ids in a random order; None if there is no seed."""
    if seed is None:
        return None
    order = list(range(blocks))
    random.Random(seed).shuffle(order)
    return order


def _check_views(views: View | Sequence[View]) -> tuple[View, ...]:
    """Return the views of a pool.

    :raises InvalidArgumentError: if they cannot share a pool.
    """
    found = (views,) if isinstance(views, View) else tuple(views) if isinstance(views, Sequence) else ()
    if not found or not all(isinstance(view, View) for view in found):
        raise InvalidArgumentError(f"views must be a hixl_async.kv.View, or a sequence of them, not {views!r}")
    if len({(view.blocks, view.shard.rank, view.shard.ranks) for view in found}) > 1:
        raise InvalidArgumentError("the views of a pool must have the same number of blocks, and the same rank")
    layers = [layer for view in found for layer in view.shard.layers]
    if len(set(layers)) < len(layers):
        raise InvalidArgumentError("a layer is in two views; each layer belongs to one group")
    if any(overlap(one, other) for one, other in combinations(found, 2)):
        raise InvalidArgumentError(
            "two views share a tensor in which a block of the one would overlap other blocks of the other; give both the same "
            "bytes per block, by View(strides=...) if their layers differ"
        )
    if found[0].blocks >= POOL_BLOCKS or max(tensor_bytes(found)) >= REGION_BYTES:
        raise InvalidArgumentError("a pool of so many blocks needs more memory than any machine has; use fewer")
    return found
