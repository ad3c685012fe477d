"""Carriers of a request's layers from a prefill process, this one, to a decode process: one-sided and two-sided.

All do the same work: the layers are in scattered blocks of a pool, the computing thread hands them over, and in the end
they are in other blocks of another pool.  One-sided: a KV stream of hixl_async.  Two-sided: the sender gathers a layer's
blocks, sends them over TCP or by gloo, and the receiver scatters them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import numpy as np
from peers.gloo import join
from peers.sockets import receive_into

from hixl_async import Engine, Peer
from hixl_async.engine.config import Drivers
from hixl_async.kv import Blocks, Group, LayerStream, Pool, PushStream, View
from rig.pair import run_loop

__all__ = ["CARRIERS", "Carrier", "Load", "Request", "gloo", "one_sided", "tcp"]


@dataclass(frozen=True)
class Load:
    """The data that is carried."""

    group: Group
    block_tokens: int
    #: Tokens of every request.
    tokens: int
    #: The number of requests whose blocks fit in either pool.
    slots: int
    loop: str

    @property
    def blocks(self) -> int:
        """The blocks of one request."""
        return -(-self.tokens // self.block_tokens)

    @property
    def view(self) -> View:
        """The cache on either side."""
        return View.ordered(self.group, blocks=self.slots * self.blocks, block_tokens=self.block_tokens)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.group.layers)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of a layer's keys, or of its values."""
        return self.block_tokens * self.group.token_bytes // 2

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of a request."""
        return 2 * self.blocks * self.block_bytes

    @property
    def nbytes(self) -> int:
        """The bytes of one request."""
        return self.layers * self.layer_bytes


class Request(Protocol):
    """One request that is being transferred."""

    def push(self, layer: int) -> None:
        """Hand a layer over, from any thread."""

    async def landed(self) -> tuple[list[int], list[int]]:
        """Return when each layer was there, on CLOCK_MONOTONIC, and the checksums, if they were asked for."""


class Carrier(Protocol):
    """This process's side of a carrier."""

    name: str

    async def begin(self, check: bool) -> Request:
        """Begin a request; with `check` its bytes are verified."""

    def checksums(self, request: Any) -> list[int]:
        """Return the checksums that the layers of a request must have."""

    def cpu_ns(self) -> int:
        """Return the CPU nanoseconds of both processes so far."""


def checksum(layer: Any) -> int:
    """Return the CRC-32 of one layer's blocks, in their order."""
    contiguous: Any = np.ascontiguousarray(layer)
    return zlib.crc32(contiguous)


