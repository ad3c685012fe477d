"""A connected engine: its links, its regions, requests to it, and how we learn that it is gone.

States: CONNECTING -> UP -> CLOSING -> DOWN, or straight to DOWN when the peer is lost.  DOWN does not mean harmless: a
stopped process may still finish a copy into our memory, so `fenced` is a second question.  It is answered by the peer's
goodbye (sent after its own work has drained) or by the confirmed death of its process, never by time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from . import errors
from ._link import CAP_SAME_HOST, Link
from .errors import (
    AccessError,
    BusyError,
    ClosedError,
    ConnectError,
    DriverError,
    HixlError,
    InvalidArgumentError,
    NoRouteError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
)
from .memory import Region, RemoteRegion, parse_access
from .types import Access, PeerState

if TYPE_CHECKING:
    from ._link import Driver
    from .control import Connection, Identity

__all__ = ["Handler", "Peer", "PeerHost"]

logger = logging.getLogger("hixl_async")

#: What `serve` takes: gets the peer and the request's body, gives the answer's body.
Handler = Callable[["Peer", dict[str, Any]], "dict[str, Any] | Awaitable[dict[str, Any]]"]

#: Seconds between a link's end and the goodbye that explains it, before the peer counts as lost.
GOODBYE_GRACE = 0.25

#: Requests of one peer that may be in our handlers at the same time.
MAX_HANDLERS = 256


class PeerHost(Protocol):
    """What a peer needs of its engine."""

    loop: asyncio.AbstractEventLoop

    def _shared_drivers(self, theirs: Sequence[str], same_host: bool) -> list[Driver]: ...
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
        self._links: dict[str, Link] = {}
        self._ready = self._loop.create_future()
        self._their_ready = False
        self._offers: dict[str, dict[str, Any]] = {}
        self._offer_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._imports: dict[str, asyncio.Task[RemoteRegion]] = {}
        self._imported: dict[int, RemoteRegion] = {}
        self._exports: dict[int, Region] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 1
        self._handlers: set[asyncio.Task[None]] = set()
        self._signal_callbacks: list[Callable[[], None]] = []
        self._lost_callbacks: list[Callable[[HixlError], None]] = []
        self._dead = False
        self._harmless = False
        self._harmless_waiters: list[asyncio.Future[None]] = []
        self._said_goodbye = False
        self._goodbye = self._loop.create_future()
        self._pidfd = -1 if connection.pidfd is None else os.dup(connection.pidfd)
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._died)

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
    def regions(self) -> dict[str, Access]:
        """Names of the regions that the peer grants us, with the access of each."""
        return {name: Access(offer["access"]) for name, offer in self._offers.items()}

    @property
    def confirmed_dead(self) -> bool:
        """True once the peer's process is known to have ended."""
        return self._dead

    def route(self, region: RemoteRegion | str) -> str:
        """Which driver carries transfers to a region, and why, in a sentence."""
        if isinstance(region, str):
            task = self._imports.get(region)
            if task is None or not task.done() or task.exception() is not None:
                raise InvalidArgumentError(f"region {region!r} is not imported; await peer.region({region!r}) first")
            region = task.result()
        others = [name for name in self._links if name != region.link.driver.name]
        rest = f"; also linked: {', '.join(others)}" if others else ", the only one that both sides share"
        return f"{region.link.driver.name}: first of this engine's drivers that can import {region.name!r}{rest}"

    # -- coming up

    async def _establish(self) -> None:
        """Links every driver that both sides have; done when both sides can submit.

        :raises NoRouteError: if there is none.
        """
        drivers = self._host._shared_drivers(self.identity.drivers, self._connection.same_host)
        if not drivers:
            self._lose(self._no_route(), dead=False)
            raise self._no_route()
        self._waiting_for = {driver.name for driver in drivers}
        cards = []
        for driver in drivers:
            link, data, fds = driver.link_new(self._cookie, self.name)
            self._links[driver.name] = link
            cards.append((driver.name, data, fds))
        self._connection.start(self._on_message, self._on_connection_lost)
        for name, data, fds in cards:
            self._send("link", {"driver": name, "card": base64.b64encode(data).decode()}, fds)
        await self._ready
        self.state = PeerState.UP
        for region in self._host._regions():
            self._offer(region)

    def _no_route(self) -> NoRouteError:
        return NoRouteError(
            f"no driver reaches {self.name!r}: it has {', '.join(self.identity.drivers) or 'none'}"
            + ("" if self._connection.same_host else ", and it is not on this host (no Unix socket leg)"),
            peer=self.name,
        )

    def _on_link(self, body: dict[str, Any], fds: list[int]) -> None:
        name, card = _field(body, "driver", str), _field(body, "card", str)
        if name not in self._waiting_for:
            raise ProtocolError(f"peer {self.name!r} offered a link of {name!r} that nobody expects", peer=self.name)
        self._waiting_for.discard(name)
        link = self._links[name]
        data = self._vouch(link, _decode(card))
        taken, fds[:] = list(fds), []
        self._host._spawn(self._join(link, data, taken))

    def _vouch(self, link: Link, card: bytes) -> bytes:
        """A same-host driver's card begins with its maker's pid; only the kernel's word for it reaches the driver."""
        if not link.driver.capabilities & CAP_SAME_HOST:
            return card
        credentials = self._connection.credentials
        claimed = int.from_bytes(card[:4], sys.byteorder)
        if credentials is not None and claimed == credentials.pid:
            return card
        return bytes(4) + card[4:]

    async def _join(self, link: Link, card: bytes, fds: list[int]) -> None:
        try:
            await link.connect(card, fds)
        except HixlError as error:
            self._lose(error, dead=False)
            return
        if self.state is not PeerState.CONNECTING:
            return
        link.watch()
        if not self._waiting_for and all(other.up for other in self._links.values()):
            self._send("ready", {})
            self._maybe_ready()

    def _on_ready(self, body: dict[str, Any], fds: list[int]) -> None:
        self._their_ready = True
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        if self._their_ready and not self._waiting_for and all(link.up for link in self._links.values()):
            _settle(self._ready)

    # -- messages

    def _send(self, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queues one control message; the descriptors are closed here once the connection has its own copies."""
        try:
            self._connection.send(kind, body, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _on_message(self, kind: str, body: dict[str, Any], fds: list[int]) -> None:
        handler = _MESSAGES.get(kind)
        try:
            if handler is None:
                raise ProtocolError(f"peer {self.name!r} sent an unknown message {kind!r}", peer=self.name)
            handler(self, body, fds)
        except ProtocolError as error:
            self._lose(error, dead=False)
        finally:
            # A handler that keeps descriptors empties the list.
            for fd in fds:
                os.close(fd)

    # -- regions, our side

    def _offer(self, region: Region) -> None:
        """Tells the peer of a region that it may use."""
        access = region.access_for(self)
        if access and self.state is PeerState.UP:
            self._send(
                "region.up", {"id": region.number, "name": region.name, "size": region.size, "access": int(access)}
            )

    def _withdraw(self, region: Region) -> bool:
        """Takes an offer back; True if the peer has imported the region and must let go of it first."""
        if self.state is PeerState.UP:
            self._send("region.down", {"id": region.number, "name": region.name})
        return region.number in self._exports

    def _on_region_get(self, body: dict[str, Any], fds: list[int]) -> None:
        call, number = _field(body, "call", int), _field(body, "id", int)
        region = self._host._region(number)
        try:
            if region is None or not region.alive:
                raise StaleRegionError("the region was closed by its owner")
            access = region.access_for(self)
            if not access:
                raise AccessError("the region is not granted to this engine")
            link = next((link for link in self._links.values() if region.known_to(link.driver)), None)
            if link is None:
                raise NoRouteError(f"none of the linked drivers ({', '.join(self._links)}) knows this region")
            card, card_fds = region.export(link.driver, int(access))
        except HixlError as error:
            self._fail(call, error)
            return
        if number not in self._exports:
            self._exports[number] = region
            region.pin()
        self._send(
            "region.card",
            {
                "call": call,
                "driver": link.driver.name,
                "card": base64.b64encode(card).decode(),
                "size": region.size,
                "access": int(access),
            },
            card_fds,
        )

    def _on_region_gone(self, body: dict[str, Any], fds: list[int]) -> None:
        self._let_go(_field(body, "id", int))

    def _let_go(self, number: int) -> None:
        region = self._exports.pop(number, None)
        if region is not None:
            region.unpin()

    # -- regions, their side

    def _on_region_up(self, body: dict[str, Any], fds: list[int]) -> None:
        name = _field(body, "name", str)
        _field(body, "id", int), _field(body, "size", int), _field(body, "access", int)
        self._offers[name] = body
        for waiter in self._offer_waiters.pop(name, ()):
            _settle(waiter)

    def _on_region_down(self, body: dict[str, Any], fds: list[int]) -> None:
        name, number = _field(body, "name", str), _field(body, "id", int)
        offer = self._offers.get(name)
        if offer is not None and offer["id"] == number:
            del self._offers[name]
            self._imports.pop(name, None)
        remote = self._imported.pop(number, None)
        if remote is not None:
            remote.retire()
            remote[:].drained().add_done_callback(lambda _: self._acknowledge(number))

    def _acknowledge(self, number: int) -> None:
        if self.state is PeerState.UP:
            self._send("region.gone", {"id": number})

    async def region(self, name: str, *, timeout: float | None = None) -> RemoteRegion:
        """The peer's region `name`; waits until the peer exports it.

        :param timeout: seconds to wait, or None for as long as the peer lives.
        :raises PeerLostError: if the peer goes before.
        :raises TransferTimeoutError: if `timeout` passed.
        :raises AccessError: if the kernel does not let this process map or reach the region's memory.
        """
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name must be a string, not {name!r}")
        try:
            async with asyncio.timeout(timeout):
                while name not in self._offers:
                    self._must_be_up()
                    waiter = self._loop.create_future()
                    self._offer_waiters.setdefault(name, []).append(waiter)
                    await waiter
                self._must_be_up()
                task = self._imports.get(name)
                if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                    task = self._imports[name] = self._host._spawn(self._import(name))
                # Several callers may wait for one import; none of them may cancel it for the others.
                return await asyncio.shield(task)
        except TimeoutError as error:
            if isinstance(error, HixlError):
                raise
            known = ", ".join(self._offers) or "none"
            raise TransferTimeoutError(
                f"peer {self.name!r} did not export region {name!r} within {timeout:g} s; it exports: {known}", peer=self.name
            ) from None

    async def _import(self, name: str) -> RemoteRegion:
        number = self._offers[name]["id"]
        body, fds = await self._call("region.get", {"id": number}, self._close_timeout)
        try:
            driver, card = _field(body, "driver", str), _decode(_field(body, "card", str))
            size, access = _field(body, "size", int), parse_access(Access(_field(body, "access", int)))
            link = self._links.get(driver)
            if link is None or size <= 0:
                raise ProtocolError(f"peer {self.name!r} answered region {name!r} with nonsense", peer=self.name)
            self._must_be_up()
            remote = RemoteRegion(name, access)
            taken, fds[:] = list(fds), []
        finally:
            for fd in fds:
                os.close(fd)
        try:
            await remote.map(link, card, taken, size, int(access))
        except BaseException:
            remote.retire()
            raise
        if self._offers.get(name, {}).get("id") != number or self.state is not PeerState.UP:
            remote.retire()
            self._acknowledge(number)
            raise StaleRegionError(f"region {name!r} of {self.name!r} was closed while it was imported", peer=self.name)
        self._imported[number] = remote
        return remote

    # -- requests

    async def request(self, service: str, body: dict[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """Asks the handler that the peer serves under `service`; body and answer are JSON objects of at most ~48 KiB.

        :raises HixlError: what the peer's handler raised, with its type.
        :raises TransferTimeoutError: if no answer came within `timeout` seconds.
        :raises PeerLostError: if the peer went away.
        """
        answer, _ = await self._call("call", {"service": service, "body": body}, timeout)
        return _field(answer, "body", dict)

    def post(self, service: str, body: dict[str, Any]) -> None:
        """Sends to the handler of `service` without an answer, in order with requests.

        :raises PeerLostError: if the peer is gone.
        """
        self._must_be_up()
        self._send("post", {"service": service, "body": body})

    async def _call(self, kind: str, body: dict[str, Any], timeout: float) -> tuple[dict[str, Any], list[int]]:
        self._must_be_up()
        number = self._next_call
        self._next_call += 1
        answer: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._calls[number] = answer
        try:
            self._send(kind, {"call": number, **body})
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            if isinstance(error, HixlError):
                raise
            raise TransferTimeoutError(
                f"peer {self.name!r} did not answer {body.get('service', kind)!r} within {timeout:g} s", peer=self.name
            ) from None
        finally:
            del self._calls[number]

    def _on_answer(self, body: dict[str, Any], fds: list[int]) -> None:
        waiter = self._calls.get(_field(body, "call", int))
        if waiter is not None and not waiter.done():
            kept, fds[:] = list(fds), []
            waiter.set_result((body, kept))

    def _on_failure(self, body: dict[str, Any], fds: list[int]) -> None:
        waiter = self._calls.get(_field(body, "call", int))
        if waiter is not None and not waiter.done():
            kind = getattr(errors, _field(body, "error", str), HixlError)
            if not (isinstance(kind, type) and issubclass(kind, HixlError)):
                kind = HixlError
            waiter.set_exception(kind(_field(body, "message", str), peer=self.name))

    def _fail(self, call: int | None, error: HixlError) -> None:
        if call is not None and self.state is PeerState.UP:
            self._send("failure", {"call": call, "error": type(error).__name__, "message": str(error)[:2000]})

    def _on_call(self, body: dict[str, Any], fds: list[int]) -> None:
        self._serve(_field(body, "call", int), body)

    def _on_post(self, body: dict[str, Any], fds: list[int]) -> None:
        self._serve(None, body)

    def _serve(self, call: int | None, body: dict[str, Any]) -> None:
        service = _field(body, "service", str)
        handler = self._host._handler(service)
        if handler is None:
            self._fail(call, InvalidArgumentError(f"nobody serves {service!r}"))
            return
        try:
            answer = handler(self, _field(body, "body", dict))
        except HixlError as error:
            self._fail(call, error)
        except Exception as error:
            self._broken_handler(call, service, error)
        else:
            if inspect.isawaitable(answer):
                if len(self._handlers) >= MAX_HANDLERS:
                    if inspect.iscoroutine(answer):
                        answer.close()
                    self._fail(call, BusyError(f"{MAX_HANDLERS} requests of this peer are being handled already"))
                    return
                task = self._host._spawn(self._serve_later(call, service, answer))
                self._handlers.add(task)
                task.add_done_callback(self._handlers.discard)
            else:
                self._reply(call, answer)

    async def _serve_later(self, call: int | None, service: str, answer: Awaitable[dict[str, Any]]) -> None:
        try:
            self._reply(call, await answer)
        except HixlError as error:
            self._fail(call, error)
        except Exception as error:
            self._broken_handler(call, service, error)

    def _reply(self, call: int | None, answer: dict[str, Any] | None) -> None:
        if call is not None and self.state is PeerState.UP:
            self._send("answer", {"call": call, "body": answer or {}})

    def _broken_handler(self, call: int | None, service: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": f"the handler of {service!r} failed", "exception": error})
        self._fail(call, HixlError(f"the handler of {service!r} failed at the peer"))

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
            callback()

    def add_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        """Calls `callback` with the reason once the peer is lost, left or closed, and again if its death is confirmed later.

        At once (through the loop) if it is down already.
        """
        self._lost_callbacks.append(callback)
        if self.error is not None:
            self._loop.call_soon(callback, self.error)

    def remove_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        """Undoes `add_lost_callback`; no error if it was not registered."""
        with contextlib.suppress(ValueError):
            self._lost_callbacks.remove(callback)

    async def fenced(self) -> None:
        """Waits until this peer's process can no longer touch memory of ours; it may never come.

        That is when it said goodbye, having drained its own work, or when its death is confirmed.
        """
        if not self._harmless:
            waiter = self._loop.create_future()
            self._harmless_waiters.append(waiter)
            await waiter

    def _link(self, needed: int, what: str) -> Link:
        """The first link whose driver has a capability.

        :raises PeerLostError: if the peer is gone.
        :raises DriverError: if no driver has it.
        """
        self._must_be_up()
        for link in self._links.values():
            if link.driver.capabilities & needed:
                return link
        raise DriverError(f"none of the drivers linked with {self.name!r} ({', '.join(self._links)}) can {what}")

    def _must_be_up(self) -> None:
        if self.state is not PeerState.UP:
            raise self._lost_error() if self.error is not None else ClosedError(f"peer {self.name!r} is {self.state.value}")

    def _lost_error(self) -> HixlError:
        # A fresh exception each time: a shared one would collect the tracebacks of everybody who raised it.
        assert self.error is not None
        fresh = type(self.error)(str(self.error), peer=self.name)
        if isinstance(fresh, PeerLostError):
            fresh.confirmed_dead = self._dead
        return fresh

    def _died(self) -> None:
        """The pidfd became readable: the process has ended."""
        self._unwatch_process()
        self._dead = True
        error = PeerLostError(f"the process of peer {self.name!r} ended", peer=self.name)
        error.confirmed_dead = True
        if self.state is PeerState.DOWN:
            self.error = error
            self._host._spawn(self._stop_links(dead=True))
            self._become_harmless()
            self._tell_lost()
        else:
            self._lose(error, dead=True)

    def _unwatch_process(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_connection_lost(self, error: HixlError) -> None:
        if self._said_goodbye and self._goodbye.done():
            return
        self._lose(PeerLostError(f"the connection to peer {self.name!r} broke: {error}", peer=self.name), dead=False)

    def _link_down(self, status: int, text: str) -> None:
        if self.state is not PeerState.UP:
            return
        for link in self._links.values():
            link.refuse()
        self._host._spawn(self._await_goodbye(PeerLostError(f"the link to peer {self.name!r} broke: {text}", peer=self.name)))

    async def _await_goodbye(self, error: PeerLostError) -> None:
        """A peer that leaves stops its links first, so the news of that may come before its goodbye, or before its death."""
        await asyncio.wait([self._goodbye], timeout=GOODBYE_GRACE)
        if self.state is PeerState.UP:
            self._lose(error, dead=False)

    def _lose(self, error: HixlError, *, dead: bool) -> None:
        """The peer is gone for us: fails everything that waits for it, and stops our work for it."""
        if self.state is PeerState.DOWN:
            return
        self._go_down(error)
        self._host._spawn(self._wind_down(dead))
        if dead:
            self._become_harmless()
        self._tell_lost()

    def _go_down(self, error: HixlError) -> None:
        self.state, self.error = PeerState.DOWN, error
        for waiters in self._offer_waiters.values():
            for waiter in waiters:
                _settle(waiter)
        self._offer_waiters.clear()
        for answer in list(self._calls.values()):
            if not answer.done():
                answer.set_exception(self._lost_error())
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: _establish may have been cancelled
        _settle(self._goodbye)
        for task in self._handlers:
            task.cancel()
        for remote in self._imported.values():
            remote.retire()
        self._imported.clear()

    def _tell_lost(self) -> None:
        assert self.error is not None
        for callback in tuple(self._lost_callbacks):
            callback(self.error)

    def _become_harmless(self) -> None:
        self._harmless = True
        for number in list(self._exports):
            self._let_go(number)
        for waiter in self._harmless_waiters:
            _settle(waiter)
        self._harmless_waiters.clear()

    def _release_all(self) -> None:
        """The engine closes: gives up on a peer whose death was never confirmed."""
        self._unwatch_process()
        self._become_harmless()
        self._host._detach(self)

    async def _stop_links(self, dead: bool) -> None:
        """Ends our side of every link, and gives it back when nothing of ours works for it any more."""
        links, self._links = self._links, {}
        for link in links.values():
            try:
                await link.stop(dead)
            except HixlError as error:
                logger.warning("link of %r to peer %r: %s", link.driver.name, self.name, error)
            link.free()

    async def _wind_down(self, dead: bool) -> None:
        await self._stop_links(dead)
        await self._connection.aclose()
        if self._pidfd < 0 or self._harmless:
            self._unwatch_process()
            self._host._detach(self)

    # -- leaving

    async def aclose(self) -> None:
        """Leaves: drains our own work within the engine's ``close_timeout``, says goodbye, and waits for the peer's.  Idempotent."""
        if self.state is PeerState.UP:
            self.state = PeerState.CLOSING
            error = ClosedError(f"the connection to {self.name!r} was closed here", peer=self.name)
            try:
                async with asyncio.timeout(self._close_timeout):
                    await self._say_goodbye()
                    await self._goodbye
            except (TimeoutError, ConnectError, ClosedError):
                logger.warning("peer %r did not say goodbye within %g s", self.name, self._close_timeout)
            else:
                self._become_harmless()
            if self.state is not PeerState.DOWN:
                self._go_down(error)
                self._tell_lost()
        elif self.state is PeerState.CONNECTING:
            self._lose(ClosedError(f"the connection to {self.name!r} was closed here", peer=self.name), dead=False)
        await self._wind_down(self._dead)

    async def _say_goodbye(self) -> None:
        """Stops our links and tells the peer that nothing of ours will touch its memory again."""
        if not self._said_goodbye:
            self._said_goodbye = True
            for link in self._links.values():
                await link.stop(False)
            with contextlib.suppress(ConnectError, ClosedError):
                self._send("goodbye", {})

    def _on_goodbye(self, body: dict[str, Any], fds: list[int]) -> None:
        """The peer has drained its work and leaves."""
        _settle(self._goodbye)
        if self.state is PeerState.UP:
            self.state = PeerState.CLOSING
            self._host._spawn(self._answer_goodbye())

    async def _answer_goodbye(self) -> None:
        await self._say_goodbye()
        if self.state is PeerState.DOWN:
            return
        self._become_harmless()
        self._go_down(PeerLostError(f"peer {self.name!r} left", peer=self.name))
        self._tell_lost()
        await self._wind_down(dead=False)

    def _abandon(self) -> None:
        """In a child of fork(): closes the child's copies of descriptors, nothing more."""
        self._connection.abandon()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _field(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 0)):
        raise ProtocolError(f"a control message lacks a valid {name!r}")
    return value


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("a control message carries a card that is not base64") from None


_MESSAGES: dict[str, Callable[[Peer, dict[str, Any], list[int]], None]] = {
    "link": Peer._on_link,
    "ready": Peer._on_ready,
    "region.up": Peer._on_region_up,
    "region.down": Peer._on_region_down,
    "region.get": Peer._on_region_get,
    "region.card": Peer._on_answer,
    "region.gone": Peer._on_region_gone,
    "call": Peer._on_call,
    "answer": Peer._on_answer,
    "failure": Peer._on_failure,
    "post": Peer._on_post,
    "goodbye": Peer._on_goodbye,
}
