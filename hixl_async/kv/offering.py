"""The owner's end of an offer: blocks that peers read, from the ticket until no reader needs them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..engine.arguments import whole_number
from ..engine.waiters import Waiters
from ..errors import HixlError, PeerDownError, RequestTimeoutError, TicketError
from ..types import Ready
from .consumer import Times
from .context import PoolContext
from .lease import BEATS, Lease
from .loan import Loan
from .offer_state import OfferState
from .outcome import Outcome, Verdict
from .pins import Pins
from .positions import check_positions
from .protocol import Decision, End, Open, Published, payload_bytes, service
from .ready import predicate
from .states import FINISHED
from .ticket import Ticket

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["Offering"]

#: The keys of the waiters.
OUTCOME, RELEASED = "outcome", "released"


class OfferedStreams(Protocol):
    """The offers of a pool that its peers' messages can find."""

    def forget_offer(self, offering: Offering) -> None: ...


class _Publication(NamedTuple):
    """Some tokens of a layer, which may be read once they are ready."""

    layer: int
    after: int
    complete: bool
    question: Callable[[], Any] | None


class _Reader:
    """A reader that has opened the offer."""

    __slots__ = ("ended", "lease", "number", "on_lost", "peer", "pin", "pool", "telling", "told")

    def __init__(self, peer: Peer, number: int, pool: str, pin: int) -> None:
        self.peer = peer
        self.number = number
        self.pool = pool
        self.pin = pin
        self.told: dict[int, tuple[int, bool]] = {}  # of what was published
        self.telling = False
        self.ended = False
        self.lease: Lease
        self.on_lost: Callable[[HixlError], None]


