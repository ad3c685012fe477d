"""The reference process: does the work of P and D alone, and in contiguous memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import hixl_async as hx

from .messages import GenerateRequest, Report
from .model import PagedCache, blocks_needed
from .timeline import Timeline
from .worker import BLOCK_TOKENS, Worker, kv_digests, start


async def program(worker: Worker) -> None:
    async def generate(router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        request = GenerateRequest(**body)
        length = len(request.prompt)
        blocks = blocks_needed(length + request.max_tokens, BLOCK_TOKENS)
        memory = np.zeros(worker.model.config.kv_shape(blocks, BLOCK_TOKENS), np.float32)
        cache = PagedCache(memory, range(blocks))
        first = await worker.step(request.prompt, cache)
        await worker.tell(router, request.run, first)
        async for step in worker.decode(first, cache, start=length, max_tokens=request.max_tokens):
            await worker.tell(router, request.run, step)
        await worker.tell(router, request.run, None)
        return Report(kv_digests(cache, length), list(range(blocks)), Timeline().to_json()).body()

    worker.engine.serve("generate", generate)
    await worker.serve_until_router_leaves()


if __name__ == "__main__":
    start("reference", program)
