"""A connected engine: how the connection comes up, how it ends, and how the loss of the peer is detected.

States: CONNECTING -> UP -> CLOSING -> DOWN, or straight to DOWN when the peer is lost.  DOWN does not mean harmless: a
stopped process may still finish a copy into our memory, so that a peer which is down need not be fenced.  It is fenced by its
goodbye (sent after its own work has drained), by its message on a later connection that nothing of this one is left, by the
confirmed death of its process, or when it holds none of our memory; never by time.

One task ends a peer, `_ending`, whatever the reason: we leave (`_leave`), the peer leaves or its link breaks (`_part`), or
the peer is lost (`_wind_down` alone).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from ..control import Connection, Identity, Incoming
from ..core import in_flight
from ..core.guard import guarded
from ..core.link import Driver, Link
from ..core.log import Log
from ..core.memory import link_of
from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..display import shown
from ..errors import ClosedError, HixlError, InvalidArgumentError, PeerDownError, ProtocolError
from ..types import Access, Address, PeerState
from .arguments import positive_seconds, require_callable
from .closing import Closing
from .heartbeats import Heartbeats
from .host import Host
from .links import FAILURE_LIMIT, Links
from .process_watch import ProcessWatch
from .region import Region, RemoteRegion, require_region_name
from .regions import Exports, Imports
from .rpc import Rpc
from .session import Mark, Session

__all__ = ["Peer"]

log = Log("hixl_async")

#: Seconds between a link's end and the goodbye that explains it, before the peer counts as lost.
GOODBYE_GRACE = 0.25

#: Seconds for which a peer whose process the kernel is ending does not count as lost yet, because its death is the cause.  The
#: kernel frees the memory of a process before it reports the death, which took 0.2 s for each GiB when measured.
DEATH_GRACE = 1.0

#: Seconds that closing waits for drivers after its time to release memory that they were told to release.
STOP_GRACE = 0.5

#: Messages that may carry descriptors.
CARRIERS = ("link", "region.metadata")

Routes = dict[str, Callable[[Incoming], None]]


class Peer(Sealed, maker="engine.connect() and engine.accepted()"):
    """Another engine that this one is connected to; returned by ``engine.connect`` and ``engine.accepted``.

    :param cookie: the number by which drivers know the peer.
    :param others: returns the other connections to the same engine.
    :param forget: called with the peer once nothing of it is left.
    """

    __reduce__ = unpicklable("send its address, and connect to it there")

    def __init__(
        self,
        host: Host,
        connection: Connection,
        cookie: int,
        others: Callable[[Peer], Iterable[Peer]],
        forget: Callable[[Peer], None],
    ) -> None:
        self._host = host
        self._connection = connection
        self._cookie = cookie
        self._others = others
        self._forget = forget
        self._loop = host.core.loop
        self._dialled_at: set[Address] = set()  # where `connect` finds it
        self._session = Session(connection, self._loop, host.check, host.spawn, host.spawn_ending, self._lose)
        self._links = Links(self._session, cookie, self._say_ready, self._come_up, self._explain, self._cause_awaited)
        self._rpc = Rpc(self._session, self._handler)
        self._exports = Exports(
            self._session,
            self._links,
            self._rpc,
            host.region,
            lambda region: region.access_for(self),
            self._holds_nothing,
        )
        self._imports = Imports(self._session, self._links, self._rpc)
        self._signal_callbacks: list[Callable[[], None]] = []
        self._lost_callbacks: list[Callable[[HixlError], None]] = []
        self._heartbeats = Heartbeats(self._loop, self._say_alive)
        self._heard_at = self._loop.time()
        self._ending: asyncio.Task[None] | None = None
        self._dying: asyncio.TimerHandle | None = None  # the end of the wait for a death
        self._awaits_goodbye = False
        # Ours from here on, because it is watched for longer than the connection lives.
        pidfd, connection.pidfd = connection.pidfd, None
        pid = connection.credentials.pid if connection.credentials is not None else 0
        self._process = ProcessWatch(self._loop, pidfd, pid, self._died)
        self._routes = self._make_routes()

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self.address or 'client'} {self.state.value}>"

    # -- identity

    @property
    def identity(self) -> Identity:
        """The identity that the peer announced; proved as far as the secret or the operating system proves it."""
        return self._session.identity

    @property
    def state(self) -> PeerState:
        """The state of the connection."""
        return self._session.state

    @property
    def error(self) -> HixlError | None:
        """The error that says why the peer is down, or None while it is not."""
        return self._session.error

    @property
    def name(self) -> str:
        """The name that the peer's engine was given."""
        return self.identity.name

    @property
    def address(self) -> str:
        """The address at which the peer listens, ``host:port``; empty if it only dials."""
        return self.identity.address

    @property
    def drivers(self) -> tuple[str, ...]:
        """The names of the drivers that link us with the peer, in our order of preference."""
        return self._links.names

    @property
    def same_host(self) -> bool:
        """True if the connection is a Unix socket, so that the peer runs on this host."""
        return self._connection.same_host

    @property
    def confirmed_dead(self) -> bool:
        """True once the peer's process is known to have ended.

        It is watched while the peer is up, and after that for as long as the peer may still use memory of ours.
        """
        return self._session.has(Mark.DEAD)

    def route(self, region: RemoteRegion | str) -> str:
        """Return a sentence that says which driver carries transfers to a region, and why.

        :param region: an imported region of this peer, or its name.
        :return: the sentence, for people.
        :raises InvalidArgumentError: if `region` is a name and not imported, or is not a region of this peer.
        """
        if isinstance(region, str):
            region = self._imports.imported(region)
        link = link_of(region) if isinstance(region, RemoteRegion) else None
        if link is None or link not in self._links:
            raise InvalidArgumentError(
                f"region must be one of peer {self.name!r}, or the name of one, not {shown(region)}"
            )
        others = [name for name in self._links.names if name != link.driver.name]
        rest = f"; also linked: {', '.join(others)}" if others else ", the only one that both sides share"
        return f"{link.driver.name}: first of this engine's drivers that can import {region.name!r}{rest}"

    def limit_bandwidth(self, bytes_per_second: float | None) -> None:
        """Limit the bandwidth of reads and writes together from now on.

        Each driver that links us with the peer keeps to the limit by itself, averaged over about 10 ms.  Limited transfers
        never finish within the call, however small they are.

        :param bytes_per_second: at least 1, or None for no limit.
        :raises InvalidArgumentError: if it is less than 1.
        :raises DriverError: if a driver cannot limit its bandwidth.
        :raises PeerDownError: if the peer is down.
        """
        self._session.must_be_up()
        if bytes_per_second is None:
            rate = 0
        elif (
            type(bytes_per_second) is not bool
            and isinstance(bytes_per_second, int | float)
            and 1 <= bytes_per_second < 1 << 63
        ):
            rate = int(bytes_per_second)
        else:
            raise InvalidArgumentError(
                f"bytes_per_second must be a number of at least 1, or None for no limit, not {shown(bytes_per_second)}"
            )
        self._links.pace(rate)

    # -- coming up

    async def _establish(self, patience: float) -> None:
        """Link every driver that both sides have, and wait until both sides can submit.

        :param patience: seconds; see `Links.establish`.
        :raises NoRouteError: if there is no such driver.
        :raises ConnectError: if no driver could be linked; the message lists all failures.
        """
        self._connection.start(self._on_message, self._on_connection_lost)
        self._links.establish(self._host.shared_drivers(self.identity.drivers, self.same_host), patience)
        await self._links.ready

    def _say_ready(self) -> None:
        """Tell the peer that it may submit, and whether anything of earlier connections with it is left here."""
        settled = all(peer._session.has(Mark.WOUND_DOWN) for peer in self._others(self))
        try:
            self._session.send("ready", {"settled": settled})
        except HixlError as error:
            self._lose(error)

    def _on_ready(self, message: Incoming) -> None:
        """Handle the peer's message that it has linked all drivers that can be linked."""
        if message.flag("settled"):
            # Nothing of its earlier connections is left there, although their goodbye could not arrive.
            for peer in self._others(self):
                if peer.state is PeerState.DOWN:
                    peer._become_harmless()
        self._links.on_ready()

    def _come_up(self) -> None:
        self._session.change(PeerState.UP)
        if not self._links.ready.done():
            self._links.ready.set_result(None)
        for region in self._host.regions():
            self._exports.offer(region)

    # -- messages

    def _make_routes(self) -> dict[PeerState, Routes]:
        """Return the handlers of the peer's messages, by state and kind."""
        rpc, exports, imports, links = self._rpc, self._exports, self._imports, self._links
        to_the_end: Routes = {
            "region.down": imports.on_down,
            "region.gone": exports.on_gone,
            "region.metadata": rpc.on_answer,
            "answer": rpc.on_answer,
            "failure": rpc.on_failure,
            "goodbye": self._on_goodbye,
            "driver": links.on_driver,
        }
        return {
            PeerState.CONNECTING: {
                "link": links.on_link,
                "link.failed": links.on_failed,
                "ready": self._on_ready,
                "driver": links.on_driver,
            },
            PeerState.UP: {
                "region.up": imports.on_up,
                "region.get": exports.on_get,
                "call": rpc.on_call,
                "post": rpc.on_post,
                "link.down": self._on_link_down,
                "alive": lambda message: None,
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
        self._heard_at = self._loop.time()
        try:
            handler = self._routes[self.state].get(kind)
            if handler is not None:
                if message.carries and kind not in CARRIERS:
                    raise ProtocolError(f"peer {self.name!r} sent descriptors with a {kind!r} message", peer=self.name)
                handler(message)
            elif self.state in (PeerState.CONNECTING, PeerState.UP):
                raise ProtocolError(f"peer {self.name!r} sent an unexpected {kind!r} message", peer=self.name)
        except ProtocolError as error:
            up = self.state is not PeerState.CONNECTING
            self._lose(
                PeerDownError(f"peer {self.name!r} broke the protocol: {error}", peer=self.name) if up else error
            )
        finally:
            message.drop()

    # -- regions and requests

    @property
    def regions(self) -> dict[str, Access]:
        """The regions that the peer grants us: the access of each by name."""
        return self._imports.offered

    async def region(self, name: str, *, timeout: float | None = None) -> RemoteRegion:
        """Wait until the peer exports a region, and import it.

        A wait of more than 5 s is logged once, with the names of the regions that the peer does export.

        :param name: the name that the peer gave the region.
        :param timeout: seconds to wait, or None for as long as the peer lives.
        :return: the region, usable in transfers; the same object for each call while the region lives.
        :raises PeerDownError: if the peer is down, or goes down before the region is imported.
        :raises StaleRegionError: if the peer closes the region meanwhile.
        :raises WaitTimeoutError: if the region was not imported within `timeout` seconds.
        :raises AccessError: if the kernel does not let this process map or reach the region's memory.
        :raises InvalidArgumentError: if no region can have that name.
        :raises ClosedError: if the connection or the engine was closed here.
        """
        self._host.check()
        require_region_name(name)
        return await self._imports.region(name, None if timeout is None else positive_seconds("timeout", timeout))

    async def request(self, service: str, body: dict[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """Send a request to the handler that the peer serves under `service`, and wait for its answer.

        :param service: the name that the peer gave to ``engine.serve``.
        :param body: a JSON object; request and answer may have a little less than 64 KiB each when encoded.
        :param timeout: seconds to wait for the answer.
        :return: the answer's body, a JSON object.
        :raises InvalidArgumentError: if `body` is not such an object or is too long, the peer does not serve `service`, or its
            handler raised this error.
        :raises RangeError: if the peer's handler raised this error; likewise `AccessError`, `TicketError` and
            `LayoutMismatchError`.
        :raises BusyError: if the peer handles too many of our requests already, or its handler raised this error.
        :raises RemoteError: if the peer's handler raised any other error, or was cancelled.
        :raises RequestTimeoutError: if no answer came within `timeout` seconds; the handler may have run.
        :raises RequestLostError: if the peer went down before it answered; the handler may have run.
        :raises PeerDownError: if the peer was down before.
        """
        self._session.must_be_up()
        return await self._rpc.request(service, body, positive_seconds("timeout", timeout))

    def post(self, service: str, body: dict[str, Any]) -> None:
        """Send a message to the handler of `service` without waiting for an answer, in order with requests.

        :param service: the name that the peer gave to ``engine.serve``.
        :param body: a JSON object, which may have a little less than 64 KiB when encoded.
        :raises InvalidArgumentError: if `body` is not a JSON object or is too long.
        :raises BusyError: if too many messages wait to be sent.
        :raises PeerDownError: if the peer is down.
        """
        self._session.must_be_up()
        self._rpc.post(service, body)

    def _handler(self, service: str) -> Callable[[dict[str, Any]], Any] | None:
        handler = self._host.handler(service)
        return None if handler is None else partial(handler, self)

    def _link(self, needed: int, what: str) -> Link:
        """Return the first link whose driver has a capability.

        :raises PeerDownError: if the peer is down.
        :raises DriverError: if no driver has it.
        """
        self._session.must_be_up()
        return self._links.first(needed, what)

    # -- signs of life

    @property
    def heard_at(self) -> float:
        """The time, by the clock of the event loop, at which the last message of the peer arrived.

        A peer that is alive may send none for long, unless it needs a lease of ours; see `begin_heartbeats`.
        """
        return self._heard_at

    def begin_heartbeats(self, interval: float) -> None:
        """Send the peer a sign of life at least every `interval` seconds, until as many calls of `end_heartbeats`.

        All leases that the peer granted share one timer.

        :param interval: seconds; a third of the lease, so that one may be late.
        :raises InvalidArgumentError: if `interval` is not a positive number.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._host.core)
        self._heartbeats.begin(positive_seconds("interval", interval))

    def end_heartbeats(self, interval: float) -> None:
        """Undo one `begin_heartbeats`.

        :param interval: the seconds of that call.
        :raises InvalidArgumentError: if there is no such call to undo.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._host.core)
        self._heartbeats.end(positive_seconds("interval", interval))

    def _say_alive(self) -> None:
        # While it is crowded, the peer is hearing from us anyway.
        if self.state is PeerState.UP and not self._connection.crowded:
            self._session.tell("alive", {})

    # -- signals and loss

    def add_signal_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop whenever this peer may have stored a signal word into our memory.

        :param callback: a function without parameters.
        :raises InvalidArgumentError: if `callback` is not a function.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._host.core)
        require_callable("callback", callback)
        self._signal_callbacks.append(callback)

    def remove_signal_callback(self, callback: Callable[[], None]) -> None:
        """Undo `add_signal_callback`; no error if `callback` was not registered.

        :param callback: the function that was registered.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._host.core)
        with contextlib.suppress(ValueError):
            self._signal_callbacks.remove(callback)

    def _signalled(self) -> None:
        for callback in tuple(self._signal_callbacks):
            self._guard(callback)

    def add_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        """Call `callback` once the peer is down, and again if its process turns out to have ended.

        If the peer is down already, the loop calls it soon.

        :param callback: a function of the error that says why the peer is down.
        :raises InvalidArgumentError: if `callback` is not a function.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._host.core)
        require_callable("callback", callback)
        self._lost_callbacks.append(callback)
        if self.error is not None:
            self._loop.call_soon(self._guard, callback, self.error)

    def remove_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        """Undo `add_lost_callback`; no error if `callback` was not registered.

        :param callback: the function that was registered.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self._host.core)
        with contextlib.suppress(ValueError):
            self._lost_callbacks.remove(callback)

    def _guard(self, callback: Callable[..., None], *args: Any) -> None:
        guarded(self._loop, lambda: f"a callback of {self!r} failed", callback, *args)

    async def fenced(self) -> None:
        """Wait until this peer's process can no longer touch memory of ours, which may never happen.

        It happens with the peer's goodbye, which follows the end of its own work; when the peer is down and holds none of our
        memory; or when the death of its process is confirmed.

        :raises ClosedError: if this engine closes first.
        """
        self._host.check()
        await self._session.until(Mark.FENCED | Mark.GIVEN_UP)
        if not self._session.has(Mark.FENCED):
            raise ClosedError(f"the engine closed before peer {self.name!r} was known to be harmless")

    def _become_harmless(self) -> None:
        self._session.mark(Mark.FENCED)
        self._exports.release()
        self._forget_if_over()

    def _died(self) -> None:
        """Handle the end of the peer's process."""
        self._session.mark(Mark.DEAD)
        error = self._death()
        self._session.cause = error  # before the links report the work that the death has ended
        self._links.peer_died()
        if self.state is PeerState.DOWN:
            self._tell_lost()
        else:
            self._lose(error)
        self._become_harmless()

    def _is_of(self, connection: Connection) -> bool:
        """Return True if `connection` leads to the same engine.

        Any engine can name an incarnation, but it cannot name it from the same process.
        """
        ours, theirs = self._connection.credentials, connection.credentials
        return self.identity.incarnation == connection.identity.incarnation and ours is not None and ours == theirs

    def _check_alive(self) -> bool:
        """Return True if the peer is up; ask the kernel, because the loop may not have seen its death yet."""
        self._process.check()
        return self.state is PeerState.UP and not self._process.is_ending

    def _explain(self) -> tuple[str, bool] | None:
        """Return why links to the peer are down, and True if its process has ended; None where that is not known.

        It asks the kernel, because transfers may fail before the loop sees the end of the process.
        """
        if self.confirmed_dead or self._process.has_ended:
            return str(self._death()), True
        cause = self._session.cause
        return None if cause is None else (str(cause), False)

    def _death(self) -> PeerDownError:
        error = PeerDownError(f"the process of peer {self.name!r} ended", peer=self.name)
        error.confirmed_dead = True
        return error

    def _cause_awaited(self) -> bool:
        """Return True while the goodbye or the death that explains the end of a link may still come."""
        return self.state is not PeerState.DOWN and (self._awaits_goodbye or self._expects_death())

    def _expects_death(self) -> bool:
        """Return True while the peer's process seems to be ending, for `DEATH_GRACE` at most; there is no new work then.

        Otherwise the cause of the loss would depend on which is seen first, the end of its sockets or that of the process.
        """
        if self._dying is None:
            if self.state not in (PeerState.UP, PeerState.CLOSING) or self._process.is_ending is False:
                return False
            error = PeerDownError(f"the process of peer {self.name!r} is ending", peer=self.name)
            self._begin_closing(error)
            self._dying = self._loop.call_later(DEATH_GRACE, self._lose, error)
        return self.state is not PeerState.DOWN

    def _on_connection_lost(self, error: HixlError) -> None:
        self._session.mark(Mark.CUT)
        # After its goodbye the peer may close the connection before we do.
        if self._session.has(Mark.GOODBYE):
            return
        self._process.check()  # whose end is the cause, then
        broken = PeerDownError(f"the connection to peer {self.name!r} broke: {error}", peer=self.name)
        if self.state not in (PeerState.UP, PeerState.CLOSING) or not self._process.may_be_reported:
            self._lose(broken)
        elif not self._expects_death():
            # A program that ends without closing its engine closes its sockets some time before its process ends.
            self._begin_closing(broken)
            self._dying = self._loop.call_later(GOODBYE_GRACE, self._outlived, broken)

    def _outlived(self, error: PeerDownError) -> None:
        """Handle that the peer's process has outlived its connection, unless it is ending by now."""
        self._dying = None
        if not self._expects_death():
            self._lose(error)

    def _link_down(self, driver: Driver, text: str) -> None:
        error = PeerDownError(f"the link to peer {self.name!r} ended: {text}", peer=self.name)
        if self.state is PeerState.CONNECTING:
            self._links.do_without(driver.name, error)
            return
        link = self._links.get(driver.name)
        if link is None:
            return
        self._process.check()
        if self._expects_death():
            link.unwatch()
        elif self.state is PeerState.UP:
            self._begin_closing(error)
            self._awaits_goodbye = True
            self._end(self._part(error, text))

    def _on_link_down(self, message: Incoming) -> None:
        """Handle the peer's message that a link broke at its side; its goodbye comes when its work has ended."""
        text = message.words("text", FAILURE_LIMIT)
        error = PeerDownError(f"peer {self.name!r} lost its link to us: {text}", peer=self.name)
        self._begin_closing(error)
        self._end(self._part(error))

    def _lose(self, error: HixlError) -> None:
        """End the peer, because it has failed: fail all waits for it, and stop our work for it."""
        self._session.mark(Mark.CUT)
        if self.state is not PeerState.DOWN:
            self._go_down(error)
            self._end(self._wind_down())

    def _tell_lost(self) -> None:
        for callback in tuple(self._lost_callbacks):
            self._guard(callback, self.error)

    # -- the end

    def aclose(self) -> Closing:
        """Leave the peer: drain our own work, say goodbye, and wait for the peer's goodbye.  Idempotent.

        Closing begins with the call, and takes little longer than the engine's ``close_timeout``.

        :return: an awaitable; cancelling it only ends the wait.
        :raises WrongLoopError: if called in another event loop than that of the engine.
        """
        in_flight.must_be_on_thread(self._host.core)
        return Closing(self, self._close)

    def _close(self) -> asyncio.Task[None]:
        self._host.check()
        error = self._closed_here()
        self._begin_closing(error)
        return self._end(self._leave(error))

    def _closed_here(self) -> ClosedError:
        return ClosedError(f"the connection to {self.name!r} was closed here", peer=self.name)

    def _end(self, how: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the task that ends the peer, unless there is one already."""
        if self._ending is None:
            self._ending = self._host.spawn_ending(how)
        else:
            how.close()
        return self._ending

    def _begin_closing(self, cause: HixlError) -> None:
        """Accept no new work from here on; no effect unless the peer is up."""
        if self.state is PeerState.UP:
            self._session.change(PeerState.CLOSING, cause)
            self._links.refuse()

    async def _leave(self, error: ClosedError) -> None:
        """End the connection because we leave."""
        if self.state is PeerState.CLOSING:
            close_timeout = self._host.config.close_timeout
            until = self._loop.time() + close_timeout
            await self._links.drain(until)
            goodbye = self._host.spawn_ending(self._say_goodbye())
            await asyncio.wait([goodbye], timeout=max(0, until - self._loop.time()) + STOP_GRACE)
            if not goodbye.done():
                log.warning("peer %r: a driver still uses memory of ours after %g s", self.name, close_timeout)
                self._go_down(error)
                self._host.spawn_ending(self._wind_down_after(goodbye))
                return
            await self._session.until(Mark.GOODBYE | Mark.DOWN, max(0, until - self._loop.time()))
            if not self._session.has(Mark.GOODBYE | Mark.DOWN):
                log.warning("peer %r did not say goodbye within %g s", self.name, close_timeout)
        self._go_down(error)
        await self._wind_down()

    async def _part(self, error: PeerDownError, broken: str | None = None) -> None:
        """End the connection because the peer leaves, or a link broke.

        :param broken: why a link of ours broke, which the other side may not have seen.  A peer that leaves stops its links
            first, so that a broken link may be seen before its goodbye or its death.
        """
        session = self._session
        if broken is not None:
            await session.until(Mark.GOODBYE | Mark.DOWN, GOODBYE_GRACE)
        if session.has(Mark.GOODBYE):
            error = PeerDownError(f"peer {self.name!r} left", peer=self.name)
        elif broken is not None:
            session.tell("link.down", {"text": broken[:FAILURE_LIMIT]})
        # First, because our side of the links may take long to stop, and no caller should wait for that.
        self._go_down(error)
        await self._say_goodbye()
        # A broken link alone does not keep the peer from saying goodbye.
        await session.until(Mark.FENCED | Mark.CUT, self._host.config.close_timeout)
        await self._wind_down()

    async def _say_goodbye(self) -> None:
        """Stop our links, and tell the peer that nothing of ours will touch its memory again."""
        await self._links.stop()
        with contextlib.suppress(PeerDownError):
            self._session.send("goodbye", {})

    def _on_goodbye(self, message: Incoming) -> None:
        """Handle the peer's goodbye: it has drained its work and leaves."""
        if not self._session.has(Mark.DOWN):
            self._session.mark(Mark.GOODBYE)
        if self.state in (PeerState.UP, PeerState.CLOSING):
            error = PeerDownError(f"peer {self.name!r} left", peer=self.name)
            self._begin_closing(error)
            self._end(self._part(error))
        self._become_harmless()

    def _holds_nothing(self) -> None:
        """Handle the release of the last of our regions by the peer."""
        if self.state is PeerState.DOWN:
            self._become_harmless()

    def _go_down(self, error: HixlError) -> None:
        """Enter DOWN; the only place that does."""
        if self.state is PeerState.DOWN:
            return
        if self._dying is not None:
            self._dying.cancel()
        self._heartbeats.stop()
        self._session.change(PeerState.DOWN, error)
        self._links.refuse()
        self._links.cause_known()
        if not self._links.ready.done():
            self._links.ready.set_exception(error)
            self._links.ready.exception()  # retrieved, because no task may be waiting for it
        self._imports.lose()
        self._rpc.lose(self._session.down_error)
        if not self._exports:
            self._become_harmless()
        self._tell_lost()

    async def _wind_down_after(self, goodbye: asyncio.Task[None]) -> None:
        await goodbye
        await self._wind_down()

    async def _wind_down(self) -> None:
        """Free the links and close the connection when none of our threads works for them."""
        await self._links.stop()
        self._links.free()
        await self._connection.aclose()
        self._session.mark(Mark.WOUND_DOWN)
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self._session.has(Mark.WOUND_DOWN) and self._session.has(Mark.FENCED):
            self._process.stop()
            self._forget(self)

    def _give_up(self) -> list[Region]:
        """Stop waiting for a peer that may still hold memory of ours, because the engine ends: see `Exports.give_up`."""
        self._process.stop()
        self._session.mark(Mark.GIVEN_UP)
        leaked = self._exports.give_up()
        self._forget(self)
        return leaked

    def _let_go(self) -> None:
        """Close what is left, because the engine ends now; the links end with their drivers."""
        self._go_down(self._closed_here())
        self._connection.close()

    def _abandon(self) -> None:
        """Close the copies of descriptors in a child of fork(), nothing more."""
        self._connection.abandon()
        self._process.abandon()
