"""The messages between the two sides of a stream.  Pure, and the only module that knows their encoding.

::

    producer                                              consumer
    Open  {id, digest, pool, sender, cache}  request ->   accepts the ticket, once for each sender; replies with its views
                                             <- request   Decision {id, finished, reason}: all have ended, or it gives up
    End   {id, complete, reason, payload}    request ->   replies with the outcome, if it is decided

The consumer decides the outcome, one for all senders: only it declares a stream with all layers *finished*, and its decision is
final.  `End` is sent when the sender can no longer touch the consumer's blocks; it is its last message, and it acknowledges a
decision to give up.  Layers do not travel as messages: after the data of a layer the driver stores a word, which says how many
tokens of the layer have landed.

Where blocks are offered for reading, the roles are the other way round::

    reader                                                owner
    Open       {id, digest, pool, sender, cache} request -> accepts the ticket, once for each reader; replies with its views,
                                                            the reader's pin and its value, and what was published
                                        <- request   Published {id, sender, layers, payload}: more can be read, or all could
                                        <- request   Decision {id, finished, reason}: the owner gives up
    End        {id, complete, reason}            request -> needs the blocks no more

A pin is a word in the owner's memory, which keeps its value as long as the blocks stay as they are for this reader.  The reader
reads it after the data: if its value has changed, so may have the data.

A ticket reaches the other side over channels that this package does not control.  Therefore `Open` carries a digest of the
ticket as its user read it, and its issuer compares it with the ticket that it issued: only granted blocks are touched.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..control import printable
from ..errors import InvalidArgumentError, ProtocolError
from .fields import field, parse_shard, shard_body
from .outcome import Outcome, Verdict
from .shapes import Shard

__all__ = [
    "PAYLOAD_BYTES",
    "Decision",
    "End",
    "Open",
    "Published",
    "check_reason",
    "parse",
    "parse_reply",
    "payload_bytes",
    "service",
]

#: Longer reasons are cut, so that no message outgrows the control connection's frames.
REASON_CHARACTERS = 400
#: The most bytes that a sender can hand over with its end, so that the message fits into a frame.
PAYLOAD_BYTES = 32 << 10


def service(pool: str) -> str:
    """Return the name under which the pool called `pool` serves its peers' messages."""
    return f"kv/{pool}"


def check_reason(reason: object) -> None:
    """Return if `reason` can be sent as the reason of an end.

    :raises InvalidArgumentError: if it is not a string.
    """
    if not isinstance(reason, str):
        raise InvalidArgumentError(f"reason must be a string, not {reason!r}")


def payload_bytes(payload: object) -> bytes:
    """Return a payload as it can be sent with an end.

    :raises InvalidArgumentError: if it is not made of bytes, or too long.
    """
    if isinstance(payload, bytes | bytearray | memoryview) and len(found := bytes(payload)) <= PAYLOAD_BYTES:
        return found
    raise InvalidArgumentError(
        f"payload must be at most {PAYLOAD_BYTES} bytes; write larger data into a region, and send its place"
    )


@dataclass(frozen=True, slots=True)
class Open:
    """A sender's or a reader's request to use a ticket."""

    id: str
    digest: str
    #: Its pool, which serves the messages of the ticket's issuer.
    pool: str
    #: The number of the sender among those of the ticket; of a reader any number that its engine has not used before.
    sender: int
    #: What it holds, and the groups of its cache; None if it has the issuer's views already, and has compared them.
    cache: tuple[Shard, list[Any]] | None

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        cache = None if self.cache is None else [shard_body(self.cache[0]), self.cache[1]]
        return {
            "say": "open",
            "id": self.id,
            "digest": self.digest,
            "pool": self.pool,
            "sender": self.sender,
            "cache": cache,
        }


