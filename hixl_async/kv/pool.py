"""A paged KV cache in one region of an engine: lends blocks, issues tickets, and routes the messages of its streams."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.arguments import positive_seconds
from ..errors import (
    AccessError,
    BusyError,
    ClosedError,
    EngineForkedError,
    InvalidArgumentError,
    RangeError,
    TicketError,
    WrongLoopError,
)
from ..types import Access, AccessLike, PeerState
from .blocks import Blocks, Reservation
from .exchange import Exchange
from .layout import Layout
from .ledger import BlockState, Ledger, Request
from .protocol import POOL_BLOCKS, REGION_BYTES, WORD, Ticket
from .push import PushStream
from .ready import ReadyPoller

if TYPE_CHECKING:
    from .. import Engine, Peer, Region
    from .stream import LayerStream

__all__ = ["Pool", "PoolStatistics"]


class PoolStatistics(NamedTuple):
    """Where a pool's blocks are; the first three sum up to its size."""

    #: Blocks that can be lent.
    free: int
    #: Blocks that somebody has.
    reserved: int
    #: Blocks given back that a peer could still write, or a push still reads.
    quarantined: int
    #: Reservations that wait for blocks.
    waiting: int


class Pool:
    """A paged KV cache that is lent block by block; an async context manager.

    :param engine: the engine that holds the memory.
    :param layout: the shape of the cache.
    :param blocks: size in blocks.
    :param name: name of the region, unique in the engine; writable pools have a second one, ``name + ".signals"``.
    :param access: what peers may do with the memory; ``"none"`` for a pool that is only a source of pushes.
    :param grant: narrows `access` per peer, as in ``engine.allocate``.
    :param shuffle: seed of a random order in which blocks are lent; by default the lowest free ids go first.
    :param memory: where the blocks lie, as for ``engine.register``, of exactly the pool's size; by default new memory.
    :raises InvalidArgumentError: if an argument is malformed, or the engine has a region of that name.
    :raises RangeError: if `memory` has another size.
    :raises DriverError: if there is not so much memory.
    """

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
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
            raise InvalidArgumentError(f"blocks must be a positive integer, not {blocks!r}")
        if not hasattr(engine, "allocate"):
            raise InvalidArgumentError(f"engine must be a hixl_async.Engine, not {engine!r}")
        if blocks >= POOL_BLOCKS or layout.pool_bytes(blocks) >= REGION_BYTES:
            raise InvalidArgumentError("a pool of so many blocks needs more memory than any machine has; use fewer")
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name must be a string, not {name!r}")
        if shuffle is not None and not isinstance(shuffle, int):
            raise InvalidArgumentError(f"shuffle must be a whole number or None, not {shuffle!r}")
        self.engine = engine
        self.layout = layout
        self.blocks = blocks
        self.name = name
        self._lock = threading.Lock()
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._lent: set[Blocks] = set()  # reserved or in quarantine
        self._tasks: set[asyncio.Task[None]] = set()
        self._poller = ReadyPoller(engine.loop)
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        #: The region that holds the blocks.
        self.region: Region
        size = layout.pool_bytes(blocks)
        # Before the books about it: a machine without so much memory says so here, not when it is used up.
        if memory is None:
            self.region = engine.allocate(name, size, access=access, grant=grant)
        else:
            self.region = engine.register(name, memory, access=access, grant=grant)
        self._signals: Region | None = None
        self._words: memoryview | None = None
        try:
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
            self._ledger = Ledger(blocks, order)
            self._exchange = Exchange(self)
        except BaseException:
            self._revoke_regions()
            raise
        engine.on_close(_closer(weakref.ref(self)))

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} of {self.blocks} blocks, {self.statistics()}>"

    @property
    def memory(self) -> memoryview:
        """The pool's bytes; ``layout.shape(blocks)`` says how to look at them; not on a device."""
        return memoryview(self.region)

    @property
    def closed(self) -> bool:
        """True once `aclose` was called."""
        return self._closed

    def statistics(self) -> PoolStatistics:
        """Where the blocks are now."""
        return PoolStatistics(
            free=self._ledger.count(BlockState.FREE),
            reserved=self._ledger.count(BlockState.RESERVED),
            quarantined=self._ledger.count(BlockState.QUARANTINED),
            waiting=self._ledger.waiting,
        )

    # ---- reservations ----

    def reserve(self, *, tokens: int | None = None, blocks: int | None = None) -> Reservation:
        """Blocks for so many tokens, or so many blocks: all or nothing, first come, first served.

        Await the answer, or enter it with ``async with``; that is when the place in the queue is taken.  Cancelling the
        wait loses nothing.

        :raises InvalidArgumentError: if not exactly one of the two is given, or it is not a positive integer.
        :raises RangeError: if the pool is smaller than that.
        :raises ClosedError: if the pool is closed, now or while waiting.
        """
        return Reservation(self, self._count(tokens, blocks))

    def reserve_nowait(self, *, tokens: int | None = None, blocks: int | None = None) -> Blocks:
        """Like `reserve`, but raises where it would have to wait; close what it answers.

        :raises BusyError: if too few blocks are free, or others wait already.
        """
        count = self._count(tokens, blocks)
        request = self._ledger.request_now(count)
        if request is None:
            free, waiting = self._ledger.count(BlockState.FREE), self._ledger.waiting
            raise BusyError(
                f"pool {self.name!r} cannot lend {count} blocks now: {free} are free and {waiting} requests wait"
            )
        return self._lend(request)

    def _count(self, tokens: int | None, blocks: int | None) -> int:
        self._check_usable()
        if (tokens is None) == (blocks is None):
            raise InvalidArgumentError("say either tokens=... or blocks=...")
        if tokens is not None:
            blocks = self.layout.blocks_for(tokens)
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
            raise InvalidArgumentError(f"blocks must be a positive integer, not {blocks!r}")
        if blocks > self.blocks:
            asked = f"{blocks} blocks" if tokens is None else f"{blocks} blocks for {tokens} tokens"
            raise RangeError(f"pool {self.name!r} can never lend {asked}: it has {self.blocks}")
        return blocks

    async def _reserve(self, count: int) -> Blocks:
        self._check_usable()
        request = self._ledger.request(count)
        if not request.ids:
            future = self._waiting[request] = self.engine.loop.create_future()
            try:
                await future
                self._check_usable()
            except BaseException:
                # Perhaps granted in the same moment: then the blocks go on to the next.
                self._wake(self._ledger.withdraw(request))
                raise
            finally:
                del self._waiting[request]
        return self._lend(request)

    def _lend(self, request: Request) -> Blocks:
        blocks = Blocks(self, request.ids)
        self._lent.add(blocks)
        return blocks

    def _quarantine(self, blocks: Blocks) -> None:
        if blocks in self._lent:
            self._ledger.quarantine(blocks.ids)

    def _free(self, blocks: Blocks) -> None:
        if blocks in self._lent:  # else the pool was closed before
            self._lent.discard(blocks)
            self._wake(self._ledger.release(blocks.ids))

    def _wake(self, granted: list[Request]) -> None:
        for request in granted:
            future = self._waiting.get(request)
            if future is not None and not future.done():
                future.set_result(None)

    # ---- streams ----

    def open_stream(self, peer: Peer, ticket: dict[str, Any], *, timeout: float = 10.0) -> PushStream:
        """A stream of this pool's blocks into those of a consumer's ticket; enter it with ``async with``, or await it.

        :param peer: the consumer, connected.
        :param ticket: what the consumer's ``blocks.ticket()`` answered.
        :param timeout: seconds for opening, and for the end: from the last landing until all is drained and
            acknowledged.
        :raises TicketError: if the ticket is malformed, or was issued by another engine or an earlier incarnation of
            it; on entering, also if it is unknown to the consumer, used or expired.
        :raises LayoutMismatchError: on entering, if the consumer's layout differs; the message lists the fields.
        :raises StreamAbortedError: on entering, if the consumer gave up meanwhile.
        :raises WaitTimeoutError: on entering, if opening takes longer than `timeout`.
        :raises InvalidArgumentError: if `timeout` is not a positive number.
        """
        self._check_usable()
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
        return PushStream(self, peer, parsed, timeout)

    def _grant(self, blocks: Blocks, ttl: float, stall: float, timeout: float | None) -> LayerStream:
        self._check_usable()
        if self._words is None:
            raise AccessError(f"pool {self.name!r} was made with an access that lets no peer write; use access='write'")
        return self._exchange.grant(blocks, self._words, ttl, stall, timeout)

    # ---- life ----

    def _check_usable(self) -> None:
        if self.engine.forked:
            raise EngineForkedError(
                f"pool {self.name!r} was made before fork(); open one in each process, with an engine of its own"
            )
        try:
            right = asyncio.get_running_loop() is self.engine.loop
        except RuntimeError:
            right = False
        if not right:
            raise WrongLoopError(
                f"pool {self.name!r} belongs to its engine's event loop; only push() is legal elsewhere"
            )
        if self._closed:
            raise ClosedError(f"pool {self.name!r} is closed")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.engine.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self, *, timeout: float = 5.0) -> None:
        """Refuses new work, ends all streams, takes all blocks back, and closes the regions; idempotent.

        :param timeout: seconds to wait for the peers of open streams; after that the regions are closed without them,
            and the engine sees to it that what they still write reaches nobody.  With ``memory=`` it reaches that: await
            ``pool.region.released()`` before it is used for other things.
        :raises InvalidArgumentError: if `timeout` is neither a positive number nor 0; nothing is closed then.
        """
        if timeout != 0:
            timeout = positive_seconds("timeout", timeout)
        self._refuse_work()
        if self._closing is None:
            self._closing = self.engine.loop.create_task(self._close(timeout))
        await asyncio.shield(self._closing)

    def _refuse_work(self) -> None:
        """Lets nobody in, and tells everybody who is."""
        if self._closed:
            return
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ClosedError(f"pool {self.name!r} was closed"))
        for stream in list(self._exchange.incoming.values()):
            stream._leave("the consumer closed its pool")
        for push in list(self._exchange.outgoing.values()):
            push._stop("the producer closed its pool")

    async def _close(self, timeout: float) -> None:
        incoming, outgoing = list(self._exchange.incoming.values()), list(self._exchange.outgoing.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(stream._ended() for stream in incoming), *(push._ended() for push in outgoing))
        for stream in incoming:
            stream._cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._exchange.close()
        for blocks in list(self._lent):
            self._free(blocks)
        await self._close_regions()

    def _revoke_regions(self) -> None:
        """Frees their names at once; memory that is in use stays until it is not."""
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
    """Ends a pool that is still open when its engine closes, without keeping pools alive that are not."""

    def close() -> None:
        if (alive := pool()) is not None:
            alive._refuse_work()

    return close
