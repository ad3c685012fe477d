"""A process with a KV pool that does what it is told, one JSON line in, one JSON line out: to be stopped or killed.

python worker.py consumer|producer
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import hixl_async as hx

LAYERS, BLOCKS = 4, 32
GROUP = hx.kv.Group.attention(LAYERS, kv_heads=2, head_dim=128, dtype="uint8")
VIEW = hx.kv.View.ordered(GROUP, blocks=BLOCKS, block_tokens=16)


def fill(pool: hx.kv.Pool, ids: tuple[int, ...], layer: int, value: int) -> None:
    """Set all bytes of one layer of some blocks."""
    for part in ("k", "v"):
        pool.array(layer, part)[list(ids)] = value


def values(pool: hx.kv.Pool, ids: tuple[int, ...], layer: int) -> set[int]:
    """Return the different bytes of one layer of some blocks."""
    return {int(value) for part in ("k", "v") for value in pool.array(layer, part)[list(ids)].reshape(-1)}


class Worker:
    def __init__(self, pool: hx.kv.Pool) -> None:
        self.pool = pool
        self.blocks: hx.kv.Blocks
        self.stream: hx.kv.LayerStream
        self.out: hx.kv.PushStream

    async def reserve(self, blocks: int, value: int = 0) -> dict[str, Any]:
        self.blocks = await self.pool.reserve(blocks=blocks)
        for layer in range(LAYERS):
            fill(self.pool, self.blocks.ids, layer, value + layer)
        return {"ids": self.blocks.ids}

    async def ticket(self, **times: float) -> dict[str, Any]:
        self.stream = self.blocks.stream(**times)
        return self.stream.ticket()

    async def open(self, ticket: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        peer = await self.pool.engine.connect(ticket["address"])
        self.out = await self.pool.open_stream(peer, ticket, timeout=timeout)
        return {}

    async def push(self, layers: list[int], ready: bool = True) -> dict[str, Any]:
        for layer in layers:
            self.out.push(layer, self.blocks, ready=None if ready else lambda: False)
        return {}

    async def end(self, payload: str = "") -> dict[str, Any]:
        await self.out.finish(payload.encode())
        return {}

    async def finished(self) -> dict[str, Any]:
        await self.stream.finished()
        return {}

    async def close(self) -> dict[str, Any]:
        await self.blocks.aclose()
        return self.pool.statistics()._asdict()

    async def free(self, blocks: int) -> dict[str, Any]:
        async with self.pool.reserve(blocks=blocks):
            return {}

    async def layer(self, layer: int) -> dict[str, Any]:
        await self.stream.layer(layer)
        return {"values": sorted(values(self.pool, self.blocks.ids, layer))}


async def main(role: str) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.StreamReader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(hx.Engine("127.0.0.1:0", name=role))
        access = "write" if role == "consumer" else "none"
        pool = await stack.enter_async_context(hx.kv.Pool(engine, VIEW, name=f"kv-{role}", access=access, shuffle=1))
        worker = Worker(pool)
        print(json.dumps({"address": engine.address}), flush=True)
        while line := await lines.readline():
            call = json.loads(line)
            try:
                answer = await getattr(worker, call.pop("do"))(**call)
            except hx.HixlError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
