"""Two-sided over TCP with asyncio's streams, on asyncio's loop or uvloop's.

A message is its length and its bytes; the receiver copies them to their place and answers one byte.
"""

from __future__ import annotations

import asyncio
import struct
from multiprocessing.connection import Connection
from time import perf_counter_ns
from typing import Any

from rig.side import BLOCK_STRIDE, Work, idle, new_loop, page_memory, serve_line

__all__ = ["Initiator", "target"]

WORD = 8
LENGTH = struct.Struct("<Q")
#: The size of a reader's buffer; large messages are slow with the default of 64 KiB.
LIMIT = 4 << 20


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Receive until `line` ends."""
    new_loop(options["loop"]).run_until_complete(_target(line, size))


async def _target(line: Connection, size: int) -> None:
    memory = page_memory(size, 0)

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                memory[:length] = await reader.readexactly(length)
                writer.write(b"k")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def look(count: int) -> bytes:
        return bytes(memory[:count])

    server = await asyncio.start_server(receive, "127.0.0.1", 0, limit=LIMIT)
    line.send(server.sockets[0].getsockname()[1])
    await serve_line(line, look)
    server.close()


class Initiator:
    """The sending side, which waits for each answer."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._loop = new_loop(options["loop"])
        self._memory = page_memory(size, 7)
        self._loop.run_until_complete(self._open(line, size))

    async def _open(self, line: Connection, size: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", line.recv())
        await self._send(Work("write", size), 1)
        line.send(WORD)
        if line.recv() != bytes([7]) * WORD:
            raise RuntimeError("the message did not arrive")

    def run(self, work: Work, times: int) -> int | None:
        """See `rig.side.Initiator`."""
        if work.kind == "idle":
            return self._loop.run_until_complete(idle(work))
        if work.kind in ("list", "rows", "flight"):
            return self._loop.run_until_complete(self._send_many(work, times))
        if work.kind == "notify":
            return None
        return self._loop.run_until_complete(self._send(work, times))

    async def _send(self, work: Work, times: int) -> int:
        reader, writer, memory = self._reader, self._writer, self._memory
        start = perf_counter_ns()
        for _ in range(times):
            writer.write(LENGTH.pack(work.size))
            writer.write(memory[: work.size])
            await writer.drain()
            await reader.readexactly(1)
        return perf_counter_ns() - start

    async def _send_many(self, work: Work, times: int) -> int:
        """Send all parts before waiting for the first answer."""
        reader, writer, memory = self._reader, self._writer, self._memory
        length = LENGTH.pack(work.size)
        spans: list[Any] = [memory[i : i + work.size] for i in range(0, work.span, work.size * BLOCK_STRIDE)]
        start = perf_counter_ns()
        for _ in range(times):
            for span in spans:
                writer.write(length)
                writer.write(span)
            await writer.drain()
            await reader.readexactly(len(spans))
        return perf_counter_ns() - start
