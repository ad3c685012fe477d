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

import hashlib
import json
import sys
import zlib
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..control import printable
from ..errors import (
    HixlError,
    InvalidArgumentError,
    LayoutMismatchError,
    LeaseExpiredError,
    PeerLostError,
    ProtocolError,
    StreamAbortedError,
    TicketError,
    TransferTimeoutError,
)
from .shapes import Shard

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = [
    "LAYER_TOKENS",
    "LEASES",
    "PAYLOAD_BYTES",
    "POOL_BLOCKS",
    "REGION_BYTES",
    "WORD",
    "Decision",
    "End",
    "Open",
    "Outcome",
    "Published",
    "Slice",
    "Ticket",
    "Verdict",
    "canonical",
    "check_reason",
    "field",
    "pack_ids",
    "pack_word",
    "parse",
    "parse_ids",
    "parse_reply",
    "parse_shard",
    "parse_word",
    "service",
    "shard_body",
]

VERSION = 4
#: Bytes of a word.
WORD = 8
#: Longer reasons are cut, so that no message outgrows the control connection's frames.
REASON_CHARACTERS = 400
#: The most bytes that a sender can hand over with its end, so that the message fits into a frame.
PAYLOAD_BYTES = 32 << 10
#: A word has, from its highest bits, the generation of its stream, the tokens that have landed, and whether these are all.
GENERATION_BITS, TOKEN_BITS = 40, 23
#: Streams have at most so many tokens of a layer.
LAYER_TOKENS = (1 << TOKEN_BITS) - 1
#: Pools have fewer blocks, and regions fewer bytes.
POOL_BLOCKS, REGION_BYTES = 1 << 31, 1 << 62
#: The most block ids in a slice of a ticket, groups and senders of a ticket, and rows of words of a pool.
SLICE_BLOCKS, GROUPS, SENDERS, ROWS = 1 << 20, 64, 1024, 1 << 31
#: Leases are shorter, in milliseconds: about 35 years.
LEASES = 1 << 40


def service(pool: str) -> str:
    """Return the name under which the pool called `pool` serves its peers' messages."""
    return f"kv/{pool}"


def check_reason(reason: object) -> None:
    """Return if `reason` can be sent as the reason of an end.

    :raises InvalidArgumentError: if it is not a string.
    """
    if not isinstance(reason, str):
        raise InvalidArgumentError(f"reason must be a string, not {reason!r}")


def pack_word(generation: int, tokens: int, complete: bool) -> int:
    """Return the word of a layer of which so many tokens have landed.

    :param generation: the generation of the stream's ticket.
    :param tokens: the number of tokens, from the first of the layer's slice.
    :param complete: True if no more will follow.
    """
    return generation << TOKEN_BITS + 1 | tokens << 1 | complete


def parse_word(word: int) -> tuple[int, int, bool]:
    """Return the generation, the tokens and the completeness that a word says; the reverse of `pack_word`."""
    return word >> TOKEN_BITS + 1, word >> 1 & LAYER_TOKENS, bool(word & 1)


def pack_ids(ids: Sequence[int]) -> str:
    """Return block ids as text: their differences as 32-bit little-endian integers, deflated, in base 64."""
    differences = array("i", [ids[0], *(after - before for before, after in pairwise(ids))])
    if sys.byteorder == "big":
        differences.byteswap()
    return b64encode(zlib.compress(differences.tobytes(), 1)).decode()


def parse_ids(text: str) -> tuple[int, ...]:
    """Return the block ids of a text; the reverse of `pack_ids`.

    :raises ProtocolError: if it is malformed, or has too many.
    """
    differences, deflated = array("i"), zlib.decompressobj()
    try:
        data = deflated.decompress(b64decode(text, validate=True), differences.itemsize * SLICE_BLOCKS)
        differences.frombytes(data)
    except (Base64Error, zlib.error, ValueError) as error:
        raise ProtocolError(f"'blocks' is not a packed list of block ids: {error}") from None
    if not deflated.eof or deflated.unused_data:
        raise ProtocolError(f"'blocks' is not a packed list of at most {SLICE_BLOCKS} block ids")
    if sys.byteorder == "big":
        differences.byteswap()
    return tuple(accumulate(differences))


