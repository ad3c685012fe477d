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

LAYOUT = hx.kv.Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16)
BLOCKS = 32


class Worker:
    def __init__(self, pool: hx.kv.Pool) -> None:
        self.pool = pool
        self.blocks: hx.kv.Blocks
        self.out: hx.kv.PushStream

    async def reserve(self, blocks: int, value: int = 0) -> dict[str, Any]:
        self.blocks = await self.pool.reserve(blocks=blocks)
        view = self.pool.region.numpy("uint8", (4, 2, BLOCKS, LAYOUT.block_bytes))
        for layer in range(4):
            view[layer, :, self.blocks.ids] = value + layer
        return {"ids": self.blocks.ids}

    async def ticket(self, **times: float) -> dict[str, Any]:
        return self.blocks.ticket(**times)

    async def open(self, ticket: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        peer = await self.pool.engine.connect(ticket["address"])
        self.out = await self.pool.open_stream(peer, ticket, timeout=timeout)
        return {}

    async def push(self, layers: list[int], ready: bool = True) -> dict[str, Any]:
        for layer in layers:
            self.out.push(layer, self.blocks[layer], ready=None if ready else lambda: False)
        return {}

    async def end(self) -> dict[str, Any]:
        await self.out.finished()
        return {}

    async def finished(self) -> dict[str, Any]:
        await self.blocks.stream().finished()
        return {}

    async def close(self) -> dict[str, Any]:
        await self.blocks.aclose()
        return self.pool.statistics()._asdict()

    async def free(self, blocks: int) -> dict[str, Any]:
        async with self.pool.reserve(blocks=blocks):
            return {}

    async def layer(self, layer: int) -> dict[str, Any]:
        await self.blocks.stream().layer(layer)
        view = self.pool.region.numpy("uint8", (4, 2, BLOCKS, LAYOUT.block_bytes))
        return {"values": sorted({int(value) for value in view[layer][:, self.blocks.ids].reshape(-1)})}


async def main(role: str) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.StreamReader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(hx.Engine("127.0.0.1:0", name=role))
        access = "write" if role == "consumer" else "none"
        pool = await stack.enter_async_context(
            hx.kv.Pool(engine, LAYOUT, blocks=BLOCKS, name=f"kv-{role}", access=access, shuffle=1)
        )
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
