"""The links of one peer, one for each driver that both sides have: how they come to be, and how all of them end.

::

    link         a driver's card, which the other side's driver joins with its own
    link.failed  that driver will not do: both sides go on without it, unless it was the last
    ready        all that could be linked is; who has said and heard it may submit
    driver       what a driver has to say to the one at the other end
    link.down    one broke after that: the side that saw it parts from the other
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING

from ..control import Incoming, binary_text
from ..core.link import CAP_SAME_HOST, MESSAGE_LIMIT, Driver, Link
from ..errors import ConnectError, DriverError, HixlError, NoRouteError, PeerLostError, ProtocolError
from ..types import PeerState

if TYPE_CHECKING:
    from .peer import Peer

__all__ = ["Links"]

logger = logging.getLogger("hixl_async")

#: Characters of a failure that one side tells the other.
FAILURE_LIMIT = 500


class Links:
    """What transfers and notifications to one peer travel over, in our order of preference."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._loop = peer._host.loop
        self._links: dict[str, Link] = {}
        self._unjoined: set[str] = set()  # drivers of which the peer has sent no card yet
        self._failed: dict[str, Link | None] = {}  # drivers that one side could not link, with what is left of it
        self._failures: list[HixlError] = []  # why
        self._broken: dict[str, HixlError] = {}  # links that broke after we told the peer that it may use them
        self._told_ready = False
        self._heard_ready = False
        self._pace = 0
        #: Done when both sides can submit, or with the reason why they never will.
        self.ready: asyncio.Future[None] = self._loop.create_future()

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Of their drivers."""
        return tuple(self._links)

    def get(self, name: str) -> Link | None:
        """The link of a driver."""
        return self._links.get(name)

    def first(self, needed: int, what: str) -> Link:
        """The first whose driver has a capability.

        :raises DriverError: if none has it.
        """
        for link in self._links.values():
            if link.driver.capabilities & needed:
                return link
        raise DriverError(f"none of the drivers linked with {self._peer.name!r} ({', '.join(self._links)}) can {what}")

    def pace(self, bytes_per_second: int) -> None:
        """At most so many for each from now on, 0: any; all of them or none."""
        paced = []
        try:
            for link in self._links.values():
                link.pace(bytes_per_second)
                paced.append(link)
        except HixlError:
            for link in paced:
                link.pace(self._pace)
            raise
        self._pace = bytes_per_second

    # -- coming up

    def establish(self, patience: float) -> None:
        """Offers a link of every driver that both sides have; `ready` tells when they are joined.

        :param patience: seconds after which those that are not are done without, if there are others.
        :raises NoRouteError: if there is none.
        """
        peer = self._peer
        drivers = peer._host._shared_drivers(peer.identity.drivers, peer.same_host)
        if not drivers:
            raise NoRouteError(
                f"no driver reaches {peer.name!r}: it has {', '.join(peer.identity.drivers) or 'none'}"
                + (
                    "" if peer.same_host else f", and it is not reached over a Unix socket: {peer._connection.fallback}"
                ),
                peer=peer.name,
            )
        self._unjoined = {driver.name for driver in drivers}
        if len(drivers) > 1:
            late = self._loop.call_later(patience, self._give_up_late, patience)
            self.ready.add_done_callback(lambda _: late.cancel())
        for driver in drivers:
            try:
                self._links[driver.name], card, fds = driver.link_new(peer._cookie, peer.name)
            except HixlError as error:
                self.do_without(driver.name, error)
            else:
                peer._send("link", {"driver": driver.name, "card": binary_text(card)}, fds)

    def on_link(self, message: Incoming) -> None:
        """The other half of one."""
        name, card = message.text("driver"), message.card()
        if name in self._failed:
            return
        if name not in self._unjoined:
            raise ProtocolError(
                f"peer {self._peer.name!r} offered a link of {name!r} that nobody expects", peer=self._peer.name
            )
        self._unjoined.discard(name)
        link = self._links[name]
        try:
            # Now, for the next message may be one for the driver, which must know its other end by then.
            joining = link.connect(self._vouch(link, card), message.take())
        except HixlError as error:
            self.do_without(name, error)
        else:
            self._peer._host._spawn(self._join(link, joining))

    def _vouch(self, link: Link, card: bytes) -> bytes:
        """A same-host driver's card begins with its maker's pid; only the kernel's word for it reaches the driver."""
        if not link.driver.capabilities & CAP_SAME_HOST:
            return card
        credentials = self._peer._connection.credentials
        claimed = int.from_bytes(card[:4], sys.byteorder)
        if credentials is not None and claimed == credentials.pid:
            return card
        return bytes(4) + card[4:]

    async def _join(self, link: Link, joining: Awaitable[int]) -> None:
        try:
            await joining
        except HixlError as error:
            self.do_without(link.driver.name, error)
        else:
            if self._coming_up and self._links.get(link.driver.name) is link:
                link.watch()
                self._maybe_ready()

    @property
    def _coming_up(self) -> bool:
        return self._peer.state is PeerState.CONNECTING

    def _give_up_late(self, patience: float) -> None:
        if self._coming_up and any(link.up for link in self._links.values()):
            for name in [name for name, link in self._links.items() if not link.up]:
                self.do_without(name, ConnectError(f"driver {name!r} did not connect within {patience:.3g} s"))

    def do_without(self, name: str, error: HixlError) -> None:
        """A driver's link failed here before it was used: another may do."""
        if not self._coming_up or name in self._failed:
            return
        if self._told_ready:  # its word is on its way: that it does without this link, or that it may use it already
            self._broken[name] = error
            return
        if isinstance(error, ProtocolError):  # the peer's fault, not the driver's
            self._peer._lose(error)
            return
        if not isinstance(error, ConnectError | PeerLostError):
            error = ConnectError(f"driver {name!r}: {error}", peer=self._peer.name, native=error.native)
        with contextlib.suppress(PeerLostError):
            self._peer._send("link.failed", {"driver": name, "text": str(error)[:FAILURE_LIMIT]})
        self._drop(name, error)

    def on_failed(self, message: Incoming) -> None:
        """The other side has to do without one."""
        name, text = message.text("driver"), message.words("text", FAILURE_LIMIT)
        if name in self._failed:
            return
        if name not in self._links:
            raise ProtocolError(
                f"peer {self._peer.name!r} could not make a link of {name!r} that nobody expects", peer=self._peer.name
            )
        self._drop(
            name, ConnectError(f"peer {self._peer.name!r} could not make the link: {text}", peer=self._peer.name)
        )

    def _drop(self, name: str, error: HixlError) -> None:
        self._unjoined.discard(name)
        link = self._failed[name] = self._links.pop(name, None)
        self._failures.append(error)
        if not self._links and not self._unjoined:
            first = self._failures[0]
            if len(self._failures) > 1:
                text = "; ".join(str(failure) for failure in self._failures)
                first = ConnectError(text, peer=self._peer.name, native=first.native)
            self._peer._lose(first)
            return
        logger.warning("peer %r is linked without driver %r: %s", self._peer.name, name, error)
        if link is not None:
            self._peer._host._spawn(self._stop(link))
        self._maybe_ready()

    @property
    def _joined(self) -> bool:
        return not self._unjoined and all(link.up for link in self._links.values())

    def _maybe_ready(self) -> None:
        """Says once, when all that can be linked is, that the peer may submit."""
        if self._coming_up and self._joined and not self._told_ready:
            self._told_ready = True
            others = self._peer._host._others(self._peer)
            try:
                self._peer._send("ready", {"settled": all(other._over for other in others)})
            except HixlError as error:
                self._peer._lose(error)
            self._maybe_up()

    def on_ready(self, message: Incoming) -> None:
        """All that can be linked is, there."""
        if message.flag("settled"):
            # Nothing of its earlier connections is left there, although we could not hear its goodbye.
            for other in self._peer._host._others(self._peer):
                if other.state is PeerState.DOWN:
                    other._become_harmless()
        self._heard_ready = True
        for name, error in self._broken.items():
            if name in self._links:
                self._peer._lose(error)
        self._maybe_up()

    def _maybe_up(self) -> None:
        if self._coming_up and self._heard_ready and self._joined:
            self._peer._come_up()

    # -- between drivers

    def tell(self, driver: Driver, data: bytes) -> None:
        """Carries what a driver of ours has to say to the one at the other end; they may talk as long as they are linked."""
        if len(data) > MESSAGE_LIMIT:
            self._peer._lose(
                ProtocolError(f"driver {driver.name!r} wants to send {len(data)} bytes at once", peer=self._peer.name)
            )
            return
        with contextlib.suppress(PeerLostError):
            self._peer._send("driver", {"driver": driver.name, "data": binary_text(data)})

    def on_driver(self, message: Incoming) -> None:
        """What its driver has to say to ours."""
        name, data = message.text("driver"), message.binary("data")
        if name in self._failed:
            return
        if name not in self._links or name in self._unjoined:
            raise ProtocolError(
                f"peer {self._peer.name!r} has a message for {name!r}, which is not linked", peer=self._peer.name
            )
        if len(data) > MESSAGE_LIMIT:
            raise ProtocolError(
                f"peer {self._peer.name!r} has a message of {len(data)} bytes for {name!r}", peer=self._peer.name
            )
        self._links[name].message(data)

    # -- the end

    def refuse(self) -> None:
        """No new work."""
        for link in self._links.values():
            link.refuse()

    async def drain(self, until: float) -> None:
        """Lets our work finish by itself, as far as there is time."""
        drains = [link.drained() for link in self._links.values()]
        if drains:
            _, late = await asyncio.wait(drains, timeout=max(0, until - self._loop.time()))
            for drain in late:
                drain.cancel()

    def _all(self) -> list[Link]:
        """Those that failed too: a driver may still have work for them."""
        return [*self._links.values(), *filter(None, self._failed.values())]

    def peer_died(self) -> None:
        """Its process has ended: whatever waits for it need not."""
        for link in self._all():
            with contextlib.suppress(HixlError):
                link.stop(True)

    async def stop(self) -> None:
        """Ends what runs; done when no thread of ours works for them any more."""
        for link in self._all():
            await self._stop(link)

    async def _stop(self, link: Link) -> None:
        try:
            await link.stop(self._peer.confirmed_dead)
        except HixlError as error:
            logger.warning("link of %r to peer %r: %s", link.driver.name, self._peer.name, error)

    def free(self) -> None:
        """Gives them back; only after `stop`."""
        for link in self._all():
            link.free()
