"""Engines without a driver or a socket: the public surface that `hixl_async.kv` uses, under the test's control.

The test decides what a real engine decides by itself: when a transfer lands, is released or fails, when messages are
delivered, when a peer is lost and whether it is dead.  This is for tests of the order of events; everything else is tested
on the real engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from hixl_async.engine.rpc import ANSWER, CROSSING
from hixl_async.errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    RemoteError,
    RequestLostError,
    RequestTimeoutError,
)
from hixl_async.kv import sender
from hixl_async.types import PeerState

_numbers = itertools.count(1)


class Range(NamedTuple):
    """A slice of a region, as far as batches and signals need it."""

    memory: Region
    start: int
    peer: Peer | None = None


class Region(bytearray):
    def __init__(self, name: str, size: int) -> None:
        super().__init__(size)
        self.name, self.size, self.closed = name, size, False

    def __getitem__(self, key: slice) -> Range:  # type: ignore[override]
        assert 0 <= key.start < self.size
        return Range(self, key.start)

    @property
    def alive(self) -> bool:
        return not self.closed

    def revoke(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.revoke()


class RemoteRegion:
    def __init__(self, region: Region, peer: Peer) -> None:
        self.region, self.peer, self.name, self.size = region, peer, region.name, region.size

    @property
    def alive(self) -> bool:
        return self.region.alive

    def __getitem__(self, key: slice) -> Range:
        assert 0 <= key.start < self.size
        return Range(self.region, key.start, self.peer)


class Copy(NamedTuple):
    """One copy of a batch."""

    local: Region
    source: int
    remote: Region
    target: int
    length: int


class Batch:
    """The copies of a write, from regions of one engine to those of one peer."""

    def __init__(self, peer: Peer, copies: list[Copy]) -> None:
        self.peer, self.copies = peer, copies

    @classmethod
    def strided(cls, verb: str, parts: list[tuple[Range, Range, Any]]) -> Batch:
        assert verb == "write"
        (peer,) = {remote.peer for _, remote, _ in parts}
        copies = [
            Copy(
                local.memory,
                local.start + source + step * stride,
                remote.memory,
                remote.start + target + step * far,
                length,
            )
            for local, remote, runs in parts
            for source, stride, target, far, length, count in memoryview(runs).tolist()
            for step in range(count)
        ]
        assert copies
        assert all(copy.source + copy.length <= copy.local.size for copy in copies)
        assert all(copy.target + copy.length <= copy.remote.size for copy in copies)
        assert peer is not None
        return cls(peer, copies)

    @property
    def closed(self) -> bool:
        return any(copy.local.closed for copy in self.copies)


class Transfer(asyncio.Future):
    """One transfer: `write` moves its bytes, `land` also its signal, `release` ends it.  Cancelling stops nothing."""

    def __init__(self, engine: Engine, batch: Batch, signal: tuple[Range, int]) -> None:
        super().__init__(loop=engine.loop)
        self.engine, self.batch, self.signal = engine, batch, signal
        self.released = engine.loop.create_future()

    def write(self) -> None:
        for copy in self.batch.copies:
            data = memoryview(copy.local)[copy.source : copy.source + copy.length]
            memoryview(copy.remote)[copy.target : copy.target + copy.length] = data

    def land(self) -> None:
        self.write()
        self.store()
        self.batch.peer.other.signalled()
        if not self.done():
            self.set_result(None)

    def store(self) -> None:
        word, value = self.signal
        memoryview(word.memory)[word.start : word.start + 8] = value.to_bytes(8, "little")

    def fail(self, error: Exception) -> None:
        self.set_exception(error)

    def release(self) -> None:
        if not self.released.done():
            self.released.set_result(None)

    async def drained(self) -> None:
        await asyncio.shield(self.released)


async def all_drained(*transfers: Transfer) -> None:
    for transfer in transfers:
        await transfer.drained()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the streams of all pools use the parts of this engine."""
    monkeypatch.setattr(sender, "Batch", Batch)
    monkeypatch.setattr(sender, "all_drained", all_drained)


