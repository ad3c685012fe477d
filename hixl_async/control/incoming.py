"""A message of the other side, whose fields are checked when they are read, and whose texts are filtered for display."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from ..display import shown
from ..errors import ProtocolError
from . import codec
from .channel import close_descriptors

__all__ = ["Incoming", "binary_text", "printable"]

T = TypeVar("T")

#: The most characters of a text for people that are shown.
TEXT_LIMIT = 500


class Incoming:
    """One message, and the descriptors that came with it."""

    __slots__ = ("_descriptors", "body", "kind")

    def __init__(self, kind: str, body: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        #: The kind of message, a short word.
        self.kind = kind
        #: All fields, unchecked.
        self.body = body
        self._descriptors = list(descriptors)

    @classmethod
    def canonical(cls, raw: bytes, kind: str) -> Incoming:
        """Parse a message of the handshake, which must be of a kind and in its canonical encoding.

        :raises ProtocolError: if it is not.
        """
        message = codec.decode(raw, codec.HANDSHAKE_LIMIT)
        if message.kind != kind:
            raise ProtocolError(f"expected a {kind!r}, not a {message.kind!r}")
        if codec.encode(*message) != raw:
            raise ProtocolError(f"the {kind!r} is not in its canonical encoding")
        return cls(*message)

    # -- fields

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a string field that is printable, and that `pattern` matches as a whole.

        :raises ProtocolError: if there is none of that name.
        """
        value = self._field(name, str)
        if not value.isprintable() or (pattern is not None and not pattern.fullmatch(value)):
            raise self._invalid(name)
        return value

    def words(self, name: str, most: int = TEXT_LIMIT) -> str:
        """Return a text for people, filtered by `printable`.

        :raises ProtocolError: if there is none of that name.
        """
        return printable(self._field(name, str), most)

    def number(self, name: str) -> int:
        """Return an integer that is not negative.

        :raises ProtocolError: if there is none of that name.
        """
        value = self._field(name, int)
        if isinstance(value, bool) or value < 0:
            raise ProtocolError(f"the {name!r} of a {self.kind!r} message is {shown(value)}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """Return an object.

        :raises ProtocolError: if there is none of that name.
        """
        return self._field(name, dict)

    def flag(self, name: str) -> bool:
        """Return a truth value; False if there is none of that name.

        :raises ProtocolError: if it is something else.
        """
        return name in self.body and self._field(name, bool)

    def metadata(self) -> bytes:
        """Return a driver's metadata of a link or a region.

        :raises ProtocolError: if there is none.
        """
        return self.binary("metadata")

    def binary(self, name: str) -> bytes:
        """Return bytes.

        :raises ProtocolError: if there are none of that name.
        """
        try:
            return base64.b64decode(self._field(name, str), validate=True)
        except (binascii.Error, ValueError):
            raise ProtocolError(f"the {name!r} of a {self.kind!r} message is not base64") from None

    def _field(self, name: str, kind: type[T]) -> T:
        value: object = self.body.get(name)
        if not isinstance(value, kind):
            raise self._invalid(name)
        return value

    def _invalid(self, name: str) -> ProtocolError:
        return ProtocolError(f"a {self.kind!r} message lacks a valid {name!r}")

    # -- descriptors

    @property
    def carries(self) -> bool:
        """True if descriptors came with it."""
        return bool(self._descriptors)

    def take(self) -> list[int]:
        """Return the descriptors, which belong to the caller from now on."""
        descriptors, self._descriptors = self._descriptors, []
        return descriptors

    def kept(self) -> Incoming:
        """Return a copy of the message that owns its descriptors, to be kept after the handler has returned."""
        return Incoming(self.kind, self.body, self.take())

    def drop(self) -> None:
        """Close the descriptors that were not taken."""
        close_descriptors(self.take())


def printable(text: str, most: int = TEXT_LIMIT) -> str:
    """Return the start of a text of the other side without control characters, for display to people."""
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def binary_text(data: bytes) -> str:
    """Return bytes, such as a driver's metadata, in the encoding of messages."""
    return base64.b64encode(data).decode()
