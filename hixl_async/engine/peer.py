"""A connected engine: its links, its life, and how we learn that it is gone.

States: CONNECTING -> UP -> CLOSING -> DOWN, or straight to DOWN when the peer is lost.  DOWN does not mean harmless: a
stopped process may still finish a copy into our memory, so `fenced` is a second question.  It is answered by the peer's
goodbye (sent after its own work has drained), by its word on a later connection that nothing of this one is left, by
the confirmed death of its process, or by the fact that it holds none of our memory; never by time.

Whatever ends a peer, one task sees it through, `_ending`: we leave (`_leave`), it leaves or its link breaks (`_part`),
or it is lost (`_wind_down` alone).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..control import Incoming, close_descriptors
from ..core.link import Link
from ..errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    PeerLostError,
    ProtocolError,
)
from ..types import Access, Address, PeerState
from .arguments import positive_seconds
from .links import FAILURE_LIMIT, Links
from .region import Region, RemoteRegion
from .regions import Exports, Imports
from .rpc import Calls, Handler

if TYPE_CHECKING:
    from ..control import Connection, Identity
    from ..core.link import Driver

__all__ = ["Peer", "PeerHost"]

logger = logging.getLogger("hixl_async")

#: Seconds between a link's end and the goodbye that explains it, before the peer counts as lost.
GOODBYE_GRACE = 0.25

#: Messages that may carry descriptors.
CARRIERS = ("link", "region.card")

Routes = dict[str, Callable[[Incoming], None]]


class PeerHost(Protocol):
    """What a peer needs of its engine."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def _must_be_here(self) -> None: ...
    def _shared_drivers(self, theirs: Sequence[str], same_host: bool) -> list[Driver]: ...
    def _others(self, peer: Peer) -> list[Peer]: ...
    def _attach(self, peer: Peer) -> int: ...
    def _detach(self, peer: Peer) -> None: ...
    def _region(self, number: int) -> Region | None: ...
    def _regions(self) -> list[Region]: ...
    def _handler(self, service: str) -> Handler | None: ...
    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...


