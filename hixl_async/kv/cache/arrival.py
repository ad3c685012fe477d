"""The push of a request that a program expects: its layers, as they land in the program's cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ...core.sealed import Sealed
from ...core.unpicklable import unpicklable
from ...engine.started import Started
from ...errors import StreamAbortedError
from ..protocol import check_reason
from .expectation import Expectation
from .keys import Identifier

__all__ = ["Arrival"]


class Arrival(Sealed, maker="cache.expect()"):
    """The layers of a request that peers push into a cache, made by ``cache.expect()``.

    Iterate it, or wait for single layers.  Any number of tasks may wait.
    """

    __reduce__ = unpicklable("wait for the layers here")

    def __init__(self, expectation: Expectation) -> None:
        self._expectation = expectation

    def __repr__(self) -> str:
        expectation, landings = self._expectation, self._expectation.landings
        end = "finished" if landings.error is None else "failed"
        state = end if landings.ended else f"{expectation.writers} pushes under way"
        landed = f"{len(landings.landed)} of {len(landings.layers or ())} layers"
        return f"<Arrival of request {expectation.req_id!r}: {landed}, {state}>"

    @property
    def req_id(self) -> Identifier:
        """The request."""
        return self._expectation.req_id

    @property
    def landed(self) -> tuple[int, ...]:
        """The layers that have landed whole, in the order of landing."""
        return tuple(self._expectation.landings.landed)

    def waiting_for(self, layer: int) -> tuple[int, ...]:
        """Return the writers that still owe the layer, by their indices in ``sources=``.

        :param layer: the number of the layer.
        :raises RangeError: if the layer is not expected.
        """
        return self._expectation.waiting_for(layer)

    async def layer(self, layer: int) -> None:
        """Wait until the layer has landed; return at once if it has.

        :param layer: the number of the layer.
        :raises RangeError: if the layer is not expected.
        :raises InvalidArgumentError: if `layer` is not a whole number.
        :raises PeerLostError: if a peer was lost before.
        :raises StreamAbortedError: if a side gave up before.
        :raises TransferTimeoutError: if the timeout passed before.
        :raises ClosedError: if the cache was closed before.
        """
        await self._expectation.landings.layer(layer)

    def __aiter__(self) -> AsyncIterator[int]:
        """Return an iterator over the layers in the order of landing, which raises like `layer`."""
        return aiter(self._expectation.landings)

    async def finished(self) -> None:
        """Wait until all layers have landed and all writers have ended, so that the blocks are free for other uses.

        A source that owes nothing, because others hold the same heads, pushes all the same: it moves no bytes.

        :raises PeerLostError: if a peer was lost.
        :raises StreamAbortedError: if a side gave up.
        :raises TransferTimeoutError: if the timeout passed.
        :raises ClosedError: if the cache was closed.
        """
        await self._expectation.landings.finished()

    def abort(self, reason: str = "the receiver gave the request up") -> Coroutine[Any, Any, None]:
        """Give the request up at the call, and tell the writers to stop; no effect if it has ended.

        :param reason: the text for the errors of all sides.
        :return: an awaitable that waits like `drained`.
        :raises InvalidArgumentError: if `reason` is not a string.
        """
        check_reason(reason)
        self._expectation.fail(StreamAbortedError(reason))
        return Started(self.drained)

    async def drained(self) -> None:
        """Wait until no push of the request can write the blocks; this may never happen if a peer hangs."""
        await self._expectation.drained()
