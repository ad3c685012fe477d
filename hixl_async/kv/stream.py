"""The consumer's side of a stream: layers land one by one, in any order, and the stream ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ..engine.arguments import whole_number
from ..errors import BusyError, ClosedError, HixlError, RangeError, TicketError
from .protocol import Abort, End, Open, Outcome, Ticket, Verdict, check_reason, service
from .states import ConsumerState
from .waiting import Waiters

if TYPE_CHECKING:
    from .. import Peer
    from .blocks import Blocks
    from .pool import Pool

__all__ = ["LayerStream"]

#: What one waits for, beside a layer's number.
ANY_LAYER, OUTCOME, FENCE, END = "any layer", "outcome", "fence", "end"


class LayerStream:
    """The layers of some reserved blocks, as a producer's pushes bring them.  Iterate it, or wait for single layers.

    Made by ``blocks.stream()``.  Any number of tasks may wait; all see the same landings and the same outcome, also
    those that come late.
    """

    def __init__(
        self, blocks: Blocks, ticket: Ticket, words: memoryview, ttl: float, stall: float, timeout: float | None
    ):
        pool = blocks.pool
        self.ticket = ticket
        self._blocks = blocks
        self._pool: Pool = pool
        self._loop = pool.engine.loop
        self._waiters = Waiters(self._loop)
        self._state = ConsumerState(ticket.layers)
        # One 64-bit word per layer, in memory that the producer writes: equal to our generation once the layer is
        # there.
        self._words = words
        self._seen = b""
        self._peer: Peer | None = None
        self._producer_pool = ""
        self._held = False  # the blocks, from the ticket's use to the fence
        self._over = False  # the consequences of the outcome are drawn
        self._stall = stall
        self._news_at = self._loop.time()
        expired = Outcome(Verdict.TIMEOUT, f"no producer opened the ticket within {ttl:g} s")
        self._idle_timer = self._loop.call_later(ttl, self._end_by, expired)
        self._timeout_timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            missed = Outcome(Verdict.TIMEOUT, f"the stream did not finish within its timeout of {timeout:g} s")
            self._timeout_timer = self._loop.call_later(timeout, self._end_by, missed)

    def __repr__(self) -> str:
        state = self._state
        end = state.outcome.verdict.value if state.outcome else "open" if state.opened else "waiting for its producer"
        return f"<LayerStream {len(state.landed)} of {self.ticket.layers} layers, {end}>"

    @property
    def landed(self) -> tuple[int, ...]:
        """The layers that are here, in the order in which they came."""
        return tuple(self._state.landed)

    @property
    def outcome(self) -> Outcome | None:
        """How the stream ended, or None while it has not."""
        return self._state.outcome

    def check(self, layer: int) -> None:
        """Returns if the layer is here: the guard to put before a read of its memory.

        :raises BusyError: if the layer has not landed yet.
        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if it is no whole number.
        """
        if not self._known(whole_number("layer", layer)):
            self._raise_failure()
            raise BusyError(f"layer {layer} has not landed yet; await stream.layer({layer}) before reading its blocks")

    async def layer(self, layer: int) -> None:
        """Waits until the layer is here; returns at once if it is, even if the stream has failed since.

        :raises StreamAbortedError: if either side aborted the stream before.
        :raises PeerLostError: if the producer was lost before.
        :raises TransferTimeoutError: if no layer came for the stall time, or the timeout passed, after a producer had
            opened the ticket.
        :raises TicketError: if the stream ended before a producer opened the ticket, or the ticket expired.
        :raises LayoutMismatchError: if a producer with another layout used the ticket.
        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if it is no whole number.
        """
        layer = whole_number("layer", layer)
        while not self._known(layer):
            self._raise_failure()
            await self._waiters.wait(layer)

    def __aiter__(self) -> AsyncIterator[int]:
        """Layers in the order in which they land, each once; raises like `layer` as soon as the stream fails."""
        return _Landings(self)

    async def finished(self) -> None:
        """Waits for the end of the stream; returns if all layers are here, else raises like `layer`."""
        while self._state.outcome is None:
            await self._waiters.wait(OUTCOME)
        self._raise_failure()

    async def abort(self, reason: str = "the consumer aborted the stream") -> Outcome:
        """Gives the stream up; no effect if it has ended.  Answers the outcome.

        The producer stops pushing and tells us when nothing of it can write the blocks any more: that is
        ``blocks.fenced()``.

        :raises InvalidArgumentError: if `reason` is no string.
        """
        check_reason(reason)
        self._end_by(Outcome(Verdict.ABORTED, reason))
        assert self._state.outcome is not None
        return self._state.outcome

    async def fenced(self) -> None:
        """Waits until no peer can write the blocks any more, whatever the outcome; it may never come.

        :raises ClosedError: if the pool is closed before.
        """
        while not self._state.fenced:
            if self._state.ended and self._pool.closed:
                raise ClosedError("the pool was closed before the producer could no longer write the blocks")
            await self._waiters.wait(FENCE)

    async def _ended(self) -> None:
        """Waits until the producer has nothing more to say."""
        while not self._state.ended:
            await self._waiters.wait(END)

    def _cut(self) -> None:
        """The pool waits for the producer no longer."""
        self._state.ended = True
        self._settle()
        self._waiters.wake(FENCE)

    # ---- what the pool forwards from the producer ----

    def _open(self, peer: Peer, message: Open, mismatch: str | None) -> None:
        if message.generation != self.ticket.generation:
            raise TicketError("this ticket was issued for an earlier use of its blocks")
        self._state.open()
        if mismatch is not None:
            refused = Outcome(Verdict.REFUSED, mismatch)
            self._state.stop(refused)
            self._state.end(False, mismatch)  # nothing was written, and nothing will be
            self._settle()
            failure = refused.error()
            assert failure is not None
            raise failure
        self._peer, self._producer_pool = peer, message.pool
        self._blocks._hold()
        self._held = True
        self._idle_timer.cancel()
        self._news_at = self._loop.time()
        self._idle_timer = self._loop.call_later(self._stall, self._check_stall)
        peer.add_signal_callback(self._scan)
        peer.add_lost_callback(self._on_lost)

    def _end(self, peer: Peer, message: End) -> Outcome:
        if peer is not self._peer:
            raise TicketError("this stream belongs to another peer")
        outcome, news = self._state.end(message.complete, message.reason)
        self._announce(news)
        self._settle()
        return outcome

    # ---- events ----

    def _scan(self) -> None:
        """Some words of ours may have changed."""
        if self._state.outcome is not None:
            return
        seen = self._words.tobytes()
        if seen == self._seen:
            return
        self._seen = seen
        generation = self.ticket.generation
        self._announce(
            self._state.land(layer for layer, word in enumerate(memoryview(seen).cast("Q")) if word == generation)
        )
        self._settle()

    def _on_lost(self, error: BaseException) -> None:
        self._scan()  # what landed before the loss has landed
        dead = bool(getattr(error, "confirmed_dead", False))
        self._state.lose(str(error), dead)
        if not self._state.fenced:
            self._pool._spawn(self._watch_fence())
        self._settle()

    async def _watch_fence(self) -> None:
        assert self._peer is not None
        # If the engine closes first the blocks stay in quarantine until the pool is closed.
        with suppress(HixlError):
            try:
                await self._peer.fenced()
                self._state.fence()
                self._settle()
            finally:
                self._waiters.wake(FENCE)

    def _check_stall(self) -> None:
        self._scan()  # this timer may be late, and the words newer than it
        rest = self._news_at + self._stall - self._loop.time()
        if self._state.outcome is None and rest > 0:
            self._idle_timer = self._loop.call_later(rest, self._check_stall)
        else:
            self._end_by(Outcome(Verdict.TIMEOUT, f"no new layer for {self._stall:g} s"))

    def _leave(self, reason: str) -> None:
        self._end_by(Outcome(Verdict.ABORTED, reason))

    def _end_by(self, outcome: Outcome) -> None:
        """Ends the stream from our side, if it has not ended."""
        self._scan()
        if self._state.stop(outcome) and self._peer is not None:
            with suppress(HixlError):  # the peer is lost: its callback comes
                self._peer.post(service(self._producer_pool), Abort(self.ticket.id, outcome.reason).body())
        self._settle()

    def _announce(self, news: list[int]) -> None:
        if news:
            self._news_at = self._loop.time()
            self._waiters.wake(ANY_LAYER, *news)

    def _settle(self) -> None:
        """Draws the consequences of the state; idempotent."""
        state = self._state
        if state.outcome is not None and not self._over:
            self._over = True
            self._words.release()
            self._idle_timer.cancel()
            if self._timeout_timer is not None:
                self._timeout_timer.cancel()
            if self._peer is not None:
                self._peer.remove_signal_callback(self._scan)
            self._waiters.wake_all()
        if state.fenced:
            self._waiters.wake(FENCE)
            if self._held:
                self._held = False
                self._blocks._unhold()
        if state.ended:
            if self._peer is not None:
                self._peer.remove_lost_callback(self._on_lost)
            self._pool._exchange.forget_incoming(self)
            self._waiters.wake(END)

    # ---- small helpers ----

    def _known(self, layer: int) -> bool:
        if not 0 <= layer < self.ticket.layers:
            raise RangeError(f"layer {layer} does not exist: the stream has layers 0 to {self.ticket.layers - 1}")
        return self._state.is_landed(layer)

    def _raise_failure(self) -> None:
        outcome = self._state.outcome
        if outcome is not None and (error := outcome.error(self._peer)) is not None:
            raise error


class _Landings(AsyncIterator[int]):
    """One walk over a stream's layers.  Not a generator, which a cancelled ``anext`` would end."""

    __slots__ = ("_position", "_stream")

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self._position = 0

    async def __anext__(self) -> int:
        stream = self._stream
        if self._position == stream.ticket.layers:
            raise StopAsyncIteration
        stream._raise_failure()
        landed = stream._state.landed
        while self._position >= len(landed):
            await stream._waiters.wait(ANY_LAYER)
            stream._raise_failure()
        self._position += 1
        return landed[self._position - 1]
