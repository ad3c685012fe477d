"""The reader's end of offers: from the request for the owners' blocks until no read can write the reader's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import (
    HixlError,
    InvalidArgumentError,
    LayoutMismatchError,
    PeerDownError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TicketError,
    WaitTimeoutError,
)
from .arrivals import ANY_LAYER, END, FENCE, Arrivals
from .context import PoolContext
from .description import differences
from .fields import field
from .lease import BEATS, Lease
from .loan import Loan
from .outcome import Outcome, Verdict
from .protocol import Decision, End, Open, Published, service
from .reading import Chunk, Claim, Reading
from .reshard import Share
from .states import FINISHED, ConsumerState
from .target import Target
from .ticket import Slice, Ticket
from .words import WORD

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["Reader", "Source"]


class Source(NamedTuple):
    """The owner of blocks that are to be read."""

    peer: Peer
    ticket: Ticket
    #: What is read from it, by layer.
    shares: dict[int, tuple[Share, ...]]


class ReadStreams(Protocol):
    """The reads of a pool that its peers' messages can find."""

    def add_reader(self, reader: Reader, number: int) -> int: ...
    def forget_reader(self, number: int) -> None: ...
    def on_read(self, slices: Sequence[Slice]) -> None: ...
    def known(self, peer: Peer, ticket: Ticket) -> Target | None: ...
    async def learn(self, peer: Peer, ticket: Ticket, reply: dict[str, Any]) -> Target: ...


class _Link:
    """One owner, as its reader knows it."""

    __slots__ = (
        "asked",
        "early",
        "finished",
        "lease",
        "name",
        "news_at",
        "on_lost",
        "open",
        "opening",
        "parted",
        "reading",
        "source",
    )

    def __init__(self, source: Source, reading: Reading, now: float, on_lost: Callable[[HixlError], None]) -> None:
        self.source = source
        self.reading = reading
        self.on_lost = on_lost
        self.name = 0  # the number by which the owner knows this side
        self.news_at = now
        self.early: list[Published] = []  # which arrived before the reply to the opening had been read
        self.asked = False  # the owner may know this side
        self.opening: asyncio.Task[None]
        self.open = False
        self.finished: bytes | None = None  # the payload of the owner's end
        self.parted = False
        self.lease: Lease | None = None


