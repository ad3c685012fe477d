"""Process P: computes a prompt's keys and values, and writes them into D's memory while it goes on computing."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
from support.messages import PrefillRequest, Report, Step, first_token_topic
from support.model import KvMemory, OnLayer, PagedCache
from support.timeline import Timeline, Track
from support.worker import Worker, kv_digests, start

import hixl_async as hx


async def program(worker: Worker) -> None:
    # access="none": only this process touches the pool, which is only a source of pushes. Blocks are lent in a random
    # order, different from D's, so that no run succeeds because both block tables happen to be equal.
    blocks = worker.settings.pool_blocks
    async with hx.kv.Pool(worker.engine, worker.layout(), blocks=blocks, access="none", shuffle=1) as pool:
        prefill = Prefill(worker, pool)
        worker.engine.serve("meet", prefill.meet)
        worker.engine.serve("prefill", prefill.prefill)
        await worker.serve_until_router_leaves()


class Prefill:
    """The services of P for the router."""

    def __init__(self, worker: Worker, pool: hx.kv.Pool) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.pool = pool
        # The model computes in the pool, so its output needs no copy before it is sent.
        self.memory: KvMemory = np.frombuffer(pool.memory, np.float32).reshape(pool.layout.shape(pool.blocks))

    async def meet(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Connect to D and map its pool, so that the first request does not wait for it."""
        decode = await self.engine.connect(body["address"])
        await decode.region(self.pool.name)
        return {}

    async def prefill(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt and send it to D, layer by layer; the answer comes when D has all of it."""
        request = PrefillRequest(**body)
        timeline = Timeline()
        decode = await self.engine.connect(request.ticket["address"])
        before = self.engine.stats()
        async with self.pool.reserve(tokens=len(request.prompt)) as blocks:
            cache = PagedCache(self.memory, blocks.ids)
            async with self.pool.open_stream(decode, request.ticket) as out:

                def push(layer: int) -> None:
                    # Called in the thread that computes, between the layer's projections and its attention. It only
                    # hands the layer over; the event loop moves it while the thread goes on.
                    timeline.mark("P", "push", f"layer {layer}", layer=layer)
                    out.push(layer, blocks[layer])

                step = await self._compute(request.prompt, cache, timeline, push if request.streamed else None)
                await self.engine.notify(decode, first_token_topic(request.run), step.to_json().encode())
                if not request.streamed:
                    for layer in range(self.pool.layout.layers):
                        push(layer)
            # Leaving the stream has waited until D acknowledged it: all layers are there.
            after = self.engine.stats()
            return Report(
                kv_digests(cache, len(request.prompt)),
                list(blocks.ids),
                timeline.to_json(),
                transfers=after.transfers - before.transfers - 1,  # one was the notification
                transferred=after.bytes - before.bytes,
            ).body()

    async def _compute(self, prompt: list[int], cache: PagedCache, timeline: Timeline, push: OnLayer | None) -> Step:
        done: list[int] = []
        step = await self.worker.step(
            prompt, cache, on_layer=push, on_layer_done=lambda _layer: done.append(time.monotonic_ns())
        )
        for layer, (began, ended) in enumerate(pairwise([step.start_ns, *done])):
            timeline.add("P", Track.COMPUTE, f"layer {layer}", began, ended, layer=layer)
        timeline.add("P", Track.COMPUTE, "logits", done[-1], step.end_ns)
        return step


if __name__ == "__main__":
    start("P", program)
