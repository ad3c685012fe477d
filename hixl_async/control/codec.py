"""The messages and frames of the control protocol: bytes in, bytes out, no sockets.

A message is a JSON object ``{"body":{...},"kind":"..."}`` in UTF-8.  On the Unix transport one packet is one message.  On the
TCP transport a frame is a big-endian 32-bit length and that many bytes: the message, followed, once the two sides have
authenticated each other, by the 16 bytes of its `Seal`.

Received bytes are not trusted: sizes are checked before anything is allocated, and every violation is a `ProtocolError`.  Sent
messages are checked by the same rules: a message that can be encoded can always be decoded.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from ..display import shown
from ..errors import ProtocolError

__all__ = [
    "ESTABLISHED_LIMIT",
    "HANDSHAKE_LIMIT",
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_FLOATS",
    "MAX_VALUES",
    "FrameDecoder",
    "Message",
    "Seal",
    "decode",
    "encode",
    "frame",
]

#: The largest message between sides that have authenticated each other, in bytes.
ESTABLISHED_LIMIT = 64 << 10
#: The largest message of the handshake, in bytes.
HANDSHAKE_LIMIT = 4 << 10
#: The deepest nesting of a message, its own two levels included.
MAX_DEPTH = 16
#: The most objects and lists, values, and floats in a message.  They cost more time to parse than their length suggests: 64 KiB
#: of empty objects take twenty times as long as 64 KiB of text.  They are counted before the message is parsed, by their
#: brackets, commas, and digits beside a point or an exponent, outside of strings.
MAX_CONTAINERS, MAX_VALUES, MAX_FLOATS = 2048, 16384, 8192

_LEAST_INTEGER, _GREATEST_INTEGER = -(1 << 63), (1 << 64) - 1
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_CONTAINERS = (dict, list, tuple)
_WITHOUT_CHECK = {bool, type(None)}
_HEADER = 4


class Message(NamedTuple):
    """One message of the control protocol."""

    #: The kind of message: a short word in lower case.
    kind: str
    #: The fields: anything that JSON can carry.
    body: dict[str, Any]


def encode(kind: str, body: dict[str, Any], limit: int = ESTABLISHED_LIMIT) -> bytes:
    """Encode a message in its canonical form: keys sorted, no white space.

    :raises ProtocolError: if `kind` is not a short lower-case word, `body` is not plain JSON (finite floats, integers of
        64 bits, string keys), is nested more than `MAX_DEPTH` levels deep, has more than `MAX_CONTAINERS` objects and
        lists, `MAX_VALUES` values or `MAX_FLOATS` floats, or makes the message longer than `limit` bytes.
    """
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ProtocolError(f"a message kind is a short lower-case word, not {kind!r}")
    if not isinstance(body, dict):
        raise ProtocolError(f"the body of {kind!r} must be a dict, not {type(body).__name__}")
    try:
        if not _is_small_and_plain(body):
            _check(body)
        data = _ENCODER.encode({"body": body, "kind": kind}).encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"the body of {kind!r} holds half a surrogate pair, which UTF-8 cannot carry") from None
    if len(data) > limit:
        raise ProtocolError(f"the {kind!r} message of {len(data)} bytes is over the limit of {limit}")
    _check_counts(data)
    return data


def decode(data: bytes, limit: int = ESTABLISHED_LIMIT) -> Message:
    """Decode a message.

    :raises ProtocolError: if `data` is longer than `limit` or is not a valid message: not UTF-8, not JSON, not an object
        of exactly ``kind`` and ``body``, a duplicate key, nested too deeply, too many objects and lists, or a number that
        is not finite or has more than 64 bits.
    """
    if len(data) > limit:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {limit}")
    containers = _check_counts(data)
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise ProtocolError(f"not a valid message: {_brief(error)}") from None
    if not isinstance(value, dict) or value.keys() != {"kind", "body"}:
        raise ProtocolError("not a valid message: it must be an object of exactly 'kind' and 'body'")
    kind, body = value["kind"], value["body"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ProtocolError("not a valid message: its kind must be a short lower-case word")
    if not isinstance(body, dict):
        raise ProtocolError(f"not a valid message: the body of {kind!r} must be an object")
    if _suspicious(data):
        try:
            _check(body)
        except UnicodeEncodeError:
            raise ProtocolError("not a valid message: half a surrogate pair, which UTF-8 cannot carry") from None
    elif containers > MAX_DEPTH:
        _check_depth(body)
    return Message(kind, body)


class Seal:
    """The sequence numbers and authentication codes of the messages in one direction of the TCP transport.

    The handshake only authenticates the two sides at its end; the seal keeps a man in the middle from adding, dropping or
    changing messages later.  It does not encrypt them.
    """

    __slots__ = ("_count", "_key")

    #: Bytes that it adds to a message.
    SIZE = 16

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def close(self, message: bytes) -> bytes:
        """Return the message with its seal."""
        return message + self._tag(message)

    def open(self, sealed: bytes) -> bytes:
        """Return the message without its seal.

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
    """Return `data` preceded by its length."""
    return len(data).to_bytes(_HEADER, "big") + data


