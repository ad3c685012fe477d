"""The messages between the two sides of a stream.  Pure, and the only module that knows their encoding.

::

    producer                                            consumer
    Open  {id, digest, layout, pool}     request ->   accepts the ticket, once
                                            <- post   Abort {id, reason}: gives up
    End   {id, complete, reason}         request ->   replies with the Outcome

The consumer decides the outcome: only it declares a stream with all layers *finished*, and its `Abort` is final.  `End` is sent
when the producer can no longer touch the consumer's blocks; it is the last message, and it acknowledges an `Abort`.  Layers do
not travel as messages: the driver stores the stream's generation into the word of each layer after its data.

A ticket reaches the producer over channels that this package does not control.  Therefore `Open` carries a digest of the ticket
as the producer read it, and the consumer compares it with the ticket that it issued: only granted blocks are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..control import printable
from ..errors import (
    HixlError,
    InvalidArgumentError,
    LayoutMismatchError,
    PeerLostError,
    ProtocolError,
    StreamAbortedError,
    TicketError,
    TransferTimeoutError,
)

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = [
    "POOL_BLOCKS",
    "REGION_BYTES",
    "WORD",
    "Abort",
    "End",
    "Open",
    "Outcome",
    "Ticket",
    "Verdict",
    "check_reason",
    "parse",
    "service",
]

VERSION = 2
#: Bytes of a layer's signal word.
WORD = 8
#: Longer reasons are cut, so that no message outgrows the control connection's frames.
REASON_CHARACTERS = 400
#: Generations are below this, so that every JSON reader keeps them exactly.
GENERATIONS = 1 << 53
#: Pools have fewer blocks, and regions fewer bytes.
POOL_BLOCKS, REGION_BYTES = 1 << 31, 1 << 62


def service(pool: str) -> str:
    """Return the name under which the pool called `pool` serves its peers' messages."""
    return f"kv/{pool}"


def check_reason(reason: object) -> None:
    """Return if `reason` can be sent as the reason of an end.

    :raises InvalidArgumentError: if it is not a string.
    """
    if not isinstance(reason, str):
        raise InvalidArgumentError(f"reason must be a string, not {reason!r}")


class Verdict(Enum):
    """The way in which a stream ended."""

    #: All layers have landed.
    FINISHED = "finished"
    #: One of the two sides gave up.
    ABORTED = "aborted"
    #: A time limit passed: between two layers, of the whole stream, or of its end.
    TIMEOUT = "timeout"
    #: The peer was lost.
    LOST = "lost"
    #: The two sides' layouts differ.
    REFUSED = "refused"
    #: The producer's ticket differs from the one that was issued.
    INVALID_TICKET = "invalid-ticket"
    #: The stream ended before it was open on this side, so that nothing was written.
    VOID = "void"


_ERRORS: dict[Verdict, type[HixlError]] = {
    Verdict.ABORTED: StreamAbortedError,
    Verdict.TIMEOUT: TransferTimeoutError,
    Verdict.LOST: PeerLostError,
    Verdict.REFUSED: LayoutMismatchError,
    Verdict.INVALID_TICKET: TicketError,
    Verdict.VOID: TicketError,
}


