"""The peers of an engine, dialled or admitted: one connection to each where possible."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Iterator
from functools import partial

from ..control import Connection, FairScheduler, dial
from ..core.log import Log
from ..errors import ClosedError, ConnectError, HandshakeError, HixlError, PeerDownError, ProtocolError
from ..types import Address, PeerState
from .host import Host
from .peer import Peer
from .region import Region
from .subscription_queue import BoundedQueue, SubscriptionQueue

__all__ = ["Peers"]

log = Log("hixl_async")

#: The most accepted peers that wait in one queue; more than a machine has descriptors for.
ACCEPTED_LIMIT = 1 << 16


class Peers:
    """All peers of an engine: those that are up, those that are coming up, and those that may still hold memory of ours.

    Self-reported identity is never trusted: `connect` finds a peer again by the address that we dialled, or because the process
    at the other end is the same.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._peers: dict[int, Peer] = {}
        self._cookies = itertools.count(1)
        # One dial at a time to each address; a lock lives as long as a task holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[Address, asyncio.Lock] = weakref.WeakValueDictionary()
        self._dialling: set[asyncio.Task[Connection]] = set()
        self._acceptors: list[BoundedQueue[Peer]] = []
        #: Shares the time of the loop between all connections of the engine.
        self.scheduler = FairScheduler()

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    def __getitem__(self, cookie: int) -> Peer | None:
        return self._peers.get(cookie)

    @property
    def up(self) -> tuple[Peer, ...]:
        """The peers that are up."""
        return tuple(peer for peer in self._peers.values() if peer.state is PeerState.UP)

    def others(self, peer: Peer) -> list[Peer]:
        """Return the other connections to the same engine."""
        return [other_peer for other_peer in self if other_peer is not peer and other_peer._is_of(peer._connection)]

    def _new(self, connection: Connection) -> Peer:
        cookie = next(self._cookies)
        peer = self._peers[cookie] = Peer(self._host, connection, cookie, self.others, self._forget)
        return peer

    def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer._cookie, None)

    # -- dialling

    async def connect(self, where: Address, seconds: float) -> Peer:
        """Connect to the engine at an address; see `Engine.connect`."""
        until = self._host.core.loop.time() + seconds
        lock = self._locks.setdefault(where, asyncio.Lock())
        try:
            async with asyncio.timeout_at(until):
                await lock.acquire()
        except TimeoutError:
            raise ConnectError(
                f"{where}: another connection attempt is in progress and did not succeed within {seconds:g} s"
            ) from None
        try:
            known = (peer for peer in self.up if where in peer._dialled_at and peer._check_alive())
            return next(known, None) or await self._connect(where, seconds, until)
        finally:
            lock.release()

    async def _connect(self, where: Address, seconds: float, until: float) -> Peer:
        connection = await self._dial(where, seconds, until)
        for peer in self.up:
            # The peer listens on another address too, or it dialled us.
            if peer._is_of(connection) and peer._check_alive():
                peer._dialled_at.add(where)
                await connection.aclose()
                return peer
        peer = self._new(connection)
        peer._dialled_at.add(where)
        try:
            return await self._bring_up(peer, until)
        except PeerDownError as error:
            raise ConnectError(f"{where}: {error}", peer=peer.name) from error
        except ProtocolError as error:
            raise HandshakeError(f"{where}: {error}", peer=peer.name) from error

    async def _dial(self, where: Address, seconds: float, until: float) -> Connection:
        host = self._host
        host.check_open()
        # A task that belongs to the engine, so that its end can cancel it.
        dialling: asyncio.Task[Connection] = host.spawn(
            dial(
                where,
                host.identity(),
                secret=host.config.secret,
                unix_dir=host.config.unix_dir,
                timeout=seconds,
                until=until,
                scheduler=self.scheduler,
            )
        )
        self._dialling.add(dialling)
        dialling.add_done_callback(self._dialling.discard)
        try:
            await asyncio.wait([dialling])
        except asyncio.CancelledError:
            dialling.cancel()
            dialling.add_done_callback(_drop)
            raise
        if dialling.cancelled() or host.core.closed:
            _drop(dialling)
            raise ClosedError("the engine was closed while it connected")
        return dialling.result()

    async def _bring_up(self, peer: Peer, until: float) -> Peer:
        try:
            async with asyncio.timeout_at(until):
                await peer._establish((until - self._host.core.loop.time()) / 2)
        except HixlError as error:
            peer._lose(error)
            raise
        except TimeoutError:
            late = PeerDownError(f"peer {peer.name!r} did not complete the connection in time", peer=peer.name)
            peer._lose(late)
            raise late from None
        except BaseException:
            peer._lose(_given_up(peer))
            raise
        return peer

    # -- admitting

    def accept(self, connection: Connection) -> None:
        """Admit a dialler that has been authenticated."""
        if self._host.core.closed:
            connection.abandon()
        else:
            peer = self._new(connection)
            admitting = self._host.spawn(self._admit(peer))
            admitting.add_done_callback(partial(_admitted, peer))

    async def _admit(self, peer: Peer) -> None:
        host = self._host
        try:
            await self._bring_up(peer, host.core.loop.time() + host.config.connect_timeout)
        except HixlError as error:
            log.info("%r: peer %r was not admitted: %s", host.core, peer.name, error)
        else:
            for queue in self._acceptors:
                queue.put(peer)

    def accepted(self) -> SubscriptionQueue[Peer]:
        """Return a new queue of accepted peers; see `Engine.accepted`."""
        queue: BoundedQueue[Peer] = BoundedQueue(ACCEPTED_LIMIT, 0)
        self._acceptors.append(queue)
        return SubscriptionQueue(self._host.core, queue, self._acceptors.remove)

    # -- the end

    def close(self) -> list[asyncio.Task[None]]:
        """End the dials, begin to leave all peers, and return what to wait for."""
        for dialling in self._dialling:
            dialling.cancel()
        return [peer._close() for peer in self]

    def give_up(self) -> Iterator[tuple[Peer, Region]]:
        """Forget the remaining peers, and yield the regions that are leaked; see `Peer._give_up`."""
        for queue in self._acceptors:
            queue.close()
        self._acceptors.clear()
        for peer in self:
            for region in peer._give_up():
                yield peer, region

    def abandon(self) -> None:
        """Close the copies of descriptors in a child of fork(), nothing more."""
        for peer in self:
            peer._abandon()


def _admitted(peer: Peer, admitting: asyncio.Task[None]) -> None:
    """Drop a peer whose admission was cancelled, perhaps before it began."""
    if admitting.cancelled():
        peer._lose(_given_up(peer))


def _given_up(peer: Peer) -> PeerDownError:
    return PeerDownError(f"the connection to {peer.name!r} was given up", peer=peer.name)


def _drop(dialling: asyncio.Task[Connection]) -> None:
    """Give up the connection of a dial that no caller waits for."""
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().abandon()
