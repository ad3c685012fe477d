"""Regions across one connection: ours that the peer uses, and the peer's that we use.

::

    owner                                              user
      │  region.up    an offer, with its access           │
      ├─────────────────────────────────────────────────▶│
      │                          region.get  the request │
      │◀─────────────────────────────────────────────────┤
      │  region.metadata  the answer: driver's metadata  │   from here on the owner's memory stays pinned
      ├─────────────────────────────────────────────────▶│
      │  region.down  the offer is withdrawn             │
      ├─────────────────────────────────────────────────▶│
      │                 region.gone  no transfer of mine │   the user's transfers have drained
      │◀────────────────  touches it any more ───────────┤   here the pin ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ..control import Incoming, binary_text
from ..core import memory
from ..core.link import Link
from ..core.log import Log
from ..errors import (
    AccessError,
    BusyError,
    DriverError,
    HixlError,
    InvalidArgumentError,
    NoRouteError,
    ProtocolError,
    StaleRegionError,
    WaitTimeoutError,
)
from ..types import Access, PeerState
from .links import Links
from .region import MAX_NAME, Region, RemoteRegion
from .rpc import Rpc
from .session import Session
from .waiters import Waiters

__all__ = ["MAX_OFFERS", "Exports", "Imports"]

log = Log("hixl_async")

#: The most regions that one peer may offer us.
MAX_OFFERS = 4096
#: The most regions that are imported at the same time: their metadata carries descriptors, of which a connection queues few.
MOST_AT_ONCE = 16
#: Seconds after which a wait for a region is logged, because the name may be mistyped.
PATIENCE = 5.0
#: The most names of regions in a message.
NAMES_SHOWN = 20

# Regions whose memory a peer may still write although our engine has ended; never freed (C7).
_leaked: list[Region] = []


class _Export(NamedTuple):
    region: Region
    #: The union of all access that the peer was ever given.
    access: Access


class Exports:
    """The regions that the peer has been given, each pinned until the peer can no longer touch it.

    :param find: returns the region with a number, or None.
    :param access: returns the access to a region that the peer is given.
    :param idle: called when the peer has released the last region.
    """

    def __init__(
        self,
        session: Session,
        links: Links,
        rpc: Rpc,
        find: Callable[[int], Region | None],
        access: Callable[[Region], Access],
        idle: Callable[[], None],
    ) -> None:
        self._session = session
        self._links = links
        self._rpc = rpc
        self._find = find
        self._access = access
        self._idle = idle
        self._given: dict[int, _Export] = {}
        self._waiting: dict[int, int] = {}  # calls for regions that a transport has not registered yet

    def __len__(self) -> int:
        return len(self._given)

    def __contains__(self, region: Region) -> bool:
        return region._number in self._given

    def offer(self, region: Region) -> None:
        """Tell the peer about a region that it may use."""
        access = self._access(region)
        if access and region.alive:  # a grant= function may even close it
            body = {"id": region._number, "name": region.name, "size": region.size, "access": int(access)}
            self._session.tell("region.up", body)

    def withdraw(self, region: Region) -> None:
        """Withdraw an offer."""
        self._session.tell("region.down", {"id": region._number, "name": region.name})

    def on_get(self, message: Incoming) -> None:
        """Answer the peer's request for a region."""
        call, number = message.number("call"), message.number("id")
        if number in self._waiting:
            self._rpc.fail(call, BusyError("this region is being fetched already"))
        else:
            self._give(call, number)

    def _give(self, call: int, number: int) -> None:
        region = self._find(number)
        try:
            if region is None or not region.alive:
                raise StaleRegionError("the region was closed by its owner")
            access = self._access(region)
            if not access:
                raise AccessError("the region is not granted to this engine")
            link = self._route(region)
            if not isinstance(link, Link):
                self._waiting[number] = call
                link.add_done_callback(lambda _: self._give_later(call, number))
                return
            metadata, fds = memory.export(region, link.driver, int(access))
        except HixlError as error:
            self._rpc.fail(call, error)
            return
        before = self._given.get(number)
        if before is None:
            memory.pin(region)
        self._given[number] = _Export(region, access | (before.access if before else Access.NONE))
        body = {"call": call, "driver": link.driver.name, "metadata": binary_text(metadata), "size": region.size}
        self._session.tell("region.metadata", {**body, "access": int(access)}, fds)

    def _route(self, region: Region) -> Link | asyncio.Future[DriverError | None]:
        """Return the first link that can carry the region, or the registration that must end first."""
        failure = None
        for link in self._links:
            if not memory.known_to(region, link.driver):
                continue
            registration = region._registrations.get(link.driver.name)
            if registration is None:
                return link
            if not registration.done():
                return registration
            failure = registration.result()
            if failure is None:
                return link
        if failure is not None:
            raise DriverError(str(failure))
        names = ", ".join(self._links.names)
        raise NoRouteError(f"none of the linked drivers ({names}) knows this region")

    def _give_later(self, call: int, number: int) -> None:
        if self._waiting.get(number) == call:  # else the peer has given up
            del self._waiting[number]
            if self._session.state is PeerState.UP:
                self._give(call, number)

    def on_gone(self, message: Incoming) -> None:
        """Note that the peer no longer touches a region."""
        number = message.number("id")
        self._waiting.pop(number, None)
        export = self._given.pop(number, None)
        if export is not None:
            memory.unpin(export.region)
            if not self._given:
                self._idle()

    def release(self) -> None:
        """Unpin all regions, because the peer can no longer touch them."""
        given, self._given = self._given, {}
        for export in given.values():
            memory.unpin(export.region)

    def give_up(self) -> list[Region]:
        """Unpin the memory that the engine allocated, because the engine ends although the peer may still write.

        :return: the regions that are leaked: registered memory, which its owner might use for other things once it is unpinned.
        """
        endangered = [
            export.region for export in self._given.values() if export.region._borrowed and export.access & Access.WRITE
        ]
        for region in endangered:
            del self._given[region._number]
        _leaked.extend(endangered)
        self.release()
        return endangered


