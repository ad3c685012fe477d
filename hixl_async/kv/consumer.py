"""The consumer's end of a stream, from the ticket until no sender of it can write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from ..errors import HixlError, TicketError
from .arrivals import ANY_LAYER, END, FENCE, Arrivals
from .context import PoolContext
from .lease import BEATS, Lease
from .loan import Loan
from .outcome import Outcome, Verdict
from .protocol import Decision, End, Open, service
from .states import FINISHED, ConsumerState
from .ticket import Ticket
from .words import Landing

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["Consumer", "Times"]


class Times(NamedTuple):
    """The limits of a stream, in seconds."""

    #: Until a producer opens the ticket.
    ttl: float
    #: Without hearing of a producer that has opened it.
    lease: float
    #: In all, from the ticket on; None: no limit.
    timeout: float | None


class IncomingStreams(Protocol):
    """The streams of a pool that its peers' messages and signals can find."""

    def scan(self) -> None: ...
    def watch(self, peer: Peer) -> None: ...
    def unwatch(self, peer: Peer) -> None: ...
    def on_fenced(self, consumer: Consumer) -> None: ...
    def forget_incoming(self, consumer: Consumer) -> None: ...


class _Link:
    """A sender that has opened the stream."""

    __slots__ = ("_interval", "informed", "news_at", "on_lost", "peer", "pool")

    def __init__(self, peer: Peer, pool: str, news_at: float, on_lost: Callable[[HixlError], None]) -> None:
        self.peer = peer
        self.news_at = news_at  # the time of its last landing
        self.pool = pool
        self.on_lost = on_lost
        self.informed = False  # of the outcome
        self._interval: float | None = None

    def begin_heartbeats(self, interval: float) -> None:
        """Send the sender signs of life while it waits for the outcome."""
        if self._interval is None:
            self._interval = interval
            self.peer.begin_heartbeats(interval)

    def end_heartbeats(self) -> None:
        """Send it no more."""
        if self._interval is not None:
            self.peer.end_heartbeats(self._interval)
            self._interval = None


