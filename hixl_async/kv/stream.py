"""The consumer's side of a stream: layers land one by one, in any order, and the stream ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.arguments import whole_number
from ..engine.started import Started
from ..engine.waiters import Waiters
from ..errors import BusyError, ClosedError, HixlError, RangeError, TicketError
from .lease import Lease
from .protocol import Abort, End, Open, Outcome, Ticket, Verdict, check_reason, service
from .states import ConsumerState

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["Consumer", "LayerStream"]

#: Keys of the consumer's waiters, beside the indices of layers.
ANY_LAYER, OUTCOME, FENCE, END = "any layer", "outcome", "fence", "end"


class LayerStream(Sealed, maker="blocks.stream()"):
    """The layers that a producer pushes into some reserved blocks, made by ``blocks.stream()``.

    Iterate it, or wait for single layers.  Any number of tasks may wait; all see the same landings and the same outcome,
    whenever they begin.
    """

    __reduce__ = unpicklable("wait for the layers here")

    def __init__(self, consumer: Consumer, blocks: object) -> None:
        self._consumer = consumer
        self._blocks = blocks  # keeps the blocks reserved as long as the program can read their layers

    def __repr__(self) -> str:
        state, layers = self._consumer.state, self.ticket.layers
        end = state.outcome.verdict.value if state.outcome else "open" if state.opened else "waiting for its producer"
        return f"<LayerStream {len(state.landed)} of {layers} layers, {end}>"

    @property
    def ticket(self) -> Ticket:
        """The ticket that the producer needs; ``blocks.ticket()`` returns it as a dict."""
        return self._consumer.ticket

    @property
    def landed(self) -> tuple[int, ...]:
        """The layers that have landed, in the order of landing."""
        return tuple(self._consumer.state.landed)

    @property
    def outcome(self) -> Outcome | None:
        """The way in which the stream ended, or None while it has not."""
        return self._consumer.state.outcome

    def check(self, layer: int) -> None:
        """Return if the layer has landed; call it before reading the layer's memory.

        :param layer: the index of the layer.
        :raises BusyError: if the layer has not landed yet.
        :raises HixlError: if the stream has failed without the layer, like `layer`.
        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if `layer` is not a whole number.
        """
        if not self._consumer.has(whole_number("layer", layer)):
            self._consumer.raise_failure()
            raise BusyError(f"layer {layer} has not landed yet; await stream.layer({layer}) before reading its blocks")

    async def layer(self, layer: int) -> None:
        """Wait until the layer has landed; return at once if it has, even if the stream has failed since.

        :param layer: the index of the layer.
        :raises StreamAbortedError: if either side aborted the stream before.
        :raises PeerLostError: if the producer was lost before.
        :raises TransferTimeoutError: if no layer landed within the stall time, or the timeout passed, after a producer had
            opened the ticket.
        :raises LayoutMismatchError: if a producer with another layout used the ticket.
        :raises TicketError: if the stream ended before a producer opened its ticket, for example because the ticket
            expired, or if a producer used a ticket that differs from the one that was issued.
        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if `layer` is not a whole number.
        """
        layer = whole_number("layer", layer)
        while not self._consumer.has(layer):
            self._consumer.raise_failure()
            await self._consumer.waiters.wait(layer)

    def __aiter__(self) -> AsyncIterator[int]:
        """Return an iterator over the layers in the order of landing, which raises like `layer` once the stream fails."""
        return _Landings(self)

    async def finished(self) -> None:
        """Wait for the end of the stream, and raise its error unless all layers have landed.

        :raises StreamAbortedError: if either side aborted the stream.
        :raises PeerLostError: if the producer was lost.
        :raises TransferTimeoutError: if no layer landed within the stall time, or the timeout passed, after a producer had
            opened the ticket.
        :raises LayoutMismatchError: if a producer with another layout used the ticket.
        :raises TicketError: if the stream ended before a producer opened its ticket, or if a producer used a ticket that
            differs from the one that was issued.
        """
        while self.outcome is None:
            await self._consumer.waiters.wait(OUTCOME)
        self._consumer.raise_failure()

    def abort(self, reason: str = "the consumer aborted the stream") -> Coroutine[Any, Any, Outcome]:
        """Give the stream up at the call; no effect if it has ended.

        The producer stops pushing, and reports when it can no longer write the blocks; ``blocks.fenced()`` waits for that.

        :param reason: the text for the errors of both sides.
        :return: an awaitable of the outcome.
        :raises InvalidArgumentError: if `reason` is not a string.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        check_reason(reason)
        self._consumer.check_thread()
        self._consumer.leave(reason)
        return Started(self._known_outcome)

    async def _known_outcome(self) -> Outcome:
        assert self.outcome is not None
        return self.outcome

    async def fenced(self) -> None:
        """Wait until no peer can write the blocks, whatever the outcome; this may never happen.

        :raises ClosedError: if the pool is closed first.
        """
        await self._consumer.fenced()


