"""Process D: lends blocks of its memory to P, and decodes from what arrives there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
from messages import DecodeRequest, Report, Step, arrivals_topic, first_token_topic
from model import KvMemory, PagedCache
from timeline import Timeline, Track
from worker import Worker, kv_digests, start

import hixl_async as hx

T = TypeVar("T")


async def program(worker: Worker) -> None:
    # Peers may write here (the default access), in the blocks for which they hold a ticket.
    blocks = worker.settings.pool_blocks
    async with hx.kv.Pool(worker.engine, worker.layout(), blocks=blocks, shuffle=2) as pool:
        decode = Decode(worker, pool)
        worker.engine.serve("reserve", decode.reserve)
        worker.engine.serve("decode", decode.decode)
        await worker.serve_until_router_leaves()


class Decode:
    """What D does for the router."""

    def __init__(self, worker: Worker, pool: hx.kv.Pool) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.pool = pool
        self.memory: KvMemory = np.frombuffer(pool.memory, np.float32).reshape(pool.layout.shape(pool.blocks))
        self.reserved: dict[int, hx.kv.Blocks] = {}

    async def reserve(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Reserves blocks for a prompt and its answer; the answer is the ticket with which P may fill them."""
        request = DecodeRequest(**body)
        blocks = await self.pool.reserve(tokens=request.prompt_tokens + request.max_tokens)
        self.reserved[request.run] = blocks
        return blocks.ticket()

    async def decode(self, router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Decodes what was reserved; the router gets each token by a notification, and at the end a report."""
        request = DecodeRequest(**body)
        timeline = Timeline()
        loop = asyncio.get_running_loop()
        async with self.reserved.pop(request.run) as blocks:
            cache = PagedCache(self.memory, blocks.ids)
            stream = blocks.stream()
            arrivals = asyncio.create_task(self._watch(stream, router, request.run, timeline))
            first = await self._first_token(request.run, arrivals)

            # The first step needs the prompt's keys and values, layer after layer. When P has streamed them, they are
            # here. When it sends them only now, the step starts with layer 0 and waits where it has to: before the
            # next layer begins, for that writes one token's keys into a block that P may still be writing to.
            def wait_for_next(layer: int) -> None:
                if layer + 1 < len(cache.memory):
                    asyncio.run_coroutine_threadsafe(stream.layer(layer + 1), loop).result()

            await stream.layer(0)
            all_here = len(stream.landed) == len(cache.memory)
            await self.worker.decode(
                request.run,
                router,
                first,
                cache,
                position=request.prompt_tokens,
                max_tokens=request.max_tokens,
                first_step_layer_done=None if all_here else wait_for_next,
            )
            await arrivals
            return Report(kv_digests(cache, request.prompt_tokens), timeline.to_json()).body()

    async def _watch(self, stream: hx.kv.LayerStream, router: hx.Peer, run: int, timeline: Timeline) -> None:
        """Notes when each layer arrives."""
        async for layer in stream:
            timeline.mark("D", Track.ARRIVAL, f"layer {layer}", layer=layer)
            self.engine.notify(router, arrivals_topic(run), b"%d" % layer)
