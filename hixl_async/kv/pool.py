"""A paged KV cache in one region of an engine, which lends blocks and opens streams."""

from __future__ import annotations

import asyncio
import random
import warnings
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.unpicklable import unpicklable
from ..engine.arguments import positive_number, positive_seconds, seconds_or_zero, whole_number
from ..engine.started import Started
from ..errors import AccessError, BusyError, ClosedError, InvalidArgumentError, RangeError, TicketError
from ..types import Access, AccessLike, PeerState
from .allocator import Allocator, BlockState, Request
from .blocks import Blocks, Reservation
from .context import PoolContext
from .layout import Layout
from .lease import Lease
from .protocol import POOL_BLOCKS, REGION_BYTES, WORD, Ticket
from .push import Producer, PushStream
from .registry import StreamRegistry
from .stream import Consumer

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.peer import Peer
    from ..engine.region import Region

__all__ = ["Pool", "PoolStatistics"]

#: The default seconds that closing a pool waits for the peers of open streams.
CLOSE_TIMEOUT = 5.0

# Closing tasks of pools, because the loop keeps only weak references to tasks.
_closings: set[asyncio.Task[None]] = set()


class PoolStatistics(NamedTuple):
    """The state of a pool's blocks; the first three sum up to its size."""

    #: Blocks that can be lent.
    free: int
    #: Blocks that are lent.
    reserved: int
    #: Blocks given back that a peer could still write, or a push still reads.
    quarantined: int
    #: Reservations that wait for blocks.
    waiting: int


