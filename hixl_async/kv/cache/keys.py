"""The keys by which one side names the caches of another.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ...engine.arguments import whole_number
from ...errors import InvalidArgumentError, ProtocolError

__all__ = ["BlocksCacheKey", "CacheKey", "CacheKeyByIdAndIndex", "Identifier", "Key", "key_body", "parse_key"]

#: The name of a request or a prefix.
Identifier: TypeAlias = int | str

#: Numbers in keys are below this; names have at most so many characters.
NUMBERS, CHARACTERS = 1 << 64, 256


def identifier(name: str, value: object) -> Identifier:
    """Return `value` if it can name a request or a prefix.

    :raises InvalidArgumentError: if it cannot; the message contains `name`.
    """
    if isinstance(value, str):
        if 0 < len(value) <= CHARACTERS and value.isprintable():
            return value
        raise InvalidArgumentError(f"{name} must be a printable string of 1 to {CHARACTERS} characters, not {value!r}")
    return _number(name, value)


def _number(name: str, value: object) -> int:
    number = whole_number(name, value)
    if not 0 <= number < NUMBERS:
        raise InvalidArgumentError(f"{name} must be in 0..2**64-1, not {number}")
    return number


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The key of one request or one prefix: its row of a contiguous cache, or its blocks of a paged one.

    :param cluster_id: the cluster that holds the cache.
    :param req_id: the request, a number or a string; exactly one of `req_id` and `prefix_id` is given.
    :param model_id: the model, for programs that serve several.
    :param prefix_id: the prefix that several requests share, a number or a string.
    :raises InvalidArgumentError: if a number is out of range, or both or none of `req_id` and `prefix_id` are given.
    """

    cluster_id: int
    req_id: Identifier | None = None
    model_id: int = 0
    prefix_id: Identifier | None = None

    def __post_init__(self) -> None:
        _number("cluster_id", self.cluster_id)
        _number("model_id", self.model_id)
        if (self.req_id is None) == (self.prefix_id is None):
            raise InvalidArgumentError("pass either req_id=... or prefix_id=...")
        for name in ("req_id", "prefix_id"):
            if (value := getattr(self, name)) is not None:
                identifier(name, value)


@dataclass(frozen=True, slots=True)
class BlocksCacheKey:
    """The key of a whole paged cache, of which each call names the blocks.

    :param cluster_id: the cluster that holds the cache.
    :param model_id: the model, for programs that serve several.
    :raises InvalidArgumentError: if a number is out of range.
    """

    cluster_id: int
    model_id: int = 0

    def __post_init__(self) -> None:
        _number("cluster_id", self.cluster_id)
        _number("model_id", self.model_id)


@dataclass(frozen=True, slots=True)
class CacheKeyByIdAndIndex:
    """The key of a cache by its number, and of one row of it where the call names no blocks.

    :param cluster_id: the cluster that holds the cache.
    :param cache_id: the number that the cache has there, ``cache.cache_id``.
    :param batch_index: the row.
    :raises InvalidArgumentError: if a number is out of range.
    """

    cluster_id: int
    cache_id: int
    batch_index: int = 0

    def __post_init__(self) -> None:
        for name in ("cluster_id", "cache_id", "batch_index"):
            _number(name, getattr(self, name))


#: A key of any kind.
Key: TypeAlias = CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex


def key_body(key: Key) -> list[Any]:
    """Return a key as a JSON-safe list, without the cluster."""
    if isinstance(key, CacheKey):
        kind, name = ("request", key.req_id) if key.prefix_id is None else ("prefix", key.prefix_id)
        return [kind, name, key.model_id]
    if isinstance(key, BlocksCacheKey):
        return ["blocks", key.model_id]
    return ["cache", key.cache_id, key.batch_index]


def parse_key(body: list[Any], cluster: int) -> Key:
    """Return the key that a peer names; the reverse of `key_body`.

    :param cluster: the cluster that the peer asks.
    :raises ProtocolError: if it is malformed.
    """
    try:
        kind, *rest = body
        if kind == "request":
            return CacheKey(cluster, rest[0], *rest[1:])
        if kind == "prefix":
            name, model = rest
            return CacheKey(cluster, None, model, name)
        if kind == "blocks":
            return BlocksCacheKey(cluster, *rest)
        if kind == "cache":
            return CacheKeyByIdAndIndex(cluster, *rest)
    except (InvalidArgumentError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"a peer names a cache by a malformed key: {error}") from None
    raise ProtocolError("a peer names a cache by a key of an unknown kind")
