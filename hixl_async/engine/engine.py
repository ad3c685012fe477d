"""The engine: regions, peers, and the routing of transfers to drivers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import warnings
import weakref
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from .. import _core, drivers
from .._core import Core
from ..control import Identity, Listener, printable
from ..core import in_flight, torch_device
from ..core.device_copies import DeviceCopies
from ..core.guard import guarded
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
from ..core.log import Log
from ..core.transfer import Transfer
from ..display import shown
from ..errors import (
    ClosedError,
    DriverError,
    HixlError,
    InvalidArgumentError,
)
from ..types import AccessLike, Address, EngineStats
from .arguments import number_of, positive_number, positive_seconds, require_callable, require_service
from .closing import Closing
from .coalescer import Coalescer
from .config import Drivers, EngineConfig, parse_address
from .ending_task import EndingTask
from .group import Group
from .host import Handler, Host
from .notifications import Subscription, Subscriptions
from .peer import Peer
from .peers import Peers
from .region import Region, operand
from .region_table import RegionTable
from .registration_cache import RegistrationCache
from .subscription_queue import SubscriptionQueue

__all__ = ["Engine"]

log = Log("hixl_async")

T = TypeVar("T")

#: Seconds that `aclose` waits beyond ``close_timeout`` for what only has to be torn down.
LINGER = 2.0

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine(Core):
    """The endpoint of this process: it lets peers use its memory, and transfers bytes to and from theirs.

    ::

        async with Engine("127.0.0.1:18515", name="prefill-0") as engine:
            kv = engine.allocate("kv", 64 << 20, access="write")
            peer = await engine.connect("127.0.0.1:18516")
            remote = await peer.region("kv")
            await engine.write(kv[:4096], remote[8192:12288])

    :param address: ``"host:port"`` to listen on; port 0 picks one; None for an engine that only dials.
    :param name: the name that peers see, 1 to 128 characters; by default it contains the process id.
    :param domain: the tenant; engines of different domains never connect.
    :param secret: at least 8 bytes, shared by all engines that may connect; default ``HIXL_ASYNC_SECRET``.  Without one, only
        processes of this user on this host may connect.
    :param drivers: names in order of preference, or a mapping of names to options; default ``HIXL_ASYNC_DRIVERS`` or
        ``["shm"]``.
    :param unix_dir: the folder of the Unix socket, for containers that share one.
    :param stall: seconds without progress after which a transfer fails.
    :param connect_timeout: seconds that `connect` may take.
    :param close_timeout: seconds that `aclose` waits for work in flight and for peers.
    :param notification_limit: the most notifications kept per subscription, and for topics without a subscriber.
    :param notify_batch_size: the most notifications of a peer, and the most completions, that are taken in one pass of the
        loop before other tasks run; default ``HIXL_NOTIFY_BATCH_SIZE`` or 256.
    :param max_bytes_in_flight: the most bytes of transfers in flight together; further ones are refused with `BusyError`, and
        `room` waits.  A single transfer that is larger is accepted when no other is in flight.  Default: no limit.
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
        if hasattr(self, "_config"):
            raise InvalidArgumentError(f"{self!r} is initialised already; make another engine")
        self._config = EngineConfig.build(
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
            spawn_ending=self._spawn_ending,
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
        if not hasattr(self, "_closing"):  # the last attribute that `__init__` sets
            return "<Engine, not initialised>"
        where = f" at {self.address}" if self._listener is not None and self.address else ""
        state = " not open" if self.loop is None else " closed" if self.closed else ""
        return f"<Engine {self.config.name!r}{where}{state}>"

    # -- life

    async def open(self) -> Engine:
        """Open and start the drivers, and listen; ``async with`` calls it.

        :return: the engine itself.
        :raises DriverError: if a driver cannot be loaded, opened or started.
        :raises AddressInUseError: if another program listens on the address.
        :raises UnknownHostError: if the name service has no entry for the host of the address.
        :raises ConnectError: if the engine cannot listen for another reason.
        :raises ClosedError: if the engine was opened before.
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
                await asyncio.shield(self._ending_task(self._end_drivers(loop.time() + self.config.close_timeout)))
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
        """Refuse new work, drain the work in flight, say goodbye to peers, and release all resources.  Idempotent.

        Closing begins with the call, and takes little longer than ``close_timeout``.  Memory that a driver still holds after
        that, or registered memory that a peer may still write, is leaked, and reported to the loop's exception handler.

        :return: an awaitable; cancelling it does not stop the closing, nor does cancelling all tasks of the loop, so that no
            engine is left half closed.
        :raises WrongLoopError: if called in another event loop than that in which the engine was opened.
        """
        if not self.forked:
            in_flight.must_be_on_thread(self)
        return Closing(self, self._begin_to_close)

    def _begin_to_close(self) -> asyncio.Task[None] | None:
        if self.forked or self.loop is None:
            return None
        if self._closing is None and not self.closed:
            self._must_be_here()
            self._closing = self._ending_task(self._close())
        return self._closing

    async def _close(self) -> None:
        in_flight.refuse_work(self)
        until = self.loop.time() + self.config.close_timeout + LINGER
        for callback in tuple(self._close_callbacks):
            guarded(self.loop, f"a callback of {self!r} failed", callback)
        peers = tuple(self._peers)
        leaving = self._peers.close()
        if self._listener is not None:
            await self._listener.aclose()
        await self._wait(leaving, until)
        if self._subscriptions is not None:
            self._subscriptions.close()
        self._regions.close()
        for peer, leaked in self._peers.give_up():
            self._report(f"{leaked!r} is leaked: {shown(peer)}, whose death is not confirmed, may still write it")
        drained = in_flight.all_drained(self)
        await self._wait([drained, *self._tasks], until)
        drained.cancel()
        for task in self._tasks:
            _give_up(task)
        await self._wait(list(self._tasks), self.loop.time() + LINGER)
        for peer in peers:
            peer._let_go()
        await self._end_drivers(until)
        _engines.discard(self)

    async def _end_drivers(self, until: float) -> None:
        """Wait until drivers have released all memory, and close them; what they hold after that is leaked (C7)."""
        for driver in self._drivers.values():
            driver.stop_links()
        while in_flight.counters(self)["pinned"] and self.loop.time() < until:
            drained = in_flight.all_drained(self)  # the end of one operation may start another
            await self._wait([drained], until)
            drained.cancel()
        if not in_flight.counters(self)["pinned"]:
            ends = [self._ending_task(self._shut_down(driver)) for driver in self._started]
            await self._wait(ends, max(until, self.loop.time() + LINGER))
            for end in ends:
                end.give_up()
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

    def _report(self, message: str, error: BaseException | None = None) -> None:
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
        """Raise the error of a call in a foreign loop or in a child of fork(); a closed engine is fine."""
        if self.forked or running_loop() is not self.loop:
            in_flight.refuse(self)

    def add_close_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the engine begins to close, on its loop; `remove_close_callback` undoes it.

        :param callback: a function without parameters.
        :raises InvalidArgumentError: if `callback` is not a function.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self)
        require_callable("callback", callback)
        self._close_callbacks.append(callback)

    def remove_close_callback(self, callback: Callable[[], None]) -> None:
        """Undo `add_close_callback`; no error if `callback` was not registered.

        :param callback: the function that `add_close_callback` was given.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self)
        with contextlib.suppress(ValueError):
            self._close_callbacks.remove(callback)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that belongs to the engine, and that `aclose` waits for."""
        return self._own(self.loop.create_task(work))

    def _spawn_ending(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of the same kind that ends something."""
        return self._own(self._ending_task(work))

    def _own(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _ending_task(self, work: Coroutine[Any, Any, T]) -> EndingTask[T]:
        return EndingTask(work, self.loop, self.config.close_timeout + 4 * LINGER)

    # -- transfers

    # Named here, where one looks for them, and not wrapped: a Python function around them would cost as much as they do.
    read = Core.read
    write = Core.write
    submit = Core.submit
    drained = Core.drained

    # -- identity

    @property
    def config(self) -> EngineConfig:
        """The arguments of the engine, checked and completed."""
        return self._config

    @property
    def name(self) -> str:
        """The name that peers see."""
        return self.config.name

    @property
    def incarnation(self) -> str:
        """Random hexadecimal digits of this engine, which distinguish a restarted one from its predecessor."""
        return self._incarnation

    @property
    def address(self) -> str:
        """The address it listens on, ``host:port`` with the real port; empty for an engine that only dials."""
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
        """Allocate new, zeroed memory for transfers, which peers may use as far as `access` allows.

        :param name: unique in this engine; peers ask for the region by it.
        :param size: bytes.
        :param access: the most that any peer can be given: ``"none"``, ``"read"``, ``"write"``, ``"read-write"``.
        :param grant: called with each peer, returns the access that it is given; `access` limits it.
        :return: the region; close it with `Region.aclose`, or by ``async with``.
        :raises InvalidArgumentError: if an argument is malformed or the name is taken.
        :raises BusyError: if 4096 regions are exported already, the most that a peer accepts.
        :raises DriverError: if there is not enough memory, or no driver can allocate.
        :raises ClosedError: if the engine is closed.
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
        """Make existing memory a region.

        :param name: unique in this engine; peers ask for the region by it.
        :param buffer: any contiguous buffer, a tensor, or an object that numpy can import by DLPack; kept alive until the
            region is closed and no longer used.
        :param access: the most that any peer can be given: ``"none"``, ``"read"``, ``"write"``, ``"read-write"``.
        :param grant: called with each peer, returns the access that it is given; `access` limits it.
        :return: the region; close it with `Region.aclose`, or by ``async with``.
        :raises InvalidArgumentError: if an argument is malformed or the name is taken.
        :raises BufferTypeError: if `buffer` has no contiguous memory, holds references to Python objects, or is read-only and
            `access` lets peers write.
        :raises RangeError: if `buffer` is empty.
        :raises BusyError: if 4096 regions are exported already, the most that a peer accepts.
        :raises DriverError: if no driver can register existing memory.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        return self._regions.register(name, buffer, access, grant)

    @property
    def regions(self) -> dict[str, Region]:
        """The regions of this engine by name."""
        return self._regions.by_name()

    # -- peers

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that are up."""
        return self._peers.up

    async def connect(self, address: str | Address, *, timeout: float | None = None) -> Peer:
        """Connect to the engine that listens at `address`; an existing connection to it is used again.

        Two engines that connect to each other at the same moment may get two connections; either works.

        :param address: ``"host:port"`` or an `Address`.
        :param timeout: seconds; default: the engine's ``connect_timeout``.
        :return: the peer, ready for transfers.
        :raises ConnectError: if no engine answers there in time.
        :raises AuthenticationError: if the secrets, domains or users do not match.
        :raises HandshakeError: if the program that listens there is not an engine, or one of another version.
        :raises NoRouteError: if no driver that both sides have reaches the peer.
        :raises UnknownHostError: if the name service has no entry for the host of `address`.
        :raises InvalidArgumentError: if `address` is malformed or this engine's own.
        :raises ClosedError: if this engine is closed, before the call or meanwhile.
        """
        in_flight.must_be_open(self)
        where = parse_address(address)
        seconds = self.config.connect_timeout if timeout is None else timeout
        seconds = positive_seconds("timeout", seconds)
        if str(where) == self.address:
            raise InvalidArgumentError(f"{where} is this engine itself; copy within the process instead")
        return await self._peers.connect(where, seconds)

    def accepted(self) -> SubscriptionQueue[Peer]:
        """Return an iterator over the peers that connect from now on: ``async for peer in engine.accepted()``.

        :return: a queue of peers; it ends when it is closed or the engine closes.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        return self._peers.accepted()

    def _shared_drivers(self, theirs: Sequence[str], same_host: bool) -> list[Driver]:
        return [
            driver
            for name, driver in self._drivers.items()
            if name in theirs and (same_host or not driver.capabilities & CAP_SAME_HOST)
        ]

    def serve(self, service: str, handler: Handler) -> None:
        """Let peers call `handler` by ``peer.request(service, body)`` and ``peer.post(service, body)``.

        :param service: the name of the service, printable, of 1 to 512 characters.
        :param handler: a function or a coroutine function.  It gets the peer and the request's body (a JSON object), and
            returns the answer's body, or None for an empty one.  It refuses a request by `InvalidArgumentError`, `RangeError`,
            `AccessError`, `BusyError`, `TicketError` or `LayoutMismatchError`, which reaches the caller with its class; any
            other error reaches the caller as `RemoteError`.
        :raises InvalidArgumentError: if `service` is malformed or served already, or `handler` is not callable.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        require_service(service)
        require_callable("handler", handler)
        if service in self._services:
            raise InvalidArgumentError(f"service {service!r} is served already")
        self._services[service] = handler

    def unserve(self, service: str) -> None:
        """Undo `serve`; no error if there is no such service.

        :param service: the name of the service.
        :raises InvalidArgumentError: if `service` cannot be the name of one.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        in_flight.must_be_on_thread(self)
        require_service(service)
        self._services.pop(service, None)

    # -- notifications

    def notify(self, peer: Peer, topic: str, payload: bytes = b"") -> Transfer:
        """Send a notification that belongs to no transfer; ``write(notify=...)`` sends one after its data.

        :param peer: a peer of this engine.
        :param topic: the topic, not empty.
        :param payload: the bytes of the message; `driver_limits` has the most for topic and payload together.
        :return: a `Transfer` that is done when the peer's queue holds the notification.
        :raises InvalidArgumentError: if topic and payload are malformed or over the driver's limit, or `peer` is not a peer of
            this engine.
        :raises DriverError: if no driver that is linked with the peer can send notifications.
        :raises PeerDownError: if the peer is down.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        if not isinstance(peer, Peer) or peer._host is not self._host:
            raise InvalidArgumentError(f"peer must be a peer of this engine, not {shown(peer)}")
        return _core.notify(self, peer._link(CAP_NOTIFY, "notify"), (topic, payload))

    def notifications(self, topic: str | None = None, *, limit: int | None = None) -> Subscription:
        """Subscribe to the notifications of a topic; unclaimed ones that have arrived already come first.

        :param topic: the topic, or None for all.
        :param limit: the most messages kept; further ones are dropped and counted.  A queue also holds at most 16 MiB, in which
            a message counts its bytes and 256 more.  Default: the engine's ``notification_limit``.
        :return: the subscription, an async iterator.
        :raises InvalidArgumentError: if `topic` is empty, or `limit` is not a number of at least 1.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        assert self._subscriptions is not None
        return self._subscriptions.subscribe(topic, limit)

    async def room(self, nbytes: int = 0) -> None:
        """Wait until `nbytes` more may be in flight, for engines with ``max_bytes_in_flight``; first come, first served.

        A transfer that is submitted without this call may overtake the waiting ones.  The room lasts until the caller awaits
        something else::

            await engine.room(len(data))
            transfer = engine.write(data, remote)

        :param nbytes: the bytes of the transfers that the caller is about to submit.
        :raises InvalidArgumentError: if `nbytes` is not a number of bytes.
        :raises ClosedError: if the engine is closed, before the call or meanwhile.
        """
        in_flight.must_be_open(self)
        nbytes = number_of("bytes", "nbytes", nbytes, 0, 62)
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
        """Return a collector of small copies: ``async with engine.coalesce() as few: few.write(a, b)``.

        :return: a new `Coalescer`.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        return Coalescer(self)

    def registration_cache(self, *, nbytes: int = 1 << 30, count: int = 1024) -> RegistrationCache:
        """Return a cache of registrations, for buffers of the program that come back.

        :param nbytes: the most bytes that it keeps registered.
        :param count: the most regions that it keeps.
        :return: a new `RegistrationCache`; close it, or enter it with ``async with``.
        :raises InvalidArgumentError: if a limit is not a positive integer.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        return RegistrationCache(
            self, self.register, positive_number("nbytes", nbytes), positive_number("count", count)
        )

    def group(self) -> Group:
        """Return a group of structured transfers: ``async with engine.group() as group: group.write(a, b)``.

        :return: a new `Group`.
        :raises ClosedError: if the engine is closed.
        """
        in_flight.must_be_open(self)
        return Group(self)

    def _on_event(self, driver: Driver, kind: int, cookie: int, status: int, topic: bytes, data: bytes) -> None:
        """Handle an event of a driver, on the loop's thread; its text may come from the peer."""
        peer = self._peers[cookie]
        if kind == EVENT_NOTE and peer is not None:  # first, because notifications are the most frequent
            assert self._subscriptions is not None
            self._subscriptions.deliver(peer, topic, data)
        elif kind == EVENT_LOG:
            (log.warning if status else log.info)("%s", printable(data.decode("utf-8", "replace")))
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
        """Return the counters and gauges; every gauge returns to zero when all work is done and everything is closed."""
        subscriptions = self._subscriptions
        return EngineStats(
            **in_flight.counters(self),
            peers=len(self._peers),
            notifications=subscriptions.received if subscriptions is not None else 0,
            notifications_dropped=subscriptions.dropped if subscriptions is not None else 0,
        )

    def driver_stats(self) -> dict[str, dict[str, int]]:
        """Return each driver's own counters and gauges, by the names of the drivers."""
        return {name: driver.stats() for name, driver in self._drivers.items()}

    def driver_limits(self) -> dict[str, dict[str, int]]:
        """Return the limits of each driver by its name.

        :return: for each driver ``descriptors`` (copies of a batch), ``notification_bytes`` (topic and payload together) and
            ``inline_bytes`` (bytes of a transfer that may finish inside the call).
        """
        return {
            name: {
                "descriptors": driver.descriptor_limit,
                "notification_bytes": driver.note_limit,
                "inline_bytes": driver.inline_limit,
            }
            for name, driver in self._drivers.items()
        }

    def driver_facts(self) -> dict[str, dict[str, str]]:
        """Return a description of each driver and of what it runs on, for people; known even if it could not be started."""
        return {name: dict(facts) for name, facts in self._facts.items()}

    def _abandon(self) -> None:
        """Close the copies of descriptors in a child of fork(), so that it keeps no port and socket open."""
        if self._listener is not None:
            self._listener.abandon()
        self._peers.abandon()
        in_flight.after_fork(self)


def _pong(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the request, as the service ``hixl.ping``, which every engine has."""
    return body


def _give_up(task: asyncio.Task[Any]) -> None:
    """Cancel a task, because the engine ends."""
    if isinstance(task, EndingTask):
        task.give_up()
    else:
        task.cancel()


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
