"""The shared secret."""

from __future__ import annotations

import hmac

from ..errors import InvalidArgumentError

__all__ = ["Secret"]


class Secret:
    """The shared secret, or its absence, behind a face that never shows it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None) -> None:
        """
        :raises InvalidArgumentError: if `key` is neither None nor bytes with something in them.
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
        """An HMAC-SHA256 over `label` and `parts`, each with its length."""
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))
        return hmac.digest(self._key or b"", b"hixl_async control\0" + text, "sha256")
