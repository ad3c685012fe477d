"""The workload of compare.py: one event loop and a second process, told over standard input what to do and how often.

It runs on the interpreter of the tree that is measured, and uses nothing but that tree's public calls and the standard
library, so that one file serves two versions of the package whose insides differ.  Each line of input is a JSON object
``{"cell": NAME, "times": N}``; the answer is ``{"ns": NANOSECONDS}`` or ``{"error": TEXT}``.  The first line of output
names the package's folder and the cells.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from time import perf_counter_ns
from typing import Any

import hixl_async as hx

KIB, MIB = 1 << 10, 1 << 20
BLOCK, REGION = 4 * KIB, 64 * MIB
LIST, MANY, WRITERS = 256, 10_000, 64
LAYERS, BLOCKS = 32, 16

#: A cell does its work so many times, and returns the nanoseconds that it took.
Cell = Callable[[int], Awaitable[int]]


def run_loop(main: Coroutine[Any, Any, None], loop: str) -> None:
    """Run `main` on a new event loop, ``"asyncio"`` or ``"uvloop"``."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


async def lines() -> AsyncIterator[str]:
    """The lines of standard input; the loop goes on between them."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode()


# ---- KV caches -------------------------------------------------------------------------------------------------------

kv: Any = hx.kv
#: True in trees from before views, where a pool had a layout, blocks had one stream, and layers were parts of blocks.
OLD = hasattr(kv, "Layout")


def make_pool(engine: hx.Engine, **options: Any) -> Any:
    shape = {"kv_heads": 1, "head_dim": 128, "dtype": "bfloat16"}
    if OLD:
        return kv.Pool(engine, kv.Layout(LAYERS, **shape, block_tokens=16), blocks=BLOCKS, **options)
    return kv.Pool(
        engine, kv.View.ordered(kv.Group.attention(LAYERS, **shape), blocks=BLOCKS, block_tokens=16), **options
    )


def grant(blocks: Any) -> tuple[Any, dict[str, Any]]:
    """Return the stream into some blocks, and its ticket."""
    stream = blocks.stream()
    return stream, blocks.ticket() if OLD else stream.ticket()


async def push(out: Any, source: Any) -> None:
    """Push all layers, and wait for the end of the stream."""
    for layer in range(LAYERS):
        out.push(layer, source[layer] if OLD else source)
    await (out.finished() if OLD else out.finish())


# ---- the second process ----------------------------------------------------------------------------------------------


async def target() -> None:
    """Own the regions that are written to, and answer, until standard input ends."""
    memory = bytearray(REGION)
    async with (
        hx.Engine("127.0.0.1:0", name="target") as engine,
        make_pool(engine, name="decode") as pool,
    ):
        engine.allocate("allocated", REGION, access="read-write")
        registered = engine.register("registered", memory, access="read-write")
        word = engine.allocate("word", 4 * KIB)
        landing: list[asyncio.Task[None]] = []

        async def write_back() -> None:
            notes = engine.notifications("ping")
            async for note in notes:
                back = await note.peer.region("back")
                await engine.write(word[:8], back[:8], notify=("pong", b""))

        async def land(blocks: Any, stream: Any) -> None:
            async for _ in stream:
                pass
            await blocks.aclose()

        async def reserve(peer: hx.Peer, body: Any) -> Any:
            blocks = await pool.reserve(blocks=BLOCKS)
            stream, ticket = grant(blocks)
            landing.append(asyncio.create_task(land(blocks, stream)))
            return {"ticket": ticket}

        async def landed(peer: hx.Peer, body: Any) -> Any:
            await landing.pop()
            return {}

        async def echo(peer: hx.Peer, body: Any) -> Any:
            return body

        for service in (reserve, landed, echo):
            engine.serve(service.__name__, service)
        answering = asyncio.create_task(write_back())
        print(engine.address, flush=True)
        async for _ in lines():
            pass
        answering.cancel()
        await registered.aclose()


# ---- the first one ---------------------------------------------------------------------------------------------------


def rows(count: int) -> memoryview:
    """Descriptors of `count` distinct blocks in scattered order on both sides, N x 3 unsigned 64-bit integers."""
    numbers = array("Q")
    for i in range(count):
        numbers.extend([i * 7 % count * BLOCK, i * 11 % count * BLOCK, BLOCK])
    return memoryview(numbers).cast("B").cast("Q", shape=[count, 3])


async def timed(times: int, work: Callable[[], Awaitable[Any]]) -> int:
    start = perf_counter_ns()
    for _ in range(times):
        await work()
    return perf_counter_ns() - start


def away_from_pages(size: int) -> bytearray:
    """Return a bytearray that begins in the middle of a page.

    The heap decides where it begins.  A copy to the start of a page takes several times as long if its source begins just
    before the start of one, because the processor takes loads for dependent on stores by the last 12 bits of the address.
    """
    kept = []
    while True:
        kept.append(bytearray(size))
        if 1024 <= ctypes.addressof(ctypes.c_char.from_buffer(kept[-1])) % 4096 < 3072:
            return kept[-1]


class Cells:
    """The cells, by name."""

    def __init__(self, engine: hx.Engine, threads: hx.Engine, pool: Any) -> None:
        self._engine, self._threads, self._pool = engine, threads, pool
        self.by_name: dict[str, Cell] = {}

    async def open(self, address: str) -> None:
        """Connect to the target, touch every page on both sides, and fill `by_name`."""
        engine = self._engine
        self._peer = peer = await engine.connect(address)
        local = engine.allocate("local", REGION)
        remote, registered = await peer.region("allocated"), await peer.region("registered")
        for side in (remote, registered):
            await engine.write(local[:], side[:])
        await engine.read(local[:], remote[:])
        for size, text in ((8, "8 B"), (4 * KIB, "4 KiB"), (64 * KIB, "64 KiB"), (MIB, "1 MiB"), (16 * MIB, "16 MiB")):
            self._single(local, remote, size, text)
        self._borrowed(local, remote, registered)
        self._lists(local, remote)
        far = await (await self._threads.connect(address)).region("allocated")
        near = self._threads.allocate("local", MIB)
        self.by_name[f"{WRITERS} writers, 4 KiB, inline"] = self._writers(engine, local, remote)
        self.by_name[f"{WRITERS} writers, 4 KiB, threads"] = self._writers(self._threads, near, far)
        engine.allocate("back", 4 * KIB, access="write")
        await self._round_trips(local, remote)

    def _single(self, local: Any, remote: Any, size: int, text: str) -> None:
        engine, a, b = self._engine, 0, size
        left, right = local[a:b], remote[a:b]

        # Loops of their own, so that what is timed is what a user writes.
        async def write_ready(times: int) -> int:
            start = perf_counter_ns()
            for _ in range(times):
                await engine.write(left, right)
            return perf_counter_ns() - start

        async def write_fresh(times: int) -> int:
            start = perf_counter_ns()
            for _ in range(times):
                await engine.write(local[a:b], remote[a:b])
            return perf_counter_ns() - start

        async def read_fresh(times: int) -> int:
            start = perf_counter_ns()
            for _ in range(times):
                await engine.read(local[a:b], remote[a:b])
            return perf_counter_ns() - start

        self.by_name[f"write, ready slices, {text}"] = write_ready
        self.by_name[f"write, fresh slices, {text}"] = write_fresh
        self.by_name[f"read, fresh slices, {text}"] = read_fresh

    def _borrowed(self, local: Any, remote: Any, registered: Any) -> None:
        engine, data = self._engine, away_from_pages(4 * KIB)

        async def buffer(times: int) -> int:
            return await timed(times, lambda: engine.write(data, remote[: len(data)]))

        async def foreign(times: int) -> int:
            return await timed(times, lambda: engine.write(local[: len(data)], registered[: len(data)]))

        self.by_name["write of a bytearray, 4 KiB"] = buffer
        self.by_name["write to registered memory, 4 KiB"] = foreign

    def _lists(self, local: Any, remote: Any) -> None:
        engine, few, many = self._engine, rows(LIST), rows(MANY)
        prepared = hx.Batch("write", local, remote, few)

        async def submit(times: int) -> int:
            return await timed(times, lambda: engine.submit(prepared))

        async def array_in(times: int) -> int:
            return await timed(times, lambda: engine.submit(hx.Batch("write", local, remote, few)))

        async def large(times: int) -> int:
            return await timed(times, lambda: engine.submit(hx.Batch("write", local, remote, many)))

        self.by_name[f"{LIST} x 4 KiB, prepared"] = submit
        self.by_name[f"{LIST} x 4 KiB, array in"] = array_in
        self.by_name[f"{MANY:,} x 4 KiB, array in"] = large

    def _writers(self, engine: hx.Engine, local: Any, remote: Any) -> Cell:
        async def writer(i: int, times: int) -> None:
            a, b = i * BLOCK, (i + 1) * BLOCK
            for _ in range(times):
                await engine.write(local[a:b], remote[a:b])

        async def run(times: int) -> int:
            start = perf_counter_ns()
            await asyncio.gather(*(writer(i, times) for i in range(WRITERS)))
            return perf_counter_ns() - start

        return run

    async def _round_trips(self, local: Any, remote: Any) -> None:
        engine, peer, pool = self._engine, self._peer, self._pool
        answers = engine.notifications("pong")
        source = await pool.reserve(blocks=BLOCKS)

        async def notify() -> None:
            await engine.write(local[:8], remote[:8], notify=("ping", b""))
            await answers.get()

        async def stream() -> None:
            answer = await peer.request("reserve", {})
            async with pool.open_stream(peer, answer["ticket"]) as out:
                await push(out, source)
            await peer.request("landed", {})

        async def notified(times: int) -> int:
            return await timed(times, notify)

        async def requests(times: int) -> int:
            return await timed(times, lambda: peer.request("echo", {}))

        async def streams(times: int) -> int:
            return await timed(times, stream)

        self.by_name["write + notify, there and back"] = notified
        self.by_name["request and answer"] = requests
        self.by_name[f"KV stream of {LAYERS} layers"] = streams


async def initiate(loop: str) -> None:
    """Do what standard input says, one cell after another."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, __file__, "--target", "--loop", loop]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        async with (
            hx.Engine("127.0.0.1:0", name="initiator") as engine,
            hx.Engine(None, name="threads", drivers={"shm": {"inline_bytes": 0}}) as threads,
            make_pool(engine, name="prefill", access="none") as pool,
        ):
            cells = Cells(engine, threads, pool)
            await cells.open((await process.stdout.readline()).decode().strip())
            print(json.dumps({"package": os.path.dirname(hx.__file__), "cells": list(cells.by_name)}), flush=True)
            async for line in lines():
                print(json.dumps(await answer(cells, json.loads(line))), flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def answer(cells: Cells, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ns": await cells.by_name[question["cell"]](question["times"])}
    except Exception as error:  # one cell's failure is a finding about that cell
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run one of the two processes."""
    parser = argparse.ArgumentParser(description="The workload of compare.py.")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run_loop(target() if options.target else initiate(options.loop), options.loop)


if __name__ == "__main__":
    main()
