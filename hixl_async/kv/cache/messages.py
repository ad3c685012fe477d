"""The messages between two cache managers.  Pure, and the only module that knows their encoding.

::

    Link {cluster}               request ->   the other side's cluster
    Unlink {}                    post    ->   the other side forgets the link
    Describe {cache}             request ->   the view of a cache
    Pull {key, place, ...}       request ->   Grant: the blocks, which stay as they are until the end
    Push {key, place, ...}       request ->   Grant: the blocks, which others do not read until the end
    End {hold, reason}           post    ->   nothing of ours touches the blocks any more
                                 <- post      Stop {hold, reason}: end this, and say so

The data are read and written one-sidedly in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...control import printable
from ...errors import ProtocolError
from ..fields import field, parse_shard, shard_body
from ..shapes import Shard
from .keys import CacheKey, Identifier, Key, key_body, parse_key
from .place import Place

__all__ = ["Describe", "End", "Grant", "Link", "Message", "Pull", "Push", "Stop", "Unlink", "parse", "service"]

#: Longer reasons are cut.
REASON_CHARACTERS = 400
#: Numbers in messages are below this.
NUMBERS = 1 << 62


def service(name: str) -> str:
    """Return the name under which the manager called `name` serves its peers' messages."""
    return f"kv.cache/{name}"


@dataclass(frozen=True, slots=True)
class Link:
    """A request to be linked."""

    cluster: int

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "link", "cluster": self.cluster}


@dataclass(frozen=True, slots=True)
class Unlink:
    """The end of a link."""

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "unlink"}


@dataclass(frozen=True, slots=True)
class Describe:
    """A request for the view of a cache."""

    cache: int

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "describe", "cache": self.cache}


@dataclass(frozen=True, slots=True)
class Pull:
    """A request to read."""

    #: The number that the requester gives the hold, so that it can end it even if it never sees the reply.
    hold: int
    key: Key
    #: Where; None: where the key says.
    place: Place | None

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        place = self.place.body() if self.place else []
        return {"say": "pull", "hold": self.hold, "key": key_body(self.key), "place": place}


@dataclass(frozen=True, slots=True)
class Push:
    """A request to write."""

    hold: int
    key: Key
    place: Place | None
    #: What the writer's cache holds of the model.
    shard: Shard
    #: The request that the reader expects; None: it need not know.
    req_id: Identifier | None
    #: The layers that will be written.
    layers: tuple[int, ...]
    #: False if more tokens of these layers follow by another push.
    last: bool

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {
            "say": "push",
            "hold": self.hold,
            "key": key_body(self.key),
            "place": self.place.body() if self.place else [],
            "shard": shard_body(self.shard),
            "request": [] if self.req_id is None else [self.req_id],
            "layers": list(self.layers),
            "last": self.last,
        }


@dataclass(frozen=True, slots=True)
class End:
    """The end of a read or a write: nothing of it can touch the blocks any more."""

    hold: int
    #: Why it failed; empty if it did not.
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "end", "hold": self.hold, "reason": self.reason[:REASON_CHARACTERS]}


@dataclass(frozen=True, slots=True)
class Stop:
    """The owner's wish that a read or a write end."""

    hold: int
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the message as a JSON-safe dict."""
        return {"say": "stop", "hold": self.hold, "reason": self.reason[:REASON_CHARACTERS]}


Message = Link | Unlink | Describe | Pull | Push | End | Stop


@dataclass(frozen=True, slots=True)
class Grant:
    """The reply to `Pull` and `Push`."""

    #: The number of the cache.
    cache: int
    place: Place
    #: For a pull, the index of the word that keeps its value as long as the blocks stay as they are; for a push, the row of the
    #: words that say which layers have landed, or -1 if there is none.
    row: int
    #: The value of that word, or the generation of those words.
    value: int
    #: For a pull, the milliseconds without a sign of life after which the owner takes its blocks back; for a push, 0.
    lease: int = 0
    #: The shards of all writers of an expected push, if there are several.
    sources: tuple[Shard, ...] = ()

    def body(self) -> dict[str, Any]:
        """Return the reply as a JSON-safe dict."""
        return {
            "cache": self.cache,
            "place": self.place.body(),
            "row": self.row,
            "value": self.value,
            "lease": self.lease,
            "sources": [shard_body(shard) for shard in self.sources],
        }

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Grant:
        """Parse the reply.

        :raises ProtocolError: if it is malformed.
        """
        place = Place.parse(field(body, "place", list))
        if place is None:
            raise ProtocolError("the owner of a cache named no blocks")
        cache, row, value, lease = (field(body, name, int) for name in ("cache", "row", "value", "lease"))
        _numbers([cache, row + 1, value >> 2, lease])
        return cls(cache, place, row, value, lease, tuple(parse_shard(shard) for shard in field(body, "sources", list)))


def parse(body: Mapping[str, Any], cluster: int) -> Message:
    """Parse a message.

    :param cluster: the cluster that received it.
    :raises ProtocolError: if it is malformed.
    """
    say = field(body, "say", str)
    if say == "link":
        return Link(_numbers([field(body, "cluster", int)], 1 << 64)[0])
    if say == "unlink":
        return Unlink()
    if say == "describe":
        return Describe(field(body, "cache", int))
    if say in ("end", "stop"):
        kind = End if say == "end" else Stop
        return kind(field(body, "hold", int), printable(field(body, "reason", str), REASON_CHARACTERS))
    if say not in ("pull", "push"):
        raise ProtocolError(f"a cache manager does not understand the message {say[:20]!r}")
    hold, key = field(body, "hold", int), parse_key(field(body, "key", list), cluster)
    place = Place.parse(field(body, "place", list))
    if say == "push":
        shard, layers = parse_shard(field(body, "shard", list)), _numbers(field(body, "layers", list))
        request, last = _request(field(body, "request", list), cluster), field(body, "last", bool)
        return Push(hold, key, place, shard, request, tuple(layers), last)
    return Pull(hold, key, place)


def _request(body: list[Any], cluster: int) -> Identifier | None:
    key = parse_key(["request", *body, 0], cluster) if body else None
    return key.req_id if isinstance(key, CacheKey) else None


def _numbers(items: list[Any], below: int = NUMBERS) -> list[int]:
    if any(type(item) is not int or not 0 <= item < below for item in items):
        raise ProtocolError("a message has a number out of range")
    return items
