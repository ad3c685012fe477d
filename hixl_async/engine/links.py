"""The links of one peer, one for each driver that both sides have: how they are made, and how they end.

::

    link         a driver's metadata, which the other side's driver joins with its own
    link.failed  a driver cannot be linked: both sides continue without it, unless it was the last
    ready        all drivers that can be linked are linked; a side that has sent and received it may submit
    driver       a message of a driver to the driver at the other end
    link.down    a link broke after that: the side that noticed it ends the connection
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator

from ..control import Incoming, binary_text
from ..core.link import CAP_SAME_HOST, MESSAGE_LIMIT, Driver, Link
from ..core.log import Log
from ..errors import ConnectError, DriverError, HixlError, NoRouteError, PeerDownError, ProtocolError
from ..types import PeerState
from .session import Mark, Session

__all__ = ["Links"]

log = Log("hixl_async")

#: The most characters of a failure that one side sends to the other.
FAILURE_LIMIT = 500


class Links:
    """The links to one peer, in our order of preference.

    :param cookie: the number by which drivers know the peer.
    :param announce: tells the peer that it may submit; called once, when all drivers that can be linked are linked.
    :param come_up: called once, when both sides may submit.
    :param explain: returns why links to the peer are down, and True if its process has ended; None where that is not known.
    :param cause_awaited: returns True while that is about to be known.
    """

    def __init__(
        self,
        session: Session,
        cookie: int,
        announce: Callable[[], None],
        come_up: Callable[[], None],
        explain: Callable[[], tuple[str, bool] | None],
        cause_awaited: Callable[[], bool],
    ) -> None:
        self._session = session
        self._cookie = cookie
        self._announce = announce
        self._come_up = come_up
        self._explain = explain
        self._cause_awaited = cause_awaited
        self._loop = session.loop
        self._links: dict[str, Link] = {}
        self._unjoined: set[str] = set()  # drivers whose metadata has not come yet
        self._failed: dict[str, Link | None] = {}  # drivers that one side could not link, and what is left of the link
        self._failures: list[HixlError] = []  # their reasons
        self._broken: dict[str, HixlError] = {}  # links that broke after we told the peer that it may use them
        self._told_ready = False
        self._heard_ready = False
        self._pace = 0
        #: Done when both sides can submit; fails with the reason if they cannot.
        self.ready: asyncio.Future[None] = self._loop.create_future()

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of their drivers."""
        return tuple(self._links)

    def get(self, name: str) -> Link | None:
        """Return the link of a driver, or None."""
        return self._links.get(name)

    def first(self, needed: int, what: str) -> Link:
        """Return the first link whose driver has a capability.

        :param needed: capability bits, of which one is enough.
        :param what: the words for it in the error.

        :raises DriverError: if none has it.
        """
        for link in self._links.values():
            if link.driver.capabilities & needed:
                return link
        raise DriverError(
            f"none of the drivers linked with {self._session.name!r} ({', '.join(self._links)}) can {what}"
        )

    def pace(self, bytes_per_second: int) -> None:
        """Limit the bytes per second of each link from now on; 0 means no limit.

        If one driver refuses, the previous limit is restored on all links.
        """
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

    def establish(self, drivers: list[Driver], patience: float) -> None:
        """Offer the peer a link of each driver; `ready` is done when they are joined.

        :param drivers: those that both sides have.
        :param patience: seconds after which links that are not joined are given up, if there are other links.
        :raises NoRouteError: if there is no driver.
        """
        session = self._session
        if not drivers:
            raise NoRouteError(
                f"no driver reaches {session.name!r}: it has {', '.join(session.identity.drivers) or 'none'}"
                + (
                    ""
                    if session.connection.same_host
                    else f", and no Unix socket leads to it: {session.connection.fallback}"
                ),
                peer=session.name,
            )
        self._unjoined = {driver.name for driver in drivers}
        if len(drivers) > 1:
            late = self._loop.call_later(patience, self._give_up_late, patience)
            self.ready.add_done_callback(lambda _: late.cancel())
        for driver in drivers:
            try:
                link, metadata, fds = driver.link_new(self._cookie, session.name)
            except HixlError as error:
                self.do_without(driver.name, error)
            else:
                link.explain_by(self._explain, self._cause_awaited)
                self._links[driver.name] = link
                session.send("link", {"driver": driver.name, "metadata": binary_text(metadata)}, fds)

    def on_link(self, message: Incoming) -> None:
        """Join our half of a link with the peer's."""
        name, metadata = message.text("driver"), message.metadata()
        if name in self._failed:
            return
        if name not in self._unjoined:
            raise ProtocolError(
                f"peer {self._session.name!r} offered a link of {name!r} that was not expected", peer=self._session.name
            )
        self._unjoined.discard(name)
        link = self._links[name]
        try:
            # At once, because the next message may be one for the driver, which must know the other end by then.
            joining = link.connect(self._vouch(link, metadata), message.take())
        except HixlError as error:
            self.do_without(name, error)
        else:
            self._session.spawn(self._join(link, joining))

    def _vouch(self, link: Link, metadata: bytes) -> bytes:
        """Return a same-host driver's metadata with the pid at its beginning replaced by the kernel's number for it, or 0.

        The peer's own number means nothing in another pid namespace, and need not be true.
        """
        if not link.driver.capabilities & CAP_SAME_HOST:
            return metadata
        credentials = self._session.connection.credentials
        pid = credentials.pid if credentials is not None else 0
        return max(0, pid).to_bytes(4, sys.byteorder) + metadata[4:]

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
        return self._session.state is PeerState.CONNECTING

    def _give_up_late(self, patience: float) -> None:
        if self._coming_up and any(link.up for link in self._links.values()):
            for name in [name for name, link in self._links.items() if not link.up]:
                self.do_without(name, ConnectError(f"driver {name!r} did not connect within {patience:.3g} s"))

    def do_without(self, name: str, error: HixlError) -> None:
        """Continue without a driver whose link failed before it was used, if there is another."""
        if not self._coming_up or name in self._failed:
            return
        if self._told_ready:  # the peer may have given up this link too, or may use it already; its message will tell
            self._broken[name] = error
            return
        if isinstance(error, ProtocolError):  # the peer's fault, not the driver's
            self._session.lose(error)
            return
        if not isinstance(error, ConnectError | PeerDownError):
            error = ConnectError(f"driver {name!r}: {error}", peer=self._session.name, native=error.native)
        with contextlib.suppress(PeerDownError):
            self._session.send("link.failed", {"driver": name, "text": str(error)[:FAILURE_LIMIT]})
        self._drop(name, error)

    def on_failed(self, message: Incoming) -> None:
        """Continue without a driver that the other side cannot link."""
        name, text = message.text("driver"), message.words("text", FAILURE_LIMIT)
        if name in self._failed:
            return
        if name not in self._links:
            raise ProtocolError(
                f"peer {self._session.name!r} could not make a link of {name!r} that was not expected",
                peer=self._session.name,
            )
        self._drop(
            name, ConnectError(f"peer {self._session.name!r} could not make the link: {text}", peer=self._session.name)
        )

    def _drop(self, name: str, error: HixlError) -> None:
        self._unjoined.discard(name)
        link = self._failed[name] = self._links.pop(name, None)
        self._failures.append(error)
        if not self._links and not self._unjoined:
            first = self._failures[0]
            if len(self._failures) > 1:
                text = "; ".join(str(failure) for failure in self._failures)
                first = ConnectError(text, peer=self._session.name, native=first.native)
            self._session.lose(first)
            return
        log.warning("peer %r is linked without driver %r: %s", self._session.name, name, error)
        if link is not None:
            self._session.spawn_ending(self._stop(link))
        self._maybe_ready()

    @property
    def _joined(self) -> bool:
        return not self._unjoined and all(link.up for link in self._links.values())

    def _maybe_ready(self) -> None:
        """Announce once, when all drivers that can be linked are linked, that the peer may submit."""
        if self._coming_up and self._joined and not self._told_ready:
            self._told_ready = True
            self._announce()
            self._maybe_up()

    def on_ready(self) -> None:
        """Note that the peer has linked all drivers that can be linked there."""
        self._heard_ready = True
        for name, error in self._broken.items():
            if name in self._links:
                self._session.lose(error)
        self._maybe_up()

    def _maybe_up(self) -> None:
        if self._coming_up and self._heard_ready and self._joined:
            self._come_up()

    # -- between drivers

    def tell(self, driver: Driver, data: bytes) -> None:
        """Send a message of our driver to the driver at the other end, which is possible while they are linked."""
        if len(data) > MESSAGE_LIMIT:
            self._session.lose(
                ProtocolError(
                    f"driver {driver.name!r} wants to send {len(data)} bytes at once", peer=self._session.name
                )
            )
            return
        with contextlib.suppress(PeerDownError):
            self._session.send("driver", {"driver": driver.name, "data": binary_text(data)})

    def on_driver(self, message: Incoming) -> None:
        """Hand a message of the peer's driver to ours."""
        name, data = message.text("driver"), message.binary("data")
        if name in self._failed:
            return
        if name not in self._links or name in self._unjoined:
            raise ProtocolError(
                f"peer {self._session.name!r} has a message for {name!r}, which is not linked", peer=self._session.name
            )
        if len(data) > MESSAGE_LIMIT:
            raise ProtocolError(
                f"peer {self._session.name!r} has a message of {len(data)} bytes for {name!r}", peer=self._session.name
            )
        self._links[name].message(data)

    # -- the end

    def refuse(self) -> None:
        """Refuse new work."""
        for link in self._links.values():
            link.refuse()

    def cause_known(self) -> None:
        """Report the transfers that failed with their link while the cause was awaited."""
        for link in self._links.values():
            link.cause_known()

    async def drain(self, until: float) -> None:
        """Wait for our work to finish by itself, until a point in time."""
        drains = [link.drained() for link in self._links.values()]
        if drains:
            _, late = await asyncio.wait(drains, timeout=max(0, until - self._loop.time()))
            for drain in late:
                drain.cancel()

    def _all(self) -> list[Link]:
        """Return all links, also those that failed, because a driver may still have work for them."""
        return [*self._links.values(), *filter(None, self._failed.values())]

    def peer_died(self) -> None:
        """Tell the drivers that the peer's process has ended, so that none waits for it."""
        for link in self._all():
            with contextlib.suppress(HixlError):
                link.stop(True)

    async def stop(self) -> None:
        """End the work in flight, and wait until no thread of ours works for the links."""
        for link in self._all():
            await self._stop(link)

    async def _stop(self, link: Link) -> None:
        try:
            await link.stop(self._session.has(Mark.DEAD))
        except HixlError as error:
            log.warning("link of %r to peer %r: %s", link.driver.name, self._session.name, error)

    def free(self) -> None:
        """Free the links; only after `stop`."""
        for link in self._all():
            link.free()