class FrameDecoder:
    """A decoder that cuts a stream of bytes into frames; it holds no more than was fed to it."""

    __slots__ = ("_buffer", "_first", "limit")

    def __init__(self, limit: int) -> None:
        #: The longest frame that is accepted, in bytes; may be changed between frames.
        self.limit = limit
        self._buffer = bytearray()
        self._first = True  # another protocol is recognised by its first bytes

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next complete frame, or None if there is none yet.

        :raises ProtocolError: if the frame is longer than `limit`; known from its first four bytes.
        """
        buffer = self._buffer
        if len(buffer) < _HEADER:
            return None
        size = int.from_bytes(buffer[:_HEADER], "big")
        if size > self.limit:
            if self._first:
                raise ProtocolError(f"it is not a hixl_async engine; it began with {bytes(buffer[:24])!r}")
            raise ProtocolError(f"a frame of {size} bytes is over the limit of {self.limit}")
        end = _HEADER + size
        if len(buffer) < end:
            return None
        data = bytes(buffer[_HEADER:end])
        del buffer[:end]
        self._first = False
        return data

    def __len__(self) -> int:
        """The number of buffered bytes."""
        return len(self._buffer)


def _levels(body: dict[str, Any]) -> Iterator[tuple[list[Any], list[Any], set[type]]]:
    """Yield the keys, the values and the types of the values of `body`, level by level.

    Built-in functions over a whole level take a tenth of the time of a call for each value, and a message of a hostile peer may
    hold 30,000 values.

    :raises ProtocolError: if the body is nested too deeply.
    """
    containers: list[Any] = [body]
    for _ in range(MAX_DEPTH - 1):
        keys: list[Any] = []
        values: list[Any] = []
        for container in containers:
            if isinstance(container, dict):
                keys += container
                values += container.values()
            else:
                values += container
        kinds = set(map(type, values))
        yield keys, values, kinds
        nested = {kind for kind in kinds if issubclass(kind, _CONTAINERS)}
        containers = [value for value in values if type(value) in nested] if nested else []
        if not containers:
            return
    raise ProtocolError(f"a message may be nested {MAX_DEPTH} levels deep, not more")


def _is_small_and_plain(body: dict[str, Any]) -> bool:
    """Return True if a body is small, and made of what a message can carry; strings are checked when they are encoded.

    Most messages are, and the calls of `_check` for whole levels only pay for large ones.
    """
    containers: list[Any] = [body]
    for container in containers:  # which grows meanwhile
        if len(container) > _FEW:
            return False
        values = container
        if type(container) is dict:
            for key in container:
                if type(key) is not str:
                    return False
            values = container.values()
        for value in values:
            kind = type(value)
            if kind is int:
                if not _LEAST_INTEGER <= value <= _GREATEST_INTEGER:
                    return False
            elif kind is dict or kind is list:
                containers.append(value)
                if len(containers) == MAX_DEPTH:  # fewer containers than levels cannot be too deep
                    return False
            elif kind is not str and kind is not bool and value is not None:
                return False
    return True


def _check(body: dict[str, Any]) -> None:
    """Check that a message can carry everything in `body`.

    :raises ProtocolError: if it cannot, or the body is nested too deeply.
    :raises UnicodeEncodeError: if a string holds half a surrogate pair.
    """
    for keys, values, kinds in _levels(body):
        for key in keys:
            if not isinstance(key, str):
                raise ProtocolError(f"keys of a message are strings, not {shown(key)}")
        "".join(keys).encode()
        for kind in kinds:
            if not issubclass(kind, _CONTAINERS) and kind not in _WITHOUT_CHECK:
                _check_all(kind, values if len(kinds) == 1 else [value for value in values if type(value) is kind])


def _check_all(kind: type, values: list[Any]) -> None:
    """Check values of one type that contains no others."""
    if issubclass(kind, str):
        "".join(values).encode()
    elif issubclass(kind, int):
        if min(values) < _LEAST_INTEGER or max(values) > _GREATEST_INTEGER:
            raise ProtocolError("an integer of a message must fit in 64 bits")
    elif issubclass(kind, float):
        if not all(map(math.isfinite, values)):
            raise ProtocolError("a float of a message must be finite")
    else:
        raise ProtocolError(f"a message cannot carry a {kind.__name__}")


def _check_depth(body: dict[str, Any]) -> None:
    for _ in _levels(body):
        pass


#: The most items of each container of a small message.
_FEW = 32
#: Each container, value and float takes at least one byte.
_FEW_BYTES = min(MAX_CONTAINERS, MAX_VALUES, MAX_FLOATS)


def _check_counts(data: bytes) -> int:
    """Return an upper bound of the number of containers in a message.

    :raises ProtocolError: if it holds too many containers, values or floats.
    """
    # Few messages are long enough to hold too many of anything, or seem to, as the base 64 of some bytes does.
    if len(data) > _FEW_BYTES and _excess(data) and (excess := _excess(_STRING.sub(b"", data))):
        raise ProtocolError(f"a message holds more than {excess}")
    return _containers(data)


def _excess(data: bytes) -> str | None:
    """Return what a message has too many of, or None; what looks alike inside of strings counts, too."""
    shape = data.translate(_SHAPE)
    counts = (
        ("objects and lists", _containers(data), MAX_CONTAINERS),
        ("values", data.count(b","), MAX_VALUES),
        ("floats", shape.count(b"0.0") + shape.count(b"0e"), MAX_FLOATS),
    )
    return next((f"{most} {what}" for what, count, most in counts if count > most), None)


def _containers(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")


def _suspicious(data: bytes) -> bool:
    """Return True if a message may hold a value that no message can carry.

    Such values are half a surrogate pair, an integer of more than 64 bits, and a float that is not finite.
    """
    shape = data.translate(_SHAPE)
    return b"0" * 19 in shape or b"e000" in shape or b"e+000" in shape or b"\\ud" in shape


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
# All digits become 0 and capital letters small ones, so that one search finds any long number, exponent or surrogate.
_SHAPE = bytes.maketrans(b"123456789DE", b"000000000de")


def _brief(error: Exception) -> str:
    # The texts of UnicodeError and JSONDecodeError are short; that of RecursionError is about Python.
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
