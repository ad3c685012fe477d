"""Reserved blocks: what a pool lends, and when they may go back."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.arguments import positive_seconds, whole_number
from ..errors import ClosedError, InvalidArgumentError, RangeError

if TYPE_CHECKING:
    from .pool import Pool
    from .stream import LayerStream

__all__ = ["Blocks", "LayerBlocks", "Reservation"]

#: Seconds that a ticket waits for its producer, and that a stream waits for its next layer, where nothing else is said.
TTL, STALL = 60.0, 10.0


class LayerBlocks(NamedTuple):
    """One layer of reserved blocks, as a source for ``push``."""

    blocks: Blocks
    layer: int


class Blocks:
    """Blocks of a pool, reserved until `aclose`; an async context manager.

    As a target: `ticket` is what the producer needs, `stream` tells which layers are there.  As a source: ``blocks[i]``
    is what ``push`` takes.  Closing never waits for a peer: blocks that a peer could still write, or that a push still
    reads, go to quarantine and return to the pool when that has ended.
    """

    def __init__(self, pool: Pool, ids: tuple[int, ...]) -> None:
        #: The block ids, in the order of the tokens.
        self.ids = ids
        self.pool = pool
        self._stream: LayerStream | None = None
        # Threads that push take holds, the loop gives them back: both under the pool's lock.
        self._holds = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "reserved"
        return f"<Blocks {len(self.ids)} of pool {self.pool.name!r}, {state}>"

    def __getitem__(self, layer: int) -> LayerBlocks:
        """One layer of these blocks, to be pushed.

        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if it is no whole number.
        :raises ClosedError: if the blocks were given back.
        """
        self._check_lent()
        layer = whole_number("layer", layer)
        if not 0 <= layer < self.pool.layout.layers:
            raise RangeError(f"layer {layer} does not exist: the layout has {self.pool.layout.layers} layers")
        return LayerBlocks(self, layer)

    def ticket(
        self, *, ttl: float | None = None, stall: float | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """The right to fill these blocks, once, as a JSON-safe dict for one producer; the same one at every call.

        Whoever holds it can use it: send it over a channel you trust.

        :param ttl: seconds within which the producer has to open it (60).
        :param stall: seconds without a new layer after which the open stream fails (10).
        :param timeout: seconds from now after which the stream fails, whatever the progress; default none.
        :raises InvalidArgumentError: if the times are given again after the first call, or are not positive.
        :raises AccessError: if the pool's ``access`` does not let peers write.
        :raises ClosedError: if the blocks or the pool are closed.
        """
        return self._grant(ttl, stall, timeout).ticket.body()

    def stream(self) -> LayerStream:
        """The layers as they land; the same object at every call.  Grants the ticket if `ticket` was not called yet.

        :raises AccessError: if the pool's ``access`` does not let peers write.
        :raises ClosedError: if the blocks or the pool are closed.
        """
        return self._grant(None, None, None)

    def _grant(self, ttl: float | None, stall: float | None, timeout: float | None) -> LayerStream:
        self._check_lent()
        if self._stream is None:
            self._stream = self.pool._grant(
                self,
                TTL if ttl is None else positive_seconds("ttl", ttl),
                STALL if stall is None else positive_seconds("stall", stall),
                None if timeout is None else positive_seconds("timeout", timeout),
            )
        elif self.pool.closed:
            raise ClosedError(f"pool {self.pool.name!r} is closed")
        elif (ttl, stall, timeout) != (None, None, None):
            raise InvalidArgumentError("ttl, stall and timeout are fixed by the first call of ticket() or stream()")
        return self._stream

    def _check_lent(self) -> None:
        if self._closed:
            raise ClosedError("these blocks were given back; reserve new ones with pool.reserve()")

    async def fenced(self) -> None:
        """Waits until no peer can write these blocks any more, whatever the stream's outcome was; it may never come.

        :raises ClosedError: if the pool is closed before.
        """
        if self._stream is not None:
            await self._stream.fenced()

    async def aclose(self) -> None:
        """Gives the blocks back, aborting a stream that has not ended.  Never waits for a peer; idempotent."""
        self._close()

    def _close(self) -> None:
        with self.pool._lock:
            if self._closed:
                return
            self._closed = True
        if self._stream is not None:
            self._stream._leave("the consumer gave its blocks back")
        with self.pool._lock:
            idle = self._holds == 0
        if idle:
            self.pool._free(self)
        else:
            self.pool._quarantine(self)

    def _hold(self) -> None:
        """Keeps the blocks from being lent again until `_unhold`; legal from any thread.

        :raises ClosedError: if they were given back.
        """
        with self.pool._lock:
            if self._closed:
                raise ClosedError("these blocks were given back; push them before leaving their `async with`")
            self._holds += 1

    def _unhold(self) -> None:
        with self.pool._lock:
            self._holds -= 1
            idle = self._closed and self._holds == 0
        if idle:
            self.pool._free(self)

    async def __aenter__(self) -> Blocks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Reservation(Awaitable[Blocks]):
    """What ``pool.reserve()`` answers: await it for the `Blocks`, or enter it with ``async with``."""

    __slots__ = ("_blocks", "_count", "_entered", "_pool")

    def __init__(self, pool: Pool, count: int) -> None:
        self._pool = pool
        self._count = count
        self._entered = False
        self._blocks: Blocks | None = None

    def __await__(self) -> Generator[Any, None, Blocks]:
        return self._pool._reserve(self._count).__await__()

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
