"""The producer's end of a stream: layers are sent as soon as they are ready, and the consumer decides the outcome."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..engine.arguments import whole_number
from ..engine.waiters import Waiters
from ..errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    LayoutMismatchError,
    PeerDownError,
    PeerLostError,
    ProtocolError,
    RangeError,
    RemoteError,
    StreamError,
    TicketError,
    WaitTimeoutError,
)
from ..types import Ready
from .blocks import Blocks, loan_of
from .context import PoolContext
from .lease import BEATS, Lease
from .loan import Loan
from .outcome import Outcome, Verdict
from .positions import check_positions
from .protocol import Decision, End, Open, parse_reply, payload_bytes, service
from .ready import predicate
from .sender import Aim, Push, Sender
from .shapes import Shard
from .states import Phase, ProducerState
from .target import Target
from .ticket import Ticket

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["Producer"]

#: The keys of the producer's waiters.
OPEN, DECISION, DRAINED, END = "open", "decision", "drained", "end"

#: The arguments of a push: the layer, the source, the tokens, `last`, and the question whether it is ready.
_Request: TypeAlias = tuple[int, Loan, tuple[int, int] | None, bool | None, Callable[[], Any] | None]


class OutgoingStreams(Protocol):
    """The streams of a pool that its peers' messages can find, and the pools into which they go."""

    def add_producer(self, producer: Producer) -> None: ...
    def add_outgoing(self, producer: Producer) -> None: ...
    def forget_outgoing(self, producer: Producer) -> None: ...
    def known(self, peer: Peer, ticket: Ticket) -> Target | None: ...
    async def learn(self, peer: Peer, ticket: Ticket, reply: dict[str, Any]) -> Target: ...


