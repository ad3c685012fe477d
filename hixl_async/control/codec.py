"""Messages and frames of the control protocol: bytes in, bytes out, no sockets.

A message is a JSON object ``{"body":{...},"kind":"..."}`` in UTF-8.  On the Unix leg one packet is one message.  On the
TCP leg a frame is a big-endian 32-bit length and that many bytes: the message, followed, once the two sides have
authenticated each other, by the 16 bytes of its `Seal`.

What arrives is hostile until proved otherwise: sizes are checked before anything is allocated, and every complaint is a
`ProtocolError`.  What leaves is checked by the same rules: a message that can be encoded can always be decoded.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from typing import Any, NamedTuple, NoReturn

from ..errors import ProtocolError

__all__ = [
    "ESTABLISHED_LIMIT",
    "HANDSHAKE_LIMIT",
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "FrameDecoder",
    "Message",
    "Seal",
    "decode",
    "encode",
    "frame",
]

#: Largest message between sides that have authenticated each other, in bytes.
ESTABLISHED_LIMIT = 64 << 10
#: Largest message before that.
HANDSHAKE_LIMIT = 4 << 10
#: Deepest nesting of a message, its own two levels included.
MAX_DEPTH = 16
#: Most objects and lists in a message; counted before it is read, which is why brackets inside of strings count, too.
#: Reading takes time for them more than for the length: 64 KiB of empty objects ten times as long as 64 KiB of text.
MAX_CONTAINERS = 2048

_INTEGERS = range(-(1 << 63), 1 << 64)
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_CONTAINERS = (dict, list)
_HEADER = 4


class Message(NamedTuple):
    """One message of the control protocol."""

    #: What is said: a short word in lower case.
    kind: str
    #: What it is said about: anything that JSON can carry.
    body: dict[str, Any]


def encode(kind: str, body: dict[str, Any], limit: int = ESTABLISHED_LIMIT) -> bytes:
    """Writes a message, always in the same way: keys sorted, no white space.

    :raises ProtocolError: if `kind` is no short lower-case word, `body` is not plain JSON (finite floats, integers of
        64 bits, string keys), is nested more than `MAX_DEPTH` levels deep, has more than `MAX_CONTAINERS` objects and
        lists, or makes the message longer than `limit` bytes.
    """
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ProtocolError(f"a message kind is a short lower-case word, not {kind!r}")
    if not isinstance(body, dict):
        raise ProtocolError(f"the body of {kind!r} must be a dict, not {type(body).__name__}")
    _check(body, 2)
    try:
        data = _ENCODER.encode({"body": body, "kind": kind}).encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"the body of {kind!r} holds half a surrogate pair, which UTF-8 cannot carry") from None
    if len(data) > limit:
        raise ProtocolError(f"a {kind!r} message of {len(data)} bytes is over the limit of {limit}")
    if _containers(data) > MAX_CONTAINERS:
        raise ProtocolError(f"a {kind!r} message holds more than {MAX_CONTAINERS} objects and lists")
    return data


def decode(data: bytes, limit: int = ESTABLISHED_LIMIT) -> Message:
    """Reads a message.

    :raises ProtocolError: if `data` is longer than `limit` or is no valid message: not UTF-8, not JSON, not an object
        of exactly ``kind`` and ``body``, a key twice, nested too deeply, too many objects and lists, a number that is
        not finite or beyond 64 bits.
    """
    if len(data) > limit:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {limit}")
    containers = _containers(data)
    if containers > MAX_CONTAINERS:
        raise ProtocolError(f"a message holds more than {MAX_CONTAINERS} objects and lists")
    try:
        text = data.decode()
        value = (_CAREFUL if _LARGE_NUMBER.search(text) else _PLAIN).decode(text)
        if "\\u" in text:  # JSON can spell half a surrogate pair, which could never be sent on
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise ProtocolError(f"not a valid message: {_brief(error)}") from None
    if not isinstance(value, dict) or value.keys() != {"kind", "body"}:
        raise ProtocolError("not a valid message: it must be an object of exactly 'kind' and 'body'")
    kind, body = value["kind"], value["body"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ProtocolError("not a valid message: its kind must be a short lower-case word")
    if not isinstance(body, dict):
        raise ProtocolError(f"not a valid message: the body of {kind!r} must be an object")
    if containers > MAX_DEPTH and _deep(body):
        raise ProtocolError(f"a message may be nested {MAX_DEPTH} levels deep, not more")
    return Message(kind, body)


class Seal:
    """Numbers and authenticates the messages of one direction of the TCP leg.

    The handshake only proves who was there at its end; the seal keeps somebody in the middle from adding, dropping or
    changing messages later.  It hides nothing.
    """

    __slots__ = ("_count", "_key")

    #: Bytes that it adds to a message.
    SIZE = 16

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def close(self, message: bytes) -> bytes:
        """The message with its seal."""
        return message + self._tag(message)

    def open(self, sealed: bytes) -> bytes:
        """The message without its seal.

        :raises ProtocolError: if the message was changed, or others before it were added, dropped or reordered.
        """
        message, tag = sealed[: -self.SIZE], sealed[-self.SIZE :]
        if not hmac.compare_digest(tag, self._tag(message)):
            raise ProtocolError("a message was altered on its way: its seal does not fit")
        return message

    def _tag(self, message: bytes) -> bytes:
        number = self._count.to_bytes(8, "big")
        self._count += 1
        return hmac.digest(self._key, number + message, "sha256")[: self.SIZE]


def frame(data: bytes) -> bytes:
    """`data` with its length before it."""
    return len(data).to_bytes(_HEADER, "big") + data


class FrameDecoder:
    """Cuts a stream of bytes into frames; holds no more than was fed to it."""

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int) -> None:
        #: Longest frame that is accepted; may be changed between frames.
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds what was received."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next complete frame, or None if there is none yet.

        :raises ProtocolError: if the frame is longer than `limit`; known from its first four bytes.
        """
        buffer = self._buffer
        if len(buffer) < _HEADER:
            return None
        size = int.from_bytes(buffer[:_HEADER], "big")
        if size > self.limit:
            raise ProtocolError(f"a frame of {size} bytes is over the limit of {self.limit}")
        end = _HEADER + size
        if len(buffer) < end:
            return None
        data = bytes(buffer[_HEADER:end])
        del buffer[:end]
        return data

    def __len__(self) -> int:
        """Bytes that wait for the rest of their frame, or to be taken."""
        return len(self._buffer)


def _check(value: object, depth: int) -> None:
    if isinstance(value, dict):
        _check_depth(depth)
        for key, item in value.items():
            if not isinstance(key, str):
                raise ProtocolError(f"keys of a message are strings, not {key!r}")
            _check(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        _check_depth(depth)
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, int):
        if value not in _INTEGERS:
            raise ProtocolError("an integer of a message must fit in 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ProtocolError("a float of a message must be finite")
    elif value is not None and not isinstance(value, str):
        raise ProtocolError(f"a message cannot carry a {type(value).__name__}")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"a message may be nested {MAX_DEPTH} levels deep, not more")


def _containers(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")


def _deep(body: dict[str, Any]) -> bool:
    """True if `body` is nested too deeply; level by level, which is three times as fast as one after the other."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH - 1):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result


def _integer(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in _INTEGERS:
        raise ValueError("an integer does not fit in 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a float")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
# Looking at every number costs as much again as reading the whole message; only these can be out of range.
_LARGE_NUMBER = re.compile(r"[0-9]{19}|[eE]\+?[0-9]{3}")
_PLAIN = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
_CAREFUL = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
)


def _brief(error: Exception) -> str:
    # The texts of UnicodeError and JSONDecodeError are short; that of RecursionError speaks of Python.
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
