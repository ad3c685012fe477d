"""The streams of a pool by the ids of their tickets: it issues tickets, and delivers messages and words to their streams."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import LayoutMismatchError, ProtocolError, TicketError
from .arrivals import Arrivals
from .consumer import Consumer, Times
from .context import PoolContext
from .description import describe, differences, fingerprint, parse_groups, parse_views
from .fields import field
from .lender import Lender
from .offering import Offering
from .pins import Pins, pins_name
from .producer import Producer
from .protocol import Decision, End, Published, parse, service
from .reader import Reader, Source
from .reshard import owed
from .shapes import Shard
from .target import Target, words_name
from .ticket import LEASES, Slice, Ticket
from .words import WordTable

if TYPE_CHECKING:
    from ..engine.peer import Peer
    from .loan import Loan

__all__ = ["StreamRegistry"]

#: The most divisions of a model over senders that are remembered.
LAYOUTS = 64
#: The numbers told to owners, to which all pools of this process are one peer.
READERS = itertools.count()


class StreamRegistry:
    """The streams of one pool, into it and out of it.

    A stream is known here until no more messages of its other side can arrive, which may be longer than its blocks are lent.

    :param context: the context of the pool; its engine serves the messages from now on.
    :param lender: the lender of the pool's blocks.
    :param words: the table of the pool's words; None if peers cannot write the pool.
    :param pins: the words of the pool's readers; None if peers cannot read the pool.
    :raises InvalidArgumentError: if the engine has a pool of that name.
    """

    def __init__(self, context: PoolContext, lender: Lender, words: WordTable | None, pins: Pins | None) -> None:
        self.incoming: dict[str, Consumer] = {}
        self.offers: dict[str, Offering] = {}
        self.readers: dict[int, tuple[Reader, int]] = {}  # with the number of the owner, by the numbers told to owners
        self.outgoing: dict[str, Producer] = {}
        #: Those of `outgoing`, and those whose ticket is awaited.
        self.producers: set[Producer] = set()
        self._context = context
        self._lender = lender
        self._words = words
        self._pins = pins
        self._views = describe(context.views)
        self._fingerprint = fingerprint(self._views)
        # Never the same twice in a row of words, and hard to guess.
        self._generations = itertools.count(1 + secrets.randbits(39))
        self._readers: dict[int, tuple[Consumer, int]] = {}  # the stream and the number of the sender, by row
        self._watched: Counter[Peer] = Counter()
        self._owed = lru_cache(LAYOUTS)(partial(owed, targets=context.views))
        self._targets: WeakKeyDictionary[Peer, dict[tuple[str, str], Target]] = WeakKeyDictionary()
        context.engine.serve(service(context.name), self._on_message)

    def close(self) -> None:
        """Stop serving messages."""
        self._context.engine.unserve(service(self._context.name))
        if self._words is not None:
            self._words.close()
        if self._pins is not None:
            self._pins.close()

    # ---- streams into the pool ----

    def grant(self, loans: Sequence[Loan], slices: Sequence[Slice], sources: Sequence[Shard], times: Times) -> Consumer:
        """Issue the ticket for some blocks, and make the consumer's end of its stream.

        :param loans: the loans of the blocks, of each group.
        :param slices: those among their blocks that are to be filled.
        :param sources: what each sender holds; empty if there is one.
        :raises LayoutMismatchError: if the sources do not hold all that the pool needs.
        :raises BusyError: if a block is being written or shared, or too few rows of words are free.
        """
        assert self._words is not None
        context, key = self._context, tuple(sources)
        layers: Sequence[Collection[int]] = self._owed(key) if key else [context.groups]
        blocks = [block for part in slices for block in part.blocks]
        self._lender.begin_writing(blocks)
        try:
            rows = self._words.take(max(1, len(sources)))
        except BaseException:
            self._lender.end_writing(blocks)
            raise
        ticket = self._ticket("write", slices, key, rows, times)
        consumer = self.incoming[ticket.id] = Consumer(context, loans, ticket, layers, times, self)
        self._readers.update((row, (consumer, number)) for number, row in enumerate(rows))
        return consumer

    def _ticket(
        self, verb: str, slices: Sequence[Slice], sources: tuple[Shard, ...], rows: tuple[int, ...], times: Times
    ) -> Ticket:
        engine = self._context.engine
        return Ticket(
            id=secrets.token_urlsafe(16),
            address=engine.address,
            engine=engine.name,
            incarnation=engine.incarnation,
            pool=self._context.name,
            views=self._fingerprint,
            slices=tuple(slices),
            sources=sources,
            rows=rows,
            generation=next(self._generations),
            lease=min(max(1, round(1000 * times.lease)), LEASES - 1),
            verb=verb,
        )

    def pull(
        self, loans: Sequence[Loan], slices: Sequence[Slice], sources: Sequence[Source], timeout: float | None
    ) -> Reader:
        """Read blocks that peers offer into some of this pool's.

        :raises BusyError: if a block is being written or shared.
        """
        self._lender.begin_writing([block for part in slices for block in part.blocks])
        return Reader(self._context, loans, slices, sources, timeout, self)

    def add_reader(self, reader: Reader, number: int) -> int:
        """Return a number by which an owner can name a reader."""
        name = next(READERS)
        self.readers[name] = reader, number
        return name

    def forget_reader(self, number: int) -> None:
        """Undo `add_reader`."""
        del self.readers[number]

    def on_read(self, slices: Sequence[Slice]) -> None:
        """Take note that no read can write these blocks any more."""
        self._lender.end_writing(block for part in slices for block in part.blocks)

    def arrivals(self) -> list[Arrivals]:
        """Return the streams into the pool of which messages can arrive."""
        return [*self.incoming.values(), *{reader for reader, _ in self.readers.values()}]

    def scan(self) -> None:
        """Hand the words that have changed to their streams."""
        if self._words is not None:
            for row, landings in self._words.landings().items():
                if row in self._readers:
                    consumer, number = self._readers[row]
                    consumer.on_landings(number, landings)

    def watch(self, peer: Peer) -> None:
        """Scan when the peer has stored a word, until as many calls of `unwatch`."""
        self._watched[peer] += 1
        if self._watched[peer] == 1:
            peer.add_signal_callback(self.scan)

    def unwatch(self, peer: Peer) -> None:
        """Undo one `watch`."""
        self._watched[peer] -= 1
        if not self._watched[peer]:
            del self._watched[peer]
            peer.remove_signal_callback(self.scan)

    def on_fenced(self, consumer: Consumer) -> None:
        """Take back what the stream's senders could write."""
        assert self._words is not None
        for row in consumer.ticket.rows:
            del self._readers[row]
        self._words.give(consumer.ticket.rows)
        self._lender.end_writing(block for part in consumer.ticket.slices for block in part.blocks)

    def forget_incoming(self, consumer: Consumer) -> None:
        """Forget a stream of which no more messages can arrive."""
        self.incoming.pop(consumer.ticket.id, None)

    # ---- streams out of the pool ----

    def offer(self, loans: Sequence[Loan], slices: Sequence[Slice], readers: int, times: Times) -> Offering:
        """Issue the ticket for blocks that peers may read.

        :raises BusyError: if a peer may be writing one of the blocks.
        """
        assert self._pins is not None
        self._lender.refuse_if_written([block for part in slices for block in part.blocks], "can be offered")
        ticket = self._ticket("read", slices, (self._context.shard,), (), times)
        self.offers[ticket.id] = offering = Offering(self._context, loans, ticket, readers, times, self._pins, self)
        return offering

    def forget_offer(self, offering: Offering) -> None:
        """Forget an offer that no reader needs."""
        self.offers.pop(offering.ticket.id, None)

    def add_producer(self, producer: Producer) -> None:
        """Add a stream that is being opened."""
        self.producers.add(producer)

    def add_outgoing(self, producer: Producer) -> None:
        """Add a stream whose ticket is known.

        :raises TicketError: if another stream of this pool uses its ticket.
        """
        assert producer.ticket is not None
        if producer.ticket.id in self.outgoing:
            raise TicketError("this ticket is in use here by another stream")
        self.outgoing[producer.ticket.id] = producer

    def forget_outgoing(self, producer: Producer) -> None:
        """Undo `add_producer` and `add_outgoing`; a stream that uses the same ticket stays."""
        self.producers.discard(producer)
        if producer.ticket is not None and self.outgoing.get(producer.ticket.id) is producer:
            del self.outgoing[producer.ticket.id]

    def known(self, peer: Peer, ticket: Ticket) -> Target | None:
        """Return the pool of a ticket as streams see it, if it is known here."""
        target = self._targets.get(peer, {}).get((ticket.pool, ticket.verb))
        return target if target is not None and target.fingerprint == ticket.views and target.alive else None

    async def learn(self, peer: Peer, ticket: Ticket, reply: dict[str, Any]) -> Target:
        """Return the pool of a ticket as streams see it.

        :param reply: the reply to `Open`, with the pool's views.
        :raises ProtocolError: if the reply is malformed.
        :raises HixlError: if the pool's regions cannot be imported.
        """
        description = field(reply, "views", list)
        if fingerprint(description) != ticket.views:
            raise ProtocolError(
                f"pool {ticket.pool!r} of peer {peer.name!r} described other views than its ticket names"
            )
        words = words_name(ticket.pool) if ticket.verb == "write" else pins_name(ticket.pool)
        target = await Target.find(peer, ticket.pool, parse_views(description), ticket.views, words)
        self._targets.setdefault(peer, {})[ticket.pool, ticket.verb] = target
        return target

    # ---- messages ----

    def _on_message(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        # The reply is immediate, so that the messages of one peer are handled in order.
        message = parse(body)
        if isinstance(message, Decision):
            outgoing = self.outgoing.get(message.id)
            if outgoing is not None:
                outgoing.on_decision(peer, message)
            for reader, number in list(self.readers.values()):
                reader.on_decision(number, peer, message)
            return {}
        if isinstance(message, Published):
            if message.sender not in self.readers:
                raise TicketError("this reader has ended")
            reader, number = self.readers[message.sender]
            reader.on_published(number, peer, message)
            return {}
        if message.id in self.offers:
            offering = self.offers[message.id]
            if isinstance(message, End):
                offering.on_end(peer, message)
                return {}
            reply = offering.on_open(peer, message)
            return reply if message.cache is None else {**reply, "views": self._views}
        incoming = self.incoming.get(message.id)
        if incoming is None:
            raise TicketError("this ticket is unknown here: it was used, has expired, or its blocks were given back")
        if isinstance(message, End):
            decision = incoming.on_end(peer, message)
            return {} if decision is None else decision.body()
        if message.cache is None:
            incoming.on_open(peer, message, None)
            return {}
        shard, groups = message.cache
        if (sources := incoming.ticket.sources) and shard not in sources:
            raise TicketError(f"rank {shard.rank} of {shard.ranks} is not a sender of this ticket")
        incoming.on_open(peer, message, self._mismatch(shard, groups, several=bool(sources)))
        return {"views": self._views}

    def _mismatch(self, shard: Shard, groups: list[Any], *, several: bool) -> str | None:
        """Return what keeps a sender from streaming to this pool, or None."""
        if groups != self._context.described_groups:
            found = differences(parse_groups(groups), [view.group for view in self._context.views])
            if found:
                return f"the KV caches of producer and consumer differ: {'; '.join(found)}"
        if not several:
            try:
                self._owed((shard,))
            except LayoutMismatchError as error:
                return str(error)
        return None