class _Offer(NamedTuple):
    number: int
    access: Access


class Imports:
    """The regions that the peer offers, and those that we have imported."""

    def __init__(self, session: Session, links: Links, rpc: Rpc) -> None:
        self._session = session
        self._links = links
        self._rpc = rpc
        self._loop = session.loop
        self._offers: dict[str, _Offer] = {}
        self._waiters = Waiters(session.loop)  # for offers, by name
        self._tasks: dict[str, asyncio.Task[RemoteRegion]] = {}
        self._used: dict[int, RemoteRegion] = {}
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    @property
    def offered(self) -> dict[str, Access]:
        """The regions that the peer grants us: the access of each by name."""
        return {name: offer.access for name, offer in self._offers.items()}

    def imported(self, name: str) -> RemoteRegion:
        """Return the region that was imported under a name.

        :raises InvalidArgumentError: if there is none.
        """
        task = self._tasks.get(name)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            raise InvalidArgumentError(f"region {name!r} is not imported; await peer.region({name!r}) first")
        return task.result()

    async def region(self, name: str, timeout: float | None) -> RemoteRegion:
        """Wait for a region and import it; see `Peer.region`."""
        try:
            async with asyncio.timeout(timeout):
                if name not in self._offers:
                    await self._offer(name)
                self._session.must_be_up()
                task = self._tasks.get(name)
                if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                    task = self._tasks[name] = self._session.spawn(
                        # The number of the present offer, because another may replace it before the task begins.
                        self._import(name, self._offers[name].number)
                    )
                    # All callers may be cancelled before it fails; then its error would never be retrieved.
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())
                # Several callers may wait for one import; a cancelled one must not cancel it for the others.
                return await asyncio.shield(task)
        except TimeoutError as error:
            if isinstance(error, HixlError):
                raise
            if name in self._offers:
                who = f"peer {self._session.name!r}"
                text = f"{who} exports region {name!r}, but it could not be imported within {timeout:g} s"
            else:
                text = self._not_offered(name, timeout)
            raise WaitTimeoutError(text, peer=self._session.name) from None

    async def _offer(self, name: str) -> None:
        """Wait until the peer offers a region; a wait of more than `PATIENCE` seconds is logged once."""
        reminder = self._loop.call_later(PATIENCE, lambda: log.warning("%s", self._not_offered(name, PATIENCE)))
        try:
            while name not in self._offers:
                self._session.must_be_up()
                await self._waiters.wait(name)
        finally:
            reminder.cancel()

    def _not_offered(self, name: str, seconds: float | None) -> str:
        names = list(self._offers)
        known = ", ".join(names[:NAMES_SHOWN]) or "none"
        if len(names) > NAMES_SHOWN:
            known += f" and {len(names) - NAMES_SHOWN} more"
        return (
            f"peer {self._session.name!r} did not export region {name!r} within {seconds:g} s; it exports: {known} "
            "(a region with access 'none' is not exported, nor one that its grant= keeps from this engine)"
        )

    async def _import(self, name: str, number: int) -> RemoteRegion:
        try:
            async with self._turns:
                return await self._fetch(name, number)
        except BaseException:
            # The owner may have pinned it for us, whatever the failure.
            self._session.tell("region.gone", {"id": number})
            raise

    async def _fetch(self, name: str, number: int) -> RemoteRegion:
        session = self._session
        answer = await self._rpc.ask("region.get", {"id": number}, answer="region.metadata")
        try:
            size, access, metadata = answer.number("size"), answer.number("access"), answer.metadata()
            link = self._links.get(answer.text("driver"))
            if link is None or size == 0 or not 0 < access <= Access.READ_WRITE:
                raise ProtocolError(
                    f"peer {session.name!r} sent malformed metadata of region {name!r}", peer=session.name
                )
            session.must_be_up()
            fds = answer.take()
        finally:
            answer.drop()
        remote = RemoteRegion(name, Access(access))
        try:
            await memory.import_remote(remote, link, metadata, fds, size, access)
            session.must_be_up()
            offer = self._offers.get(name)
            if offer is None or offer.number != number:
                raise StaleRegionError(
                    f"region {name!r} of {session.name!r} was closed while it was imported", peer=session.name
                )
        except BaseException:
            memory.retire(remote)
            raise
        self._used[number] = remote
        return remote

    def on_up(self, message: Incoming) -> None:
        """Record an offer of the peer."""
        name, number, access = message.text("name"), message.number("id"), message.number("access")
        if not 0 < len(name.encode()) <= MAX_NAME or not 0 < access <= Access.READ_WRITE:
            raise ProtocolError(
                f"peer {self._session.name!r} offers a malformed region",
                peer=self._session.name,
            )
        if name not in self._offers and len(self._offers) >= MAX_OFFERS:
            raise ProtocolError(
                f"peer {self._session.name!r} offers more than {MAX_OFFERS} regions", peer=self._session.name
            )
        self._offers[name] = _Offer(number, Access(access))
        self._waiters.wake(name)

    def on_down(self, message: Incoming) -> None:
        """Forget an offer, and tell the peer when no transfer of ours touches the region any more."""
        name, number = message.text("name"), message.number("id")
        offer = self._offers.get(name)
        if offer is not None and offer.number == number:
            del self._offers[name]
            self._tasks.pop(name, None)
        remote = self._used.pop(number, None)
        if remote is not None:
            memory.retire(remote)
            remote.released().add_done_callback(lambda _: self._session.tell("region.gone", {"id": number}))

    def lose(self) -> None:
        """End all waits and retire all imported regions, because the peer is down."""
        self._waiters.wake_all()
        for remote in self._used.values():
            memory.retire(remote)
        self._used.clear()
