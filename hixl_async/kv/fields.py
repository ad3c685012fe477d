"""The fields of tickets and messages, which come from peers and are not trusted.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ProtocolError
from .shapes import Shard

__all__ = ["REGION_BYTES", "ROWS", "canonical", "field", "parse_shard", "shard_body", "short_list"]

#: Regions have fewer bytes, and pools fewer rows of words.
REGION_BYTES, ROWS = 1 << 62, 1 << 31

_Kind = TypeVar("_Kind")


def field(body: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """Return a field of a message.

    :raises ProtocolError: if it is missing, or of another type.
    """
    value = body.get(name)
    if type(value) is not kind:  # isinstance would take True for a number
        raise ProtocolError(f"{name!r} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def short_list(body: Mapping[str, Any], name: str, most: int) -> list[Any]:
    """Return a field that is a list of at most so many items.

    :raises ProtocolError: if it is missing, of another type, or longer.
    """
    items = field(body, name, list)
    if len(items) > most:
        raise ProtocolError(f"{name!r} must have at most {most} items")
    return items


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


def canonical(body: Any) -> bytes:
    """Return JSON in ASCII with sorted keys and without spaces, for digests."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