class Peer:
    """One end of a connection; `other` is the opposite end."""

    def __init__(self, engine: Engine, other_engine: Engine) -> None:
        self.engine, self.loop = engine, engine.loop
        engine.peers.append(self)
        self.name, self.identity, self.address = other_engine.name, other_engine.identity, other_engine.address
        self.other: Peer
        self.state = PeerState.UP
        self.error: HixlError | None = None
        self.confirmed_dead = False
        #: False leaves the messages of the other side in the queue, as a stopped process does.
        self.running = True
        self.queue: deque[Callable[[], None]] = deque()
        self.signals: list[Callable[[], None]] = []
        self.losses: list[Callable[[HixlError], None]] = []
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.harmless = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.last_message = self.loop.time()
        self.heartbeats: list[float] = []

    # ---- used by kv ----

    async def region(self, name: str) -> RemoteRegion:
        await asyncio.sleep(0)
        return RemoteRegion(self.other.engine.regions[name], self)

    async def request(self, service: str, body: dict[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        number = next(_numbers)
        answer = self.calls[number] = self.loop.create_future()
        self._send(service, body, number)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise RequestTimeoutError("no answer") from None
        finally:
            del self.calls[number]

    def post(self, service: str, body: dict[str, Any]) -> None:
        self._send(service, body, None)

    def add_signal_callback(self, callback: Callable[[], None]) -> None:
        self.signals.append(callback)

    def remove_signal_callback(self, callback: Callable[[], None]) -> None:
        if callback in self.signals:
            self.signals.remove(callback)

    def add_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        self.losses.append(callback)
        if self.error is not None:
            self.loop.call_soon(callback, self.error)

    def remove_lost_callback(self, callback: Callable[[HixlError], None]) -> None:
        if callback in self.losses:
            self.losses.remove(callback)

    async def fenced(self) -> None:
        await self.harmless.wait()

    # No messages but those of the test: who is silent here is silent.

    @property
    def heard_at(self) -> float:
        return self.last_message

    def begin_heartbeats(self, interval: float) -> None:
        self.heartbeats.append(interval)

    def end_heartbeats(self, interval: float) -> None:
        self.heartbeats.remove(interval)

    # ---- used by tests ----

    def lose(self, *, dead: bool) -> None:
        """Break the connection for this side, or let its peer die."""
        self.error = PeerDownError("the peer is lost")
        self.error.confirmed_dead = self.confirmed_dead = dead
        if dead:
            self.harmless.set()
        self.queue.clear()
        for answer in self.calls.values():
            if not answer.done():
                answer.set_exception(RequestLostError("the peer is lost"))
        for callback in list(self.losses):
            callback(self.error)

    def resume(self) -> None:
        """Deliver what has queued up, as a process does that goes on."""
        self.running = True
        self._deliver()
        self.signalled()

    def signalled(self) -> None:
        if self.running:
            self.loop.call_soon(lambda: [callback() for callback in list(self.signals)])

    # ---- the wire ----

    def _send(self, service: str, body: dict[str, Any], number: int | None) -> None:
        if self.error is not None:
            raise PeerDownError("the peer is lost")
        body = json.loads(json.dumps(body))
        self.sent.append(body)
        self.other._receive(lambda: self.other._handle(service, body, number))

    def _receive(self, work: Callable[[], None]) -> None:
        if self.error is None:
            self.queue.append(work)
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        while self.running and self.queue:
            self.last_message = self.loop.time()
            self.queue.popleft()()

    def _handle(self, service: str, body: dict[str, Any], number: int | None) -> None:
        handler = self.engine.handlers.get(service)
        try:
            if handler is None:
                raise InvalidArgumentError(f"no handler serves {service}")
            answer = json.loads(json.dumps(handler(self, body)))
        except HixlError as error:
            failure = error
            self.other._receive(lambda: self.other._answer(number, None, failure))
        else:
            self.other._receive(lambda: self.other._answer(number, answer, None))

    def _answer(self, number: int | None, body: Any, error: HixlError | None) -> None:
        future = self.calls.get(number)  # type: ignore[arg-type]
        if future is not None and not future.done():
            if error is not None:
                kind = type(error) if type(error) in CROSSING[ANSWER] else RemoteError
                future.set_exception(kind(str(error)))
            else:
                future.set_result(body)


class _Callbacks(list[Callable[[], None]]):
    __call__ = list.append


class Engine:
    """An engine whose transfers land at once, unless `hold` is set."""

    forked = False

    def __init__(self, name: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.name, self.address = name, f"{name}:1"
        self.incarnation = f"{name}-{next(_numbers)}"
        self.identity = SimpleNamespace(incarnation=self.incarnation)
        self.add_close_callback = self.close_callbacks = _Callbacks()
        self.remove_close_callback = self.close_callbacks.remove
        self.regions: dict[str, Region] = {}
        self.peers: list[Peer] = []
        self.handlers: dict[str, Callable[[Peer, dict[str, Any]], dict[str, Any]]] = {}
        self.hold = False
        self.transfers: list[Transfer] = []
        self.took_off = asyncio.Event()

    def allocate(self, name: str, size: int, *, access: str = "none", grant: Any = None) -> Region:
        if name in self.regions and not self.regions[name].closed:
            raise InvalidArgumentError(f"region {name} exists")
        region = self.regions[name] = Region(name, size)
        return region

    def serve(self, service: str, handler: Any) -> None:
        self.handlers[service] = handler

    def unserve(self, service: str) -> None:
        del self.handlers[service]

    def submit(self, batch: Batch, *, signal: Any = None) -> Transfer:
        if batch.peer.error is not None:
            raise PeerDownError("the peer is lost")
        if batch.closed:
            raise ClosedError("region closed")
        transfer = Transfer(self, batch, signal)
        self.transfers.append(transfer)
        self.took_off.set()
        if not self.hold:
            transfer.land()
            transfer.release()
        return transfer

    async def reaches(self, transfers: int) -> None:
        """Wait until so many transfers have started."""
        while len(self.transfers) < transfers:
            self.took_off.clear()
            await self.took_off.wait()


def connect(one: Engine, two: Engine) -> tuple[Peer, Peer]:
    """Connect two engines, and return `one`'s peer for `two`, and the reverse."""
    left, right = Peer(one, two), Peer(two, one)
    left.other, right.other = right, left
    return left, right
