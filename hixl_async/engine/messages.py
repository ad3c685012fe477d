"""Messages of an established connection, as they come; whatever is read from one is checked here."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable
from typing import Any, TypeVar

from ..errors import ProtocolError

__all__ = ["Incoming", "binary_text", "close_all"]

T = TypeVar("T")


class Incoming:
    """One message of a peer, and the descriptors that came with it."""

    __slots__ = ("_body", "_fds", "kind")

    def __init__(self, kind: str, body: dict[str, Any], fds: list[int]) -> None:
        self.kind = kind
        self._body = body
        self._fds = fds

    def text(self, name: str) -> str:
        """A string.

        :raises ProtocolError: if there is none of that name.
        """
        return self._field(name, str)

    def number(self, name: str) -> int:
        """An integer that is not negative.

        :raises ProtocolError: if there is none of that name.
        """
        value = self._field(name, int)
        if isinstance(value, bool) or value < 0:
            raise ProtocolError(f"the {name!r} of a {self.kind!r} message is {value!r}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object.

        :raises ProtocolError: if there is none of that name.
        """
        return self._field(name, dict)

    def flag(self, name: str) -> bool:
        """A truth value; False if there is none of that name.

        :raises ProtocolError: if it is something else.
        """
        return name in self._body and self._field(name, bool)

    def card(self) -> bytes:
        """The driver's card.

        :raises ProtocolError: if there is none.
        """
        return self.binary("card")

    def binary(self, name: str) -> bytes:
        """Bytes.

        :raises ProtocolError: if there are none of that name.
        """
        try:
            return base64.b64decode(self.text(name), validate=True)
        except (binascii.Error, ValueError):
            raise ProtocolError(f"the {name!r} of a {self.kind!r} message is not base64") from None

    def _field(self, name: str, kind: type[T]) -> T:
        value: object = self._body.get(name)
        if not isinstance(value, kind):
            raise ProtocolError(f"a {self.kind!r} message lacks a valid {name!r}")
        return value

    @property
    def carries(self) -> bool:
        """True if descriptors came with it."""
        return bool(self._fds)

    def take(self) -> list[int]:
        """Its descriptors, which are the caller's from here on."""
        fds, self._fds = self._fds, []
        return fds

    def kept(self) -> Incoming:
        """The same message for later, with its descriptors."""
        return Incoming(self.kind, self._body, self.take())

    def drop(self) -> None:
        """Closes the descriptors that nobody took."""
        close_all(self.take())


def binary_text(data: bytes) -> str:
    """Bytes, such as a driver's card, as they travel."""
    return base64.b64encode(data).decode()


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)
