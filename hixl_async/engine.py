"""The engine: regions, peers, and the routing of transfers to drivers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from . import _link, drivers
from ._core import Core
from ._link import Driver
from ._transfer import Transfer
from .config import Drivers, EngineConfig
from .control import Connection, Identity, Listener, dial
from .errors import (
    ClosedError,
    DriverError,
    HixlError,
    InvalidArgumentError,
    PeerLostError,
)
from .group import Group
from .memory import Operand, Region, operand, parse_access
from .notify import Subscription, Topics
from .peer import Handler, Peer
from .types import AccessLike, Address, EngineStats, PeerState

__all__ = ["Engine"]

logger = logging.getLogger("hixl_async")

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
    :param secret: shared by all engines that may connect.  Without one only processes of the same user on this host may.
    :param drivers: names in order of preference, or a mapping of names to options; default ``["shm"]``.
    :param unix_dir: folder for the Unix socket, for containers that share one.
    :param stall: seconds without progress after which a transfer fails.
    :param connect_timeout: seconds that `connect` may take.
    :param close_timeout: seconds that `aclose` waits for work in flight and for peers.
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
        )
        self._incarnation = secrets.token_hex(16)
        self._listener: Listener | None = None
        self._drivers: dict[str, Driver] = {}
        self._names: dict[str, Region] = {}
        self._numbers: dict[int, Region] = {}
        self._peers: dict[int, Peer] = {}
        self._next_number = 1
        self._services: dict[str, Handler] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dials: dict[Address, asyncio.Lock] = {}
        self._acceptors: list[_Acceptor] = []
        self._close_callbacks: list[Callable[[], None]] = []
        self._topics: Topics | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        where = f" at {self.address}" if self._listener is not None and self.address else ""
        return f"<Engine {self.config.name!r}{where}{' closed' if self.closed else ''}>"

    # -- life

    async def open(self) -> Engine:
        """Opens the drivers and listens; ``async with`` does it.

        :raises DriverError: if a driver cannot be loaded or opened.
        :raises AddressInUseError: if somebody listens on the address already.
        """
        if self.loop is not None:
            raise ClosedError("this engine was opened before; make a new one")
        self._open(asyncio.get_running_loop(), self._on_event, self.config.stall)
        self._topics = Topics(self.loop, self.config.notification_limit)
        try:
            for name, options in self.config.drivers.items():
                capsule, settings = drivers.resolve(name, options)
                self._drivers[name] = Driver(self, capsule, name, settings)
            self._listener = await Listener.open(
                self.config.address,
                self._identity,
                secret=self.config.secret,
                unix_dir=self.config.unix_dir,
                handshake_timeout=self.config.connect_timeout,
                on_connection=self._accept,
            )
        except BaseException:
            # The original error is the one to show; nothing has started that could fail to stop.
            self._refuse_work()
            self._close_drivers()
            self._finish()
            raise
        _engines.add(self)
        return self

    async def aclose(self) -> None:
        """Refuses new work, drains what is in flight, says goodbye to peers, and gives everything back.  Idempotent.

        Within ``close_timeout``; what a driver still holds after it is leaked, and the loop's exception handler hears of it.
        """
        if self.forked or self.loop is None or (self.closed and self._closing is None):
            return
        if self._closing is None:
            self._closing = self.loop.create_task(self._close())
        # A caller that is cancelled must not leave the engine half closed.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._refuse_work()
        for callback in self._close_callbacks:
            callback()
        if self._listener is not None:
            await self._listener.aclose()
        await asyncio.gather(*(peer.aclose() for peer in self._peers.values()), return_exceptions=True)
        if self._topics is not None:
            self._topics.close()
        for acceptor in list(self._acceptors):
            acceptor.close()
        for region in list(self._numbers.values()):
            self._forget_region(region)
        for peer in list(self._peers.values()):
            # Lost peers whose death was never confirmed: this process gives its memory back all the same.
            peer._release_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.close_timeout):
                await self._all_drained()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        leaked = self._finish()
        if leaked:
            self.loop.call_exception_handler(
                {"message": f"{self!r}: a driver still held the memory of {leaked} transfers at close; it is leaked"}
            )
        else:
            self._close_drivers()
        _engines.discard(self)

    def _close_drivers(self) -> None:
        for driver in self._drivers.values():
            driver.close()

    async def __aenter__(self) -> Engine:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self.closed and not self.forked:
            warnings.warn(f"{self!r} was never closed; use 'async with'", ResourceWarning, source=self, stacklevel=2)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the engine begins to close."""
        self._close_callbacks.append(callback)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that belongs to the engine, and that `aclose` waits for."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
        """New memory, zeroed, that transfers may use, and that peers may use as far as `access` goes.

        :param name: unique in this engine; peers ask for it.
        :param size: bytes.
        :param access: the most that any peer can be given: ``"none"``, ``"read"``, ``"write"``, ``"read-write"``.
        :param grant: called with each peer, narrows `access` for it.
        :raises InvalidArgumentError: if an argument is malformed or the name is taken.
        :raises DriverError: if there is not enough memory.
        """
        self._check_new_region(name)
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 62:
            raise InvalidArgumentError(f"size must be a positive number of bytes, not {size!r}")
        region = Region(self, name, parse_access(access), grant)
        allocator = next((d for d in self._drivers.values() if d.capabilities & _link.CAP_ALLOC), None)
        if allocator is None:
            raise DriverError(f"none of the drivers ({', '.join(self._drivers)}) allocates memory; register a buffer of yours")
        self._adopt(region, allocator, size, int(region.access))
        self._register_everywhere(region, allocator)
        return self._enter_region(region)

    def register(
        self,
        name: str,
        buffer: Any,
        *,
        access: AccessLike = "none",
        grant: Callable[[Peer], AccessLike] | None = None,
    ) -> Region:
        """Memory that exists already, as a region: any contiguous buffer, a CPU tensor, or what numpy adopts by DLPack.

        The object is kept alive until the region is closed and nobody uses it any more.  Parameters as for `allocate`.

        :raises BufferTypeError: if `buffer` has no contiguous memory, or is read-only and `access` lets peers write.
        :raises DriverError: if no driver can register memory that exists already.
        """
        self._check_new_region(name)
        region = Region(self, name, parse_access(access), grant)
        if isinstance(buffer, Region):
            raise InvalidArgumentError(f"{buffer!r} is a region already")
        if hasattr(type(buffer), "__buffer__") or _has_buffer(buffer):
            self._borrow(region, buffer, int(region.access))
        else:
            where = operand(buffer, bool(region.access & 2))
            if where.size == 0:
                raise InvalidArgumentError("the buffer is empty; there is nothing to register")
            self._borrow_address(region, where.owner, where.address, where.size, int(region.access))
        self._register_everywhere(region, None)
        return self._enter_region(region)

    def _check_new_region(self, name: str) -> None:
        self._must_be_open()
        if not isinstance(name, str) or not 0 < len(name.encode()) <= 256:
            raise InvalidArgumentError(f"name must be a string of 1 to 256 bytes, not {name!r}")
        if name in self._names:
            raise InvalidArgumentError(f"region {name!r} exists already; close it first, or choose another name")

    def _register_everywhere(self, region: Region, allocator: Driver | None) -> None:
        """Makes `region` known to every driver that can use it."""
        try:
            for driver in self._drivers.values():
                if driver is not allocator and driver.capabilities & _link.CAP_REGISTER:
                    self._register(region, driver, 0)
        except BaseException:
            region.retire()
            raise

    def _enter_region(self, region: Region) -> Region:
        region.number = self._next_number
        self._next_number += 1
        self._names[region.name] = self._numbers[region.number] = region
        for peer in self.peers:
            peer._offer(region)
        return region

    async def _withdraw(self, region: Region) -> None:
        if self._numbers.get(region.number) is not region:
            return
        self._must_be_open()
        self._forget_region(region)
        users = [peer for peer in self.peers if peer._withdraw(region)]
        await region.drained()
        if users:
            try:
                async with asyncio.timeout(self.config.close_timeout):
                    await region.released()
            except TimeoutError:
                names = ", ".join(repr(peer.name) for peer in users)
                logger.warning("%r: not all of its users (%s) let go of it; its memory stays pinned until they do", region, names)

    def _forget_region(self, region: Region) -> None:
        del self._numbers[region.number], self._names[region.name]
        region.retire()

    @property
    def regions(self) -> dict[str, Region]:
        """This engine's regions by name."""
        return dict(self._names)

    def _region(self, number: int) -> Region | None:
        return self._numbers.get(number)

    def _regions(self) -> list[Region]:
        return list(self._numbers.values())

    def _address_of(self, local: Any, writable: bool) -> Operand:
        return operand(local, writable)

    # -- peers

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that are up."""
        return tuple(peer for peer in self._peers.values() if peer.state is PeerState.UP)

    async def connect(self, address: str | Address, *, timeout: float | None = None) -> Peer:
        """The peer that listens at `address`: the one that is connected already, or a new connection.

        :param timeout: seconds; default: the engine's ``connect_timeout``.
        :raises ConnectError: if nobody answers there in time.
        :raises AuthenticationError: if the secrets, domains or users do not match.
        :raises NoRouteError: if no common driver reaches it.
        :raises InvalidArgumentError: if `address` is malformed or this engine's own.
        """
        self._must_be_open()
        try:
            where = Address.parse(address) if isinstance(address, str) else address
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        if str(where) == self.address:
            raise InvalidArgumentError(f"{where} is this engine itself; copy within the process instead")
        async with self._dials.setdefault(where, asyncio.Lock()):
            for peer in self.peers:
                if peer.address == str(where):
                    return peer
            connection = await dial(
                where,
                self._identity(),
                secret=self.config.secret,
                unix_dir=self.config.unix_dir,
                timeout=timeout or self.config.connect_timeout,
            )
            if self.closed:
                await connection.aclose()
                raise ClosedError("the engine was closed while it connected")
            peer = Peer(self, connection, self.config.close_timeout)
            return await self._bring_up(peer, timeout or self.config.connect_timeout)

    async def _bring_up(self, peer: Peer, timeout: float) -> Peer:
        try:
            async with asyncio.timeout(timeout):
                await peer._establish()
        except TimeoutError:
            error = PeerLostError(f"peer {peer.name!r} did not complete the connection within {timeout:g} s", peer=peer.name)
            peer._lose(error, dead=False)
            raise error from None
        except BaseException:
            peer._lose(PeerLostError(f"the connection to {peer.name!r} was given up", peer=peer.name), dead=False)
            raise
        return peer

    def _accept(self, connection: Connection) -> None:
        if self.closed:
            connection.abandon()
            return
        peer = Peer(self, connection, self.config.close_timeout)
        self._spawn(self._admit(peer))

    async def _admit(self, peer: Peer) -> None:
        try:
            await self._bring_up(peer, self.config.connect_timeout)
        except HixlError as error:
            logger.warning("%r: peer %r was not admitted: %s", self, peer.name, error)
            return
        for acceptor in self._acceptors:
            acceptor._put(peer)

    def accepted(self) -> _Acceptor:
        """Peers that connect to this engine from now on, in an async iterator: ``async for peer in engine.accepted()``."""
        self._must_be_open()
        acceptor = _Acceptor(self)
        self._acceptors.append(acceptor)
        return acceptor

    def _shared_drivers(self, theirs: Sequence[str], same_host: bool) -> list[Driver]:
        return [
            driver
            for name, driver in self._drivers.items()
            if name in theirs and (same_host or not driver.capabilities & _link.CAP_SAME_HOST)
        ]

    def _attach(self, peer: Peer) -> int:
        cookie = self._next_number
        self._next_number += 1
        self._peers[cookie] = peer
        return cookie

    def _detach(self, peer: Peer) -> None:
        self._peers.pop(peer._cookie, None)

    def _handler(self, service: str) -> Handler | None:
        return self._services.get(service)

    def serve(self, service: str, handler: Handler) -> None:
        """Lets peers call `handler` by ``peer.request(service, body)`` and ``peer.post(service, body)``.

        :param handler: gets the peer and the body (a JSON object), gives the answer's body; a function or a coroutine
            function.  A `HixlError` that it raises reaches the caller with its type.
        :raises InvalidArgumentError: if `service` is taken.
        """
        self._must_be_open()
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
        """
        return self._post_note(peer._link(_link.CAP_NOTIFY, "notify"), (topic, payload))

    def notifications(self, topic: str | None = None, *, limit: int | None = None) -> Subscription:
        """The notifications of `topic` from now on, in an async iterator; those that nobody has taken yet come first.

        :param topic: the topic, or None for all.
        :param limit: messages kept before new ones are dropped and counted.
        """
        self._must_be_open()
        assert self._topics is not None
        return self._topics.subscribe(topic, limit)

    def group(self) -> Group:
        """Structured transfers: ``async with engine.group() as group: group.write(a, b)``; see `Group`."""
        self._must_be_open()
        return Group(self)

    def _on_event(self, kind: int, cookie: int, status: int, topic: bytes, data: bytes) -> None:
        """What drivers report, on the loop's thread."""
        peer = self._peers.get(cookie)
        if kind == _link.EVENT_LOG:
            logger.info("%s", data.decode("utf-8", "replace"))
        elif peer is None:
            return
        elif kind == _link.EVENT_NOTE:
            assert self._topics is not None
            self._topics.deliver(peer, topic, data)
        elif kind == _link.EVENT_SIGNAL:
            peer._signalled()
        elif kind == _link.EVENT_LINK_DOWN:
            peer._link_down(status, data.decode("utf-8", "replace"))

    # -- counters

    def stats(self) -> EngineStats:
        """Counters and gauges; every gauge is zero again when all work is done and everything closed."""
        transfers, inline, nbytes, failed, wakeups = self._counters()
        topics = self._topics
        return EngineStats(
            transfers=transfers,
            inline=inline,
            bytes=nbytes,
            failed=failed,
            in_flight=self.in_flight,
            pinned=self.pinned,
            regions=self.local_memories,
            remote_regions=self.remote_memories,
            peers=len(self._peers),
            notifications=topics.received if topics is not None else 0,
            notifications_dropped=topics.dropped if topics is not None else 0,
            wakeups=wakeups,
        )

    def driver_stats(self) -> dict[str, dict[str, int]]:
        """Each driver's own counters and gauges."""
        return {name: driver.stats() for name, driver in self._drivers.items()}

    def _abandon(self) -> None:
        """In a child of fork(): closes the child's copies of descriptors, so that it holds no port and no socket open."""
        if self._listener is not None:
            self._listener.abandon()
        for peer in self._peers.values():
            peer._abandon()
        self._after_fork()


class _Acceptor:
    """The async iterator of ``engine.accepted()``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: deque[Peer] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __aiter__(self) -> _Acceptor:
        return self

    async def __anext__(self) -> Peer:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = self._engine.loop.create_future()
            await self._waiter
        return self._queue.popleft()

    def close(self) -> None:
        """Ends the iterator.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine._acceptors.remove(self)
            self._wake()

    async def aclose(self) -> None:
        """As `close`, for contextlib.aclosing."""
        self.close()

    def _put(self, peer: Peer) -> None:
        self._queue.append(peer)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _has_buffer(obj: object) -> bool:
    try:
        memoryview(obj).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    except BufferError:
        return True
    return True


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