class Reader(Arrivals):
    """The reader's end of one stream, whose blocks are filled by reads of this side.

    :param context: the context of the reader's pool.
    :param loans: the blocks to be filled, of each group.
    :param slices: those among their blocks that are filled.
    :param sources: the owners, and what is read from each.
    :param timeout: seconds after which the stream fails, or None.
    :param streams: the registry, which knows the stream until no more messages of it can arrive.
    """

    def __init__(
        self,
        context: PoolContext,
        loans: Sequence[Loan],
        slices: Sequence[Slice],
        sources: Sequence[Source],
        timeout: float | None,
        streams: ReadStreams,
    ) -> None:
        owed: list[Collection[int]] = [source.shares for source in sources]
        super().__init__(context, ConsumerState(tuple(context.groups), owed), slices)
        self._loop = context.loop
        self._loans = loans
        self._streams = streams
        self._failure: HixlError | None = None  # of an opening
        self._over = self._released = False  # True once the outcome, or the fence, has been acted on
        self._parting = 0  # from so many owners
        self._links = [self._link(number, source) for number, source in enumerate(sources)]
        for loan in loans:
            loan.hold()
        self._timeout_timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            missed = Outcome(Verdict.TIMEOUT, f"the stream did not finish within its timeout of {timeout:g} s")
            self._timeout_timer = self._loop.call_later(timeout, self._end_by, missed)
        for number, link in enumerate(self._links):
            link.name = streams.add_reader(self, number)
            link.source.peer.add_lost_callback(link.on_lost)
            link.opening = context.spawn(self._open(number, link))

    def _link(self, number: int, source: Source) -> _Link:
        reading = Reading(
            self._context,
            self._slices,
            partial(self._on_read, number),
            partial(self._on_failed, number),
            partial(self._on_expired, source.peer),
        )
        return _Link(source, reading, self._loop.time(), partial(self._on_lost, number))

    # ---- calls of the program ----

    def ticket_body(self) -> dict[str, Any]:
        raise TicketError("this stream reads blocks by the tickets of their owners, and has none itself")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        super().raise_failure()

    def _lost_peer(self) -> Peer | None:
        peers = [link.source.peer for link in self._links]
        return next((peer for peer in peers if peer.error is not None), peers[0] if peers else None)

    async def ended(self) -> None:
        while not self.state.ended or self._parting:
            await self.waiters.wait(END)

    # ---- opening ----

    async def _open(self, number: int, link: _Link) -> None:
        """Ask an owner for its blocks, and read what it has published."""
        peer, ticket = link.source.peer, link.source.ticket
        lease = ticket.lease / 1000
        try:
            self.state.open(number)
            target = self._streams.known(peer, ticket)
            link.asked = True
            peer.begin_heartbeats(lease / BEATS)
            async with asyncio.timeout(lease):
                reply = await self._ask(link, target is not None)
                if target is None:
                    target = await self._streams.learn(peer, ticket, reply)
            self._compare(target)
            published = Published.parse(field(reply, "published", dict))
            link.reading.begin(self._claim(link, target, reply))
        except Exception as error:
            late = isinstance(error, TimeoutError) and not isinstance(error, HixlError)
            text = f"the owner's blocks could not be reached within {lease:g} s"
            self._fail(number, WaitTimeoutError(text, peer=peer.name) if late else error)
            return
        link.open = True
        link.lease = Lease(
            self._loop, lease, lambda: max(peer.heard_at, link.news_at), partial(self._on_silence, lease)
        )
        link.lease.begin()
        early, link.early = link.early, []
        for message in (published, *early):
            self._take(number, link, message)
        self._settle()

    async def _ask(self, link: _Link, known: bool) -> dict[str, Any]:
        context, ticket = self._context, link.source.ticket
        cache = None if known else (context.shard, context.described_groups)
        message = Open(ticket.id, ticket.digest(), context.name, link.name, cache)
        try:
            return await link.source.peer.request(service(ticket.pool), message.body(), timeout=ticket.lease / 1000)
        except InvalidArgumentError as error:
            raise TicketError(f"the owner has no pool {ticket.pool!r} any more: {error}") from error

    def _compare(self, target: Target) -> None:
        """Return if the caches have the same groups.

        :raises LayoutMismatchError: if they differ.
        """
        theirs, ours = [placed.view.group for placed in target.placed], [view.group for view in self._context.views]
        if found := differences(theirs, ours):
            raise LayoutMismatchError(f"the KV caches of owner and reader differ: {'; '.join(found)}")

    @staticmethod
    def _claim(link: _Link, target: Target, reply: Mapping[str, Any]) -> Claim:
        pin, value = field(reply, "pin", int), field(reply, "value", int)
        if not 0 <= pin < target.words.size // WORD:
            raise ProtocolError(f"the owner names pin {pin}, and has fewer")
        source = link.source
        return Claim(target, source.ticket.slices, source.shares, target.words[pin * WORD : (pin + 1) * WORD], value)

    def _fail(self, number: int, error: Exception) -> None:
        """End the stream, because an owner could not be asked, or is lost."""
        lost = isinstance(error, PeerLostError | PeerDownError)
        if self.state.outcome is None and not any(link.open for link in self._links):
            # Nothing was written.
            name = self._links[number].source.peer.name
            self._failure = error if isinstance(error, HixlError) else ProtocolError(f"the reply: {error}", peer=name)
            verdict = Verdict.REFUSED if isinstance(error, LayoutMismatchError) else Verdict.VOID
            self.state.stop(Outcome(verdict, str(error)))
        elif lost:
            self.state.lose(number, str(error), dead=False)
        else:
            self.state.stop(Outcome(Verdict.ABORTED, f"an owner did not let its blocks be read: {error}"))
        self._settle()

    # ---- messages of the owners ----

    def on_published(self, number: int, peer: Peer, message: Published) -> None:
        """Read what an owner has published.

        :raises TicketError: if the message is not of this stream.
        """
        link = self._links[number]
        if peer is not link.source.peer or message.id != link.source.ticket.id:
            raise TicketError("this stream belongs to another peer")
        if link.open:
            self._take(number, link, message)
            self._settle()
        else:
            link.early.append(message)

    def _take(self, number: int, link: _Link, message: Published) -> None:
        link.news_at = self._loop.time()
        if message.payload is not None:
            link.finished = message.payload
        link.reading.add(message)
        self._end_if_read(number, link)

    def on_decision(self, number: int, peer: Peer, message: Decision) -> None:
        """Handle the end of an offer by its owner."""
        link = self._links[number]
        if peer is link.source.peer and message.id == link.source.ticket.id:
            # The owner may have given this reader up alone, which its pin says.
            link.reading.check(partial(self._end_by, Outcome(Verdict.ABORTED, message.reason)))

    # ---- events ----

    def _on_read(self, number: int, chunks: Sequence[Chunk]) -> None:
        link, groups = self._links[number], self._context.groups
        news = [
            chunk.layer
            for chunk in chunks
            if self.state.land(
                number, chunk.layer, chunk.last - self._slices[groups[chunk.layer]].first, chunk.complete
            )
        ]
        if news:
            link.news_at = self._loop.time()
            self.waiters.wake(*news, ANY_LAYER)
        self._end_if_read(number, link)
        self._settle()

    def _end_if_read(self, number: int, link: _Link) -> None:
        """End the part of an owner that has finished, and of which all was read."""
        sender = self.state.senders[number]
        if link.finished is not None and sender.delivered and not sender.ended:
            self.state.end(number, True, "", link.finished)
            self._part_from(number, finished=True)

    def _on_failed(self, number: int, reason: str, cause: BaseException | None) -> None:
        if isinstance(cause, PeerLostError | PeerDownError):
            self._fail(number, cause)
        elif isinstance(cause, StaleRegionError):
            self._end_by(Outcome(Verdict.ABORTED, f"the owner closed its pool: {cause}"))
        else:
            self._end_by(Outcome(Verdict.ABORTED, reason))

    def _on_expired(self, peer: Peer) -> None:
        self._end_by(
            Outcome(
                Verdict.EXPIRED,
                f"peer {peer.name!r} did not keep its blocks until they were read, because it had heard nothing for too long",
            )
        )

    def _on_silence(self, lease: float) -> None:
        self._end_by(Outcome(Verdict.TIMEOUT, f"the owner was silent for {lease:g} s, and its lease has expired"))

    def _on_lost(self, number: int, error: HixlError) -> None:
        self._fail(number, error)

    def _look(self) -> None:
        pass  # every read reports its landing

    def _settle(self) -> None:
        state = self.state
        if state.outcome is not None and not self._over:
            self._over = True
            if self._timeout_timer is not None:
                self._timeout_timer.cancel()
            self.waiters.wake_all()
            for number in range(len(self._links)):
                self._part_from(number, finished=state.outcome == FINISHED)
        if state.fenced and self._over and not self._released:
            self._released = True
            self._streams.on_read(self._slices)
            for loan in self._loans:
                loan.unhold()
            self.waiters.wake(FENCE)

    def _part_from(self, number: int, *, finished: bool) -> None:
        """Read no more from an owner, and tell it so; idempotent."""
        link = self._links[number]
        if not link.parted:
            link.parted = True
            self._parting += 1
            link.opening.cancel()  # it may wait for regions that the owner does not export any more
            link.reading.stop()
            if link.lease is not None:
                link.lease.end()
            self._context.spawn(self._part(number, link, finished))

    async def _part(self, number: int, link: _Link, finished: bool) -> None:
        peer, ticket = link.source.peer, link.source.ticket
        reason = "" if self.state.outcome is None else self.state.outcome.reason
        try:
            await link.reading.drained()
            if not self.state.senders[number].ended:
                self.state.lose(number, reason, dead=False)
            self.state.fence(number)
            self._settle()
            if link.asked:
                with suppress(HixlError):
                    end = End(ticket.id, link.name, finished, reason)
                    await peer.request(service(ticket.pool), end.body(), timeout=ticket.lease / 1000)
        except HixlError:
            pass  # the engine has ended, and leaks the memory that a driver still holds
        finally:
            if link.asked:
                peer.end_heartbeats(ticket.lease / 1000 / BEATS)
            peer.remove_lost_callback(link.on_lost)
            self._streams.forget_reader(link.name)
            self._parting -= 1
            self.waiters.wake(END)
