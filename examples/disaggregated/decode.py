"""Process D: lends blocks of its memory to P, and decodes from the keys and values that arrive there."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from support.messages import DecodeRequest, Report, Step, arrivals_topic, first_token_topic
from support.model import KvMemory, PagedCache
from support.timeline import Timeline, Track
from support.worker import Worker, kv_digests, start

import hixl_async as hx

STALL = 60.0  # seconds


async def program(worker: Worker) -> None:
    # Peers may write into the pool (that is its default access): P, into the blocks for which it gets a ticket.
    blocks = worker.settings.pool_blocks
    async with hx.kv.Pool(worker.engine, worker.layout(), blocks=blocks, shuffle=2) as pool:
        decode = Decode(worker, pool)
        worker.engine.serve("reserve", decode.reserve)
        worker.engine.serve("decode", decode.decode)
        await worker.serve_until_router_leaves()


class Decode:
    """The services of D for the router."""

    def __init__(self, worker: Worker, pool: hx.kv.Pool) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.pool = pool
        # The model reads where P writes, so arriving data needs no copy before it is used.
        self.memory: KvMemory = np.frombuffer(pool.memory, np.float32).reshape(pool.layout.shape(pool.blocks))
        self.reserved: dict[int, hx.kv.Blocks] = {}

    async def reserve(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Reserve blocks for a prompt and its continuation; return the ticket with which P may fill them."""
        request = DecodeRequest(**body)
        blocks = await self.pool.reserve(tokens=request.prompt_tokens + request.max_tokens)
        self.reserved[request.run] = blocks
        # If nothing comes for a minute, something is wrong. The default of 10 s suits accelerators; here K/V may
        # be sent after the prefill, and then the first layer waits until a CPU has computed all of them.
        return blocks.ticket(stall=STALL)

    async def decode(self, router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Decode into the reserved blocks; notify the router of each token, and answer with a report."""
        request = DecodeRequest(**body)
        timeline = Timeline()
        async with self.reserved.pop(request.run) as blocks:
            cache = PagedCache(self.memory, blocks.ids)
            try:
                async with asyncio.TaskGroup() as group:
                    # If the stream fails, this ends the group, wherever it waits.
                    group.create_task(self._watch(blocks.stream(), request.run, router, timeline))
                    await self._decode(request, router, blocks.stream(), cache, timeline)
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            return Report(kv_digests(cache, request.prompt_tokens), list(blocks.ids), timeline.to_json()).body()

    async def _watch(self, stream: hx.kv.LayerStream, run: int, router: hx.Peer, timeline: Timeline) -> None:
        """Record every layer that arrives."""
        async for layer in stream:
            timeline.mark("D", Track.ARRIVAL, f"layer {layer}", layer=layer)
            self.engine.notify(router, arrivals_topic(run), str(layer).encode())

    async def _decode(
        self,
        request: DecodeRequest,
        router: hx.Peer,
        stream: hx.kv.LayerStream,
        cache: PagedCache,
        timeline: Timeline,
    ) -> None:
        loop = asyncio.get_running_loop()
        layers = len(cache.memory)

        def wait_for_next(layer: int) -> None:
            # In the thread that computes, when a layer is done. It waits before it begins with the next one, not just
            # before it reads there: it also writes there, into a block that P's push fills as a whole.
            if layer + 1 < layers:
                with timeline.measure("D", "wait", f"layer {layer + 1}"):
                    asyncio.run_coroutine_threadsafe(stream.layer(layer + 1), loop).result()

        async with self.engine.notifications(first_token_topic(request.run)) as notes:
            first = Step.from_json((await notes.get()).payload)
        await self.worker.tell(router, request.run, first)
        # Where P streamed, all layers are here by now. Where it did not, the first step follows them as they come.
        await stream.layer(0)
        async for step in self.worker.decode(
            first,
            cache,
            start=request.prompt_tokens,
            max_tokens=request.max_tokens,
            on_first_layer_done=wait_for_next if len(stream.landed) < layers else None,
        ):
            await self.worker.tell(router, request.run, step)
        await self.worker.tell(router, request.run, None)


if __name__ == "__main__":
    start("D", program)
