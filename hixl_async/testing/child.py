"""The program of the process that `peer_process` starts."""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import socket
import sys
from typing import Any

from ..engine.engine import Engine
from ..engine.region import RemoteRegion
from ..types import AccessLike
from .plan import FaultPlan, faulty

# -- the commands: functions of the engine with JSON-safe arguments and results


def address(engine: Engine) -> str:
    """Return the address at which the engine listens."""
    return engine.address


def allocate(engine: Engine, name: str, size: int, access: AccessLike) -> None:
    """Allocate a region."""
    engine.allocate(name, size, access=access)


def peek(engine: Engine, region: str, start: int, stop: int | None) -> str:
    """Return bytes of a region."""
    return base64.b64encode(bytes(memoryview(engine.regions[region])[start:stop])).decode()


def poke(engine: Engine, region: str, data: str, start: int) -> None:
    """Store bytes into a region."""
    raw = base64.b64decode(data)
    memoryview(engine.regions[region])[start : start + len(raw)] = raw


async def connect(engine: Engine, address: str) -> str:
    """Connect to another engine."""
    return (await engine.connect(address)).name


async def write(engine: Engine, peer: str, region: str, data: str, start: int, notify: tuple[str, str] | None) -> int:
    """Write into a peer's region."""
    raw = base64.b64decode(data)
    remote = await _remote(engine, peer, region)
    note = None if notify is None else (notify[0], base64.b64decode(notify[1]))
    return await engine.write(raw, remote[start : start + len(raw)], notify=note)


async def read(engine: Engine, peer: str, region: str, start: int, stop: int) -> str:
    """Read from a peer's region."""
    buffer = bytearray(stop - start)
    await engine.read(buffer, (await _remote(engine, peer, region))[start:stop])
    return base64.b64encode(buffer).decode()


def stats(engine: Engine) -> dict[str, int]:
    """Return the engine's counters and gauges."""
    return engine.stats()._asdict()


async def _remote(engine: Engine, peer: str, region: str) -> RemoteRegion:
    return await next(other for other in engine.peers if other.name == peer).region(region)


# -- the channel


async def _answer(engine: Engine, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    answer: dict[str, Any] = {"id": request["id"]}
    try:
        module, _, function = request["target"].partition(":")
        result = getattr(importlib.import_module(module), function)(engine, **request["arguments"])
        answer["result"] = await result if inspect.isawaitable(result) else result
        line = json.dumps(answer)
    except Exception as error:
        line = json.dumps({"id": request["id"], "error": type(error).__name__, "message": str(error)})
    writer.write(line.encode() + b"\n")


async def _serve(fd: int, setup: dict[str, Any]) -> None:
    drivers: dict[str, dict[str, Any]] = {setup["driver"]: setup["options"]}
    if setup["plan"] is not None:
        drivers = faulty(setup["driver"], FaultPlan.parse(setup["plan"]), **setup["options"])
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd), limit=1 << 26)
    async with Engine("127.0.0.1:0", name=setup["name"], drivers=drivers, **setup["settings"]) as engine:
        for name, size in setup["regions"].items():
            engine.allocate(name, size, access="read-write")
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(_answer(engine, json.loads(line), writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    writer.close()


def _main(fd: int, setup: dict[str, Any]) -> None:
    factory = None
    if setup["loop"] == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(fd, setup))


if __name__ == "__main__":
    _main(int(sys.argv[1]), json.loads(sys.argv[2]))