class Pool:
    """A paged KV cache that is lent block by block; an async context manager.

    A pool is closed with a ResourceWarning when the last reference to it is dropped.

    :param engine: the engine that holds the memory.
    :param layout: the shape of the cache.
    :param blocks: the size in blocks.
    :param name: the name of the region, unique in the engine; writable pools have a second one, ``name + ".signals"``.
    :param access: the most that any peer can be given: ``"none"`` (for a pool that is only a source of pushes), ``"read"``,
        ``"write"`` or ``"read-write"``.
    :param grant: called with each peer, returns the access that it is given; `access` limits it.
    :param shuffle: the seed of a random order in which blocks are lent; by default the lowest free ids are lent first.
    :param memory: the memory of the blocks, a contiguous buffer, a tensor, or an object that numpy can import by DLPack, of
        exactly the pool's size; by default new memory.
    :raises InvalidArgumentError: if an argument is malformed, or the engine has a region of that name.
    :raises BufferTypeError: if `memory` has no contiguous memory, or is read-only and `access` lets peers write.
    :raises RangeError: if `memory` has another size.
    :raises BusyError: if the engine exports as many regions as it can.
    :raises DriverError: if there is not enough memory.
    :raises ClosedError: if the engine is closed.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    _complete = False  # True once `__init__` has succeeded

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        *,
        blocks: int,
        name: str = "kv",
        access: AccessLike = "write",
        grant: Callable[[Peer], AccessLike] | None = None,
        shuffle: int | None = None,
        memory: Any = None,
    ) -> None:
        if not isinstance(layout, Layout):
            raise InvalidArgumentError(f"layout must be a hixl_async.kv.Layout, not {type(layout).__name__}")
        blocks = positive_number("blocks", blocks)
        if not hasattr(engine, "allocate"):
            raise InvalidArgumentError(f"engine must be a hixl_async.Engine, not {engine!r}")
        if blocks >= POOL_BLOCKS or layout.pool_bytes(blocks) >= REGION_BYTES:
            raise InvalidArgumentError("a pool of so many blocks needs more memory than any machine has; use fewer")
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name must be a string, not {name!r}")
        if shuffle is not None:
            shuffle = whole_number("shuffle", shuffle)
        #: The engine that holds the memory.
        self.engine = engine
        #: The shape of the cache.
        self.layout = layout
        #: The size in blocks.
        self.blocks = blocks
        #: The name of the region, and of the pool in tickets.
        self.name = name
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._lent: set[Lease] = set()  # reserved or in quarantine
        self._closing: asyncio.Task[None] | None = None
        #: The region that holds the blocks.
        self.region: Region
        size = layout.pool_bytes(blocks)
        # First, because a machine without enough memory must fail here, and not after other allocations.
        if memory is None:
            self.region = engine.allocate(name, size, access=access, grant=grant)
        else:
            self.region = engine.register(name, memory, access=access, grant=grant)
        self._signals: Region | None = None
        self._words: memoryview | None = None
        try:
            self._context = PoolContext(engine, name, layout, blocks, self.region)
            if self.region.size != size:
                raise RangeError(f"memory has {self.region.size} bytes; a pool of {blocks} such blocks has {size}")
            if Access.parse(access) & Access.WRITE:
                size = blocks * layout.layers * WORD
                self._signals = engine.allocate(f"{name}.signals", size, access="write", grant=grant)
                self._words = memoryview(self._signals).cast("B").cast("Q")
            order = None
            if shuffle is not None:
                order = list(range(blocks))
                random.Random(shuffle).shuffle(order)
            self._allocator = Allocator(blocks, order)
            self._registry = StreamRegistry(self._context)
        except BaseException:
            self._revoke_regions()
            raise
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
    def memory(self) -> memoryview:
        """The bytes of the pool, to be read as an array of the shape ``layout.shape(blocks)``; not for device memory."""
        return memoryview(self.region)

    @property
    def closed(self) -> bool:
        """True once `aclose` was called."""
        return self._context.closed

    def statistics(self) -> PoolStatistics:
        """Return the numbers of blocks in each state, and of waiting requests."""
        return PoolStatistics(
            free=self._allocator.count(BlockState.FREE),
            reserved=self._allocator.count(BlockState.RESERVED),
            quarantined=self._allocator.count(BlockState.QUARANTINED),
            waiting=self._allocator.waiting,
        )

    # ---- reservations ----

    def reserve(self, *, tokens: int | None = None, blocks: int | None = None) -> Reservation:
        """Reserve blocks for so many tokens, or so many blocks: all or nothing, first come, first served.

        :param tokens: the number of tokens that the blocks have to hold.
        :param blocks: the number of blocks.
        :return: a `Reservation`: await it, or enter it with ``async with``; it joins the queue at that moment.  Cancelling the
            wait leaks no blocks.
        :raises InvalidArgumentError: if not exactly one of the two is given, or it is not a positive integer.
        :raises RangeError: if the pool is smaller than that.
        :raises ClosedError: if the pool is closed, at the call or while waiting.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        return Reservation(partial(self._reserve, self._count(tokens, blocks)))

    def reserve_nowait(self, *, tokens: int | None = None, blocks: int | None = None) -> Blocks:
        """Reserve blocks like `reserve`, but raise where that would have to wait.

        :param tokens: the number of tokens that the blocks have to hold.
        :param blocks: the number of blocks.
        :return: the blocks, to be closed by the caller.
        :raises InvalidArgumentError: if not exactly one of the two is given, or it is not a positive integer.
        :raises RangeError: if the pool is smaller than that.
        :raises ClosedError: if the pool is closed.
        :raises BusyError: if too few blocks are free, or other requests wait already.
        """
        count = self._count(tokens, blocks)
        request = self._allocator.request_now(count)
        if request is None:
            free, waiting = self._allocator.count(BlockState.FREE), self._allocator.waiting
            raise BusyError(
                f"pool {self.name!r} cannot lend {count} blocks now: {free} are free and {waiting} requests wait"
            )
        return self._lend(request)

    def _count(self, tokens: int | None, blocks: int | None) -> int:
        self._context.check_usable()
        if (tokens is None) == (blocks is None):
            raise InvalidArgumentError("pass either tokens=... or blocks=...")
        if tokens is not None:
            blocks = self.layout.blocks_for(tokens)
        blocks = positive_number("blocks", blocks)
        if blocks > self.blocks:
            asked = f"{blocks} blocks" if tokens is None else f"{blocks} blocks for {tokens} tokens"
            raise RangeError(f"pool {self.name!r} can never lend {asked}: it has {self.blocks}")
        return blocks

    async def _reserve(self, count: int) -> Blocks:
        self._context.check_usable()
        request = self._allocator.request(count)
        if not request.ids:
            future = self._waiting[request] = self.engine.loop.create_future()
            try:
                await future
                self._context.check_usable()
            except BaseException:
                # It may have been granted at the same moment; then the blocks pass to the next request.
                self._wake(self._allocator.withdraw(request))
                raise
            finally:
                del self._waiting[request]
        return self._lend(request)

    def _lend(self, request: Request) -> Blocks:
        lease = Lease(self._context, request.ids, self._free, self._quarantine)
        self._lent.add(lease)
        return Blocks(lease, self._grant)

    def _quarantine(self, lease: Lease) -> None:
        if lease in self._lent:
            self._allocator.quarantine(lease.ids)

    def _free(self, lease: Lease) -> None:
        if lease in self._lent:  # else the pool was closed before
            self._lent.discard(lease)
            self._wake(self._allocator.release(lease.ids))

    def _wake(self, granted: list[Request]) -> None:
        for request in granted:
            future = self._waiting.get(request)
            if future is not None and not future.done():
                future.set_result(None)

    # ---- streams ----

    def open_stream(self, peer: Peer, ticket: dict[str, Any], *, timeout: float = 10.0) -> PushStream:
        """Make a stream of this pool's blocks into those of a consumer's ticket.

        :param peer: the consumer, a connected peer of the pool's engine.
        :param ticket: the dict that the consumer's ``blocks.ticket()`` returned.
        :param timeout: seconds for opening, and also for the end: from the last landing until all is drained and acknowledged.
        :return: the stream: enter it with ``async with``, or await it; it is opened at that moment.
        :raises TicketError: if the ticket is malformed, or was issued by another engine or an earlier incarnation of
            it; on entering, also if it is unknown to the consumer, was used before, has expired, or was changed.
        :raises LayoutMismatchError: on entering, if the consumer's layout differs; the message lists the fields.
        :raises StreamAbortedError: on entering, if the consumer gave up meanwhile.
        :raises PeerDownError: on entering, if the peer is down, or goes down meanwhile.
        :raises WaitTimeoutError: on entering, if opening takes longer than `timeout`.
        :raises RemoteError: on entering, if the consumer's pool does not understand the request, because its release differs.
        :raises InvalidArgumentError: if `timeout` is not a positive number, or `peer` is not a peer of the pool's engine.
        :raises ClosedError: if the pool is closed.
        """
        self._context.check_usable()
        if not hasattr(peer, "identity"):
            raise InvalidArgumentError(f"peer must be a peer of the pool's engine, not {peer!r}")
        if peer.state is PeerState.UP and peer not in self.engine.peers:
            raise InvalidArgumentError(f"{peer!r} is a peer of another engine than the pool's; connect this one to it")
        timeout = positive_seconds("timeout", timeout)
        parsed = Ticket.parse(ticket)
        if parsed.incarnation != peer.identity.incarnation:
            raise TicketError(
                f"the ticket was issued by engine {parsed.engine!r}, which is not, or no longer, peer {peer.name!r}",
                peer=peer.name,
            )
        return PushStream(Producer(self._context, peer, parsed, timeout, self._registry), self)

    def _grant(self, lease: Lease, ttl: float, stall: float, timeout: float | None) -> Consumer:
        self._context.check_usable()
        if self._words is None:
            raise AccessError(f"pool {self.name!r} was made with an access that lets no peer write; use access='write'")
        return self._registry.grant(lease, self._words, ttl, stall, timeout)

    # ---- life ----

    def aclose(self, *, timeout: float = CLOSE_TIMEOUT) -> Coroutine[Any, Any, None]:
        """Close the pool at the call: refuse new work, end all streams, take all blocks back, close the regions.  Idempotent.

        :param timeout: seconds to wait for the peers of open streams; after that the regions are closed without them.  The
            engine keeps memory that they may still write pinned.  With ``memory=``, await ``pool.region.released()`` before
            using the memory for other things.
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
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ClosedError(f"pool {self.name!r} was closed"))
        for consumer in list(self._registry.incoming.values()):
            consumer.leave("the consumer closed its pool")
        for producer in list(self._registry.outgoing.values()):
            producer.stop("the producer closed its pool")

    async def _close(self, timeout: float) -> None:
        incoming, outgoing = list(self._registry.incoming.values()), list(self._registry.outgoing.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(consumer.ended() for consumer in incoming), *(push.ended() for push in outgoing))
        for consumer in incoming:
            consumer.cut()
        await self._context.cancel_tasks()
        self._registry.close()
        for lease in list(self._lent):
            self._free(lease)
        await self._close_regions()

    def _revoke_regions(self) -> None:
        """Free the names of the regions at once; memory that is in use stays pinned until its last use ends."""
        if self._words is not None:
            self._words.release()
        if self._signals is not None:
            self._signals.revoke()
        self.region.revoke()

    async def _close_regions(self) -> None:
        self._revoke_regions()
        if self._signals is not None:
            await self._signals.aclose()
        await self.region.aclose()

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
