"""How the listening side says no."""

from __future__ import annotations

from ..errors import AuthenticationError, BusyError, ConnectError, HixlError, InvalidArgumentError, ProtocolError
from . import codec
from .fields import printable

__all__ = ["raise_if_refusal", "refusal"]

_KINDS: dict[str, type[HixlError]] = {
    kind.code: kind for kind in (AuthenticationError, BusyError, ConnectError, InvalidArgumentError, ProtocolError)
}


def refusal(error: HixlError) -> bytes:
    """The message that tells the dialler why it was refused."""
    code = error.code if error.code in _KINDS else ConnectError.code
    return codec.encode("refuse", {"code": code, "text": printable(str(error))}, codec.HANDSHAKE_LIMIT)


def raise_if_refusal(raw: bytes) -> None:
    """Raises, at the dialler, the error that the listener refused it with, if `raw` says so.

    :raises ProtocolError: also if `raw` is no message at all.
    """
    message = codec.decode(raw, codec.HANDSHAKE_LIMIT)
    if message.kind == "refuse":
        text = message.body.get("text")
        kind = _KINDS.get(str(message.body.get("code")), ConnectError)
        raise kind(f"refused: {printable(text) if isinstance(text, str) else 'no reason given'}")