class Consumer(Arrivals):
    """The consumer's end of one stream, from the ticket until no sender of it can write.

    :param context: the context of the consumer's pool.
    :param loans: the blocks to be filled, of each group.
    :param ticket: the ticket that was issued for them.
    :param owed: the layers that each sender brings.
    :param times: the limits of the stream.
    :param streams: the registry, which looks for landings and knows the stream until no more messages of it can arrive.
    """

    def __init__(
        self,
        context: PoolContext,
        loans: Sequence[Loan],
        ticket: Ticket,
        owed: Sequence[Collection[int]],
        times: Times,
        streams: IncomingStreams,
    ) -> None:
        super().__init__(context, ConsumerState(tuple(context.groups), owed), ticket.slices)
        self.ticket = ticket
        self._loans = loans
        self._loop = context.loop
        self._streams = streams
        self._links: dict[int, _Link] = {}  # by the number of the sender
        self._held = False  # the blocks, from the ticket's first use to the fence
        self._over = self._released = False  # True once the outcome, or the fence, has been acted on
        self._times = times
        self._lease = Lease(self._loop, times.lease, self._heard_at, self._expire)
        self._idle_timer = self._loop.call_later(times.ttl, self._end_unopened)
        self._timeout_timer: asyncio.TimerHandle | None = None
        if times.timeout is not None:
            missed = Outcome(Verdict.TIMEOUT, f"the stream did not finish within its timeout of {times.timeout:g} s")
            self._timeout_timer = self._loop.call_later(times.timeout, self._end_by, missed)

    # ---- calls of the program ----

    def ticket_body(self) -> dict[str, Any]:
        if (outcome := self.state.outcome) is not None:
            why = outcome.reason or "all layers have landed"
            raise TicketError(f"the ticket of this stream cannot be used any more: {why}; make another stream")
        return self.ticket.body()

    def _lost_peer(self) -> Peer | None:
        peers = [link.peer for link in self._links.values()]
        return next((peer for peer in peers if peer.error is not None), peers[0] if peers else None)

    async def ended(self) -> None:
        """Wait until no more messages of a sender can arrive, and all know the outcome."""
        while not self.state.ended or any(map(self._must_inform, self._links.values())):
            await self.waiters.wait(END)

    # ---- messages of the senders ----

    def on_open(self, peer: Peer, message: Open, mismatch: str | None) -> None:
        """Accept the opening of a sender that uses the ticket.

        :param mismatch: the text of the error, if the caches differ.
        :raises TicketError: if the ticket was used before, is void, or was changed on its way.
        :raises LayoutMismatchError: if the caches differ.
        """
        number = message.sender
        if not 0 <= number < len(self.ticket.rows):
            raise TicketError(f"this ticket is for {len(self.ticket.rows)} senders, and has none of number {number}")
        self.state.open(number)
        if message.digest != self.ticket.digest():
            changed = "the producer's ticket is not the one that was issued: a field was changed on the way"
            self._refuse(number, Outcome(Verdict.INVALID_TICKET, changed))
        if mismatch is not None:
            self._refuse(number, Outcome(Verdict.REFUSED, mismatch))
        self._links[number] = link = _Link(peer, message.pool, self._loop.time(), partial(self._on_lost, number))
        if not self._held:
            self._held = True
            for loan in self._loans:
                loan.hold()
        if len(self._links) == len(self.ticket.rows):
            self._idle_timer.cancel()
        self._lease.begin()
        self._streams.watch(peer)
        peer.add_lost_callback(link.on_lost)

    def _refuse(self, number: int, outcome: Outcome) -> NoReturn:
        self.state.stop(outcome)
        self.state.end(number, False, outcome.reason)  # nothing was written, and nothing will be
        self._settle()
        failure = outcome.error()
        assert failure is not None
        raise failure

    def on_end(self, peer: Peer, message: End) -> Decision | None:
        """Handle a sender's last message.

        :return: the outcome, if it is decided; else a message follows.
        :raises TicketError: if another peer opened the stream.
        """
        link = self._links.get(message.sender)
        if link is None or peer is not link.peer:
            raise TicketError("this stream belongs to another peer")
        self._streams.scan()
        self.state.end(message.sender, message.complete, message.reason, message.payload)
        link.informed = self.state.outcome is not None
        self._settle()
        if link.informed:
            return self._decision()
        link.begin_heartbeats(self._times.lease / BEATS)  # until the outcome
        return None

    def _decision(self) -> Decision:
        assert self.state.outcome is not None
        return Decision(self.ticket.id, self.state.outcome == FINISHED, self.state.outcome.reason)

    # ---- events ----

    def on_landings(self, number: int, landings: Sequence[Landing]) -> None:
        """Handle the words of a sender's row that have changed."""
        state, layers, ours = self.state, self.layers, self.ticket.generation
        news = [
            layers[place]
            for place, generation, tokens, complete in landings
            if generation == ours and state.land(number, layers[place], tokens, complete)
        ]
        if news:
            self._links[number].news_at = self._loop.time()
            self.waiters.wake(*news, ANY_LAYER)
            if state.fenced:
                self._settle()

    def _on_lost(self, number: int, error: BaseException) -> None:
        self._streams.scan()  # layers that landed before the loss count
        self.state.lose(number, str(error), bool(getattr(error, "confirmed_dead", False)))
        if not self.state.senders[number].harmless:
            self._context.spawn(self._watch_fence(number))
        self._settle()

    async def _watch_fence(self, number: int) -> None:
        # If the engine closes first, the blocks stay in quarantine until the pool is closed.
        with suppress(HixlError):
            try:
                await self._links[number].peer.fenced()
                self.state.fence(number)
                self._settle()
            finally:
                self.waiters.wake(FENCE)

    def _end_unopened(self) -> None:
        who = "not every producer" if self._links else "no producer"
        self._end_by(Outcome(Verdict.TIMEOUT, f"{who} opened the ticket within {self._times.ttl:g} s"))

    def _heard_at(self) -> float:
        """Return the time at which the sender that has been silent for longest was heard."""
        self._streams.scan()  # the words may have changed since their signal
        senders = self.state.senders
        heard = (max(link.peer.heard_at, link.news_at) for n, link in self._links.items() if not senders[n].ended)
        return min(heard, default=self._loop.time())

    def _expire(self) -> None:
        self._end_by(
            Outcome(Verdict.TIMEOUT, f"the producer was silent for {self._times.lease:g} s, and its lease has expired")
        )

    def _look(self) -> None:
        self._streams.scan()

    def _settle(self) -> None:
        state = self.state
        if state.outcome is not None and not self._over:
            self._over = True
            self._idle_timer.cancel()
            self._lease.end()
            if self._timeout_timer is not None:
                self._timeout_timer.cancel()
            self.waiters.wake_all()
            for number, link in self._links.items():
                self._streams.unwatch(link.peer)
                link.end_heartbeats()
                # A sender that has still to end is told with the reply to that, unless it must stop.
                if self._must_inform(link) and (state.senders[number].ended or state.outcome != FINISHED):
                    self._context.spawn(self._inform(link))
        if state.fenced and not self._released:
            self._released = True
            self._streams.on_fenced(self)
            self.waiters.wake(FENCE)
            if self._held:
                for loan in self._loans:
                    loan.unhold()
        if state.ended:
            for link in self._links.values():
                link.peer.remove_lost_callback(link.on_lost)
            self._streams.forget_incoming(self)
            self.waiters.wake(END)

    @staticmethod
    def _must_inform(link: _Link) -> bool:
        return not link.informed and link.peer.error is None

    async def _inform(self, link: _Link) -> None:
        """Tell a sender the outcome."""
        with suppress(HixlError):  # the peer is lost; the lost callback handles it
            await link.peer.request(service(link.pool), self._decision().body(), timeout=self._times.lease)
        link.informed = True
        self.waiters.wake(END)
