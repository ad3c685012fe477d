"""Tickets: the rights to fill or to read certain blocks.  Pure."""

from __future__ import annotations

import hashlib
import sys
import zlib
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..errors import ProtocolError, TicketError
from .fields import REGION_BYTES, ROWS, canonical, field, parse_shard, shard_body, short_list
from .shapes import Shard
from .words import GENERATION_BITS, LAYER_TOKENS

__all__ = ["LEASES", "POOL_BLOCKS", "VERSION", "Slice", "Ticket", "pack_ids", "parse_ids"]

#: The version of the protocol, of tickets and messages.
VERSION = 4
#: Pools have fewer blocks.
POOL_BLOCKS = 1 << 31
#: The most block ids in a slice of a ticket, and groups and senders of a ticket.
SLICE_BLOCKS, GROUPS, SENDERS = 1 << 20, 64, 1024
#: Leases are shorter, in milliseconds: about 35 years.
LEASES = 1 << 40


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
                slices=tuple(_parse_slice(part) for part in short_list(body, "slices", GROUPS)),
                sources=tuple(parse_shard(shard) for shard in short_list(body, "sources", SENDERS)),
                rows=tuple(short_list(body, "rows", SENDERS)),
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
