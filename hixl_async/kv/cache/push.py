"""Pushes: blocks of a cache of this side are written into a peer's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ...core.batch import Batch
from ...errors import AccessError
from ..reshard import Share, senders
from ..words import pack_word
from .holds import Use
from .keys import Identifier, Key
from .messages import Grant, Push
from .operation import Operation
from .place import Place
from .remote import RemoteCache
from .roles import Duty
from .synchronizer import Synchronizer

if TYPE_CHECKING:
    from ...core.transfer import Transfer

__all__ = ["PushOperation"]


class PushOperation(Operation):
    """One push.

    :param key: the key of the peer's cache.
    :param there: the peer's blocks; None: those that the key names.
    :param req_id: the request that the peer expects; None: it need not know.
    :param last: True if no more tokens of these layers follow.
    :param synchronizer: tells when each layer may be read.
    :param common: the other arguments of `Operation`.
    """

    verb = "write"
    use = Use.READ
    duty = Duty.PUSH

    def __init__(
        self,
        *common: Any,
        key: Key,
        there: Place | None,
        req_id: Identifier | None,
        last: bool,
        synchronizer: Synchronizer,
    ) -> None:
        super().__init__(*common)
        self._key = key
        self._there = there
        self._req_id = req_id
        self._last = last
        self._synchronizer = synchronizer
        self._remote: RemoteCache
        self._grant: Grant
        self._owed: dict[int, tuple[Share, ...]] | None = None

    def _request(self) -> Push:
        shard = self._cache.view.shard
        return Push(self.number, self._key, self._there, shard, self._req_id, self._layers or shard.layers, self._last)

    async def _prepare(self, remote: RemoteCache, grant: Grant) -> None:
        if remote.words is None:
            raise AccessError(f"the cache of peer {self.peer.name!r} cannot be written")
        self._remote, self._grant = remote, grant
        if grant.sources:
            mine = grant.sources.index(self._cache.view.shard)
            found = senders(remote.view.group, grant.sources, remote.view.shard)
            self._owed = {layer: tuple(one for one in shares if one.sender == mine) for layer, shares in found.items()}

    def _shares(self, layer: int) -> tuple[Share, ...] | None:
        return None if self._owed is None else self._owed.get(layer, ())

    def _wait(self, layer: int) -> asyncio.Future[None] | None:
        return self._synchronizer.wait(layer)

    def _submit(self, batch: Batch, layer: int, tokens: int) -> Transfer:
        signal = None
        if self._grant.row >= 0:
            assert self._remote.words is not None
            word = self._remote.words[self._remote.word(self._grant.row, layer)]
            signal = (word, pack_word(self._grant.value, tokens, self._last))
        return self._context.engine.submit(batch, signal=signal)

    async def _confirm(self, layer: int) -> None:
        """Nothing: what was written is there."""