class Peer:
    """Another engine that this one is connected to; made by ``engine.connect`` or given by ``engine.accepted``."""

    def __init__(self, host: PeerHost, connection: Connection, close_timeout: float) -> None:
        #: Who the peer says it is; proved as far as the engine's secret or the operating system proves it.
        self.identity: Identity = connection.identity
        #: Where the connection stands.
        self.state = PeerState.CONNECTING
        #: Why it is down, or None.
        self.error: HixlError | None = None
        self._host = host
        self._connection = connection
        self._close_timeout = close_timeout
        self._loop = host.loop
        self._cookie = host._attach(self)
        self._dialled_at: set[Address] = set()  # where `connect` finds it
        self._links = Links(self)
        self._calls = Calls(self)
        self._exports = Exports(self)
        self._imports = Imports(self)
        self._signal_callbacks: list[Callable[[], None]] = []
        self._lost_callbacks: list[Callable[[HixlError], None]] = []
        self._farewell: asyncio.Future[bool] = self._loop.create_future()  # True: its goodbye; False: it went without
        self._cut: asyncio.Future[None] = self._loop.create_future()  # nothing can be heard of it any more
        self._fence: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Task[None] | None = None
        self._over = False  # nothing of ours works for it any more
        self._dead = False
        # Ours from here on: it is watched longer than the connection lives.
        self._pidfd, connection.pidfd = connection.pidfd, None
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._died)
        self._routes = self._make_routes()

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self.address or 'client'} {self.state.value}>"

    # -- what it is

    @property
    def name(self) -> str:
        """The name that the peer's engine was given."""
        return self.identity.name

    @property
    def address(self) -> str:
        """Where the peer listens, ``host:port``; empty if it only dials."""
        return self.identity.address

    @property
    def drivers(self) -> tuple[str, ...]:
        """Names of the drivers that link us with the peer, in our order of preference."""
        return self._links.names

    @property
    def same_host(self) -> bool:
        """True if the connection is a Unix socket: the peer runs on this host."""
        return self._connection.same_host

    @property
    def confirmed_dead(self) -> bool:
        """True once the peer's process is known to have ended."""
        return self._dead

    def route(self, region: RemoteRegion | str) -> str:
        """Which driver carries transfers to a region, and why, in a sentence.

        :raises InvalidArgumentError: if `region` is a name and not imported, or is no region of this peer.
        """
        if isinstance(region, str):
            region = self._imports.imported(region)
        if not isinstance(region, RemoteRegion) or region.link not in self._links:
            raise InvalidArgumentError(f"region must be one of peer {self.name!r}, or the name of one, not {region!r}")
        others = [name for name in self._links.names if name != region.link.driver.name]
        rest = f"; also linked: {', '.join(others)}" if others else ", the only one that both sides share"
        return f"{region.link.driver.name}: first of this engine's drivers that can import {region.name!r}{rest}"

    def limit_bandwidth(self, bytes_per_second: float | None) -> None:
        """Lets reads and writes together move at most so many bytes per second from now on; None: as many as they can.

        Each of the drivers that link us with the peer keeps to it by itself, averaged over about 10 ms.  What is limited is
        never finished within the call, however small it is.

        :raises InvalidArgumentError: if it is less than 1.
        :raises DriverError: if a driver cannot do it.
        """
        self._must_be_up()
        if bytes_per_second is None:
            rate = 0
        elif isinstance(bytes_per_second, int | float) and 1 <= bytes_per_second < 1 << 63:
            rate = int(bytes_per_second)
        else:
            raise InvalidArgumentError(
                f"bytes_per_second must be a number of at least 1, or None for no limit, not {bytes_per_second!r}"
            )
        self._links.pace(rate)

    # -- coming up

    async def _establish(self, patience: float) -> None:
        """Links every driver that both sides have; done when both sides can submit over all that could be linked.

        :param patience: seconds; see `Links.establish`.
        :raises NoRouteError: if there is none.
        :raises ConnectError: if none could be linked; it lists all failures.
        """
        self._connection.start(self._on_message, self._on_connection_lost)
        self._links.establish(patience)
        await self._links.ready

    def _come_up(self) -> None:
        self.state = PeerState.UP
        _settle(self._links.ready, None)
        for region in self._host._regions():
            self._exports.offer(region)

    # -- messages

    def _send(self, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queues one control message; the descriptors are closed here, the connection has its own copies.

        :raises PeerLostError: if the connection is gone.
        :raises ProtocolError: if the message cannot be sent.
        """
        try:
            self._connection.send(kind, body, fds)
        except ClosedError as error:
            raise PeerLostError(f"peer {self.name!r} is gone: {error}", peer=self.name) from None
        finally:
            close_descriptors(fds)

    def _tell(self, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """As `_send`, for what only matters to a peer that is still there."""
        if self.state in (PeerState.UP, PeerState.CLOSING):
            with contextlib.suppress(PeerLostError):
                self._send(kind, body, fds)
        else:
            close_descriptors(fds)

    def _make_routes(self) -> dict[PeerState, Routes]:
        """What the peer is heard to say, state by state."""
        calls, exports, imports, links = self._calls, self._exports, self._imports, self._links
        to_the_end: Routes = {
            "region.down": imports.on_down,
            "region.gone": exports.on_gone,
            "region.card": calls.on_answer,
            "answer": calls.on_answer,
            "failure": calls.on_failure,
            "goodbye": self._on_goodbye,
            "driver": links.on_driver,
        }
        return {
            PeerState.CONNECTING: {
                "link": links.on_link,
                "link.failed": links.on_failed,
                "ready": links.on_ready,
                "driver": links.on_driver,
            },
            PeerState.UP: {
                "region.up": imports.on_up,
                "region.get": exports.on_get,
                "call": calls.on_call,
                "post": calls.on_post,
                "link.down": self._on_link_down,
                **to_the_end,
            },
            PeerState.CLOSING: to_the_end,
            PeerState.DOWN: {
                "region.gone": exports.on_gone,
                "goodbye": self._on_goodbye,
                "driver": links.on_driver,
            },
        }

    def _on_message(self, kind: str, body: dict[str, Any], fds: list[int]) -> None:
        message = Incoming(kind, body, fds)
        try:
            handler = self._routes[self.state].get(kind)
            if handler is not None:
                if message.carries and kind not in CARRIERS:
                    raise ProtocolError(f"peer {self.name!r} sent descriptors with a {kind!r} message", peer=self.name)
                handler(message)
            elif self.state in (PeerState.CONNECTING, PeerState.UP):
                raise ProtocolError(f"peer {self.name!r} said {kind!r}, which has no place here", peer=self.name)
        except ProtocolError as error:
            up = self.state is not PeerState.CONNECTING
            self._lose(
                PeerLostError(f"peer {self.name!r} broke the protocol: {error}", peer=self.name) if up else error
            )
        finally:
            message.drop()

    # -- regions and requests

    @property
    def regions(self) -> dict[str, Access]:
        """Names of the regions that the peer grants us, with the access of each."""
        return self._imports.offered

    async def region(self, name: str, *, timeout: float | None = None) -> RemoteRegion:
        """The peer's region `name`; waits until the peer exports it.

        :param timeout: seconds to wait, or None for as long as the peer lives.
        :raises PeerLostError: if the peer goes before.
        :raises StaleRegionError: if the peer closes the region meanwhile.
        :raises TransferTimeoutError: if `timeout` passed.
        :raises AccessError: if the kernel does not let this process map or reach the region's memory.
        """
        self._host._must_be_here()
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name must be a string, not {name!r}")
        return await self._imports.region(name, None if timeout is None else positive_seconds("timeout", timeout))

    async def request(self, service: str, body: dict[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """Asks the handler that the peer serves under `service`.

        :param body: a JSON object; request and answer may have a little less than 64 KiB each, as they travel.
        :raises InvalidArgumentError: if `body` is no such object or is too long.
        :raises HixlError: what the peer's handler raised, with its type.
        :raises TransferTimeoutError: if no answer came within `timeout` seconds.
        :raises PeerLostError: if the peer went away.
        """
        self._must_be_up()
        return await self._calls.request(service, body, positive_seconds("timeout", timeout))

    def post(self, service: str, body: dict[str, Any]) -> None:
        """Sends to the handler of `service` without an answer, in order with requests.

        :raises InvalidArgumentError: if `body` is no JSON object or is too long.
        :raises BusyError: if too many messages wait to be sent.
        :raises PeerLostError: if the peer is gone.
        """
        self._must_be_up()
        self._calls.post(service, body)

    def _must_be_up(self) -> None:
        self._host._must_be_here()
        if self.error is not None:
            raise self._lost_error()
        if self.state is not PeerState.UP:
            raise ClosedError(f"the connection to peer {self.name!r} is {self.state.value}", peer=self.name)

    def _link(self, needed: int, what: str) -> Link:
        """The first link whose driver has a capability.

        :raises PeerLostError: if the peer is gone.
        :raises DriverError: if no driver has it.
        """
        self._must_be_up()
        return self._links.first(needed, what)

    # -- signals and loss

    def add_signal_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the loop whenever this peer may have stored a signal word into our memory."""
        self._signal_callbacks.append(callback)

    def remove_signal_callback(self, callback: Callable[[], None]) -> None:
        """Undoes `add_signal_callback`; no error if it was not registered."""
        with contextlib.suppress(ValueError):
            self._signal_callbacks.remove(callback)

    def _signalled(self) -> None:
        for callback in tuple(self._signal_callbacks):
            self._guard(callback)

    def add_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        """Calls `callback` with the reason once the peer is lost, left or closed, and again if it turns out to be dead.

        At once (through the loop) if it is down already.
        """
        self._lost_callbacks.append(callback)
        if self.error is not None:
            self._loop.call_soon(callback, self.error)

    def remove_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        """Undoes `add_lost_callback`; no error if it was not registered."""
        with contextlib.suppress(ValueError):
            self._lost_callbacks.remove(callback)

    def _guard(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception as error:
            self._loop.call_exception_handler({"message": f"a callback of {self!r} failed", "exception": error})

    async def fenced(self) -> None:
        """Waits until this peer's process can no longer touch memory of ours; it may never come.

        That is when it said goodbye, having drained its own work, or is down and holds none of our memory, or when its
        death is confirmed.

        :raises ClosedError: if this engine closes first.
        """
        self._host._must_be_here()
        await asyncio.shield(self._fence)

    @property
    def _harmless(self) -> bool:
        return self._fence.done()

    def _become_harmless(self) -> None:
        _settle(self._fence, None)
        self._exports.release()
        self._detach_if_over()

    def _died(self) -> None:
        """The pidfd became readable: the process has ended."""
        self._unwatch_process()
        self._dead = True
        error = PeerLostError(f"the process of peer {self.name!r} ended", peer=self.name)
        error.confirmed_dead = True
        self._links.peer_died()
        if self.state is PeerState.DOWN:
            self.error = error
            self._tell_lost()
        else:
            self._lose(error)
        self._become_harmless()

    def _is_of(self, connection: Connection) -> bool:
        """Whether `connection` leads to the same engine: anybody can name its incarnation, but not from its process."""
        ours, theirs = self._connection.credentials, connection.credentials
        return self.identity.incarnation == connection.identity.incarnation and ours is not None and ours == theirs

    def _check_alive(self) -> bool:
        """Whether it is up; asks the kernel instead of waiting until the loop hears of its death."""
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(0):
                self._died()
        return self.state is PeerState.UP

    def _unwatch_process(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_connection_lost(self, error: HixlError) -> None:
        _settle(self._cut, None)
        # After its goodbye the peer may close the connection before we do.
        if not (self._farewell.done() and self._farewell.result()):
            self._lose(PeerLostError(f"the connection to peer {self.name!r} broke: {error}", peer=self.name))

    def _link_down(self, driver: Driver, text: str) -> None:
        error = PeerLostError(f"the link to peer {self.name!r} broke: {text}", peer=self.name)
        if self.state is PeerState.CONNECTING:
            self._links.do_without(driver.name, error)
        elif self.state is PeerState.UP and self._links.get(driver.name) is not None:
            self._begin_closing()
            self._end(self._part(error, text))

    def _on_link_down(self, message: Incoming) -> None:
        """The other side parts from us, for it lost a link; its goodbye takes as long as its work."""
        text = message.words("text", FAILURE_LIMIT)
        self._begin_closing()
        self._end(self._part(PeerLostError(f"peer {self.name!r} lost its link to us: {text}", peer=self.name)))

    def _lose(self, error: HixlError) -> None:
        """The peer is gone for us: fails everything that waits for it, and stops our work for it."""
        _settle(self._cut, None)
        if self.state is not PeerState.DOWN:
            self._go_down(error)
            self._end(self._wind_down())

    def _lost_error(self) -> HixlError:
        # A fresh exception each time: a shared one would collect the tracebacks of everybody who raised it.
        assert self.error is not None
        fresh = type(self.error)(str(self.error), peer=self.name)
        if isinstance(fresh, PeerLostError):
            fresh.confirmed_dead = self._dead
        return fresh

    def _tell_lost(self) -> None:
        for callback in tuple(self._lost_callbacks):
            self._guard(callback, self.error)

    # -- the end

    async def aclose(self) -> None:
        """Leaves: drains our own work, says goodbye, and waits for the peer's.  Idempotent.

        Within the engine's ``close_timeout``, and a moment to tear down.
        """
        self._host._must_be_here()
        await asyncio.shield(self._close())

    def _close(self) -> asyncio.Task[None]:
        if self.state is PeerState.UP:
            self._begin_closing()
        return self._end(self._leave())

    def _end(self, how: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Ends the peer this way, unless it is ending already."""
        if self._ending is None:
            self._ending = self._host._spawn(how)
        else:
            how.close()
        return self._ending

    def _begin_closing(self) -> None:
        self.state = PeerState.CLOSING
        self._links.refuse()

    async def _leave(self) -> None:
        """We leave."""
        error = ClosedError(f"the connection to {self.name!r} was closed here", peer=self.name)
        if self.state is PeerState.CLOSING:
            until = self._loop.time() + self._close_timeout
            await self._links.drain(until)
            await self._say_goodbye()
            await asyncio.wait([self._farewell], timeout=max(0, until - self._loop.time()))
            if not self._farewell.done():
                logger.warning("peer %r did not say goodbye within %g s", self.name, self._close_timeout)
        self._go_down(error)
        await self._wind_down()

    async def _part(self, error: PeerLostError, broken: str | None = None) -> None:
        """The peer leaves, or its link broke.

        :param broken: why a link of ours did, which the other side may not have seen.  A peer that leaves stops its links
            first, so that the news of it may come before its goodbye or its death.
        """
        if broken is not None:
            await asyncio.wait([self._farewell], timeout=GOODBYE_GRACE)
        if self._farewell.done() and self._farewell.result():
            error = PeerLostError(f"peer {self.name!r} left", peer=self.name)
        elif broken is not None:
            self._tell("link.down", {"text": broken[:FAILURE_LIMIT]})
        # First, for our side of the links may take its time to stop, and nobody should wait for that.
        self._go_down(error)
        await self._links.stop()
        with contextlib.suppress(PeerLostError):
            self._send("goodbye", {})
        if not self._harmless:  # a broken link alone does not keep it from saying goodbye
            await asyncio.wait([self._fence, self._cut], timeout=self._close_timeout, return_when=FIRST_COMPLETED)
        await self._wind_down()

    async def _say_goodbye(self) -> None:
        """Stops our links and tells the peer that nothing of ours will touch its memory again."""
        await self._links.stop()
        self._tell("goodbye", {})

    def _on_goodbye(self, message: Incoming) -> None:
        """The peer has drained its work and leaves."""
        _settle(self._farewell, True)
        if self.state is PeerState.UP:
            self._begin_closing()
            self._end(self._part(PeerLostError(f"peer {self.name!r} left", peer=self.name)))
        self._become_harmless()

    def _holds_nothing(self) -> None:
        """It let go of the last region of ours."""
        if self.state is PeerState.DOWN:
            self._become_harmless()

    def _go_down(self, error: HixlError) -> None:
        """The one way into DOWN."""
        if self.state is PeerState.DOWN:
            return
        self.state, self.error = PeerState.DOWN, error
        if not self._links.ready.done():
            self._links.ready.set_exception(error)
            self._links.ready.exception()  # retrieved: perhaps nobody waits for it any more
        _settle(self._farewell, False)
        self._imports.lose()
        self._calls.lose(self._lost_error)
        if not self._exports:
            self._become_harmless()
        self._tell_lost()

    async def _wind_down(self) -> None:
        """Gives back links and connection when nothing of ours works for them any more."""
        await self._links.stop()
        self._links.free()
        await self._connection.aclose()
        self._over = True
        self._detach_if_over()

    def _detach_if_over(self) -> None:
        if self._over and self._harmless:
            self._unwatch_process()
            self._host._detach(self)

    def _give_up(self) -> list[Region]:
        """The engine ends, and this peer may still hold memory of ours: see `Exports.give_up`."""
        self._unwatch_process()
        if not self._fence.done():
            self._fence.set_exception(
                ClosedError(f"the engine closed before peer {self.name!r} was known to be harmless")
            )
            self._fence.exception()
        leaked = self._exports.give_up()
        self._host._detach(self)
        return leaked

    def _abandon(self) -> None:
        """In a child of fork(): closes the child's copies of descriptors, nothing more."""
        self._connection.abandon()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