class _Landings(AsyncIterator[int]):
    """An iterator over a stream's layers; not a generator, because a cancelled ``anext`` would end it."""

    __slots__ = ("_position", "_stream")

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self._position = 0

    async def __anext__(self) -> int:
        consumer = self._stream._consumer
        if self._position == consumer.ticket.layers:
            raise StopAsyncIteration
        consumer.raise_failure()
        landed = consumer.state.landed
        while self._position >= len(landed):
            await consumer.waiters.wait(ANY_LAYER)
            consumer.raise_failure()
        self._position += 1
        return landed[self._position - 1]


class Consumer:
    """The consumer's end of one stream, from the ticket until its producer can no longer write.

    It works until then, even if the program has lost the blocks and their `LayerStream`.

    :param lease: the blocks to be filled.
    :param ticket: the ticket that was issued for them.
    :param words: one 64-bit word per layer, in memory that the producer writes: equal to the ticket's generation once
        the layer has landed.
    :param ttl: seconds within which the producer has to open the ticket.
    :param stall: seconds without a new layer after which the stream fails.
    :param timeout: seconds from now after which the stream fails, or None.
    :param forget: called when no more messages of the producer can arrive.
    """

    def __init__(
        self,
        lease: Lease,
        ticket: Ticket,
        words: memoryview,
        ttl: float,
        stall: float,
        timeout: float | None,
        forget: Callable[[Consumer], None],
    ) -> None:
        self.ticket = ticket
        self.state = ConsumerState(ticket.layers)
        self._lease = lease
        self._context = lease.context
        self._loop = lease.context.loop
        self._forget = forget
        self.waiters = Waiters(self._loop)
        self._words = words
        self._seen = b""
        self._peer: Peer | None = None
        self._producer_pool = ""
        self._held = False  # the blocks, from the ticket's use to the fence
        self._over = False  # True once the outcome has been acted on
        self._stall = stall
        self._news_at = self._loop.time()
        expired = Outcome(Verdict.TIMEOUT, f"no producer opened the ticket within {ttl:g} s")
        self._idle_timer = self._loop.call_later(ttl, self._end_by, expired)
        self._timeout_timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            missed = Outcome(Verdict.TIMEOUT, f"the stream did not finish within its timeout of {timeout:g} s")
            self._timeout_timer = self._loop.call_later(timeout, self._end_by, missed)

    # ---- calls of the program ----

    def has(self, layer: int) -> bool:
        """Return True if the layer has landed.

        :raises RangeError: if there is no such layer.
        """
        if not 0 <= layer < self.ticket.layers:
            raise RangeError(f"layer {layer} does not exist: the stream has layers 0 to {self.ticket.layers - 1}")
        return self.state.is_landed(layer)

    def raise_failure(self) -> None:
        """Raise the error of the outcome, if the stream has failed."""
        outcome = self.state.outcome
        if outcome is not None and (error := outcome.error(self._peer)) is not None:
            raise error

    def check_thread(self) -> None:
        """Return if the caller is on the thread of the engine's event loop; see `PoolContext.check_thread`."""
        self._context.check_thread()

    def leave(self, reason: str) -> None:
        """Abort the stream, if it has not ended."""
        self._end_by(Outcome(Verdict.ABORTED, reason))

    async def fenced(self) -> None:
        """Wait until no peer can write the blocks.

        :raises ClosedError: if the pool is closed first.
        """
        while not self.state.fenced:
            if self.state.ended and self._context.closed:
                raise ClosedError("the pool was closed before the producer could no longer write the blocks")
            await self.waiters.wait(FENCE)

    async def ended(self) -> None:
        """Wait until no more messages of the producer can arrive."""
        while not self.state.ended:
            await self.waiters.wait(END)

    def cut(self) -> None:
        """End the wait for messages of the producer, because the pool closes."""
        self.state.cut()
        self._settle()
        self.waiters.wake(FENCE)

    # ---- messages of the producer ----

    def on_open(self, peer: Peer, message: Open, mismatch: str | None) -> None:
        """Accept the opening of a producer that uses the ticket.

        :param mismatch: the text of the error, if the layouts differ.
        :raises TicketError: if the ticket was used before, is void, or was changed on its way.
        :raises LayoutMismatchError: if the layouts differ.
        """
        self.state.open()
        if message.digest != self.ticket.digest():
            changed = "the producer's ticket is not the one that was issued: a field was changed on the way"
            self._refuse(Outcome(Verdict.INVALID_TICKET, changed))
        if mismatch is not None:
            self._refuse(Outcome(Verdict.REFUSED, mismatch))
        self._peer, self._producer_pool = peer, message.pool
        self._lease.hold()
        self._held = True
        self._idle_timer.cancel()
        self._news_at = self._loop.time()
        self._idle_timer = self._loop.call_later(self._stall, self._check_stall)
        peer.add_signal_callback(self._scan)
        peer.add_lost_callback(self._on_lost)

    def _refuse(self, outcome: Outcome) -> NoReturn:
        self.state.stop(outcome)
        self.state.end(False, outcome.reason)  # nothing was written, and nothing will be
        self._settle()
        failure = outcome.error()
        assert failure is not None
        raise failure

    def on_end(self, peer: Peer, message: End) -> Outcome:
        """Handle the producer's last message.

        :return: the outcome, which is the reply.
        :raises TicketError: if another peer opened the stream.
        """
        if peer is not self._peer:
            raise TicketError("this stream belongs to another peer")
        outcome, news = self.state.end(message.complete, message.reason)
        self._announce(news)
        self._settle()
        return outcome

    # ---- events ----

    def _scan(self) -> None:
        """Check the signal words, some of which may have changed."""
        if self.state.outcome is not None:
            return
        seen = self._words.tobytes()
        if seen == self._seen:
            return
        self._seen = seen
        generation = self.ticket.generation
        self._announce(
            self.state.land(layer for layer, word in enumerate(memoryview(seen).cast("Q")) if word == generation)
        )
        self._settle()

    def _on_lost(self, error: BaseException) -> None:
        self._scan()  # layers that landed before the loss count
        dead = bool(getattr(error, "confirmed_dead", False))
        self.state.lose(str(error), dead)
        if not self.state.fenced:
            self._context.spawn(self._watch_fence())
        self._settle()

    async def _watch_fence(self) -> None:
        assert self._peer is not None
        # If the engine closes first, the blocks stay in quarantine until the pool is closed.
        with suppress(HixlError):
            try:
                await self._peer.fenced()
                self.state.fence()
                self._settle()
            finally:
                self.waiters.wake(FENCE)

    def _check_stall(self) -> None:
        self._scan()  # the timer may be late, and the words may have changed since it was due
        rest = self._news_at + self._stall - self._loop.time()
        if self.state.outcome is None and rest > 0:
            self._idle_timer = self._loop.call_later(rest, self._check_stall)
        else:
            self._end_by(Outcome(Verdict.TIMEOUT, f"no new layer for {self._stall:g} s"))

    def _end_by(self, outcome: Outcome) -> None:
        """End the stream from this side, if it has not ended."""
        self._scan()
        if self.state.stop(outcome) and self._peer is not None:
            with suppress(HixlError):  # the peer is lost; the lost callback handles it
                self._peer.post(service(self._producer_pool), Abort(self.ticket.id, outcome.reason).body())
        self._settle()

    def _announce(self, news: list[int]) -> None:
        if news:
            self._news_at = self._loop.time()
            self.waiters.wake(ANY_LAYER, *news)

    def _settle(self) -> None:
        """Act on the state; idempotent."""
        state = self.state
        if state.outcome is not None and not self._over:
            self._over = True
            self._words.release()
            self._idle_timer.cancel()
            if self._timeout_timer is not None:
                self._timeout_timer.cancel()
            if self._peer is not None:
                self._peer.remove_signal_callback(self._scan)
            self.waiters.wake_all()
        if state.fenced:
            self.waiters.wake(FENCE)
            if self._held:
                self._held = False
                self._lease.unhold()
        if state.ended:
            if self._peer is not None:
                self._peer.remove_lost_callback(self._on_lost)
            self._forget(self)
            self.waiters.wake(END)
