"""ASGI applications that serve HTTP while they move memory; `test_servers.py` runs them under real servers.

``right`` opens an engine in each worker, in its lifespan.  ``wrong`` uses the engine that was opened when the module
was imported, which with a preloading server is before the fork.  PEER is the address of an engine with a region ``kv``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import hixl_async as hx

PEER = os.environ["PEER"]
#: Each worker writes into a slot of its own.
SLOT = 4096

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


class Right:
    """A server that writes its process id into SLOT on GET /SLOT, and returns how much it has moved meanwhile."""

    def __init__(self) -> None:
        self.engine: hx.Engine | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "http":
            slot = int(scope["path"].strip("/"))
            place = self.remote[slot * SLOT : slot * SLOT + 8]
            assert self.engine is not None
            await self.engine.write(os.getpid().to_bytes(8, "little"), place)
            await answer(send, 200, {"pid": os.getpid(), "rounds": self.rounds})

    async def live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with hx.Engine("127.0.0.1:0", name=f"worker {os.getpid()}") as self.engine:
            peer = await self.engine.connect(PEER)
            self.remote = await peer.region("kv")
            self.rounds = 0
            busy = asyncio.create_task(self.keep_moving())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            busy.cancel()
            await asyncio.wait([busy])
        await send({"type": "lifespan.shutdown.complete"})

    async def keep_moving(self) -> None:
        """Read all of it over and over: large enough to run on copy threads while requests are served."""
        assert self.engine is not None
        window = bytearray(len(self.remote))
        while True:
            await self.engine.read(window, self.remote)
            self.rounds += 1


right = Right()


class Wrong:
    """A server that opens its engine at import, which fails in its workers."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine, self.remote = self.loop.run_until_complete(self.open())

    async def open(self) -> tuple[hx.Engine, hx.RemoteRegion]:
        engine = await hx.Engine("127.0.0.1:0", name="master").open()
        return engine, await (await engine.connect(PEER)).region("kv")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            try:
                await self.engine.write(bytes(8), self.remote[:8])
            except hx.HixlError as error:
                await answer(send, 500, {"pid": os.getpid(), "error": type(error).__name__, "message": str(error)})
            else:
                await answer(send, 200, {"pid": os.getpid()})

    async def finish(self) -> None:
        """Close the engine in the master, when its workers are gone."""
        await self.engine.write(b"the end.", self.remote[:8])
        await self.engine.aclose()


def __getattr__(name: str) -> Any:
    """Make `wrong` when the server asks for it, and so only where it is intended."""
    if name == "wrong":
        globals()[name] = Wrong()
        return globals()[name]
    raise AttributeError(name)


def on_exit(server: object) -> None:
    """gunicorn's hook in the master, which takes this file for its configuration too: a copy of the module."""
    wrong = sys.modules["apps"].wrong
    wrong.loop.run_until_complete(wrong.finish())
    wrong.loop.close()
