"""hixl_async itself, by its public calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from time import perf_counter_ns
from typing import Any

import numpy as np
from rig.side import BLOCK_STRIDE, Work, idle, new_loop, serve_line

from hixl_async import Batch, Engine, Peer, RemoteRegion, Subscription

__all__ = ["Initiator", "target"]

#: Topics: a round trip that is written both ways, and one whose answer is a bare notification.
PING, PONG, DATA, SEEN = "ping", "pong", "data", "seen"
WORD = 8


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Own the region, with coroutines that answer notifications."""
    new_loop(options["loop"]).run_until_complete(_target(line, size))


async def _target(line: Connection, size: int) -> None:
    async with Engine("127.0.0.1:0", name="target") as engine:
        region = engine.allocate("target", size, access="read-write")
        word = engine.allocate("word", 4096)
        tasks: list[asyncio.Task[None]] = []

        async def write_back(peer: Peer) -> None:
            back = await peer.region("back")
            async for _ in engine.notifications(PING):
                await engine.write(word[:WORD], back[:WORD], notify=(PONG, b""))

        async def answer(peer: Peer) -> None:
            async for _ in engine.notifications(DATA):
                engine.notify(peer, SEEN)

        async def handle(what: Any) -> Any:
            if what == "begin":
                tasks.extend(asyncio.create_task(one(engine.peers[0])) for one in (write_back, answer))
                await engine.peers[0].region("back")
                return None
            return bytes(region[:what])

        line.send(engine.address)
        await serve_line(line, handle)
        for task in tasks:
            task.cancel()


class Initiator:
    """The side that awaits one call after the other on a loop of its own."""

    _engine: Engine
    _peer: Peer
    _remote: RemoteRegion
    _pong: Subscription
    _seen: Subscription

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._loop = new_loop(options["loop"])
        self._ready = options["slices"] == "ready"
        self._batches: dict[Work, Batch] = {}
        self._loop.run_until_complete(self._open(line, size))

    async def _open(self, line: Connection, size: int) -> None:
        self._engine = engine = await Engine("127.0.0.1:0", name="initiator").open()
        engine.allocate("back", 4096, access="write")
        self._local = local = engine.allocate("local", size)
        self._peer = await engine.connect(line.recv())
        self._remote = remote = await self._peer.region("target")
        self._pong, self._seen = engine.notifications(PONG), engine.notifications(SEEN)
        local.numpy("uint8")[:] = 7
        await engine.write(local[:], remote[:])  # every page is touched on both sides
        for message, expected in ((WORD, bytes([7]) * WORD), ("begin", None)):
            line.send(message)
            await asyncio.to_thread(line.poll, 10)  # the target may need this loop to answer
            if line.recv() != expected:
                raise RuntimeError("the write did not arrive")

    def run(self, work: Work, times: int) -> int | None:
        """See `rig.side.Initiator`."""
        if self._ready and work.kind != "write":
            return None
        how: dict[str, Callable[[Work, int], Coroutine[Any, Any, int]]] = {
            "write": self._write_ready if self._ready else self._write_fresh,
            "list": self._list,
            "rows": self._rows,
            "flight": self._flight,
            "notify": self._notify,
            "deliver": self._deliver,
            "idle": lambda work, _: idle(work),
        }
        return self._loop.run_until_complete(how[work.kind](work, times))

    async def _write_fresh(self, work: Work, times: int) -> int:
        engine, kv, remote = self._engine, self._local, self._remote
        a, b, c, d = 0, work.size, 0, work.size
        start = perf_counter_ns()
        for _ in range(times):
            await engine.write(kv[a:b], remote[c:d])
        return perf_counter_ns() - start

    async def _write_ready(self, work: Work, times: int) -> int:
        engine, left, right = self._engine, self._local[: work.size], self._remote[: work.size]
        start = perf_counter_ns()
        for _ in range(times):
            await engine.write(left, right)
        return perf_counter_ns() - start

    async def _list(self, work: Work, times: int) -> int:
        engine = self._engine
        if work not in self._batches:
            self._batches[work] = Batch("write", self._local, self._remote, _blocks(work))
        batch = self._batches[work]
        start = perf_counter_ns()
        for _ in range(times):
            await engine.submit(batch)
        return perf_counter_ns() - start

    async def _rows(self, work: Work, times: int) -> int:
        engine, kv, remote, rows = self._engine, self._local, self._remote, _blocks(work)
        start = perf_counter_ns()
        for _ in range(times):
            await engine.submit(Batch("write", kv, remote, rows))
        return perf_counter_ns() - start

    async def _flight(self, work: Work, times: int) -> int:
        engine, kv, remote = self._engine, self._local, self._remote

        async def writer(i: int) -> None:
            a, b = i * work.size, (i + 1) * work.size
            for _ in range(times):
                await engine.write(kv[a:b], remote[a:b])

        start = perf_counter_ns()
        await asyncio.gather(*(writer(i) for i in range(work.parts)))
        return perf_counter_ns() - start

    async def _notify(self, work: Work, times: int) -> int:
        engine, left, right, answers = self._engine, self._local[: work.size], self._remote[: work.size], self._pong
        start = perf_counter_ns()
        for _ in range(times):
            await engine.write(left, right, notify=(PING, b""))
            await answers.get()
        return perf_counter_ns() - start

    async def _deliver(self, work: Work, times: int) -> int:
        engine, kv, remote, answers = self._engine, self._local, self._remote, self._seen
        a, b = 0, work.size
        start = perf_counter_ns()
        for _ in range(times):
            await engine.write(kv[a:b], remote[a:b], notify=(DATA, b""))
            await answers.get()
        return perf_counter_ns() - start


def _blocks(work: Work) -> Any:
    """N x 3: local offset, remote offset, length."""
    begin = np.arange(work.parts, dtype=np.uint64) * np.uint64(work.size * BLOCK_STRIDE)
    return np.stack([begin, begin, np.full(work.parts, work.size, np.uint64)], axis=1)