@contextlib.contextmanager
def _child(main: Callable[..., None], *arguments: Any) -> Iterator[tuple[SpawnProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _cpu_ns(process: SpawnProcess) -> int:
    assert process.pid is not None
    return time.process_time_ns() + time.clock_gettime_ns(~process.pid << 3 | 2)


# ---- one-sided -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def one_sided(load: Load, drivers: Drivers | None = None) -> AsyncIterator[OneSided]:
    """Carry by hixl_async: a stream of pushes for each request."""
    with _child(_decode, load) as (process, line):
        address = await asyncio.to_thread(line.recv)
        async with (
            Engine(None, name="prefill", drivers=drivers) as engine,
            Pool(engine, load.view, name="source", access="none", shuffle=1) as pool,
        ):
            _fill(pool.regions[0].numpy("uint8"))
            yield OneSided(load, pool, await engine.connect(address), process)


class OneSided:
    """The prefill side."""

    name = "hixl_async"

    def __init__(self, load: Load, pool: Pool, peer: Peer, process: SpawnProcess) -> None:
        self.load, self.pool, self.peer = load, pool, peer
        self._process = process
        self._number = 0

    async def begin(self, check: bool) -> Request:
        """See `Carrier`."""
        self._number += 1
        blocks = await self.pool.reserve(blocks=self.load.blocks)
        ticket = self.peer.request("reserve", {"number": self._number, "check": check})
        # Opened beside the computation: layers that are pushed before wait in the stream.
        return Pushed(self, self._number, blocks, self.pool.open_stream(self.peer, ticket))

    def checksums(self, request: Any) -> list[int]:
        """See `Carrier`."""
        return _checksums(self.load, self.pool, request.blocks)

    def cpu_ns(self) -> int:
        """See `Carrier`."""
        return _cpu_ns(self._process)


class Pushed:
    """A request of `OneSided`."""

    def __init__(self, carrier: OneSided, number: int, blocks: Blocks, stream: PushStream) -> None:
        self._carrier, self._number = carrier, number
        self.blocks, self._stream = blocks, stream

    def push(self, layer: int) -> None:
        """See `Request`."""
        self._stream.push(layer, self.blocks)

    async def landed(self) -> tuple[list[int], list[int]]:
        """See `Request`."""
        await self._stream.finish()
        await self.blocks.aclose()
        answer = await self._carrier.peer.request("landed", {"number": self._number})
        return answer["at"], answer["sums"]


def _checksums(load: Load, pool: Pool, blocks: Blocks) -> list[int]:
    """Return the checksums of some blocks' layers."""
    layers = pool.regions[0].numpy("uint8", (load.layers, 2, pool.blocks, -1))
    return [checksum(layer[:, blocks.ids]) for layer in layers]


def _decode(line: Connection, load: Load) -> None:
    run_loop(_decode_one_sided(line, load), load.loop)


async def _decode_one_sided(line: Connection, load: Load) -> None:
    leave = asyncio.Event()
    asyncio.get_running_loop().add_reader(line.fileno(), leave.set)
    async with (
        Engine("127.0.0.1:0", name="decode") as engine,
        Pool(engine, load.view, name="target", shuffle=2) as pool,
    ):
        waiting: dict[int, asyncio.Task[tuple[list[int], list[int]]]] = {}

        async def land(blocks: Blocks, stream: LayerStream, check: bool) -> tuple[list[int], list[int]]:
            at = [0] * load.layers
            async for layer in stream:
                at[layer] = time.monotonic_ns()
            sums = _checksums(load, pool, blocks) if check else []
            await blocks.aclose()
            return at, sums

        async def reserve(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
            blocks = await pool.reserve(blocks=load.blocks)
            stream = blocks.stream()
            waiting[body["number"]] = asyncio.create_task(land(blocks, stream, body["check"]))
            return stream.ticket()

        async def landed(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
            at, sums = await waiting.pop(body["number"])
            return {"at": at, "sums": sums}

        engine.serve("reserve", reserve)
        engine.serve("landed", landed)
        line.send(engine.address)
        await leave.wait()


# ---- two-sided -------------------------------------------------------------------------------------------------------

HEAD = struct.Struct("<qqq")  # number, layer, whether to check


def _fill(memory: Any) -> None:
    memory[:] = np.random.default_rng(3).integers(0, 256, len(memory), np.uint8)


class Blocked:
    """A pool for two-sided carriers: the blocks of each slot, in random order."""

    def __init__(self, load: Load, seed: int) -> None:
        count = load.slots * load.blocks
        self.array = np.zeros((load.layers, 2, count, load.block_bytes), np.uint8)
        self.array.fill(1)  # every page is touched
        order = np.random.default_rng(seed).permutation(count)
        self.ids = np.split(order, load.slots)
        self.staging: Any = np.zeros((2, load.blocks, load.block_bytes), np.uint8)

    def gather(self, number: int, layer: int) -> Any:
        """Return a layer's blocks, one after another."""
        return self.array[layer].take(self.ids[number % len(self.ids)], axis=1, out=self.staging, mode="clip")

    def scatter(self, number: int, layer: int) -> None:
        """Copy what was received to its blocks."""
        self.array[layer][:, self.ids[number % len(self.ids)]] = self.staging

    def checksums(self, number: int) -> list[int]:
        """Return the checksums of all layers of a request."""
        return [checksum(layer[:, self.ids[number % len(self.ids)]]) for layer in self.array]


class TwoSided:
    """The prefill side: a thread of its own gathers and sends, in the order in which layers are handed over."""

    def __init__(self, name: str, load: Load, line: Connection, process: SpawnProcess, pool: Blocked) -> None:
        self.name = name
        self.pool = pool
        self._process = process
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self.waiting: dict[int, asyncio.Future[tuple[list[int], list[int]]]] = {}
        self._loop.add_reader(line.fileno(), self._hear)
        self.send: Callable[[int, int, bool], None]

    def _hear(self) -> None:
        try:
            number, at, sums = self._line.recv()
        except EOFError:
            self.close()
            return
        self.waiting.pop(number).set_result((at, sums))

    def close(self) -> None:
        """Stop listening."""
        self._loop.remove_reader(self._line.fileno())

    async def begin(self, check: bool) -> Request:
        """See `Carrier`."""
        number = self._number
        self._number += 1
        self.waiting[number] = self._loop.create_future()
        return Sent(self, number, check, self.waiting[number])

    def checksums(self, request: Any) -> list[int]:
        """See `Carrier`."""
        return self.pool.checksums(request.number)

    def cpu_ns(self) -> int:
        """See `Carrier`."""
        return _cpu_ns(self._process)


class Sent:
    """A request of `TwoSided`."""

    def __init__(self, carrier: TwoSided, number: int, check: bool, done: asyncio.Future[Any]) -> None:
        self.number = number
        self._carrier, self._check, self._done = carrier, check, done

    def push(self, layer: int) -> None:
        """See `Request`."""
        self._carrier.send(self.number, layer, self._check)

    async def landed(self) -> tuple[list[int], list[int]]:
        """See `Request`."""
        at, sums = await self._done
        return at, sums


class Landings:
    """The decode side: the layers that have landed, reported when a request is complete."""

    def __init__(self, line: Connection, load: Load) -> None:
        self.pool = Blocked(load, 2)
        self._line, self._layers = line, load.layers
        self._at: dict[int, list[int]] = {}

    def land(self, number: int, layer: int, check: bool) -> None:
        """Take a layer that is in the staging buffer."""
        self.pool.scatter(number, layer)
        at = self._at.setdefault(number, [0] * self._layers)
        at[layer] = time.monotonic_ns()
        if all(at):
            self._line.send((number, self._at.pop(number), self.pool.checksums(number) if check else []))


@contextlib.asynccontextmanager
async def tcp(load: Load) -> AsyncIterator[TwoSided]:
    """Carry by sockets on the event loops, without a copy between socket and buffer."""
    with _child(_decode_tcp, load) as (process, line):
        loop = asyncio.get_running_loop()
        sock = socket.create_connection(("127.0.0.1", await asyncio.to_thread(line.recv)))
        _settle(sock)
        pool = Blocked(load, 1)
        _fill(pool.array.reshape(-1))
        carrier = TwoSided("sockets", load, line, process, pool)
        layers: asyncio.Queue[tuple[int, int, bool]] = asyncio.Queue()

        async def send() -> None:
            while True:
                number, layer, check = await layers.get()
                gathered = pool.gather(number, layer)
                await loop.sock_sendall(sock, HEAD.pack(number, layer, check))
                await loop.sock_sendall(sock, memoryview(gathered).cast("B"))

        def hand_over(*what: Any) -> None:
            loop.call_soon_threadsafe(layers.put_nowait, what)

        carrier.send = hand_over
        sender = asyncio.create_task(send())
        try:
            yield carrier
        finally:
            sender.cancel()
            carrier.close()
            sock.close()


def _settle(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _decode_tcp(line: Connection, load: Load) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        run_loop(_receive_tcp(line, load), load.loop)


async def _receive_tcp(line: Connection, load: Load) -> None:
    loop = asyncio.get_running_loop()
    landings = Landings(line, load)
    head, body = memoryview(bytearray(HEAD.size)), memoryview(landings.pool.staging).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        line.send(listener.getsockname()[1])
        sock, _ = await loop.sock_accept(listener)
        _settle(sock)
        with sock:
            while True:
                await receive_into(loop, sock, head)
                await receive_into(loop, sock, body)
                number, layer, check = HEAD.unpack(head)
                landings.land(number, layer, bool(check))


@contextlib.asynccontextmanager
async def gloo(load: Load) -> AsyncIterator[TwoSided]:
    """Carry by gloo's send and recv, which block a thread on either side."""
    with tempfile.TemporaryDirectory() as folder, _child(_decode_gloo, load) as (process, line):
        meeting = os.path.join(folder, "meeting")
        line.send(meeting)
        torch, dist = await asyncio.to_thread(join, 0, meeting)
        pool = Blocked(load, 1)
        _fill(pool.array.reshape(-1))
        head, body = torch.zeros(3, dtype=torch.int64), torch.from_numpy(pool.staging)
        carrier = TwoSided("gloo", load, line, process, pool)
        layers: queue.SimpleQueue[tuple[int, int, bool] | None] = queue.SimpleQueue()

        def send() -> None:
            while (what := layers.get()) is not None:
                pool.gather(what[0], what[1])
                head.copy_(torch.tensor(what))
                dist.send(head, 1)
                dist.send(body, 1)
            head.fill_(-1)
            dist.send(head, 1)

        carrier.send = lambda *what: layers.put(what)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield carrier
        finally:
            layers.put(None)
            await asyncio.to_thread(sender.join)
            carrier.close()
            dist.destroy_process_group()


def _decode_gloo(line: Connection, load: Load) -> None:
    torch, dist = join(1, line.recv())
    landings = Landings(line, load)
    head, body = torch.zeros(3, dtype=torch.int64), torch.from_numpy(landings.pool.staging)
    while True:
        dist.recv(head, 0)
        number, layer, check = head.tolist()
        if number < 0:
            break
        dist.recv(body, 0)
        landings.land(number, layer, bool(check))
    os._exit(0)


CARRIERS: dict[str, Callable[[Load], contextlib.AbstractAsyncContextManager[Any]]] = {
    "hixl_async": one_sided,
    "sockets": tcp,
    "gloo": gloo,
}