class Offering:
    """An offer of blocks to a number of readers.

    It holds the blocks from its making until no reader needs them, even if the program gives them back.

    :param context: the context of the owner's pool.
    :param loans: the blocks that are offered, of each group.
    :param ticket: the ticket that was issued for them.
    :param readers: the number of readers.
    :param times: the limits of the offer.
    :param pins: the words of the pool's readers.
    :param streams: the registry, which knows the offer until no reader needs it.
    """

    def __init__(
        self,
        context: PoolContext,
        loans: Sequence[Loan],
        ticket: Ticket,
        readers: int,
        times: Times,
        pins: Pins,
        streams: OfferedStreams,
    ) -> None:
        slices = ticket.slices
        self.context = context
        self.ticket = ticket
        self.state = OfferState(
            {layer: (slices[group].first, slices[group].last) for layer, group in context.groups.items()}, readers
        )
        self._loop = context.loop
        self._loans = loans
        self._times = times
        self._pins = pins
        self._streams = streams
        self._waiters = Waiters(self._loop)
        self._readers: dict[tuple[Peer, int], _Reader] = {}
        self._lock = threading.Lock()  # guards what is shared with publishing threads
        self._queue: deque[_Publication] = deque()
        self._pump_is_due = False
        self._over = self._released = False  # True once the outcome, or the release, has been acted on
        for loan in loans:
            loan.hold()
        self._idle_timer = self._loop.call_later(times.ttl, self._end_unopened)
        self._timeout_timer: asyncio.TimerHandle | None = None
        if times.timeout is not None:
            missed = Outcome(Verdict.TIMEOUT, f"the offer was not read within its timeout of {times.timeout:g} s")
            self._timeout_timer = self._loop.call_later(times.timeout, self._end_by, missed)

    # ---- calls of the program ----

    def ticket_body(self) -> dict[str, Any]:
        """Return the ticket as a dict; see `Offer.ticket`."""
        if (outcome := self.state.outcome) is not None:
            why = outcome.reason or "all readers have ended"
            raise TicketError(f"the ticket of this offer cannot be used any more: {why}; make another offer")
        return self.ticket.body()

    def publish(self, layer: int, tokens: tuple[int, int] | None, last: bool | None, ready: Ready) -> None:
        """Let readers have a layer, once it is ready; see `Offer.publish`."""
        layer, question = whole_number("layer", layer), predicate(ready)
        self.context.group_of(layer)
        if tokens is not None:
            check_positions(tokens)
        with self._lock:
            self.state.check_going_on()
            after, complete = self.state.announce(layer, tokens, tokens is None or bool(last))
            self._queue.append(_Publication(layer, after, complete, question))
            was_due, self._pump_is_due = self._pump_is_due, True
        if threading.get_ident() == self.context.thread:
            self._pump()
        elif not was_due:
            self.context.thread_calls.call(self._pump)

    def finish(self, payload: bytes) -> None:
        """Let the offer end once all readers have read all; see `Offer.finish`."""
        self.context.check_thread()
        self.state.finish(payload_bytes(payload))
        self._tell_all()
        self._settle()

    def stop(self, reason: str) -> None:
        """Give the offer up, if it has not ended."""
        self._end_by(Outcome(Verdict.ABORTED, reason))

    def close(self, reason: str) -> None:
        """Finish the offer if all layers were published, else give it up."""
        if self.state.outcome is None and self.state.payload is None:
            if self.state.announced == self.state.layers:
                self.finish(b"")
            else:
                self.stop(f"{reason} after {self.state.announced} of {self.state.layers} layers")

    async def decided(self) -> Outcome:
        """Wait for the outcome."""
        while self.state.outcome is None:
            await self._waiters.wait(OUTCOME)
        return self.state.outcome

    async def ended(self) -> None:
        """Wait until no reader needs the blocks."""
        while not self._released:
            await self._waiters.wait(RELEASED)

    def raise_failure(self) -> None:
        """Raise the error of the outcome, if the offer has failed."""
        outcome = self.state.outcome
        if outcome is not None and (error := outcome.error(self._lost_peer())) is not None:
            raise error

    def _lost_peer(self) -> Peer | None:
        peers = [reader.peer for reader in self._readers.values()]
        return next((peer for peer in peers if peer.error is not None), peers[0] if peers else None)

    # ---- what is published ----

    def _pump(self) -> None:
        if not self._publish_ready():
            self.context.poller.watch(self._publish_ready)

    def _publish_ready(self) -> bool:
        """Publish what is ready, in order, and return True if the poller has nothing to check."""
        published = False
        try:
            while True:
                with self._lock:
                    self._pump_is_due = False
                    if not self._queue:
                        return True
                    head = self._queue[0]
                if head.question is not None and not head.question():
                    return False
                with self._lock:
                    # The question may itself have published, or ended the offer.
                    if not self._queue or self._queue[0] is not head:
                        continue
                    self._queue.popleft()
                self.state.publish(head.layer, head.after, head.complete)
                published = True
        except BaseException as error:
            # A question of the program may raise anything; only an exit goes on from here.
            self.stop(f"layer {head.layer} could not be published: {type(error).__name__}: {error}")
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return True
        finally:
            if published:
                self._tell_all()
                self._settle()

    def _tell_all(self) -> None:
        for reader in self._readers.values():
            if not reader.telling and not reader.ended:
                reader.telling = True
                self.context.spawn(self._tell(reader))

    async def _tell(self, reader: _Reader) -> None:
        """Tell a reader what it may read, one message at a time, which has all the news since the one before."""
        try:
            finished = False
            while not reader.ended and not finished and self.state.outcome is None:
                news = self._news(reader)
                finished = self.state.complete
                if not news and not finished:
                    break
                message = Published(self.ticket.id, reader.number, news, self.state.payload if finished else None)
                await reader.peer.request(service(reader.pool), message.body(), timeout=self._times.lease)
        except PeerDownError:
            pass  # the lost callback handles it
        except RequestTimeoutError:
            self._expire(reader)
        except HixlError as error:
            self._give_up(reader, Outcome(Verdict.ABORTED, f"a reader did not take a message: {error}"))
        finally:
            reader.telling = False

    def _news(self, reader: _Reader) -> tuple[tuple[int, int, int], ...]:
        """Return what a reader has not been told, and note that it will be."""
        news = {layer: far for layer, far in self.state.published.items() if reader.told.get(layer) != far}
        reader.told.update(news)
        return tuple((layer, after, int(complete)) for layer, (after, complete) in news.items())

    # ---- messages of the readers ----

    def on_open(self, peer: Peer, message: Open) -> dict[str, Any]:
        """Accept a reader; return the reply.

        :raises TicketError: if the ticket was changed on its way, is void, or was used by all readers.
        :raises BusyError: if too many peers read blocks of the pool.
        """
        if message.digest != self.ticket.digest():
            raise TicketError("the reader's ticket is not the one that was issued: a field was changed on the way")
        if (peer, message.sender) in self._readers:
            raise TicketError("this ticket was used before by the same reader")
        pin, value = self._pins.take()
        try:
            self.state.open()
        except BaseException:
            self._pins.move_on(pin)
            raise
        reader = self._readers[peer, message.sender] = _Reader(peer, message.sender, message.pool, pin)
        since = self._loop.time()
        reader.lease = Lease(
            self._loop, self._times.lease, lambda: max(since, peer.heard_at), partial(self._expire, reader)
        )
        reader.lease.begin()
        reader.on_lost = partial(self._on_lost, reader)
        peer.begin_heartbeats(self._times.lease / BEATS)
        peer.add_lost_callback(reader.on_lost)
        if not self.state.awaited:
            self._idle_timer.cancel()
        payload = self.state.payload if self.state.complete else None
        told = Published(self.ticket.id, message.sender, self._news(reader), payload)
        return {"pin": pin, "value": value, "published": told.body()}

    def on_end(self, peer: Peer, message: End) -> None:
        """Handle a reader's last message.

        :raises TicketError: if the peer has no reader of that number here, or it has ended.
        """
        reader = self._readers.get((peer, message.sender))
        if reader is None or reader.ended:
            raise TicketError("this reader has ended, or its lease has expired")
        self._end_reader(reader, FINISHED if message.complete else Outcome(Verdict.ABORTED, message.reason))

    # ---- events ----

    def _on_lost(self, reader: _Reader, error: HixlError) -> None:
        self._end_reader(reader, Outcome(Verdict.LOST, str(error)))

    def _expire(self, reader: _Reader) -> None:
        silent = f"a reader was silent for {self._times.lease:g} s, and its lease has expired"
        self._give_up(reader, Outcome(Verdict.TIMEOUT, silent))

    def _give_up(self, reader: _Reader, outcome: Outcome) -> None:
        """Take the blocks from a reader that has not ended."""
        if not reader.ended:
            self._end_reader(reader, outcome)
            self.context.spawn(self._inform(reader, outcome.reason))  # it sees from its pin why nothing more comes

    def _end_reader(self, reader: _Reader, outcome: Outcome) -> None:
        """Note that a reader has no claim to the blocks any more; its pin says so to itself."""
        if reader.ended:
            return
        reader.ended = True
        self._pins.move_on(reader.pin)
        reader.lease.end()
        reader.peer.end_heartbeats(self._times.lease / BEATS)
        reader.peer.remove_lost_callback(reader.on_lost)
        self.state.end(outcome)
        self._settle()

    def _end_unopened(self) -> None:
        who = "not every reader" if self.state.opened else "no reader"
        self.state.expire(Outcome(Verdict.TIMEOUT, f"{who} opened the ticket within {self._times.ttl:g} s"))
        self._settle()

    def _end_by(self, outcome: Outcome) -> None:
        with self._lock:
            self.state.stop(outcome)
        self._settle()

    def _settle(self) -> None:
        """Act on the state; idempotent."""
        state = self.state
        if state.outcome is not None and not self._over:
            self._over = True
            self._idle_timer.cancel()
            if self._timeout_timer is not None:
                self._timeout_timer.cancel()
            self.context.poller.forget(self._publish_ready)
            with self._lock:
                self._queue.clear()
            self._waiters.wake(OUTCOME)
            for reader in self._readers.values():
                if not reader.ended:
                    self.context.spawn(self._inform(reader, state.outcome.reason))
        if state.released and not self._released:
            self._released = True
            self._streams.forget_offer(self)
            for loan in self._loans:
                loan.unhold()
            self._waiters.wake(RELEASED)

    async def _inform(self, reader: _Reader, reason: str) -> None:
        """Tell a reader that it must stop; it ends then, or its lease expires."""
        with suppress(HixlError):
            decision = Decision(self.ticket.id, False, reason)
            await reader.peer.request(service(reader.pool), decision.body(), timeout=self._times.lease)

    def cut(self) -> None:
        """End the wait for readers, because the pool closes."""
        for reader in self._readers.values():
            self._end_reader(reader, Outcome(Verdict.ABORTED, "the owner closed its pool"))
