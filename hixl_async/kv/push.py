"""The producer's side of a stream, as the program uses it."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.started import Started
from ..types import Ready
from .blocks import Blocks
from .outcome import Outcome
from .producer import Producer
from .protocol import check_reason
from .ticket import Ticket

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["PushStream"]

#: The reason of streams that the program loses.
LOST = "the producer lost its stream without closing it"


class PushStream(Sealed, maker="pool.open_stream()"):
    """A stream of one request's layers into the consumer's blocks, made by ``pool.open_stream()``.

    The consumer is asked at once, and layers can be pushed at once; they leave when it has accepted the ticket.  `push` is
    legal from any thread; everything else belongs to the engine's loop.

    Enter the stream as an async context manager.  Leaving it waits until all transfers are drained and the consumer has
    decided the outcome; leaving it by an exception, or before all layers were pushed, aborts the stream.  Await the stream to
    wait until the consumer has accepted the ticket.

    A stream that is not finished is closed when the last reference to it is dropped, with a ResourceWarning if layers are
    missing.
    """

    __reduce__ = unpicklable("open one there, with a pool of its own")

    def __init__(self, producer: Producer, pool: object) -> None:
        self._producer = producer
        self._pool = pool  # keeps the pool open as long as the program can push from it

    def __repr__(self) -> str:
        state = self._producer.state
        end = state.outcome.verdict.value if state.outcome else "stopping" if state.stopping is not None else "open"
        return f"<PushStream {state.pushed} of {state.layers} layers to {self.peer.name!r}, {end}>"

    def __del__(self) -> None:
        state, context = self._producer.state, self._producer.context
        if state.unfinished and context.clean_up(self._producer.close, LOST) and state.pushed < state.layers:
            message = f"{self!r} was never closed; use 'async with pool.open_stream(...) as out'"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    @property
    def ticket(self) -> Ticket | None:
        """The consumer's ticket; None while it is awaited."""
        return self._producer.ticket

    @property
    def peer(self) -> Peer:
        """The consumer."""
        return self._producer.peer

    @property
    def outcome(self) -> Outcome | None:
        """The way in which the stream ended, or None while it has not."""
        return self._producer.state.outcome

    def push(
        self,
        layer: int,
        source: Blocks,
        *,
        tokens: tuple[int, int] | None = None,
        last: bool | None = None,
        ready: Ready = None,
    ) -> None:
        """Queue a layer, or some tokens of it, to be sent, and return at once; legal from any thread.

        Layers are sent in the order of the calls, each once it is ready.  The source blocks stay reserved until the stream is
        drained, even if they are closed meanwhile.  A layer that the consumer does not need from this rank is not sent.

        :param layer: the number of the layer; layers may be pushed in any order.
        :param source: blocks of this stream's pool that hold the tokens.
        :param tokens: the position in the sequence of the first token, and the one after the last; of each layer tokens are
            pushed in order.  Default: all that the ticket names, as far as the source holds them.
        :param last: True if no more tokens of the layer follow.  Default: True if `tokens` is not given, or reaches the end of
            what the ticket names.
        :param ready: None (ready now), an event with ``query()`` (a device event; a torch event that was never recorded is not
            ready) or ``is_set()``, or a callable that returns True once the layer may be read.  It is called often, on the
            loop's thread, and must not block.
        :raises RangeError: if the layer does not exist, or the ticket or the source does not have the tokens.
        :raises InvalidArgumentError: if an argument is malformed, all of the layer was pushed before, tokens are left out or
            pushed twice, or `source` is not made of blocks of this pool and the layer's group.
        :raises StreamAbortedError: if the stream was aborted.
        :raises PeerLostError: if the consumer was lost.
        :raises TransferTimeoutError: if the end of the stream took longer than its timeout.
        :raises TicketError: if the consumer did not accept the ticket; likewise the other errors of `opened`.
        :raises ClosedError: if the stream was finished, or the source blocks are closed.
        """
        self._producer.push(layer, source, tokens, last, ready)

    async def opened(self) -> None:
        """Wait until the consumer has accepted the ticket.

        :raises TicketError: if the ticket is malformed, or was issued by another engine or an earlier incarnation of it; or is
            unknown to the consumer, was used before, has expired, or was changed; or if the stream was aborted meanwhile.
        :raises LayoutMismatchError: if the consumer's cache differs; the message lists the differences.
        :raises PeerDownError: if the peer is down, or goes down meanwhile.
        :raises WaitTimeoutError: if opening took longer than the timeout.
        :raises RemoteError: if the consumer's pool does not understand the request, because its release differs.
        """
        await self._producer.opened()

    async def finish(self, payload: bytes = b"") -> None:
        """Wait until all layers were pushed, have landed and are drained, and the consumer has decided the outcome.

        :param payload: what the consumer's ``stream.finished()`` returns, such as the first token; at most 32 KiB.
        :raises StreamAbortedError: if either side aborted the stream.
        :raises TicketError: if it could not be opened; likewise the other errors of `opened`.
        :raises PeerLostError: if the consumer was lost.
        :raises TransferTimeoutError: if draining, or the consumer's decision, took longer than the timeout.
        :raises InvalidArgumentError: if `payload` is not made of bytes, or too long.
        :raises ClosedError: if the stream was finished or closed before.
        """
        self._producer.finish(payload)
        await self._producer.ended()
        self._producer.raise_failure()

    def abort(self, reason: str = "the producer aborted the stream") -> Coroutine[Any, Any, Outcome]:
        """Give the stream up at the call; no effect if it has ended.

        :param reason: the text for the errors of both sides.
        :return: an awaitable of the outcome, which the consumer has decided.
        :raises InvalidArgumentError: if `reason` is not a string.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        check_reason(reason)
        self._producer.context.check_thread()
        self._producer.stop(reason)
        return Started(self._producer.ended)

    async def drained(self) -> None:
        """Wait until the stream has ended, and no transfer of it can touch either side's blocks; this may never happen."""
        await self._producer.drained()

    def aclose(self) -> Coroutine[Any, Any, None]:
        """End the stream at the call: abort it unless all layers were pushed.  Idempotent.

        :return: an awaitable that waits like `finish`, but raises nothing.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._producer.context.check_thread()
        self._producer.close("the producer closed the stream")
        return Started(self._closed)

    async def _closed(self) -> None:
        await self._producer.ended()

    def __await__(self) -> Generator[Any, None, PushStream]:
        return self._opened().__await__()

    async def _opened(self) -> PushStream:
        await self._producer.opened()
        return self

    async def __aenter__(self) -> PushStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._producer.stop(f"the producer failed: {type(error).__name__}: {error}")
        await self.aclose()
        if error is None:
            self._producer.raise_failure()