class Verdict(Enum):
    """The way in which a stream ended."""

    #: All layers have landed, and all senders have ended.
    FINISHED = "finished"
    #: One of the two sides gave up.
    ABORTED = "aborted"
    #: A time limit passed: of the lease, of the whole stream, or of its end.
    TIMEOUT = "timeout"
    #: The peer was lost.
    LOST = "lost"
    #: The two sides' caches differ.
    REFUSED = "refused"
    #: The producer's ticket differs from the one that was issued.
    INVALID_TICKET = "invalid-ticket"
    #: The stream ended before it was open on this side, so that nothing was written.
    VOID = "void"
    #: The owner of offered blocks did not keep them until they were read.
    EXPIRED = "expired"


_ERRORS: dict[Verdict, type[HixlError]] = {
    Verdict.ABORTED: StreamAbortedError,
    Verdict.TIMEOUT: TransferTimeoutError,
    Verdict.LOST: PeerLostError,
    Verdict.REFUSED: LayoutMismatchError,
    Verdict.INVALID_TICKET: TicketError,
    Verdict.VOID: TicketError,
    Verdict.EXPIRED: LeaseExpiredError,
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


class Slice(NamedTuple):
    """The tokens of a sequence that a stream brings into blocks of one group."""

    #: The block ids, in the order of the tokens.
    blocks: tuple[int, ...]
    #: The position in the sequence of the first token of the first block.
    start: int
    #: The position of the first token that is brought.
    first: int
    #: The position after the last one.
    last: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill certain blocks of one pool of one incarnation of one engine, once, or to read them.

    ``stream.ticket()`` and ``offer.ticket()`` return it as a dict.
    """

    #: A random name of the ticket, and of its stream.
    id: str
    #: The address at which the consumer's engine listens, ``host:port``.
    address: str
    #: The name of the consumer's engine.
    engine: str
    #: The incarnation of the consumer's engine.
    incarnation: str
    #: The name of the consumer's pool.
    pool: str
    #: The fingerprint of the pool's views.
    views: str
    #: The blocks to be filled or read, and the tokens, of each group of the pool.
    slices: tuple[Slice, ...]
    #: What each sender holds; empty if there is one, which may be anyone that holds all.  In an offer: what the owner holds.
    sources: tuple[Shard, ...]
    #: The row of words of each sender in the pool's region of words; none in an offer.
    rows: tuple[int, ...]
    #: The number of this stream, which no other stream of the pool has; its words have it.
    generation: int
    #: The milliseconds within which the issuer has to hear of each peer that uses the ticket.
    lease: int
    #: ``"write"``, or ``"read"`` in an offer.
    verb: str = "write"

    def body(self) -> dict[str, Any]:
        """Return the ticket as a JSON-safe dict."""
        return self._body(pack_ids)

    def _body(self, pack: Callable[[Sequence[int]], Any]) -> dict[str, Any]:
        return {
            "version": VERSION,
            "id": self.id,
            "address": self.address,
            "engine": self.engine,
            "incarnation": self.incarnation,
            "pool": self.pool,
            "views": self.views,
            "slices": [[pack(part.blocks), part.start, part.first, part.last] for part in self.slices],
            "sources": [shard_body(shard) for shard in self.sources],
            "rows": list(self.rows),
            "generation": self.generation,
            "lease": self.lease,
            "verb": self.verb,
        }

    def digest(self) -> str:
        """Return 32 hexadecimal digits that change with any field.

        They are the first 128 bits of the SHA-256 of the body as JSON in ASCII, with sorted keys and without spaces, and with
        lists of block ids, because libraries deflate the same data to different bytes.
        """
        return hashlib.sha256(canonical(self._body(list))).hexdigest()[:32]

    @classmethod
    def parse(cls, body: Any) -> Ticket:
        """Parse the dict of a ticket.

        :param body: the dict that ``stream.ticket()`` returned; it may have passed through JSON.
        :return: the ticket.
        :raises TicketError: if it is malformed, or of another version of the protocol.
        """
        try:
            if not isinstance(body, Mapping):
                raise ProtocolError("a ticket is a dict")
            if field(body, "version", int) != VERSION:
                raise ProtocolError(f"its version is not {VERSION}, which this package supports")
            if unknown := body.keys() - _TICKET_FIELDS:
                raise ProtocolError(f"a ticket has no field {min(map(repr, unknown))[:40]}")
            ticket = cls(
                id=field(body, "id", str),
                address=field(body, "address", str),
                engine=field(body, "engine", str),
                incarnation=field(body, "incarnation", str),
                pool=field(body, "pool", str),
                views=field(body, "views", str),
                slices=tuple(_parse_slice(part) for part in _short(body, "slices", GROUPS)),
                sources=tuple(parse_shard(shard) for shard in _short(body, "sources", SENDERS)),
                rows=tuple(_short(body, "rows", SENDERS)),
                generation=field(body, "generation", int),
                lease=field(body, "lease", int),
                verb=field(body, "verb", str),
            )
            ticket._check()
        except ProtocolError as error:
            raise TicketError(f"this is not a valid ticket: {error}") from None
        return ticket

    def _check(self) -> None:
        # No message contains a number that Python may refuse to print.
        if not self.slices:
            raise ProtocolError("'slices' must not be empty")
        if self.verb not in ("read", "write"):
            raise ProtocolError("'verb' must be 'read' or 'write'")
        if self.verb == "read" and len(self.sources) != 1:
            raise ProtocolError("'sources' of an offer must have one entry")
        if len(self.rows) != (max(1, len(self.sources)) if self.verb == "write" else 0):
            raise ProtocolError("'rows' must have one row for each sender")
        if any(type(row) is not int or not 0 <= row < ROWS for row in self.rows) or len(set(self.rows)) < len(
            self.rows
        ):
            raise ProtocolError(f"'rows' must be different numbers below {ROWS}")
        if not 0 < self.generation < 1 << GENERATION_BITS:
            raise ProtocolError("'generation' is out of range")
        if not 0 < self.lease < LEASES:
            raise ProtocolError("'lease' is out of range")


_TICKET_FIELDS = {"version", *Ticket.__dataclass_fields__}


def _parse_slice(body: Any) -> Slice:
    """Parse a slice: its blocks, and three positions.

    :raises ProtocolError: if it is malformed.
    """
    if not isinstance(body, list) or [type(item) for item in body] != [str, int, int, int]:
        raise ProtocolError("'slices' must consist of lists of packed block ids and three numbers")
    part = Slice(parse_ids(body[0]), *body[1:])
    if not 0 <= part.start <= part.first < part.last < REGION_BYTES or part.tokens > LAYER_TOKENS:
        raise ProtocolError("'slices' has positions out of range")
    if not part.blocks or min(part.blocks) < 0 or max(part.blocks) >= POOL_BLOCKS:
        raise ProtocolError("'slices' has block ids out of range")
    if len(set(part.blocks)) < len(part.blocks):
        raise ProtocolError("'slices' names a block twice")
    return part


def shard_body(shard: Shard) -> list[Any]:
    """Return a shard as a JSON-safe list: rank, ranks, and the layers."""
    return [shard.rank, shard.ranks, list(shard.layers)]


def parse_shard(body: Any) -> Shard:
    """Parse a shard.

    :raises ProtocolError: if it is malformed.
    """
    if not isinstance(body, list) or [type(item) for item in body] != [int, int, list]:
        raise ProtocolError("a shard is a list of a rank, the ranks and a list of layers")
    rank, ranks, layers = body
    if any(type(layer) is not int or not 0 <= layer < REGION_BYTES for layer in layers) or not 0 <= rank < ranks < ROWS:
        raise ProtocolError("a shard has a number out of range")
    return Shard(rank, ranks, layers)


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


_Kind = TypeVar("_Kind")


def field(body: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """Return a field of a message.

    :raises ProtocolError: if it is missing, or of another type.
    """
    value = body.get(name)
    if type(value) is not kind:  # isinstance would take True for a number
        raise ProtocolError(f"{name!r} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _short(body: Mapping[str, Any], name: str, most: int) -> list[Any]:
    items = field(body, name, list)
    if len(items) > most:
        raise ProtocolError(f"{name!r} must have at most {most} items")
    return items


def _parse_cache(body: Mapping[str, Any]) -> tuple[Shard, list[Any]] | None:
    if "cache" in body and body["cache"] is None:
        return None
    cache = field(body, "cache", list)
    if len(cache) != 2 or not isinstance(cache[1], list):
        raise ProtocolError("'cache' must be null, or a list of a shard and a list of groups")
    return parse_shard(cache[0]), cache[1]


def _reason(body: Mapping[str, Any]) -> str:
    return printable(field(body, "reason", str), REASON_CHARACTERS)


def canonical(body: Any) -> bytes:
    """Return JSON in ASCII with sorted keys and without spaces, for digests."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
