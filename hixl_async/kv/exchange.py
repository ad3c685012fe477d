"""Where a pool's streams meet their peers' messages: tickets are issued here, and every message finds its stream."""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError, ProtocolError, TicketError
from .layout import Layout
from .protocol import Abort, Open, Ticket, parse, service
from .push import PushStream
from .stream import LayerStream

if TYPE_CHECKING:
    from .. import Peer
    from .blocks import Blocks
    from .pool import Pool

__all__ = ["Exchange"]


class Exchange:
    """The streams of one pool, into it and out of it, by the ids of their tickets.

    A stream is known here until its other side has nothing more to say, which may be longer than its blocks are lent.

    :param pool: the pool; its engine serves the messages from now on.
    :raises InvalidArgumentError: if the engine has a pool of that name.
    """

    def __init__(self, pool: Pool) -> None:
        self.incoming: dict[str, LayerStream] = {}
        self.outgoing: dict[str, PushStream] = {}
        self._pool = pool
        # Never the same twice in a slot, and not to be guessed; small enough for JSON readers that know doubles only.
        self._generations = itertools.count(1 + secrets.randbits(48))
        pool.engine.serve(service(pool.name), self._on_message)

    def close(self) -> None:
        """Serves no more messages."""
        self._pool.engine.unserve(service(self._pool.name))

    def grant(self, blocks: Blocks, words: memoryview, ttl: float, stall: float, timeout: float | None) -> LayerStream:
        """Issues the ticket for `blocks`, and makes their stream.

        :param words: the signal words of all blocks of the pool.
        """
        pool = self._pool
        # A block is in one reservation at a time, and with it the words that bear its number.
        slot, layers = blocks.ids[0], pool.layout.layers
        ticket = Ticket(
            id=secrets.token_urlsafe(16),
            address=pool.engine.address,
            engine=pool.engine.name,
            incarnation=pool.engine.incarnation,
            pool=pool.name,
            signals=f"{pool.name}.signals",
            pool_blocks=pool.blocks,
            layers=layers,
            blocks=blocks.ids,
            slot=slot,
            generation=next(self._generations),
            layout=pool.layout.fingerprint(),
        )
        window = words[slot * layers : (slot + 1) * layers]
        stream = self.incoming[ticket.id] = LayerStream(blocks, ticket, window, ttl, stall, timeout)
        return stream

    def add_outgoing(self, stream: PushStream) -> None:
        """Makes an opening stream known.

        :raises TicketError: if another stream of this pool uses its ticket.
        """
        if stream.ticket.id in self.outgoing:
            raise TicketError("this ticket is in use here by another stream")
        self.outgoing[stream.ticket.id] = stream

    def forget_outgoing(self, stream: PushStream) -> None:
        self.outgoing.pop(stream.ticket.id, None)

    def forget_incoming(self, stream: LayerStream) -> None:
        self.incoming.pop(stream.ticket.id, None)

    def _on_message(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        # Answers at once, so that the messages of one peer are handled in their order.
        message = parse(body)
        if isinstance(message, Abort):
            outgoing = self.outgoing.get(message.id)
            if outgoing is not None:
                outgoing._on_abort(peer, message)
            return {}
        incoming = self.incoming.get(message.id)
        if incoming is None:
            raise TicketError("this ticket is unknown here: it was used, has expired, or its blocks were given back")
        if isinstance(message, Open):
            incoming._open(peer, message, self._mismatch(message))
            return {}
        return incoming._end(peer, message).body()

    def _mismatch(self, message: Open) -> str | None:
        try:
            theirs = Layout.from_fields(message.layout)
        except InvalidArgumentError as error:
            raise ProtocolError(f"the producer's layout is malformed: {error}") from None
        ours = self._pool.layout
        fields = ours.mismatch(theirs)
        if not fields:
            return None
        listed = ", ".join(f"{field} ({getattr(ours, field)!r} and {getattr(theirs, field)!r})" for field in fields)
        return f"the KV layouts of consumer and producer differ in {listed}"
