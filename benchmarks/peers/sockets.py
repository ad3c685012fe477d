"""Two-sided over TCP with ``loop.sock_sendall`` and ``sock_recv_into``, without a buffer in between."""

from __future__ import annotations

import asyncio
import socket
import struct
from multiprocessing.connection import Connection
from time import perf_counter_ns

from rig.side import Work, idle, new_loop, page_memory, serve_line

__all__ = ["Initiator", "receive_into", "target"]

WORD = 8
LENGTH = struct.Struct("<Q")


async def receive_into(loop: asyncio.AbstractEventLoop, sock: socket.socket, memory: memoryview) -> None:
    """Fill `memory`; the socket is tried before the loop, because it often has data.

    :raises EOFError: if the other side closes the connection.
    """
    while memory:
        try:
            count = sock.recv_into(memory)
        except BlockingIOError:
            count = await loop.sock_recv_into(sock, memory)
        if count == 0:
            raise EOFError("the other side closed the connection")
        memory = memory[count:]


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Receive until `line` ends."""
    new_loop(options["loop"]).run_until_complete(_target(line, size))


async def _target(line: Connection, size: int) -> None:
    memory = page_memory(size, 0)
    loop = asyncio.get_running_loop()

    async def receive(listener: socket.socket) -> None:
        sock, _ = await loop.sock_accept(listener)
        _settle(sock)
        head = memoryview(bytearray(LENGTH.size))
        try:
            while True:
                await receive_into(loop, sock, head)
                (length,) = LENGTH.unpack(head)
                await receive_into(loop, sock, memory[:length])
                await loop.sock_sendall(sock, b"k")
        except (EOFError, ConnectionError):
            sock.close()

    async def look(count: int) -> bytes:
        return bytes(memory[:count])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        line.send(listener.getsockname()[1])
        receiver = asyncio.create_task(receive(listener))
        await serve_line(line, look)
        receiver.cancel()


def _settle(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Initiator:
    """The sending side, which waits for each answer."""

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._loop = new_loop(options["loop"])
        self._memory = page_memory(size, 7)
        self._sock = socket.create_connection(("127.0.0.1", line.recv()))
        _settle(self._sock)
        self._loop.run_until_complete(self._send(Work("write", size), 1))
        line.send(WORD)
        if line.recv() != bytes([7]) * WORD:
            raise RuntimeError("the message did not arrive")

    def run(self, work: Work, times: int) -> int | None:
        """See `rig.side.Initiator`."""
        if work.kind == "idle":
            return self._loop.run_until_complete(idle(work))
        if work.kind not in ("write", "deliver"):
            return None
        return self._loop.run_until_complete(self._send(work, times))

    async def _send(self, work: Work, times: int) -> int:
        loop, sock, memory, answer = self._loop, self._sock, self._memory, memoryview(bytearray(1))
        start = perf_counter_ns()
        for _ in range(times):
            await loop.sock_sendall(sock, LENGTH.pack(work.size))
            await loop.sock_sendall(sock, memory[: work.size])
            await receive_into(loop, sock, answer)
        return perf_counter_ns() - start
