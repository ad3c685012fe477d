"""Blocks that peers read, as the program that owns them sees it."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.started import Started
from ..types import Ready
from .offering import Offering
from .outcome import Outcome
from .protocol import check_reason

__all__ = ["Offer"]

#: The reason of offers that the program loses.
LOST = "the owner lost its offer without closing it"


class Offer(Sealed, maker="blocks.offer()"):
    """Blocks that other pools may read, made by ``blocks.offer()``.

    Each of the announced number of readers uses the ticket once, by ``blocks.pull()``, and reads the layers as they are
    published.  The offer holds the blocks until no reader needs them: they can be given back at once.
    `publish` is legal from any thread; everything else belongs to the engine's loop.

    A reader that is lost, or silent for the time of its lease, loses its claim to the blocks; what it reads from then on raises
    a `LeaseExpiredError` there.  It ends no other reader.

    Enter the offer as an async context manager.  Leaving it waits until all readers have ended; leaving it by an exception, or
    before all layers were published, aborts the offer.  An offer that is not finished is closed when the last reference to it
    is dropped, with a ResourceWarning if layers are missing.
    """

    __reduce__ = unpicklable("send offer.ticket(), with which the other process reads the blocks")

    def __init__(self, offering: Offering, pool: object) -> None:
        self._offering = offering
        self._pool = pool  # keeps the pool open as long as the program can publish

    def __repr__(self) -> str:
        state = self._offering.state
        end = state.outcome.verdict.value if state.outcome else "open"
        return (
            f"<Offer {state.announced} of {state.layers} layers, {state.ended} of {state.opened} readers ended, {end}>"
        )

    def __del__(self) -> None:
        state, context = self._offering.state, self._offering.context
        unfinished = state.outcome is None and state.payload is None
        if unfinished and context.clean_up(self._offering.close, LOST) and state.announced < state.layers:
            message = f"{self!r} was never closed; use 'async with blocks.offer() as offer'"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def ticket(self) -> dict[str, Any]:
        """Return the right to read the blocks, once for each reader; the same one at every call.

        Any process that holds the ticket can use it, if the pool's ``access`` and ``grant`` let its engine read: send it over a
        channel you trust.

        :return: the ticket as a JSON-safe dict.
        :raises TicketError: if the offer has ended, for example because the ticket expired.
        """
        return self._offering.ticket_body()

    @property
    def outcome(self) -> Outcome | None:
        """The way in which the offer ended, or None while it has not."""
        return self._offering.state.outcome

    def publish(
        self,
        layer: int,
        *,
        tokens: tuple[int, int] | None = None,
        last: bool | None = None,
        ready: Ready = None,
    ) -> None:
        """Let readers have a layer, or some tokens of it, and return at once; legal from any thread.

        Layers are published in the order of the calls, each once it is ready.

        :param layer: the number of the layer; layers may be published in any order.
        :param tokens: the position in the sequence of the first token, and the one after the last; of each layer tokens are
            published in order.  Default: all that are left.
        :param last: True if no more tokens of the layer follow.  Default: True if `tokens` is not given, or reaches the end of
            what is offered.
        :param ready: None (ready now), an event with ``query()`` or ``is_set()``, or a callable that returns True once the
            layer may be read; as for ``PushStream.push``.
        :raises RangeError: if the layer does not exist, or the offer does not have the tokens.
        :raises InvalidArgumentError: if an argument is malformed, all of the layer was published before, or tokens are left out
            or published twice.
        :raises StreamAbortedError: if the offer was aborted.
        :raises TransferTimeoutError: if its timeout has passed.
        :raises TicketError: if no reader opened the ticket in time.
        :raises ClosedError: if the offer has ended.
        """
        self._offering.publish(layer, tokens, last, ready)

    async def finish(self, payload: bytes = b"") -> None:
        """Wait until all readers have read all layers, which were published before.

        :param payload: what the readers' ``stream.finished()`` returns, such as the first token; at most 32 KiB.
        :raises StreamAbortedError: if either side aborted.
        :raises PeerLostError: if a reader was lost.
        :raises TransferTimeoutError: if the lease of a reader expired, not all readers came in time, or the timeout passed.
        :raises TicketError: if no reader opened the ticket in time.
        :raises InvalidArgumentError: if `payload` is not made of bytes, or too long.
        :raises ClosedError: if layers are missing, or the offer was finished before.
        """
        self._offering.finish(payload)
        await self._offering.decided()
        self._offering.raise_failure()

    def abort(self, reason: str = "the owner aborted the offer") -> Coroutine[Any, Any, Outcome]:
        """Give the offer up at the call; no effect if it has ended.

        Readers stop reading, and report when they have; `drained` waits for that.

        :param reason: the text for the errors of all sides.
        :return: an awaitable of the outcome.
        :raises InvalidArgumentError: if `reason` is not a string.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        check_reason(reason)
        self._offering.context.check_thread()
        self._offering.stop(reason)
        return Started(self._offering.decided)

    async def drained(self) -> None:
        """Wait until no reader needs the blocks, whatever the outcome; a silent reader needs them for its lease at most."""
        await self._offering.ended()

    def aclose(self) -> Coroutine[Any, Any, None]:
        """End the offer at the call: finish it if all layers were published, else abort it.  Idempotent.

        :return: an awaitable that waits like `finish`, but raises nothing.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._offering.context.check_thread()
        self._offering.close("the owner closed the offer")
        return Started(self._closed)

    async def _closed(self) -> None:
        await self._offering.decided()

    async def __aenter__(self) -> Offer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._offering.stop(f"the owner failed: {type(error).__name__}: {error}")
        await self.aclose()
        if error is None:
            self._offering.raise_failure()
