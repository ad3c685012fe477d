"""The consumer's side of a stream, as the program uses it: layers land one by one, in any order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.started import Started
from ..errors import BusyError
from .arrivals import ANY_LAYER, OUTCOME, Arrivals
from .outcome import Outcome
from .protocol import check_reason

__all__ = ["LayerStream"]


class LayerStream(Sealed, maker="blocks.stream() or blocks.pull()"):
    """The layers that land in some reserved blocks, made by ``blocks.stream()`` for producers that push them, and by
    ``blocks.pull()``, which reads them from their owners.

    Iterate it, or wait for single layers.  Any number of tasks may wait; all see the same landings and the same outcome,
    whenever they begin.
    """

    __reduce__ = unpicklable("wait for the layers here")

    def __init__(self, consumer: Arrivals, blocks: object) -> None:
        self._consumer = consumer
        self._blocks = blocks  # keeps the blocks reserved as long as the program can read their layers

    def __repr__(self) -> str:
        state = self._consumer.state
        end = state.outcome.verdict.value if state.outcome else "open" if state.opened else "not open yet"
        return f"<LayerStream {len(state.complete)} of {len(self._consumer.layers)} layers, {end}>"

    def ticket(self) -> dict[str, Any]:
        """Return the right to fill the blocks, once for each sender; the same one at every call.

        Any process that holds the ticket can use it: send it over a channel you trust.

        :return: the ticket as a JSON-safe dict.
        :raises TicketError: if the stream has ended, for example because the ticket expired.
        """
        return self._consumer.ticket_body()

    @property
    def landed(self) -> tuple[int, ...]:
        """The layers that have landed whole, in the order of landing."""
        return tuple(self._consumer.state.complete)

    @property
    def outcome(self) -> Outcome | None:
        """The way in which the stream ended, or None while it has not."""
        return self._consumer.state.outcome

    def progress(self) -> dict[int, int]:
        """Return for each layer the position in the sequence before which all tokens have landed."""
        return {layer: self._consumer.position(layer) for layer in self._consumer.layers}

    def waiting_for(self, layer: int) -> tuple[int, ...]:
        """Return the senders that still owe tokens of the layer, by their indices in ``sources=``.

        :param layer: the number of the layer.
        :raises RangeError: if the stream brings no such layer.
        :raises InvalidArgumentError: if `layer` is not a whole number.
        """
        return tuple(self._consumer.state.waiting_for(self._consumer.check_layer(layer)))

    def check(self, layer: int, *, tokens: int | None = None) -> None:
        """Return if the layer has landed; call it before reading the layer's memory.

        :param layer: the number of the layer.
        :param tokens: the position in the sequence before which tokens are needed; default: all of the layer.
        :raises BusyError: if the layer has not landed so far.
        :raises HixlError: if the stream has failed without the layer, like `layer`.
        :raises RangeError: if the stream brings no such layer, or fewer tokens.
        :raises InvalidArgumentError: if `layer` or `tokens` is not a whole number.
        """
        if not self._consumer.has(layer, tokens):
            self._consumer.raise_failure()
            raise BusyError(f"layer {layer} has not landed yet; await stream.layer({layer}) before reading its blocks")

    async def layer(self, layer: int, *, tokens: int | None = None) -> None:
        """Wait until the layer has landed; return at once if it has, even if the stream has failed since.

        :param layer: the number of the layer.
        :param tokens: the position in the sequence before which tokens are needed; default: all of the layer.
        :raises StreamAbortedError: if a side aborted the stream before.
        :raises PeerLostError: if a producer was lost before.
        :raises TransferTimeoutError: if the lease expired because a producer was silent, or the timeout passed, after a
            producer had opened the ticket.
        :raises LayoutMismatchError: if a producer with another cache used the ticket.
        :raises TicketError: if the stream ended before a producer opened its ticket, for example because the ticket
            expired, or if a producer used a ticket that differs from the one that was issued.
        :raises RangeError: if the stream brings no such layer, or fewer tokens.
        :raises InvalidArgumentError: if `layer` or `tokens` is not a whole number.
        """
        while not self._consumer.has(layer, tokens):
            self._consumer.raise_failure()
            await self._consumer.waiters.wait(layer)

    def __aiter__(self) -> AsyncIterator[int]:
        """Return an iterator over the layers in the order of landing, which raises like `layer` once the stream fails."""
        return _Landings(self)

    async def finished(self) -> bytes:
        """Wait for the end of the stream, and raise its error unless all layers have landed and all producers have ended.

        :return: the payload of the producer's ``finish``; of several producers the first that is not empty.
        :raises StreamAbortedError: if a side aborted the stream.
        :raises PeerLostError: if a producer was lost.
        :raises TransferTimeoutError: if the lease expired because a producer was silent, or the timeout passed, after a
            producer had opened the ticket.
        :raises LayoutMismatchError: if a producer with another cache used the ticket.
        :raises TicketError: if the stream ended before a producer opened its ticket, or if a producer used a ticket that
            differs from the one that was issued.
        """
        while self.outcome is None:
            await self._consumer.waiters.wait(OUTCOME)
        self._consumer.raise_failure()
        return self._consumer.state.payload

    def abort(self, reason: str = "the consumer aborted the stream") -> Coroutine[Any, Any, Outcome]:
        """Give the stream up at the call; no effect if it has ended.

        The producers stop pushing, and report when they can no longer write the blocks; `drained` waits for that.

        :param reason: the text for the errors of all sides.
        :return: an awaitable of the outcome.
        :raises InvalidArgumentError: if `reason` is not a string.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        check_reason(reason)
        self._consumer.check_thread()
        self._consumer.abort(reason)
        return Started(self._known_outcome)

    async def _known_outcome(self) -> Outcome:
        assert self.outcome is not None
        return self.outcome

    async def drained(self) -> None:
        """Wait until no peer can write the blocks, whatever the outcome; this may never happen.

        :raises ClosedError: if the pool is closed first.
        """
        await self._consumer.drained()


class _Landings(AsyncIterator[int]):
    """An iterator over a stream's layers; not a generator, because a cancelled ``anext`` would end it."""

    __slots__ = ("_seen", "_stream")

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self._seen = 0

    async def __anext__(self) -> int:
        consumer = self._stream._consumer
        if self._seen == len(consumer.layers):
            raise StopAsyncIteration
        consumer.raise_failure()
        complete = consumer.state.complete
        while self._seen >= len(complete):
            await consumer.waiters.wait(ANY_LAYER)
            consumer.raise_failure()
        self._seen += 1
        return complete[self._seen - 1]
