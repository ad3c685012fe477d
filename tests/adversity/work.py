"""Functions that these tests run in other processes; see `hixl_async.testing.PeerProcess.run`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

from hixl_async import Engine, HixlError

_kept: list[Any] = []


async def listen(engine: Engine, address: str) -> str:
    """Open a second engine at a given address."""
    other = await Engine(address, name="decode-0").open()
    _kept.append(other)
    other.allocate("kv", 4096, access="read-write")
    return other.incarnation


async def hammer(engine: Engine, peer: str, region: str, size: int, notify: bool) -> None:
    """Write the whole of a region over and over, each time with another byte, until the process is ended."""
    remote = await next(other for other in engine.peers if other.name == peer).region(region)
    local = engine.allocate(f"source of {region}", size)
    view = memoryview(local)

    async def work() -> None:
        value = 0
        with contextlib.suppress(HixlError):
            while True:
                value = value % 250 + 1
                view[:] = bytes([value]) * size
                await engine.write(local, remote, notify=("hammer", bytes([value])) if notify else None)

    _kept.append(asyncio.ensure_future(work()))


async def exercise(engine: Engine, address: str, rounds: int) -> int:
    """Move data both ways, notify and request, as a well-behaved peer does; return the number of rounds."""
    peer = await engine.connect(address)
    remote = await peer.region("shared")
    for number in range(rounds):
        data = number.to_bytes(8, "big") * 512
        await engine.write(data, remote, notify=("friend", data[:8]))
        back = bytearray(len(data))
        await engine.read(back, remote)
        assert back == data
        assert await peer.request("hixl.ping", {"n": number}) == {"n": number}
    return rounds


async def serve_nothing(engine: Engine) -> None:
    """Serve a service that never answers."""

    async def wait(peer: Any, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    engine.serve("never", wait)


def dead_pid(engine: Engine) -> int:
    """Return a pid that no process has any more."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def names(engine: Engine) -> list[str]:
    """Return the names of all Unix sockets of this process."""
    inodes = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in inodes]


def who(engine: Engine) -> dict[str, Any]:
    """Return the engine's incarnation, and let its peers ask which process it is."""
    engine.serve("adversity.who", lambda peer, body: {"pid": os.getpid()})
    return {"incarnation": engine.incarnation}
