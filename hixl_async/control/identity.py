"""The identity that a side claims, and the secret with which it proves that it may connect."""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

from ..errors import InvalidArgumentError, ProtocolError

__all__ = ["Identity", "Secret"]

_HEX32 = re.compile(r"[0-9a-f]{32}")


class Identity(NamedTuple):
    """The claims of an engine about itself; one that knows the secret, or belongs to the same user, can claim anything."""

    #: The name for people; not unique.
    name: str
    #: The tenant; two sides of different domains refuse each other.
    domain: str
    #: 32 random hexadecimal digits, drawn once per engine: a restarted engine has another one.
    incarnation: str
    #: The address at which the engine listens, ``host:port``; "" if it only dials.
    address: str
    #: The names of the drivers that it has opened.
    drivers: tuple[str, ...]

    @classmethod
    def parse(cls, value: object) -> Identity:
        """Return the identity that the other side claims.

        :param value: the field of the message.
        :return: the identity.
        :raises ProtocolError: if it is missing or malformed.
        """
        if not isinstance(value, dict) or value.keys() != set(cls._fields) or not isinstance(value["drivers"], list):
            raise ProtocolError("a message of the handshake lacks a valid 'identity'")
        claimed = cls(**{**value, "drivers": tuple(value["drivers"])})
        if problem := claimed.problem():
            raise ProtocolError(f"the identity of the other side is not valid: {problem}")
        return claimed

    def problem(self) -> str | None:
        """Return a text that says which field is invalid, or None."""
        for field, text, least, most in (
            ("name", self.name, 1, 128),
            ("domain", self.domain, 0, 128),
            ("address", self.address, 0, 300),
        ):
            if not _short(text, least, most):
                return f"{field} must be {least} to {most} bytes of printable UTF-8"
        if not isinstance(self.incarnation, str) or not _HEX32.fullmatch(self.incarnation):
            return "incarnation must be 32 hexadecimal digits"
        if len(self.drivers) > 16 or not all(_short(driver, 1, 32) for driver in self.drivers):
            return "drivers must be at most 16 names of 1 to 32 bytes of printable UTF-8"
        return None


class Secret:
    """The shared secret, or its absence; never shown."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None) -> None:
        """
        :param key: the bytes of the secret, or None.
        :raises InvalidArgumentError: if `key` is neither None nor bytes, or is empty.
        """
        if key is not None and (not isinstance(key, (bytes, bytearray)) or not key):
            what = "empty" if isinstance(key, bytes | bytearray) else f"a {type(key).__name__}"
            raise InvalidArgumentError(f"secret must be bytes, not empty, or None; it is {what}")
        self._key = None if key is None else bytes(key)

    def __bool__(self) -> bool:
        return self._key is not None

    def __repr__(self) -> str:
        return "<Secret>" if self else "<no Secret>"

    def tag(self, label: str, *parts: bytes) -> bytes:
        """Return an HMAC-SHA256 over `label` and `parts`, each with its length."""
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))
        return hmac.digest(self._key or b"", b"hixl_async control\0" + text, "sha256")


def _short(text: object, least: int, most: int) -> bool:
    # No control characters, because these strings are logged; isprintable() excludes lone surrogates, too.
    return isinstance(text, str) and text.isprintable() and least <= len(text.encode()) <= most