@dataclass(frozen=True, slots=True)
class End:
    """A sender's request to end its part of a stream, none of whose transfers can touch the consumer's blocks any more."""

    id: str
    #: The number of the sender, by which the consumer knows several of one peer.
    sender: int
    complete: bool
    reason: str
    payload: bytes = b""

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        reason, payload = self.reason[:REASON_CHARACTERS], b64encode(self.payload).decode()
        return {
            "say": "end",
            "id": self.id,
            "sender": self.sender,
            "complete": self.complete,
            "reason": reason,
            "payload": payload,
        }


@dataclass(frozen=True, slots=True)
class Published:
    """What a reader of an offer may read."""

    id: str
    #: The number of the reader.
    sender: int
    #: The position after the last token of layers that may be read, and 1 if no more tokens follow, else 0.
    layers: tuple[tuple[int, int, int], ...]
    #: The payload of the end, once the owner has finished the offer.
    payload: bytes | None

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        payload = None if self.payload is None else b64encode(self.payload).decode()
        return {
            "say": "published",
            "id": self.id,
            "sender": self.sender,
            "layers": [list(layer) for layer in self.layers],
            "payload": payload,
        }

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Published:
        """Parse the message.

        :raises ProtocolError: if it is malformed.
        """
        layers = field(body, "layers", list)
        if any(type(layer) is not list or [type(number) for number in layer] != [int] * 3 for layer in layers):
            raise ProtocolError("'layers' must be a list of a layer, a position, and 0 or 1 for each")
        payload = None if "payload" in body and body["payload"] is None else _payload(body)
        return cls(field(body, "id", str), field(body, "sender", int), tuple(map(tuple, layers)), payload)


@dataclass(frozen=True, slots=True)
class Decision:
    """The issuer's outcome.

    If it is not *finished*, the other side must stop, and send `End` when its transfers have drained.
    """

    id: str
    finished: bool
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "decision", "id": self.id, "finished": self.finished, "reason": self.reason[:REASON_CHARACTERS]}

    @property
    def outcome(self) -> Outcome:
        """The outcome at the sender, which has only two; the reason says more."""
        return Outcome(Verdict.FINISHED) if self.finished else Outcome(Verdict.ABORTED, self.reason)


def parse(body: Mapping[str, Any]) -> Open | End | Decision | Published:
    """Parse a message.

    :raises ProtocolError: if it is malformed.
    """
    say = field(body, "say", str)
    if say == "open":
        return Open(
            field(body, "id", str),
            field(body, "digest", str),
            field(body, "pool", str),
            field(body, "sender", int),
            _parse_cache(body),
        )
    if say == "end":
        complete, reason = field(body, "complete", bool), _reason(body)
        return End(field(body, "id", str), field(body, "sender", int), complete, reason, _payload(body))
    if say == "published":
        return Published.parse(body)
    if say == "decision":
        return Decision(field(body, "id", str), field(body, "finished", bool), _reason(body))
    raise ProtocolError(f"a KV pool does not understand the message {say[:20]!r}")


def _payload(body: Mapping[str, Any]) -> bytes:
    try:
        return b64decode(field(body, "payload", str), validate=True)
    except (Base64Error, ValueError) as error:
        raise ProtocolError(f"'payload' must be in base 64: {error}") from None


def parse_reply(body: Mapping[str, Any]) -> Decision | None:
    """Parse the reply to `End`: the consumer's outcome, or None if other senders have not ended yet.

    :raises ProtocolError: if it is malformed.
    """
    if not body:
        return None
    message = parse(body)
    if not isinstance(message, Decision):
        raise ProtocolError("the reply to the end of a stream must be a decision")
    return message


def _parse_cache(body: Mapping[str, Any]) -> tuple[Shard, list[Any]] | None:
    if "cache" in body and body["cache"] is None:
        return None
    cache = field(body, "cache", list)
    if len(cache) != 2 or not isinstance(cache[1], list):
        raise ProtocolError("'cache' must be null, or a list of a shard and a list of groups")
    return parse_shard(cache[0]), cache[1]


def _reason(body: Mapping[str, Any]) -> str:
    return printable(field(body, "reason", str), REASON_CHARACTERS)
