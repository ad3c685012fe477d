"""The pulls and pushes of peers in our caches: from the grant until the peer can no longer touch the blocks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import ClosedError, HixlError, PeerLostError, StreamAbortedError
from ..lease import Lease
from ..pins import Pins
from .context import ManagerContext
from .expectation import Expectation, Writer
from .holds import Hold, Use
from .index import Found
from .roles import Duty
from .store import CacheStore

if TYPE_CHECKING:
    from ...engine.peer import Peer

__all__ = ["Served", "ServedPull", "ServedPush"]


class Served(ABC):
    """One transfer that a peer makes in our blocks.

    :param context: the context of the manager.
    :param peer: the peer.
    :param cache: the cache.
    :param hold: the hold on its blocks.
    :param forget: called once, when the peer can no longer touch them.
    """

    def __init__(
        self, context: ManagerContext, peer: Peer, cache: CacheStore, hold: Hold, forget: Callable[[Served], None]
    ) -> None:
        self.peer = peer
        self.cache = cache
        self.hold = hold
        self._context = context
        self._forget = forget
        self._ended = False
        peer.add_lost_callback(self._lose)

    @property
    def duty(self) -> Duty:
        """The kind of work that this is for the manager."""
        return Duty.SERVE_PULLS if self.hold.use is Use.READ else Duty.ACCEPT_PUSHES

    def end(self, reason: str) -> None:
        """Give the blocks back, because the peer can no longer touch them; idempotent.

        :param reason: why the transfer failed; empty if it did not.
        """
        if not self._ended:
            self._ended = True
            self.peer.remove_lost_callback(self._lose)
            self._settle(reason)
            self.cache.holds.give(self.hold)
            self._forget(self)

    def _lose(self, error: HixlError) -> None:
        if not self._ended:  # the loop may have been asked to call this before
            self._on_lost(error)

    @abstractmethod
    def _settle(self, reason: str) -> None:
        """Give back what else the transfer used, and tell those who wait for it."""

    @abstractmethod
    def _on_lost(self, error: HixlError) -> None:
        """Act on the loss of the peer."""


class ServedPull(Served):
    """A pull of a peer.

    A peer that is lost or silent loses its claim to the blocks: its word moves on, so that it learns that what it reads from
    then on may be other data.

    :param found: what it reads.
    :param pins: the words of pulls.
    """

    def __init__(
        self,
        context: ManagerContext,
        peer: Peer,
        found: Found,
        hold: Hold,
        forget: Callable[[Served], None],
        pins: Pins,
    ) -> None:
        self._pins = pins
        self.pin, self.value = pins.take()
        self._pulled = found.pulled
        since = context.loop.time()
        self._lease = Lease(context.loop, context.lease, lambda: max(since, peer.heard_at), self._expire)
        self._lease.begin()
        super().__init__(context, peer, found.cache, hold, forget)

    def _settle(self, reason: str) -> None:
        self._lease.end()
        self._pins.move_on(self.pin)
        if not reason and self._pulled is not None and not self._pulled.done():
            self._pulled.set_result(None)

    def _expire(self) -> None:
        self.end(f"nothing was heard of the peer for {self._context.lease:g} s")

    def _on_lost(self, error: HixlError) -> None:
        self.end(str(error))


class ServedPush(Served):
    """A push of a peer, which may write until it says that it has ended, or is fenced; time ends nothing.

    :param row: the row of its words, or -1 if no request expects it.
    """

    def __init__(
        self,
        context: ManagerContext,
        peer: Peer,
        cache: CacheStore,
        hold: Hold,
        forget: Callable[[Served], None],
        row: int,
    ) -> None:
        self.row = row
        self.generation = next(cache.generations)
        self._expectation: Expectation | None = None
        self._writer: Writer
        self._fencing: asyncio.Task[None] | None = None
        self._layers = {place: layer for layer, place in cache.places.items()}
        super().__init__(context, peer, cache, hold, forget)

    def bring(self, expectation: Expectation, writer: Writer) -> None:
        """Tell an expectation of what lands."""
        self._expectation, self._writer = expectation, writer

    def land(self, place: int) -> None:
        """Note that all tokens of a layer have landed, by the index of the layer's word."""
        if self._expectation is not None:
            self._expectation.land(self._writer, self._layers[place])

    def _settle(self, reason: str) -> None:
        if self._fencing is not None:
            self._fencing.cancel()
        if self.row >= 0 and self.cache.words is not None:
            self.cache.words.give((self.row,))
        if self._expectation is not None:
            error = StreamAbortedError(reason, peer=self.peer.name) if reason else None
            self._expectation.leave(self._writer, error)

    def _on_lost(self, error: HixlError) -> None:
        if self._expectation is not None:
            lost = PeerLostError(str(error), peer=self.peer.name)
            lost.confirmed_dead = self.peer.confirmed_dead
            self._expectation.lose(lost)
        if self._fencing is None:
            self._fencing = self._context.spawn(self._await_fence())

    async def _await_fence(self) -> None:
        with suppress(ClosedError):  # the engine ends, and its memory with it
            await self.peer.fenced()
        self.end("")
