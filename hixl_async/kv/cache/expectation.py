"""What is expected of the pushes of a request, and what has landed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ...engine.waiters import Waiters
from ...errors import ClosedError, RangeError, StreamAbortedError, TicketError, TransferTimeoutError
from ..reshard import senders
from ..shapes import Shard, View
from .keys import Identifier
from .landings import Landings

__all__ = ["Expectation", "Writer"]


class Writer:
    """One push of an expected request.

    :param source: the index of the peer's shard among the sources.
    :param stop: tells the peer to stop, with a reason.
    """

    __slots__ = ("source", "stop")

    def __init__(self, source: int, stop: Callable[[str], None]) -> None:
        self.source = source
        self.stop = stop


class Expectation:
    """The state of an expected request, from ``cache.expect()`` until no push of it can write the blocks.

    :param loop: the loop of the engine.
    :param req_id: the request.
    :param view: how the cache lies in memory.
    :param blocks: the only blocks that the pushes may name; None: any.
    :param layers: the layers that are expected.
    :param sources: what each writer holds; empty if one holds all that a layer needs.
    :param timeout: seconds until which all have to arrive.
    :param forget: called once, at the end.
    :raises LayoutMismatchError: if the sources do not hold all that the cache needs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        req_id: Identifier,
        view: View,
        blocks: Iterable[int] | None,
        layers: Sequence[int],
        sources: Sequence[Shard],
        timeout: float,
        forget: Callable[[Expectation], None],
    ) -> None:
        self.req_id = req_id
        self.sources = tuple(sources)
        self._view = view
        self._blocks = None if blocks is None else frozenset(blocks)
        self.landings = Landings(loop, layers)
        # The sources that still owe something of a layer; and those that hold a layer, owe nothing, and have not said so.
        self._missing = {layer: {0} for layer in layers}
        self._silent: set[tuple[int, int]] = set()
        if sources:
            wanted = Shard(view.shard.rank, view.shard.ranks, layers)
            for layer, shares in senders(view.group, sources, wanted).items():
                owing = self._missing[layer] = {share.sender for share in shares}
                holding = {number for number, source in enumerate(sources) if layer in source.layers}
                self._silent.update((number, layer) for number in holding - owing)
        self._writers: dict[Writer, None] = {}
        self._refusal: str | None = None
        self._waiters = Waiters(loop)
        self._forget = forget
        self._timer = loop.call_later(timeout, self._expire, timeout)

    @property
    def writers(self) -> int:
        """The number of pushes that may write the blocks."""
        return len(self._writers)

    def waiting_for(self, layer: int) -> tuple[int, ...]:
        """Return the writers that still owe a layer, by their indices among the sources.

        :raises RangeError: if the layer is not expected.
        """
        if layer not in self._missing:
            raise RangeError(f"layer {layer} is not expected: the layers are {', '.join(map(str, self._missing))}")
        return tuple(sorted(self._missing[layer]))

    async def drained(self) -> None:
        """Wait until no push can write the blocks."""
        while self._writers:
            await self._waiters.wait(None)

    def begin(
        self, shard: Shard, layers: Sequence[int], last: bool, blocks: Iterable[int], stop: Callable[[str], None]
    ) -> Writer:
        """Accept a push.

        :param shard: what the peer holds.
        :param layers: the layers that it brings.
        :param last: False if the peer brings more tokens of these layers later.
        :param blocks: the blocks that it writes.
        :raises TicketError: if the request has ended, or the peer is not one of the sources.
        :raises RangeError: if the blocks are not those that the request expects.
        :raises LayoutMismatchError: if there should be one writer, and the peer holds too few heads.
        """
        if self._refusal is not None:
            raise TicketError(self._refusal)
        if self._blocks is not None and (strange := set(blocks) - self._blocks):
            raise RangeError(f"request {self.req_id!r} expects nothing in block {min(strange)}")
        source = 0
        if not self.sources:
            common = [layer for layer in layers if layer in self._missing]
            senders(self._view.group, [shard], Shard(self._view.shard.rank, self._view.shard.ranks, common))
        elif shard not in self.sources:
            raise TicketError(f"rank {shard.rank} of {shard.ranks} is not a source of request {self.req_id!r}")
        else:
            source = self.sources.index(shard)
            if last:
                self._silent.difference_update((source, layer) for layer in layers)
        writer = Writer(source, stop)
        self._writers[writer] = None
        return writer

    def land(self, writer: Writer, layer: int) -> None:
        """Note that a writer has written all of a layer that it owes."""
        missing = self._missing.get(layer)
        if missing is not None and writer.source in missing:
            missing.discard(writer.source)
            if not missing and not self.landings.ended:
                self.landings.land(layer)

    def leave(self, writer: Writer, error: BaseException | None) -> None:
        """Note that a writer can no longer write the blocks.

        :param error: why the push failed, or None.
        """
        del self._writers[writer]
        self._waiters.wake(None)
        if error is not None:
            self.fail(error)
        elif self._writers or self.landings.ended:
            return
        elif self.landings.complete and not self._silent:
            self._end(None)
        elif self._refusal is not None:
            self.fail(StreamAbortedError(self._refusal))

    def lose(self, error: BaseException) -> None:
        """Note that a writer was lost; its blocks may still be written until it leaves."""
        if not self.landings.complete:
            self.fail(error)

    def refuse(self, reason: str) -> None:
        """Accept no more pushes; those under way may end."""
        self._refusal = reason
        if not self._writers:
            self.fail(StreamAbortedError(reason))

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended, and tell the writers to stop."""
        if not self.landings.ended:
            self._end(error)
            for writer in list(self._writers):
                writer.stop(str(error))

    def close(self) -> None:
        """End because the cache is closed."""
        self.fail(ClosedError("the cache was closed"))

    def _expire(self, timeout: float) -> None:
        self.fail(TransferTimeoutError(f"request {self.req_id!r} did not arrive within {timeout:g} s"))

    def _end(self, error: BaseException | None) -> None:
        self._timer.cancel()
        self._refusal = self._refusal or f"request {self.req_id!r} has ended"
        self.landings.end(error)
        self._forget(self)
