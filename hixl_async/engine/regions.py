"""Regions across one connection: those of ours that the peer uses, and those of its that we use.

::

    owner                                              user
      │  region.up    you may use this, so far           │
      ├─────────────────────────────────────────────────▶│
      │                          region.get  how?        │
      │◀─────────────────────────────────────────────────┤
      │  region.card  so: a driver's card                │   from here on the owner's memory stays pinned
      ├─────────────────────────────────────────────────▶│
      │  region.down  no more                            │
      ├─────────────────────────────────────────────────▶│
      │                 region.gone  nothing of mine     │   the user's flights have drained
      │◀────────────────  touches it any more ───────────┤   here the pin ends
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from ..control import Incoming, binary_text
from ..core.link import Link
from ..errors import (
    AccessError,
    BusyError,
    DriverError,
    HixlError,
    InvalidArgumentError,
    NoRouteError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
)
from ..types import Access, PeerState
from .region import MAX_NAME, Region, RemoteRegion

if TYPE_CHECKING:
    from .peer import Peer

__all__ = ["MAX_OFFERS", "Exports", "Imports"]

#: Regions that one peer may offer us.
MAX_OFFERS = 4096
#: Regions that are imported at the same time: their cards carry descriptors, of which a connection queues few.
MOST_AT_ONCE = 16

# Regions whose memory a peer may still write although its engine is gone; never given back (C7).
_leaked: list[Region] = []


class _Export(NamedTuple):
    region: Region
    #: All that the peer was ever given of it.
    access: Access


class Exports:
    """Regions of ours that the peer has been given, each pinned until the peer can touch it no more."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._given: dict[int, _Export] = {}
        self._waiting: dict[int, asyncio.Task[None]] = {}  # for regions that a transport has not registered yet

    def __len__(self) -> int:
        return len(self._given)

    def __contains__(self, region: Region) -> bool:
        return region.number in self._given

    def offer(self, region: Region) -> None:
        """Tells the peer of a region that it may use."""
        access = region.access_for(self._peer)
        if access and region.alive:  # a grant= may even close it
            body = {"id": region.number, "name": region.name, "size": region.size, "access": int(access)}
            self._peer._tell("region.up", body)

    def withdraw(self, region: Region) -> None:
        """Takes an offer back."""
        self._peer._tell("region.down", {"id": region.number, "name": region.name})

    def on_get(self, message: Incoming) -> None:
        """The peer wants to use a region."""
        call, number = message.number("call"), message.number("id")
        if number in self._waiting:
            self._peer._calls.fail(call, BusyError("this region is being fetched already"))
        else:
            self._give(call, number)

    def _give(self, call: int, number: int) -> None:
        region = self._peer._host._region(number)
        try:
            if region is None or not region.alive:
                raise StaleRegionError("the region was closed by its owner")
            access = region.access_for(self._peer)
            if not access:
                raise AccessError("the region is not granted to this engine")
            link = self._route(region)
            if not isinstance(link, Link):
                self._waiting[number] = self._peer._host._spawn(self._give_later(call, number, link))
                return
            card, fds = region.export(link.driver, int(access))
        except HixlError as error:
            self._peer._calls.fail(call, error)
            return
        before = self._given.get(number)
        if before is None:
            region.pin()
        self._given[number] = _Export(region, access | (before.access if before else Access.NONE))
        body = {"call": call, "driver": link.driver.name, "card": binary_text(card), "size": region.size}
        self._peer._tell("region.card", {**body, "access": int(access)}, fds)

    def _route(self, region: Region) -> Link | asyncio.Future[DriverError | None]:
        """The first link that a region can be lent over, or the registration on which that depends."""
        failure = None
        for link in self._peer._links:
            if not region.known_to(link.driver):
                continue
            registration = region.registrations.get(link.driver.name)
            if registration is None:
                return link
            if not registration.done():
                return registration
            failure = registration.result()
            if failure is None:
                return link
        if failure is not None:
            raise DriverError(str(failure))
        names = ", ".join(self._peer._links.names)
        raise NoRouteError(f"none of the linked drivers ({names}) knows this region")

    async def _give_later(self, call: int, number: int, registration: asyncio.Future[DriverError | None]) -> None:
        await asyncio.wait([registration])
        del self._waiting[number]
        if self._peer.state is PeerState.UP:
            self._give(call, number)

    def on_gone(self, message: Incoming) -> None:
        """Nothing of the peer's touches a region any more."""
        number = message.number("id")
        if waiting := self._waiting.pop(number, None):
            waiting.cancel()  # it has given up
        export = self._given.pop(number, None)
        if export is not None:
            export.region.unpin()
            if not self._given:
                self._peer._holds_nothing()

    def release(self) -> None:
        """The peer can touch none of them any more."""
        given, self._given = self._given, {}
        for export in given.values():
            export.region.unpin()

    def give_up(self) -> list[Region]:
        """The engine ends, and the peer may still write: gives back what is ours alone.

        :return: what is leaked: memory that somebody else lent us, and might use for other things once we let go of it.
        """
        endangered = [
            export.region for export in self._given.values() if export.region.borrowed and export.access & Access.WRITE
        ]
        for region in endangered:
            del self._given[region.number]
        _leaked.extend(endangered)
        self.release()
        return endangered


