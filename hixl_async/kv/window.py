"""The bytes that a stream has in flight."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["has_room"]

#: The most bytes of layers in flight, beyond two layers.  Layers in flight share the link, so that a layer lands no later if it
#: waits for its turn; it suffices to keep the link busy.
WINDOW = 8 << 20


def has_room(in_flight: Collection[int], nbytes: int) -> bool:
    """Return True if so many bytes more may be in flight, beside transfers of these numbers of bytes."""
    return len(in_flight) < 2 or sum(in_flight) + nbytes <= WINDOW
