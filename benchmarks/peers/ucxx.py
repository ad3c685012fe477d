"""ucxx, the asyncio binding of UCX, over TCP.  It offers messages only, so this is two-sided too."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection
from time import perf_counter_ns
from typing import Any

import numpy as np
from rig.side import Work, idle, new_loop, page_memory, serve_line

__all__ = ["Initiator", "target"]

WORD = 8


def _ucxx() -> Any:
    # Its own choice is shared memory that this kernel may not have; as a peer of the network it is measured over TCP.
    os.environ.setdefault("UCX_TLS", "tcp")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import libucx
        import libucxx

        libucx.load_library()
        libucxx.load_library()
    except ImportError:
        pass  # of the system
    import ucxx

    return ucxx


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Receives until `line` ends."""
    new_loop("asyncio").run_until_complete(_target(line, size))


async def _target(line: Connection, size: int) -> None:
    ucxx = _ucxx()
    memory = np.frombuffer(page_memory(size, 0), np.uint8)
    length, answer = np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    receivers: list[Any] = []

    async def receive(endpoint: Any) -> None:
        receivers.append(asyncio.current_task())
        while True:
            await endpoint.recv(length)
            await endpoint.recv(memory[: int(length[0])])
            await endpoint.send(answer)

    async def look(count: int) -> bytes:
        return bytes(memory[:count])

    listener = ucxx.create_listener(receive)
    line.send(listener.port)
    await serve_line(line, look)
    for receiver in receivers:
        receiver.cancel()


class Initiator:
    """Sends, and waits for the answer."""

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._loop = new_loop("asyncio")
        self._memory = np.frombuffer(page_memory(size, 7), np.uint8)
        self._loop.run_until_complete(self._open(line, size))

    async def _open(self, line: Connection, size: int) -> None:
        self._endpoint = await _ucxx().create_endpoint("127.0.0.1", line.recv())
        await self._send(Work("write", size), 1)
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
        endpoint, memory = self._endpoint, self._memory
        length, answer = np.array([work.size], np.uint64), np.zeros(1, np.uint8)
        start = perf_counter_ns()
        for _ in range(times):
            await endpoint.send(length)
            await endpoint.send(memory[: work.size])
            await endpoint.recv(answer)
        return perf_counter_ns() - start