class _Offer(NamedTuple):
    number: int
    access: Access


class Imports:
    """Regions that the peer offers, and those of them that we use."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._loop = peer._host.loop
        self._offers: dict[str, _Offer] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}  # for offers of a name
        self._tasks: dict[str, asyncio.Task[RemoteRegion]] = {}
        self._used: dict[int, RemoteRegion] = {}
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    @property
    def offered(self) -> dict[str, Access]:
        """Names of the regions that the peer grants us, with the access of each."""
        return {name: offer.access for name, offer in self._offers.items()}

    def imported(self, name: str) -> RemoteRegion:
        """The region that was imported under a name.

        :raises InvalidArgumentError: if there is none.
        """
        task = self._tasks.get(name)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            raise InvalidArgumentError(f"region {name!r} is not imported; await peer.region({name!r}) first")
        return task.result()

    async def region(self, name: str, timeout: float | None) -> RemoteRegion:
        """See `Peer.region`."""
        try:
            async with asyncio.timeout(timeout):
                while name not in self._offers:
                    self._peer._must_be_up()
                    await self._offer_of(name)
                self._peer._must_be_up()
                task = self._tasks.get(name)
                if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                    task = self._tasks[name] = self._peer._host._spawn(
                        # The number is that of the offer seen now: before the task begins another may take its place.
                        self._import(name, self._offers[name].number)
                    )
                    # All who wait for it may be cancelled before it fails; then nobody else would look at its error.
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())
                # Several callers may wait for one import; none of them may cancel it for the others.
                return await asyncio.shield(task)
        except TimeoutError as error:
            if isinstance(error, HixlError):
                raise
            who = f"peer {self._peer.name!r}"
            if name in self._offers:
                text = f"{who} exports region {name!r}, but it could not be imported within {timeout:g} s"
            else:
                known = ", ".join(self._offers) or "none"
                text = (
                    f"{who} did not export region {name!r} within {timeout:g} s; it exports: {known} "
                    "(a region with access 'none' is not exported, nor one that its grant= keeps from this engine)"
                )
            raise TransferTimeoutError(text, peer=self._peer.name) from None

    async def _offer_of(self, name: str) -> None:
        """Waits for an offer of that name, or the end of the peer."""
        waiter = self._loop.create_future()
        waiters = self._waiters.setdefault(name, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(name) is waiters:
                del self._waiters[name]

    async def _import(self, name: str, number: int) -> RemoteRegion:
        try:
            async with self._turns:
                return await self._fetch(name, number)
        except BaseException:
            # Whatever went wrong, the owner may have pinned it for us.
            self._peer._tell("region.gone", {"id": number})
            raise

    async def _fetch(self, name: str, number: int) -> RemoteRegion:
        peer = self._peer
        answer = await peer._calls.ask("region.get", {"id": number}, answer="region.card")
        try:
            size, access, card = answer.number("size"), answer.number("access"), answer.card()
            link = peer._links.get(answer.text("driver"))
            if link is None or size == 0 or not 0 < access <= Access.READ_WRITE:
                raise ProtocolError(f"peer {peer.name!r} answered region {name!r} with nonsense", peer=peer.name)
            peer._must_be_up()
            fds = answer.take()
        finally:
            answer.drop()
        remote = RemoteRegion(name, Access(access))
        try:
            await remote.map(link, card, fds, size, access)
            peer._must_be_up()
            offer = self._offers.get(name)
            if offer is None or offer.number != number:
                raise StaleRegionError(
                    f"region {name!r} of {peer.name!r} was closed while it was imported", peer=peer.name
                )
        except BaseException:
            remote.retire()
            raise
        self._used[number] = remote
        return remote

    def on_up(self, message: Incoming) -> None:
        """The peer offers a region."""
        name, number, access = message.text("name"), message.number("id"), message.number("access")
        if not 0 < len(name.encode()) <= MAX_NAME or not 0 < access <= Access.READ_WRITE:
            raise ProtocolError(f"peer {self._peer.name!r} offers a region that cannot be", peer=self._peer.name)
        if name not in self._offers and len(self._offers) >= MAX_OFFERS:
            raise ProtocolError(f"peer {self._peer.name!r} offers more than {MAX_OFFERS} regions", peer=self._peer.name)
        self._offers[name] = _Offer(number, Access(access))
        self._wake(name)

    def on_down(self, message: Incoming) -> None:
        """The peer takes an offer back; it wants to know when nothing of ours touches the region any more."""
        name, number = message.text("name"), message.number("id")
        offer = self._offers.get(name)
        if offer is not None and offer.number == number:
            del self._offers[name]
            self._tasks.pop(name, None)
        remote = self._used.pop(number, None)
        if remote is not None:
            remote.retire()
            remote.released().add_done_callback(lambda _: self._peer._tell("region.gone", {"id": number}))

    def _wake(self, name: str) -> None:
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    def lose(self) -> None:
        """The peer is gone: nothing of it can be used any more."""
        for name in list(self._waiters):
            self._wake(name)
        for remote in self._used.values():
            remote.retire()
        self._used.clear()