class Producer:
    """The producer's end of one stream, from its opening until nothing of it is in flight.

    It works until then, even if the program has lost its `PushStream`.

    :param context: the context of the producer's pool.
    :param peer: the consumer.
    :param ticket: the consumer's ticket as a dict, or an awaitable of it.
    :param timeout: seconds for opening, and also for the end.
    :param streams: the registry in which the stream is known while messages for it may arrive.
    :raises TicketError: if the ticket is malformed, or of another engine.
    :raises LayoutMismatchError: if the consumer's cache has other groups.
    """

    def __init__(
        self,
        context: PoolContext,
        peer: Peer,
        ticket: dict[str, Any] | Awaitable[dict[str, Any]],
        timeout: float,
        streams: OutgoingStreams,
    ) -> None:
        self.context = context
        self.peer = peer
        self.ticket: Ticket | None = None
        self.state = ProducerState(context.groups)
        self._streams = streams
        self._loop = context.loop
        self._timeout = timeout
        self._waiters = Waiters(self._loop)
        self._cause: BaseException | None = None
        self._failure: HixlError | None = None  # of the opening
        self._number = 0  # of this sender among those of the ticket
        self._interval: float | None = None  # of the signs of life that keep the consumer's lease
        self._early: list[_Request] = []  # pushes before it is known which tokens the ticket names
        self._lock = threading.Lock()  # guards what is shared with pushing threads
        self._sender = Sender(context, self.state, self._lock, self._advance, self._fail)
        # The ticket to come, which is cancelled if the stream ends before.
        self._awaited = asyncio.ensure_future(ticket) if isinstance(ticket, Awaitable) else None
        if self._awaited is None:
            self._adopt(ticket)
        streams.add_producer(self)
        peer.add_lost_callback(self._on_lost)
        context.spawn(self._open(self._awaited))

    # ---- calls of the program ----

    def push(self, layer: int, source: Blocks, tokens: tuple[int, int] | None, last: bool | None, ready: Ready) -> None:
        """Queue a layer to be sent; see `PushStream.push`."""
        if tokens is not None:
            check_positions(tokens)
        layer, loan, question = whole_number("layer", layer), self._loan_of(source), predicate(ready)
        if loan.group != (group := self.context.group_of(layer)):
            raise InvalidArgumentError(
                f"layer {layer} belongs to group {group}, and the source blocks to group {loan.group}; reserve blocks with "
                f"group={group}"
            )
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self.state.check_going_on()
            if self.ticket is None:
                self._sender.hold(loan)
                self._early.append((layer, loan, tokens, last, question))
                return
            wake = self._add(self.ticket, layer, loan, tokens, last, question)
        if threading.get_ident() == self.context.thread:
            self._sender.pump()
        elif wake:
            self.context.thread_calls.call(self._sender.pump)

    def _loan_of(self, source: Blocks) -> Loan:
        if not isinstance(source, Blocks):
            raise InvalidArgumentError(f"source must be reserved blocks, not {source!r}")
        loan, ours = loan_of(source), self.context
        if loan.context is not ours:
            raise InvalidArgumentError(f"the source blocks belong to pool {loan.context}, the stream to pool {ours}")
        return loan

    def _add(
        self,
        ticket: Ticket,
        layer: int,
        source: Loan,
        tokens: tuple[int, int] | None,
        complete: bool | None,
        question: Callable[[], Any] | None,
    ) -> bool:
        """Queue what was asked for; the caller holds the lock.  See `Sender.add`."""
        part = ticket.slices[source.group]
        held = source.start + len(source.ids) * self.context.views[source.group].block_tokens
        first, last = (part.first, min(part.last, held)) if tokens is None else tokens
        if not part.first <= first < last <= part.last:
            raise RangeError(
                f"tokens {first} to {last} are not within those of the ticket, {part.first} to {part.last}"
            )
        if not source.start <= first < last <= held:
            raise RangeError(f"the source blocks hold the tokens {source.start} to {held}, not {first} to {last}")
        self.state.check(layer, first, part.first)
        complete = tokens is None or last == part.last or bool(complete)
        wake = self._sender.add(Push(layer, source, first, last, complete, question))
        self.state.push(layer, None if complete else last)
        return wake

    def finish(self, payload: bytes) -> None:
        """Have the stream end once all is there; see `PushStream.finish`."""
        self.context.check_thread()
        payload = payload_bytes(payload)
        if self.state.payload is not None:
            raise ClosedError("the stream was finished before")
        self._change(self.state.finish, payload)

    def stop(self, reason: str) -> None:
        """Give the stream up, if it has not ended."""
        self._change(self.state.stop, reason)

    def close(self, reason: str) -> None:
        """Give the stream up unless all layers were pushed."""
        self._change(self.state.close, reason)

    async def opened(self) -> None:
        """Wait until the consumer has accepted the ticket; see `PushStream.opened`."""
        while self.state.phase is Phase.OPENING and self._failure is None:
            await self._waiters.wait(OPEN)
        if self._failure is not None:
            raise self._failure

    async def ended(self) -> Outcome:
        """Wait until the stream has ended and is drained, or until its timeout has passed."""
        while not self.state.settled:
            await self._waiters.wait(END)
        assert self.state.outcome is not None
        return self.state.outcome

    async def drained(self) -> None:
        """Wait until no transfer can read the source blocks."""
        while not self.state.drained:
            await self._waiters.wait(DRAINED)

    def raise_failure(self) -> None:
        """Raise the error of the outcome, if the stream has failed."""
        if self._failure is not None:
            raise self._failure
        assert self.state.outcome is not None
        if (error := self.state.outcome.error(self.peer)) is not None:
            raise error from self._cause

    # ---- opening ----

    def _adopt(self, body: object) -> None:
        """Take the ticket, and what was pushed before it was known."""
        ticket = Ticket.parse(body)
        name = self.peer.name
        if ticket.verb != "write":
            raise TicketError("this ticket lets blocks be read, not written; use it with blocks.pull(...)", peer=name)
        if ticket.incarnation != self.peer.identity.incarnation:
            raise TicketError(
                f"the ticket was issued by engine {ticket.engine!r}, which is not, or no longer, peer {name!r}",
                peer=name,
            )
        if len(ticket.slices) != len(self.context.views):
            raise LayoutMismatchError(
                f"the consumer's cache has {len(ticket.slices)} groups of layers and this pool {len(self.context.views)}",
                peer=name,
            )
        if ticket.sources:
            if self.context.shard not in ticket.sources:
                ours = _described(self.context.shard)
                raise TicketError(f"the ticket does not name this pool's {ours} as a sender", peer=name)
            self._number = ticket.sources.index(self.context.shard)
        with self._lock:
            self.ticket, early = ticket, self._early
            self._early = []
            for request in early:
                self._add(ticket, *request)

    async def _open(self, ticket: Awaitable[dict[str, Any]] | None) -> None:
        """Ask the consumer to accept the ticket; `PushStream.opened` lists the errors."""
        granted = False
        try:
            if ticket is not None:
                self._adopt(await ticket)
            assert self.ticket is not None
            # Before the consumer is asked, because its decision may arrive before its reply has been read.
            self._streams.add_outgoing(self)
            self._begin_heartbeats(self.ticket)
            target = self._streams.known(self.peer, self.ticket)
            async with asyncio.timeout(self._timeout):
                granted = True  # possibly: once the request is sent, its outcome is unknown until the reply
                try:
                    reply = await self._ask(self.ticket, target is not None)
                except StreamError:
                    granted = False
                    raise
                if target is None:
                    target = await self._streams.learn(self.peer, self.ticket, reply)
                aim = self._aim_at(self.ticket, target)
        except BaseException as error:
            self._opening_failed(error, granted)
            if isinstance(error, Exception):
                return
            raise
        self._sender.aim(aim)
        if self.state.stopping is not None:
            self._failure = self._aborted_early()
        self._change(self.state.open, aim.shares)
        self._waiters.wake(OPEN)
        self._sender.pump()

    async def _ask(self, ticket: Ticket, known: bool) -> dict[str, Any]:
        context = self.context
        cache = None if known else (context.shard, context.described_groups)
        message = Open(ticket.id, ticket.digest(), context.name, self._number, cache)
        try:
            return await self.peer.request(service(ticket.pool), message.body(), timeout=self._timeout)
        except InvalidArgumentError as error:
            raise TicketError(
                f"the consumer has no pool {ticket.pool!r} any more: {error}", peer=self.peer.name
            ) from error

    def _aim_at(self, ticket: Ticket, target: Target) -> Aim:
        row = ticket.rows[self._number]
        if not target.has_row(row):
            raise TicketError(
                f"the ticket names row {row} of the consumer's words, which has fewer", peer=self.peer.name
            )
        shares = target.owed(ticket.sources or (self.context.shard,))[self._number]
        return Aim(target, ticket.slices, shares, row, ticket.generation)

    def _opening_failed(self, error: BaseException, granted: bool) -> None:
        if granted:
            # It follows the request on the same connection, and so is correct in both cases.
            self._say_over(f"the producer could not open the stream: {type(error).__name__}")
        failure = self._explain(error)
        with self._lock:
            self._failure = failure
        self._change(self.state.decide, Outcome(Verdict.VOID, str(failure)))
        self._sender.cancel()
        self._sender.release()
        self._finish()
        self._waiters.wake(OPEN)

    def _explain(self, error: BaseException) -> HixlError:
        """Return the error of an opening that failed."""
        if isinstance(error, HixlError):
            return error
        if isinstance(error, asyncio.CancelledError):  # the stream ended while its ticket was awaited
            if isinstance(self._cause, HixlError):
                return self._cause
            return self._aborted_early()
        if isinstance(error, TimeoutError) and self.ticket is not None:
            return WaitTimeoutError(f"the stream did not open within {self._timeout:g} s", peer=self.peer.name)
        failure = TicketError(f"there is no ticket: {type(error).__name__}: {error}", peer=self.peer.name)
        failure.__cause__ = error
        return failure

    def _aborted_early(self) -> TicketError:
        """Return the error of a stream that was aborted before anything could be sent."""
        reason = self.state.stopping or "the ticket's awaitable was cancelled"
        return TicketError(f"the stream was aborted before it was open: {reason}", peer=self.peer.name)

    def _begin_heartbeats(self, ticket: Ticket) -> None:
        self._interval = ticket.lease / 1000 / BEATS
        self.peer.begin_heartbeats(self._interval)

    # ---- events ----

    def on_decision(self, peer: Peer, message: Decision) -> None:
        """Handle the consumer's outcome."""
        if peer is self.peer:
            self._change(self.state.decide, message.outcome)

    def _on_lost(self, error: BaseException) -> None:
        self._cause = self._cause or error
        self._change(self.state.lose, str(error))

    def _fail(self, reason: str, cause: BaseException | None) -> None:
        self._cause = self._cause or cause
        if isinstance(cause, PeerLostError | PeerDownError):
            self._change(self.state.lose, str(cause))
        else:
            self.stop(reason)

    def _change(self, change: Callable[..., bool], *arguments: Any) -> None:
        """Change the state, and act on the change."""
        with self._lock:
            stopped = change(*arguments)
        if stopped:
            self._sender.cancel()
            if self._awaited is not None:
                self._awaited.cancel()
        self._advance()

    def _advance(self) -> None:
        if not self.state.concluding and self.state.outcome is None:
            return
        if self.state.conclude():
            self.context.spawn(self._conclude())
        if self.state.outcome is not None:
            self._waiters.wake(DECISION)
        if self.state.settled:
            self._waiters.wake(END)

    # ---- the end ----

    async def _conclude(self) -> None:
        """Wait until all transfers are drained, then ask the consumer for the outcome."""
        patience = self._loop.call_later(self._timeout, self._give_up)
        try:
            await self._sender.drained()
            self.state.drained = True
            self._waiters.wake(DRAINED)
            if self.state.outcome is None or self.state.outcome.verdict is not Verdict.LOST:
                await self._say_end()
            patience.cancel()
            if self.state.outcome is None:
                await self._decided()
        except HixlError:
            pass  # the engine has ended, and leaks the memory that a driver still holds
        finally:
            patience.cancel()
            if self.state.outcome is None:  # the pool no longer waits
                self._give_up()
            self._finish()

    async def _say_end(self) -> None:
        assert self.ticket is not None
        name, message = service(self.ticket.pool), self.state.end(self.ticket.id, self._number)
        try:
            decision = parse_reply(await self.peer.request(name, message.body(), timeout=self._timeout))
            if decision is not None:
                self._change(self.state.decide, decision.outcome)
        except (PeerDownError, ClosedError) as error:
            self._on_lost(error)
        except (RemoteError, StreamError, InvalidArgumentError, ProtocolError) as error:
            reason = f"the consumer did not accept the end of the stream: {error}"
            self._change(self.state.decide, Outcome(Verdict.ABORTED, reason))
        except (TimeoutError, HixlError):
            self._give_up()

    async def _decided(self) -> None:
        """Wait until all senders have ended, for which the consumer sets the time limits; it must be heard meanwhile."""
        assert self.ticket is not None
        lease = Lease(self._loop, self.ticket.lease / 1000, lambda: self.peer.heard_at, self._give_up)
        lease.begin()
        try:
            while self.state.outcome is None:
                await self._waiters.wait(DECISION)
        finally:
            lease.end()

    def _say_over(self, reason: str) -> None:
        """Tell the consumer that nothing will be sent."""
        assert self.ticket is not None
        with suppress(HixlError):
            self.peer.post(service(self.ticket.pool), End(self.ticket.id, self._number, False, reason).body())

    def _give_up(self) -> None:
        what = "the consumer did not decide the end" if self.state.drained else "the transfers were not drained"
        self._change(self.state.give_up, f"{what} within {self._timeout:g} s")

    def _finish(self) -> None:
        self.peer.remove_lost_callback(self._on_lost)
        if self._interval is not None:
            self.peer.end_heartbeats(self._interval)
            self._interval = None
        self._streams.forget_outgoing(self)
        self.state.drained = True
        self.state.conclude_all()
        self._waiters.wake(DRAINED)
        self._advance()


def _described(shard: Shard) -> str:
    return f"shard (rank {shard.rank} of {shard.ranks}, {len(shard.layers)} layers)"
