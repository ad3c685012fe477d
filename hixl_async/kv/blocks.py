"""Reserved blocks of a pool, and when they may return to it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.arguments import positive_seconds, whole_number
from ..engine.started import Started, already_over
from ..errors import ClosedError, InvalidArgumentError, RangeError, TicketError
from .lease import Lease
from .stream import Consumer, LayerStream

__all__ = ["Blocks", "LayerBlocks", "Reservation", "lease_of"]

#: The default seconds that a ticket waits for its producer, and that a stream waits for its next layer.
TTL, STALL = 60.0, 10.0

#: Issues the ticket for a lease, with its ttl, stall and timeout in seconds.
Grant: TypeAlias = Callable[[Lease, float, float, float | None], Consumer]


class LayerBlocks(NamedTuple):
    """One layer of reserved blocks, as a source for ``push``."""

    #: The reserved blocks.
    blocks: Blocks
    #: The index of the layer.
    layer: int


class Blocks(Sealed, maker="pool.reserve()"):
    """Reserved blocks of a pool, made by ``pool.reserve()``; an async context manager.

    As a target, the producer needs their `ticket`, and `stream` reports the layers that have landed.  As a source, ``push``
    takes ``blocks[i]``.  Closing never waits for a peer: blocks that a peer could still write, or that a push still reads, are
    quarantined and return to the pool when that is over.

    Blocks are closed with a ResourceWarning when the last reference to them and to their stream is dropped.
    """

    __reduce__ = unpicklable("send blocks.ticket(), with which the other process fills them")

    def __init__(self, lease: Lease, grant: Grant) -> None:
        #: The block ids, in the order of the tokens.
        self.ids = lease.ids
        self._lease = lease
        self._grant_ticket = grant
        self._consumer: Consumer | None = None
        # Weak, because the stream refers to the blocks, and a lost object must be noticed without the garbage collector.
        self._stream: weakref.ref[LayerStream] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._lease.closed else "reserved"
        return f"<Blocks {len(self.ids)} of pool {self._lease.context.name!r}, {state}>"

    def __del__(self) -> None:
        lease = self._lease
        if lease.closed or not lease.context.clean_up(
            _give_back, lease, self._consumer, "the consumer lost its blocks without closing them"
        ):
            return
        ids = ", ".join(map(str, self.ids[:8])) + (", ..." if len(self.ids) > 8 else "")
        message = f"{self!r} (ids {ids}) was never closed; use 'async with pool.reserve(...) as blocks'"
        warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def __getitem__(self, layer: int) -> LayerBlocks:
        """Return one layer of these blocks, to be pushed.

        :param layer: the index of the layer.
        :return: the source for ``push``.
        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if `layer` is not a whole number.
        :raises ClosedError: if the blocks were given back.
        """
        self._lease.check_open()
        layer, layers = whole_number("layer", layer), self._lease.context.layout.layers
        if not 0 <= layer < layers:
            raise RangeError(f"layer {layer} does not exist: the layout has {layers} layers")
        return LayerBlocks(self, layer)

    def ticket(
        self, *, ttl: float | None = None, stall: float | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the right to fill these blocks once, for one producer; the same one at every call.

        Any process that holds the ticket can use it: send it over a channel you trust.

        :param ttl: seconds within which the producer has to open it; default 60.
        :param stall: seconds without a new layer after which the open stream fails; default 10.
        :param timeout: seconds from now after which the stream fails, whatever its progress; default: no limit.
        :return: the ticket as a JSON-safe dict.
        :raises InvalidArgumentError: if the times are given again after the first call, or are not positive.
        :raises TicketError: if the stream has ended, for example because the ticket expired.
        :raises AccessError: if the pool's ``access`` does not let peers write.
        :raises ClosedError: if the blocks or the pool are closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        consumer = self._grant(ttl, stall, timeout)
        if (outcome := consumer.state.outcome) is not None:
            why = outcome.reason or "all layers have landed"
            raise TicketError(f"the ticket of these blocks cannot be used any more: {why}; reserve other blocks")
        return consumer.ticket.body()

    def stream(self) -> LayerStream:
        """Return the stream of the layers that land; the same object at every call.

        The ticket is granted if `ticket` was not called before.

        :return: the stream, to iterate or to wait on.
        :raises AccessError: if the pool's ``access`` does not let peers write.
        :raises ClosedError: if the blocks or the pool are closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        consumer = self._grant(None, None, None)
        stream = self._stream() if self._stream is not None else None
        if stream is None:
            stream = LayerStream(consumer, self)
            self._stream = weakref.ref(stream)
        return stream

    def _grant(self, ttl: float | None, stall: float | None, timeout: float | None) -> Consumer:
        self._lease.context.check_usable()
        self._lease.check_open()
        if self._consumer is None:
            self._consumer = self._grant_ticket(
                self._lease,
                TTL if ttl is None else positive_seconds("ttl", ttl),
                STALL if stall is None else positive_seconds("stall", stall),
                None if timeout is None else positive_seconds("timeout", timeout),
            )
        elif any(time is not None for time in (ttl, stall, timeout)):
            raise InvalidArgumentError("ttl, stall and timeout are fixed by the first call of ticket() or stream()")
        return self._consumer

    async def fenced(self) -> None:
        """Wait until no peer can write these blocks, whatever the outcome of the stream; this may never happen.

        :raises ClosedError: if the pool is closed first.
        """
        if self._consumer is not None:
            await self._consumer.fenced()

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Give the blocks back at the call, and abort a stream that has not ended.  Idempotent.

        :return: an awaitable, for uniformity with other resources; it is done at once, because closing never waits for a peer.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._lease.context.check_thread()
        _give_back(self._lease, self._consumer, "the consumer gave its blocks back")
        return Started(already_over)

    async def __aenter__(self) -> Blocks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _give_back(lease: Lease, consumer: Consumer | None, reason: str) -> None:
    if consumer is not None and not lease.closed:
        consumer.leave(reason)
    lease.close()


def lease_of(source: LayerBlocks) -> Lease:
    """Return the lease behind a layer's blocks; for the streams."""
    return source.blocks._lease


class Reservation(Sealed, Awaitable[Blocks], maker="pool.reserve()"):
    """A request for blocks, made by ``pool.reserve()``: await it for the `Blocks`, or enter it with ``async with``."""

    __slots__ = ("_blocks", "_entered", "_reserve")

    def __init__(self, reserve: Callable[[], Coroutine[Any, Any, Blocks]]) -> None:
        self._reserve = reserve
        self._entered = False
        self._blocks: Blocks | None = None

    def __await__(self) -> Generator[Any, None, Blocks]:
        return self._reserve().__await__()

    async def __aenter__(self) -> Blocks:
        if self._entered:
            raise ClosedError("a reservation is entered once; call pool.reserve() again")
        self._entered = True
        self._blocks = await self
        return self._blocks

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._blocks is not None:
            await self._blocks.aclose()

    if not TYPE_CHECKING:  # type checkers report missing attributes by themselves

        def __getattr__(self, name: str) -> Any:
            if name == "ids" or (not name.startswith("_") and hasattr(Blocks, name)):
                raise _not_reserved(f".{name}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __getitem__(self, layer: int) -> Any:
            raise _not_reserved("[...]")


def _not_reserved(use: str) -> ClosedError:
    return ClosedError(
        f"pool.reserve(...){use} is used before the blocks are reserved; write `blocks = await pool.reserve(...)`, or "
        "`async with pool.reserve(...) as blocks:`"
    )
