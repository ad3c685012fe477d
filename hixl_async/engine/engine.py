"""The engine: regions, peers, and the routing of transfers to drivers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import warnings
import weakref
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .. import _core, drivers
from .._core import Core
from ..control import Identity, Listener, printable
from ..core import in_flight, torch_device
from ..core.device_copies import DeviceCopies
from ..core.link import (
    CAP_NOTIFY,
    CAP_SAME_HOST,
    EVENT_LINK_DOWN,
    EVENT_LOG,
    EVENT_MESSAGE,
    EVENT_NOTE,
    EVENT_SIGNAL,
    Driver,
)
from ..core.transfer import Transfer
from ..errors import (
    ClosedError,
    DriverError,
    HixlError,
    InvalidArgumentError,
)
from ..types import AccessLike, Address, EngineStats
from .arguments import positive_seconds, require_callable
from .closing import Closing
from .coalescer import Coalescer
from .config import Drivers, EngineConfig, parse_address
from .group import Group
from .host import Handler, Host
from .notifications import Subscription, Subscriptions
from .peer import Peer
from .peers import Peers
from .region import Region, operand
from .region_table import RegionTable
from .subscription_queue import SubscriptionQueue

__all__ = ["Engine"]

logger = logging.getLogger("hixl_async")

#: Seconds that `aclose` waits beyond ``close_timeout`` for what only has to be torn down.
LINGER = 2.0

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine(Core):
    """This process's endpoint: lends its memory to peers, and moves bytes to and from theirs.

    ::

        async with Engine("127.0.0.1:18515", name="prefill-0") as engine:
            kv = engine.allocate("kv", 64 << 20, access="write")
            peer = await engine.connect("127.0.0.1:18516")
            remote = await peer.region("kv")
            await engine.write(kv[:4096], remote[8192:12288])

    :param address: ``"host:port"`` to listen on; port 0 picks one; None for an engine that only dials.
    :param name: what peers see; default: from the process id.
    :param domain: tenant; engines of different domains never connect.
    :param secret: shared by all engines that may connect.  Without one only processes of this user and host may.
    :param drivers: names in order of preference, or a mapping of names to options; default ``["shm"]``.
    :param unix_dir: folder for the Unix socket, for containers that share one.
    :param stall: seconds without progress after which a transfer fails.
    :param connect_timeout: seconds that `connect` may take.
    :param close_timeout: seconds that `aclose` waits for work in flight and for peers.
    :param notification_limit: notifications kept per subscription, and for topics that nobody has subscribed to yet.
    :param notify_batch_size: the most notifications of a peer, and the most completions, that are taken in one pass of the
        loop before other tasks run; default ``HIXL_NOTIFY_BATCH_SIZE`` or 256.
    :param max_bytes_in_flight: the most bytes of transfers in flight together; beyond it they are refused with `BusyError`, and
        `room` waits.  One that is larger goes alone.  Default: no bound.
    :raises InvalidArgumentError: if a setting is malformed, or `address` is not loopback and there is no secret.
    """

    def __init__(
        self,
        address: str | Address | None = None,
        *,
        name: str | None = None,
        domain: str = "default",
        secret: str | bytes | None = None,
        drivers: Drivers | None = None,
        unix_dir: str | None = None,
        stall: float = 10.0,
        connect_timeout: float = 5.0,
        close_timeout: float = 5.0,
        notification_limit: int = 4096,
        notify_batch_size: int | None = None,
        max_bytes_in_flight: int | None = None,
    ) -> None:
        self.config = EngineConfig.build(
            address,
            name=name,
            domain=domain,
            secret=secret,
            drivers=drivers,
            unix_dir=unix_dir,
            stall=stall,
            connect_timeout=connect_timeout,
            close_timeout=close_timeout,
            notification_limit=notification_limit,
            notify_batch_size=notify_batch_size,
            max_bytes_in_flight=max_bytes_in_flight,
        )
        self._incarnation = secrets.token_hex(16)
        self._listener: Listener | None = None
        self._drivers: dict[str, Driver] = {}
        self._started: list[Driver] = []
        self._facts: dict[str, dict[str, str]] = {}
        self._services: dict[str, Handler] = {"hixl.ping": _pong}
        self._host = Host(
            core=self,
            config=self.config,
            identity=self._identity,
            check_open=lambda: in_flight.must_be_open(self),
            check=self._must_be_here,
            spawn=self._spawn,
            shared_drivers=self._shared_drivers,
            region=lambda number: self._regions.get(number),
            regions=lambda: self._regions.all(),
            handler=self._services.get,
        )
        self._peers = Peers(self._host)
        self._regions = RegionTable(self, self._drivers, self._peers, self._host)
        _core.set_object_support(self, operand, DeviceCopies(self, torch_device.pin, torch_device.copy).begin)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._close_callbacks: list[Callable[[], None]] = []
        self._subscriptions: Subscriptions | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        where = f" at {self.address}" if self._listener is not None and self.address else ""
        return f"<Engine {self.config.name!r}{where}{' closed' if self.closed else ''}>"

    # -- life

    async def open(self) -> Engine:
        """Opens and starts the drivers and listens; ``async with`` does it.

        :raises DriverError: if a driver cannot be loaded, opened or started.
        :raises AddressInUseError: if somebody listens on the address already.
        """
        if self.loop is not None:
            raise ClosedError("this engine was opened before; make a new one")
        loop = asyncio.get_running_loop()
        try:
            config = self.config
            in_flight.start(
                self, loop, self._on_event, config.stall, config.notify_batch_size, config.max_bytes_in_flight or 0
            )
            self._subscriptions = Subscriptions(self, self.config.notification_limit)
            for name, options in self.config.drivers.items():
                capsule, settings = drivers.resolve(name, options)
                self._drivers[name] = Driver(self, capsule, name, settings)
                self._facts[name] = self._drivers[name].about()
            for driver in self._drivers.values():
                await self._start(driver)
            self._listener = await Listener.open(
                self.config.address,
                self._identity,
                secret=self.config.secret,
                unix_dir=self.config.unix_dir,
                handshake_timeout=self.config.connect_timeout,
                on_connection=self._peers.accept,
                scheduler=self._peers.scheduler,
            )
        except BaseException as error:
            # The original error is the one to show.
            in_flight.refuse_work(self)
            if self.loop is not None:
                await asyncio.shield(self.loop.create_task(self._end_drivers(loop.time() + self.config.close_timeout)))
            if isinstance(error, OSError) and not isinstance(error, HixlError):  # out of descriptors, most likely
                raise DriverError(f"the engine could not be opened: {error}", native=error.errno) from error
            raise
        _engines.add(self)
        return self

    async def _start(self, driver: Driver) -> None:
        starting = driver.start()
        self._started.append(driver)
        try:
            await starting
        except HixlError as error:
            if isinstance(error, DriverError | InvalidArgumentError):
                raise
            raise DriverError(str(error), native=error.native) from error
        self._facts[driver.name] = driver.about()

    def aclose(self) -> Closing:
        """Refuse new work, drain what is in flight, say goodbye to peers, and give everything back.  Idempotent.

        It begins with the call, and takes ``close_timeout`` and a moment at most.  Memory that a driver still holds after that,
        or registered memory that a peer may still write, is leaked, and reported to the loop's exception handler.

        :return: an awaitable; cancelling it does not stop the end, so that no engine is left half closed.
        :raises WrongLoopError: if called in another event loop than that in which the engine was opened.
        """
        return Closing(self, self._begin_to_close)

    def _begin_to_close(self) -> asyncio.Task[None] | None:
        if self.forked or self.loop is None:
            return None
        if self._closing is None and not self.closed:
            self._must_be_here()
            self._closing = self.loop.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        in_flight.refuse_work(self)
        until = self.loop.time() + self.config.close_timeout + LINGER
        for callback in tuple(self._close_callbacks):
            try:
                callback()
            except Exception as error:
                self._report(f"a callback of {self!r} failed", error)
        leaving = self._peers.close()
        if self._listener is not None:
            await self._listener.aclose()
        await self._wait(leaving, until)
        if self._subscriptions is not None:
            self._subscriptions.close()
        self._regions.close()
        for peer, leaked in self._peers.give_up():
            self._report(f"{leaked!r} is leaked: {peer!r}, whose death is not confirmed, may still write it")
        drained = in_flight.all_drained(self)
        await self._wait([drained, *self._tasks], until)
        for waiting in (drained, *self._tasks):
            waiting.cancel()
        await self._wait(list(self._tasks), self.loop.time() + LINGER)
        await self._end_drivers(until)
        _engines.discard(self)

    async def _end_drivers(self, until: float) -> None:
        """Waits until drivers have let go of everything, and closes them; what they hold after that is leaked (C7)."""
        while in_flight.counters(self)["pinned"] and self.loop.time() < until:
            drained = in_flight.all_drained(self)  # the end of one thing may be the beginning of another
            await self._wait([drained], until)
            drained.cancel()
        if not in_flight.counters(self)["pinned"]:
            ends = [self.loop.create_task(self._shut_down(driver)) for driver in self._started]
            await self._wait(ends, max(until, self.loop.time() + LINGER))
            for end in ends:
                end.cancel()
        held = in_flight.finish(self)
        if held:
            self._report(f"{self!r}: drivers still held the memory of {held} transfers or calls at close; it is leaked")
        else:
            for driver in self._drivers.values():
                driver.close()

    async def _shut_down(self, driver: Driver) -> None:
        try:
            await driver.shutdown()
        except HixlError as error:
            self._report(f"{driver!r} could not be shut down", error)

    async def _wait(self, what: Sequence[asyncio.Future[Any]], until: float) -> None:
        if what:
            await asyncio.wait(what, timeout=max(0, until - self.loop.time()))

    def _report(self, message: str, error: Exception | None = None) -> None:
        context: dict[str, Any] = {"message": message}
        if error is not None:
            context["exception"] = error
        self.loop.call_exception_handler(context)

    async def __aenter__(self) -> Engine:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self.closed and not self.forked:
            warnings.warn(f"{self!r} was never closed; use 'async with'", ResourceWarning, source=self, stacklevel=2)

    def _must_be_here(self) -> None:
        """Raises what any call in a foreign loop, or in a child of fork(), raises; a closed engine will do."""
        if self.forked or running_loop() is not self.loop:
            in_flight.refuse(self)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the engine begins to close, on its loop; `remove_close_callback` undoes it.

        :param callback: a function without parameters.
        :raises InvalidArgumentError: if `callback` is no function.
        """
        require_callable("callback", callback)
        self._close_callbacks.append(callback)

    def remove_close_callback(self, callback: Callable[[], None]) -> None:
        """Undo `on_close`; no error if `callback` was not registered.

        :param callback: the function that `on_close` was given.
        """
        with contextlib.suppress(ValueError):
            self._close_callbacks.remove(callback)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that belongs to the engine, and that `aclose` waits for."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- transfers

    # Named here, where one looks for them, and not wrapped: a Python function around them would cost as much as they do.
    read = Core.read
    write = Core.write
    submit = Core.submit
    drained = Core.drained

    # -- who and where

    @property
    def name(self) -> str:
        """What peers see."""
        return self.config.name

    @property
    def incarnation(self) -> str:
        """Random per opened engine, so that a restarted one is told from its predecessor."""
        return self._incarnation

    @property
    def address(self) -> str:
        """Where it listens, ``host:port`` with the real port; empty for an engine that only dials."""
        listener = self._listener
        return str(listener.address) if listener is not None and listener.address is not None else ""

    def _identity(self) -> Identity:
        return Identity(
            name=self.config.name,
            domain=self.config.domain,
            incarnation=self._incarnation,
            address=self.address,
            drivers=tuple(self._drivers),
        )

    # -- regions

    def allocate(
        self,
        name: str,
        size: int,
        *,
        access: AccessLike = "none",
        grant: Callable[[Peer], AccessLike] | None = None,
    ) -> Region:
        """Allocate new memory, zeroed, that transfers may use, and that peers may use as far as `access` goes.

        :param name: unique in this engine; peers ask for the region by it.
        :param size: bytes.
        :param access: the most that any peer can be given: ``"none"``, ``"read"``, ``"write"``, ``"read-write"``.
        :param grant: called with each peer, narrows `access` for it.
        :return: the region; close it with `Region.aclose`, or by ``async with``.
        :raises InvalidArgumentError: if an argument is malformed or the name is taken.
        :raises BusyError: if 4096 regions are exported already, the most that a peer takes note of.
        :raises DriverError: if there is not enough memory.
        """
        in_flight.must_be_open(self)
        return self._regions.allocate(name, size, access, grant)

    def register(
        self,
        name: str,
        buffer: Any,
        *,
        access: AccessLike = "none",
        grant: Callable[[Peer], AccessLike] | None = None,
    ) -> Region:
        """Make a region of memory that exists already.

        :param name: unique in this engine; peers ask for the region by it.
        :param buffer: any contiguous buffer, a tensor, or an object that numpy adopts by DLPack; kept alive until the region is
            closed and no longer used.
        :param access: the most that any peer can be given: ``"none"``, ``"read"``, ``"write"``, ``"read-write"``.
        :param grant: called with each peer, narrows `access` for it.
        :return: the region; close it with `Region.aclose`, or by ``async with``.
        :raises InvalidArgumentError: if an argument is malformed or the name is taken.
        :raises BufferTypeError: if `buffer` has no contiguous memory, holds references to Python objects, or is read-only and
            `access` lets peers write.
        :raises BusyError: if 4096 regions are exported already, the most that a peer takes note of.
        :raises DriverError: if no driver can register memory that exists already.
        """
        in_flight.must_be_open(self)
        return self._regions.register(name, buffer, access, grant)

    @property
    def regions(self) -> dict[str, Region]:
        """This engine's regions by name."""
        return self._regions.by_name()

    # -- peers

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that are up."""
        return self._peers.up

    async def connect(self, address: str | Address, *, timeout: float | None = None) -> Peer:
        """The peer that listens at `address`: the one that is connected already, or a new connection.

        Two engines that connect to each other at the same moment may get two connections; either works.

        :param timeout: seconds; default: the engine's ``connect_timeout``.
        :raises ConnectError: if nobody answers there in time.
        :raises AuthenticationError: if the secrets, domains or users do not match.
        :raises HandshakeError: if what listens there is no engine, or one of another version.
        :raises NoRouteError: if no common driver reaches it.
        :raises InvalidArgumentError: if `address` is malformed or this engine's own.
        :raises ClosedError: if this engine is closed meanwhile.
        """
        in_flight.must_be_open(self)
        where = parse_address(address)
        seconds = self.config.connect_timeout if timeout is None else timeout
        seconds = positive_seconds("timeout", seconds)
        if str(where) == self.address:
            raise InvalidArgumentError(f"{where} is this engine itself; copy within the process instead")
        return await self._peers.connect(where, seconds)

    def accepted(self) -> SubscriptionQueue[Peer]:
        """Peers that connect to this engine from now on: ``async for peer in engine.accepted()``."""
        in_flight.must_be_open(self)
        return self._peers.accepted()

    def _shared_drivers(self, theirs: Sequence[str], same_host: bool) -> list[Driver]:
        return [
            driver
            for name, driver in self._drivers.items()
            if name in theirs and (same_host or not driver.capabilities & CAP_SAME_HOST)
        ]

    def serve(self, service: str, handler: Handler) -> None:
        """Lets peers call `handler` by ``peer.request(service, body)`` and ``peer.post(service, body)``.

        :param handler: gets the peer and the body (a JSON object), gives the answer's body; a function or a coroutine
            function.  A `HixlError` that it raises reaches the caller with its type.
        :raises InvalidArgumentError: if `service` is taken.
        """
        in_flight.must_be_open(self)
        if not isinstance(service, str) or not service or not service.isprintable() or not callable(handler):
            raise InvalidArgumentError(f"serve takes a printable name and a function, not {service!r} and {handler!r}")
        if service in self._services:
            raise InvalidArgumentError(f"service {service!r} is served already")
        self._services[service] = handler

    def unserve(self, service: str) -> None:
        """Undoes `serve`; no error if nobody serves it."""
        self._services.pop(service, None)

    # -- notifications

    def notify(self, peer: Peer, topic: str, payload: bytes = b"") -> Transfer:
        """Sends a notification that belongs to no transfer; ``write(notify=...)`` sends one after its data.

        :return: a `Transfer`, done when the peer's queue holds it.
        :raises InvalidArgumentError: if topic and payload are over the driver's limit.
        :raises PeerDownError: if the peer is down.
        """
        in_flight.must_be_open(self)
        if not isinstance(peer, Peer) or peer._host is not self._host:
            raise InvalidArgumentError(f"peer must be a peer of this engine, not {peer!r}")
        return _core.notify(self, peer._link(CAP_NOTIFY, "notify"), (topic, payload))

    def notifications(self, topic: str | None = None, *, limit: int | None = None) -> Subscription:
        """The notifications of `topic` from now on, in an async iterator; those that nobody has taken yet come first.

        :param topic: the topic, or None for all.
        :param limit: messages kept before new ones are dropped and counted.  Whatever it is, a queue holds 16 MiB, in which a
            message counts its bytes and 256 more.
        """
        in_flight.must_be_open(self)
        assert self._subscriptions is not None
        return self._subscriptions.subscribe(topic, limit)

    async def room(self, nbytes: int = 0) -> None:
        """Waits until `nbytes` more may be in flight, for engines with ``max_bytes_in_flight``; first come, first served.

        What is submitted without it may pass those who wait.  What fits when it returns fits until the caller awaits
        something else::

            await engine.room(len(data))
            transfer = engine.write(data, remote)

        :raises InvalidArgumentError: if it is no number of bytes.
        :raises ClosedError: if the engine is closed meanwhile.
        """
        in_flight.must_be_open(self)
        if not isinstance(nbytes, int) or not 0 <= nbytes < 1 << 62:
            raise InvalidArgumentError(f"nbytes must be a number of bytes, not {nbytes!r}")
        if (pause := in_flight.checkpoint(self)) is not None:
            await pause
        waiter = in_flight.wait_for_room(self, nbytes)
        if waiter is not None:
            try:
                await waiter
            except asyncio.CancelledError:
                in_flight.admit_waiters(self)
                raise
            in_flight.must_be_open(self)

    def coalesce(self) -> Coalescer:
        """Many small copies sent as few batches: ``async with engine.coalesce() as few: few.write(a, b)``; see `Coalescer`."""
        in_flight.must_be_open(self)
        return Coalescer(self)

    def group(self) -> Group:
        """Structured transfers: ``async with engine.group() as group: group.write(a, b)``; see `Group`."""
        in_flight.must_be_open(self)
        return Group(self)

    def _on_event(self, driver: Driver, kind: int, cookie: int, status: int, topic: bytes, data: bytes) -> None:
        """Handle a driver's report, on the loop's thread; the text of an event may be the peer's."""
        peer = self._peers[cookie]
        if kind == EVENT_NOTE and peer is not None:  # first, for there are many
            assert self._subscriptions is not None
            self._subscriptions.deliver(peer, topic, data)
        elif kind == EVENT_LOG:
            logger.log(logging.WARNING if status else logging.INFO, "%s", printable(data.decode("utf-8", "replace")))
        elif peer is None:
            return
        elif kind == EVENT_SIGNAL:
            peer._signalled()
        elif kind == EVENT_MESSAGE:
            peer._links.tell(driver, data)
        elif kind == EVENT_LINK_DOWN:
            peer._link_down(driver, printable(data.decode("utf-8", "replace")))

    # -- counters

    def stats(self) -> EngineStats:
        """Counters and gauges; every gauge is zero again when all work is done and everything closed."""
        topics = self._subscriptions
        return EngineStats(
            **in_flight.counters(self),
            peers=len(self._peers),
            notifications=topics.received if topics is not None else 0,
            notifications_dropped=topics.dropped if topics is not None else 0,
        )

    def driver_stats(self) -> dict[str, dict[str, int]]:
        """Each driver's own counters and gauges."""
        return {name: driver.stats() for name, driver in self._drivers.items()}

    def driver_limits(self) -> dict[str, dict[str, int]]:
        """The most that each driver takes: in a batch, in a notification, and without leaving the call."""
        return {
            name: {
                "descriptors": driver.descriptor_limit,
                "notification_bytes": driver.note_limit,
                "inline_bytes": driver.inline_limit,
            }
            for name, driver in self._drivers.items()
        }

    def driver_facts(self) -> dict[str, dict[str, str]]:
        """What each driver tells of itself and what it runs on, for people; known even if it could not be started."""
        return {name: dict(facts) for name, facts in self._facts.items()}

    def _abandon(self) -> None:
        """In a child of fork(): closes the child's copies of descriptors, so that it keeps no port and socket open."""
        if self._listener is not None:
            self._listener.abandon()
        self._peers.abandon()
        in_flight.after_fork(self)


def _pong(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
    """The service ``hixl.ping``, which every engine has: sends back what came."""
    return body


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
