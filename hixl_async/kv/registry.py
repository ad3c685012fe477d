"""The streams of a pool by the ids of their tickets: it issues tickets, and delivers messages to their streams."""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError, ProtocolError, TicketError
from .context import PoolContext
from .layout import Layout
from .lease import Lease
from .protocol import Abort, Open, Ticket, parse, service
from .push import Producer
from .stream import Consumer

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["StreamRegistry"]


class StreamRegistry:
    """The streams of one pool, into it and out of it.

    A stream is known here until no more messages of its other side can arrive, which may be longer than its blocks are lent.

    :param context: the context of the pool; its engine serves the messages from now on.
    :raises InvalidArgumentError: if the engine has a pool of that name.
    """

    def __init__(self, context: PoolContext) -> None:
        self.incoming: dict[str, Consumer] = {}
        self.outgoing: dict[str, Producer] = {}
        self._context = context
        # Never the same twice in a slot, and hard to guess; small enough for JSON readers that use doubles.
        self._generations = itertools.count(1 + secrets.randbits(48))
        context.engine.serve(service(context.name), self._on_message)

    def close(self) -> None:
        """Stop serving messages."""
        self._context.engine.unserve(service(self._context.name))

    def grant(self, lease: Lease, words: memoryview, ttl: float, stall: float, timeout: float | None) -> Consumer:
        """Issue the ticket for some blocks, and make the consumer's end of its stream.

        :param words: the signal words of all blocks of the pool.
        """
        context = self._context
        # A block is in one reservation at a time, and so is the row of words with its number.
        slot, layers = lease.ids[0], context.layout.layers
        ticket = Ticket(
            id=secrets.token_urlsafe(16),
            address=context.engine.address,
            engine=context.engine.name,
            incarnation=context.engine.incarnation,
            pool=context.name,
            signals=f"{context.name}.signals",
            pool_blocks=context.blocks,
            layers=layers,
            blocks=lease.ids,
            slot=slot,
            generation=next(self._generations),
            layout=context.layout.fingerprint(),
        )
        window = words[slot * layers : (slot + 1) * layers]
        consumer = Consumer(lease, ticket, window, ttl, stall, timeout, self._forget_incoming)
        self.incoming[ticket.id] = consumer
        return consumer

    def add_outgoing(self, producer: Producer) -> None:
        """Add a stream that is being opened.

        :raises TicketError: if another stream of this pool uses its ticket.
        """
        if producer.ticket.id in self.outgoing:
            raise TicketError("this ticket is in use here by another stream")
        self.outgoing[producer.ticket.id] = producer

    def forget_outgoing(self, producer: Producer) -> None:
        """Undo `add_outgoing`; no effect if another stream uses the ticket."""
        if self.outgoing.get(producer.ticket.id) is producer:
            del self.outgoing[producer.ticket.id]

    def _forget_incoming(self, consumer: Consumer) -> None:
        self.incoming.pop(consumer.ticket.id, None)

    def _on_message(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        # The reply is immediate, so that the messages of one peer are handled in order.
        message = parse(body)
        if isinstance(message, Abort):
            outgoing = self.outgoing.get(message.id)
            if outgoing is not None:
                outgoing.on_abort(peer, message)
            return {}
        incoming = self.incoming.get(message.id)
        if incoming is None:
            raise TicketError("this ticket is unknown here: it was used, has expired, or its blocks were given back")
        if isinstance(message, Open):
            incoming.on_open(peer, message, self._mismatch(message))
            return {}
        return incoming.on_end(peer, message).body()

    def _mismatch(self, message: Open) -> str | None:
        try:
            theirs = Layout.from_fields(message.layout)
        except InvalidArgumentError as error:
            raise ProtocolError(f"the producer's layout is malformed: {error}") from None
        ours = self._context.layout
        fields = ours.mismatch(theirs)
        if not fields:
            return None
        listed = ", ".join(f"{field} ({getattr(ours, field)!r} and {getattr(theirs, field)!r})" for field in fields)
        return f"the KV layouts of consumer and producer differ in {listed}"
