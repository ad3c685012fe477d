"""Pulls: blocks of a peer are read into a cache of this side."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from ...core.batch import Batch
from ...errors import StreamAbortedError
from ..reshard import Share
from ..words import WORD
from .holds import Use
from .keys import Key
from .messages import Grant, Pull
from .operation import Operation
from .place import Place
from .remote import RemoteCache
from .roles import Duty

if TYPE_CHECKING:
    from ...core.transfer import Transfer
    from ...engine.region import RemoteRegion

__all__ = ["PullOperation"]


class PullOperation(Operation):
    """One pull.

    :param key: the key of the peer's cache.
    :param there: the peer's blocks; None: those that the key names.
    :param common: the other arguments of `Operation`.
    """

    verb = "read"
    use = Use.WRITE
    duty = Duty.PULL

    def __init__(self, *common: Any, key: Key, there: Place | None) -> None:
        super().__init__(*common)
        self._key = key
        self._there = there
        self._pins: RemoteRegion
        self._pin = slice(0)
        self._value = b""

    def _request(self) -> Pull:
        return Pull(self.number, self._key, self._there)

    async def _prepare(self, remote: RemoteCache, grant: Grant) -> None:
        self._pins = await self._remotes.pins(self.peer)
        self._pin = slice(grant.row * WORD, (grant.row + 1) * WORD)
        self._value = grant.value.to_bytes(WORD, sys.byteorder)

    def _shares(self, layer: int) -> tuple[Share, ...] | None:
        return None

    def _wait(self, layer: int) -> asyncio.Future[None] | None:
        return None

    def _submit(self, batch: Batch, layer: int, tokens: int) -> Transfer:
        return self._context.engine.submit(batch)

    async def _confirm(self, layer: int) -> None:
        """Read the word of this pull, after the data: while it has its value, the blocks were not given to others."""
        found = bytearray(WORD)
        await self._context.engine.read(found, self._pins[self._pin])
        if found != self._value:
            raise StreamAbortedError(
                f"peer {self.peer.name!r} did not keep its blocks for this pull until layer {layer} was read: it had heard "
                "nothing for too long, or has closed its cache",
                peer=self.peer.name,
            )