class Outcome(NamedTuple):
    """The end of a stream, as one side sees it."""

    #: The way in which the stream ended.
    verdict: Verdict
    #: An explanation for people; empty if the stream finished.
    reason: str = ""

    def error(self, peer: Peer | None = None) -> HixlError | None:
        """Return a new exception for this outcome, or None if it is *finished*.

        :param peer: the other side, which the exception names.
        """
        if self.verdict is Verdict.FINISHED:
            return None
        error = _ERRORS[self.verdict](self.reason, peer=None if peer is None else peer.name)
        if isinstance(error, PeerLostError) and peer is not None:
            error.confirmed_dead = peer.confirmed_dead
        return error

    def body(self) -> dict[str, Any]:
        """Return the reply to `End`, which has only two outcomes; the reason says more."""
        finished = self.verdict is Verdict.FINISHED
        return {"outcome": "finished" if finished else "aborted", "reason": self.reason[:REASON_CHARACTERS]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Outcome:
        """Parse the reply to `End`.

        :param body: the body of the reply.
        :return: the outcome.
        :raises ProtocolError: if it is malformed.
        """
        word = _field(body, "outcome", str)
        if word not in ("finished", "aborted"):
            raise ProtocolError(f"a stream's outcome is 'finished' or 'aborted', not {word[:20]!r}")
        return cls(Verdict(word), _reason(body))


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill certain blocks of one pool of one incarnation of one engine, once.

    ``blocks.ticket()`` returns it as a dict.
    """

    #: A random name of the ticket, and of its stream.
    id: str
    #: The address at which the consumer's engine listens, ``host:port``.
    address: str
    #: The name of the consumer's engine.
    engine: str
    #: The incarnation of the consumer's engine.
    incarnation: str
    #: The name of the consumer's pool, and of the region with its blocks.
    pool: str
    #: The name of the region with the signal words of the pool.
    signals: str
    #: The size of the consumer's pool in blocks.
    pool_blocks: int
    #: The number of layers of the consumer's layout.
    layers: int
    #: The block ids, in the order of the tokens.
    blocks: tuple[int, ...]
    #: The index of the stream's row of words in the region `signals`.
    slot: int
    #: The value that a layer's word has once the layer has landed.
    generation: int
    #: The fingerprint of the consumer's layout.
    layout: str

    def body(self) -> dict[str, Any]:
        """Return the ticket as a JSON-safe dict."""
        body: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"version": VERSION, **body, "blocks": list(self.blocks)}

    def digest(self) -> str:
        """Return 32 hexadecimal digits that change with any field.

        They are the first 128 bits of the SHA-256 of the body as JSON in ASCII, with sorted keys and without spaces.
        """
        text = json.dumps(self.body(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @classmethod
    def parse(cls, body: Any) -> Ticket:
        """Parse the dict of a ticket.

        :param body: the dict that ``blocks.ticket()`` returned; it may have passed through JSON.
        :return: the ticket.
        :raises TicketError: if it is malformed, or of another version of the protocol.
        """
        try:
            if not isinstance(body, Mapping):
                raise ProtocolError("a ticket is a dict")
            if _field(body, "version", int) != VERSION:
                raise ProtocolError(f"its version is not {VERSION}, which this package supports")
            if unknown := body.keys() - _TICKET_FIELDS:
                raise ProtocolError(f"a ticket has no field {min(map(repr, unknown))[:40]}")
            ticket = cls(
                id=_field(body, "id", str),
                address=_field(body, "address", str),
                engine=_field(body, "engine", str),
                incarnation=_field(body, "incarnation", str),
                pool=_field(body, "pool", str),
                signals=_field(body, "signals", str),
                pool_blocks=_field(body, "pool_blocks", int),
                layers=_field(body, "layers", int),
                blocks=tuple(_field(body, "blocks", list)),
                slot=_field(body, "slot", int),
                generation=_field(body, "generation", int),
                layout=_field(body, "layout", str),
            )
            ticket._check()
        except ProtocolError as error:
            raise TicketError(f"this is not a valid ticket: {error}") from None
        return ticket

    def _check(self) -> None:
        # The number of blocks comes first, because other fields are checked against it.  No message contains a number that
        # Python may refuse to print.
        if not 0 < self.pool_blocks < POOL_BLOCKS:
            raise ProtocolError("'pool_blocks' is out of range")
        if not self.blocks or any(type(block) is not int for block in self.blocks):
            raise ProtocolError("'blocks' must be a list of block ids")
        if min(self.blocks) < 0 or max(self.blocks) >= self.pool_blocks or len(set(self.blocks)) < len(self.blocks):
            raise ProtocolError(f"'blocks' must be different numbers below {self.pool_blocks}")
        if self.layers < 1 or self.pool_blocks * self.layers * WORD >= REGION_BYTES:
            raise ProtocolError("'layers' is out of range")
        if not 0 <= self.slot < self.pool_blocks or not 0 < self.generation < GENERATIONS:
            raise ProtocolError("'slot' or 'generation' is out of range")


_TICKET_FIELDS = {"version", *Ticket.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Open:
    """The producer's request to use a ticket."""

    id: str
    digest: str
    pool: str
    layout: dict[str, Any]

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "open", "id": self.id, "digest": self.digest, "pool": self.pool, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class End:
    """The producer's request to end a stream, none of whose transfers can touch the consumer's blocks any more."""

    id: str
    complete: bool
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "end", "id": self.id, "complete": self.complete, "reason": self.reason[:REASON_CHARACTERS]}


@dataclass(frozen=True, slots=True)
class Abort:
    """The consumer's message that the producer must stop, and send `End` when its transfers have drained."""

    id: str
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "abort", "id": self.id, "reason": self.reason[:REASON_CHARACTERS]}


def parse(body: Mapping[str, Any]) -> Open | End | Abort:
    """Parse a message.

    :raises ProtocolError: if it is malformed.
    """
    say = _field(body, "say", str)
    if say == "open":
        digest = _field(body, "digest", str)
        return Open(_field(body, "id", str), digest, _field(body, "pool", str), _field(body, "layout", dict))
    if say == "end":
        return End(_field(body, "id", str), _field(body, "complete", bool), _reason(body))
    if say == "abort":
        return Abort(_field(body, "id", str), _reason(body))
    raise ProtocolError(f"a KV pool does not understand the message {say[:20]!r}")


_Kind = TypeVar("_Kind")


def _field(body: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    value = body.get(name)
    if type(value) is not kind:  # isinstance would take True for a number
        raise ProtocolError(f"{name!r} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _reason(body: Mapping[str, Any]) -> str:
    return printable(_field(body, "reason", str), REASON_CHARACTERS)
