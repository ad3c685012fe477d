"""ucxx, the asyncio binding of UCX, over shared memory or TCP.  It has messages only, so this is two-sided as well.

UCX takes shared memory only for endpoints that do not watch for errors of the other side, and that are made from the address
of a worker; one that is made from an IP address and a port stays on TCP.
"""

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
#: Tags of messages to the target, and of its answers.
THERE, BACK = 1, 2


def _ucxx(transports: str) -> Any:
    os.environ["UCX_TLS"] = transports
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import libucx
        import libucxx

        libucx.load_library()
        libucxx.load_library()
    except ImportError:
        pass  # UCX of the system is used
    import ucxx

    return ucxx


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Receive until `line` ends."""
    new_loop("asyncio").run_until_complete(_target(line, size, options["transports"]))


async def _target(line: Connection, size: int, transports: str) -> None:
    memory = np.frombuffer(page_memory(size, 0), np.uint8)
    length, answer = np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    endpoint = await _meet(line, transports)

    async def receive() -> None:
        while True:
            await endpoint.recv(length, tag=THERE, force_tag=True)
            await endpoint.recv(memory[: int(length[0])], tag=THERE, force_tag=True)
            await endpoint.send(answer, tag=BACK, force_tag=True)

    async def look(count: int) -> bytes:
        return bytes(memory[:count])

    receiver = asyncio.create_task(receive())
    await serve_line(line, look)
    receiver.cancel()


async def _meet(line: Connection, transports: str) -> Any:
    """Return an endpoint to the other process's worker."""
    ucxx = _ucxx(transports)
    line.send(bytes(ucxx.get_worker_address()))
    address = ucxx.get_ucx_address_from_buffer(line.recv())
    return await ucxx.create_endpoint_from_worker_address(address, endpoint_error_handling=False)


class Initiator:
    """The sending side, which waits for each answer."""

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._loop = new_loop("asyncio")
        self._memory = np.frombuffer(page_memory(size, 7), np.uint8)
        self._loop.run_until_complete(self._open(line, size, options["transports"]))

    async def _open(self, line: Connection, size: int, transports: str) -> None:
        self._endpoint = await _meet(line, transports)
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
            await endpoint.send(length, tag=THERE, force_tag=True)
            await endpoint.send(memory[: work.size], tag=THERE, force_tag=True)
            await endpoint.recv(answer, tag=BACK, force_tag=True)
        return perf_counter_ns() - start
