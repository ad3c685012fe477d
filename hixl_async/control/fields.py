"""Reads the fields of handshake messages, whose sender nobody knows yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import ProtocolError
from . import codec
from .identity import Identity
from .rendezvous import RendezvousName

__all__ = [
    "FINGERPRINT",
    "HEX32",
    "HEX64",
    "TICKS",
    "body_of",
    "identity",
    "printable",
    "socket",
    "text",
]

HEX32 = re.compile(r"[0-9a-f]{32}")
HEX64 = re.compile(r"[0-9a-f]{64}")
FINGERPRINT = re.compile(r"(?:[0-9a-f]{32})?")
TICKS = re.compile(r"[0-9]{0,20}")
_SOCKET = re.compile(r"(?:abstract|directory):[0-9a-f]{32}")


def body_of(raw: bytes, kind: str) -> dict[str, Any]:
    """The body of a message that must be a `kind`, in its canonical spelling.

    :raises ProtocolError: if it is not.
    """
    message = codec.decode(raw, codec.HANDSHAKE_LIMIT)
    if message.kind != kind:
        raise ProtocolError(f"expected a {kind!r}, not a {message.kind!r}")
    if codec.encode(*message) != raw:
        raise ProtocolError(f"the {kind!r} is not in its canonical spelling")
    return message.body


def text(body: Mapping[str, Any], field: str, pattern: re.Pattern[str]) -> str:
    """A string that matches `pattern` as a whole.

    :raises ProtocolError: if there is no such `field`.
    """
    value = body.get(field)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ProtocolError(f"a message of the handshake lacks a valid {field!r}")
    return value


def socket(body: Mapping[str, Any]) -> RendezvousName:
    """The Unix socket that the listening side names.

    :raises ProtocolError: if it names none.
    """
    kind, token = text(body, "socket", _SOCKET).split(":")
    return RendezvousName("abstract" if kind == "abstract" else "directory", token)


def identity(body: Mapping[str, Any]) -> Identity:
    """The identity that the other side claims.

    :raises ProtocolError: if it is missing or malformed.
    """
    value = body.get("identity")
    if not isinstance(value, dict) or value.keys() != set(Identity._fields) or not isinstance(value["drivers"], list):
        raise ProtocolError("a message of the handshake lacks a valid 'identity'")
    claimed = Identity(**{**value, "drivers": tuple(value["drivers"])})
    if problem := claimed.problem():
        raise ProtocolError(f"the identity of the other side is not valid: {problem}")
    return claimed


def printable(text: str) -> str:
    """What may be shown to people of `text`: not too much of it, and no control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:500])
