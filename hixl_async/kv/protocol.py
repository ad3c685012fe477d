"""What the two sides of a stream say to each other.  Pure, and the only place that knows the form on the wire.

::

    producer                                            consumer
    Open  {id, generation, layout, pool}   request ->   accepts the ticket, once
                                              <- post   Abort {id, reason}: gives up
    End   {id, complete, reason}           request ->   answers Outcome: finished or aborted

The consumer is the arbiter: it alone turns "all layers are there" into *finished*, and its `Abort` is final.  `End` is
sent when nothing of the producer's can touch the consumer's blocks any more; it is the last word, and the
acknowledgement of an `Abort`.  Layers do not travel as messages: the driver stores the stream's generation into the
word of each layer after its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
    from .. import Peer

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

VERSION = 1
#: Bytes of a layer's signal word.
WORD = 8
#: Reasons are for people; longer ones are cut, so that no message outgrows the control connection's frames.
REASON_CHARACTERS = 400
#: Signal values fit into what every JSON reader keeps exactly.
GENERATIONS = 1 << 53
#: No pool has so many blocks, and no region so many bytes.
POOL_BLOCKS, REGION_BYTES = 1 << 31, 1 << 62


def service(pool: str) -> str:
    """The name under which the pool called `pool` serves its peers' messages."""
    return f"kv/{pool}"


def check_reason(reason: object) -> None:
    """Returns if it can be sent as the reason of an end.

    :raises InvalidArgumentError: if it is no string.
    """
    if not isinstance(reason, str):
        raise InvalidArgumentError(f"reason must be a string, not {reason!r}")


class Verdict(Enum):
    """How a stream ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    TIMEOUT = "timeout"
    LOST = "lost"
    #: The layouts of the two sides differ.
    REFUSED = "refused"
    #: It was given up before it was open, so nothing was written.
    VOID = "void"


_ERRORS: dict[Verdict, type[HixlError]] = {
    Verdict.ABORTED: StreamAbortedError,
    Verdict.TIMEOUT: TransferTimeoutError,
    Verdict.LOST: PeerLostError,
    Verdict.REFUSED: LayoutMismatchError,
    Verdict.VOID: TicketError,
}


class Outcome(NamedTuple):
    """The one end of a stream, as one side sees it."""

    verdict: Verdict
    reason: str = ""

    def error(self, peer: Peer | None = None) -> HixlError | None:
        """A fresh exception for this outcome, or None if it is *finished*."""
        if self.verdict is Verdict.FINISHED:
            return None
        error = _ERRORS[self.verdict](self.reason, peer=None if peer is None else peer.name)
        if isinstance(error, PeerLostError) and peer is not None:
            error.confirmed_dead = peer.confirmed_dead
        return error

    def body(self) -> dict[str, Any]:
        """The answer to `End`.  The other side only learns whether the stream finished; why not is in the reason."""
        finished = self.verdict is Verdict.FINISHED
        return {"outcome": "finished" if finished else "aborted", "reason": self.reason[:REASON_CHARACTERS]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Outcome:
        """Reads the answer to `End`.

        :raises ProtocolError: if it is malformed.
        """
        word = _field(body, "outcome", str)
        if word not in ("finished", "aborted"):
            raise ProtocolError(f"a stream's outcome is 'finished' or 'aborted', not {word[:20]!r}")
        return cls(Verdict(word), _reason(body))


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill certain blocks of one pool of one incarnation of one engine, once."""

    id: str
    address: str
    engine: str
    incarnation: str
    pool: str
    signals: str
    pool_blocks: int
    layers: int
    blocks: tuple[int, ...]
    slot: int
    generation: int
    layout: str

    def body(self) -> dict[str, Any]:
        """The ticket as a JSON-safe dict."""
        body: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"version": VERSION, **body, "blocks": list(self.blocks)}

    @classmethod
    def parse(cls, body: Any) -> Ticket:
        """Reads a ticket that came from somewhere.

        :raises TicketError: if it is malformed, or of another version of the protocol.
        """
        try:
            if not isinstance(body, Mapping):
                raise ProtocolError("a ticket is a dict")
            if _field(body, "version", int) != VERSION:
                raise ProtocolError(f"its version is not the {VERSION} that this package speaks")
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
            raise TicketError(f"this is no valid ticket: {error}") from None
        return ticket

    def _check(self) -> None:
        # First, for the others are measured by it; and no message shows a number that Python may refuse to print.
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


@dataclass(frozen=True, slots=True)
class Open:
    """Producer to consumer, request: this ticket is used now."""

    id: str
    generation: int
    pool: str
    layout: dict[str, Any]

    def body(self) -> dict[str, Any]:
        return {"say": "open", "id": self.id, "generation": self.generation, "pool": self.pool, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class End:
    """Producer to consumer, request: nothing of mine touches your blocks any more, and all layers landed, or not."""

    id: str
    complete: bool
    reason: str

    def body(self) -> dict[str, Any]:
        return {"say": "end", "id": self.id, "complete": self.complete, "reason": self.reason[:REASON_CHARACTERS]}


@dataclass(frozen=True, slots=True)
class Abort:
    """Consumer to producer, post: stop, and say `End` as soon as it is true."""

    id: str
    reason: str

    def body(self) -> dict[str, Any]:
        return {"say": "abort", "id": self.id, "reason": self.reason[:REASON_CHARACTERS]}


def parse(body: Mapping[str, Any]) -> Open | End | Abort:
    """Reads a message.

    :raises ProtocolError: if it is malformed.
    """
    say = _field(body, "say", str)
    if say == "open":
        generation = _field(body, "generation", int)
        return Open(_field(body, "id", str), generation, _field(body, "pool", str), _field(body, "layout", dict))
    if say == "end":
        return End(_field(body, "id", str), _field(body, "complete", bool), _reason(body))
    if say == "abort":
        return Abort(_field(body, "id", str), _reason(body))
    raise ProtocolError(f"a KV pool does not understand the message {say[:20]!r}")


_Kind = TypeVar("_Kind")


def _field(body: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    value = body.get(name)
    if type(value) is not kind:  # not isinstance: True is no number here
        raise ProtocolError(f"{name!r} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _reason(body: Mapping[str, Any]) -> str:
    return _field(body, "reason", str)[:REASON_CHARACTERS]
