"""Process P: computes a prompt's keys and values, and writes them into D's memory while it goes on computing."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from support.messages import PrefillRequest, Report, Step
from support.model import OnLayer, PagedCache
from support.timeline import Timeline, Track
from support.worker import Worker, kv_digests, start

import hixl_async as hx


async def program(worker: Worker) -> None:
    # access="none": only this process touches the pool, which is only a source of pushes. Blocks are lent in a random
    # order, different from D's, so that no run succeeds because both block tables happen to be equal.
    async with hx.kv.Pool(worker.engine, worker.view(), access="none", shuffle=1) as pool:
        prefill = Prefill(worker, pool)
        worker.engine.serve("meet", prefill.meet)
        worker.engine.serve("prefill", prefill.prefill)
        await worker.serve_until_router_leaves()


class Prefill:
    """The services of P for the router."""

    decode: hx.Peer
    """D, once P has met it."""

    def __init__(self, worker: Worker, pool: hx.kv.Pool) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.pool = pool
        self.memory = worker.memory(pool)

    async def meet(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Connect to D and map its pool, so that the first request does not wait for it."""
        self.decode = await self.engine.connect(body["address"])
        await self.decode.region(self.pool.name)
        return {}

    async def prefill(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt and send it to D, layer by layer; the answer comes when D has all of it."""
        request = PrefillRequest(**body)
        timeline = Timeline()
        before = self.engine.stats()
        async with self.pool.reserve(tokens=len(request.prompt)) as blocks:
            cache = PagedCache(self.memory, blocks.ids)
            # D answers with a ticket, its permission to fill certain blocks of its pool, once. The computation does not
            # wait for that: layers that are ready before wait in the stream.
            ticket = self.decode.request("ticket", {"run": request.run})
            async with self.pool.open_stream(self.decode, ticket) as out:

                def push(layer: int) -> None:
                    # Called in the thread that computes, between the layer's projections and its attention. It only
                    # hands the layer over; the event loop moves it while the thread goes on.
                    timeline.mark("P", "push", f"layer {layer}", layer=layer)
                    out.push(layer, blocks)

                step = await self._compute(request.prompt, cache, timeline, push if request.streamed else None)
                if not request.streamed:
                    for layer in range(len(self.memory)):
                        push(layer)
                # Waits until D has all layers, and the step with the first token.
                await out.finish(step.to_json().encode())
            after = self.engine.stats()
            return Report(
                kv_digests(cache, len(request.prompt)),
                list(blocks.ids),
                timeline.to_json(),
                transfers=after.transfers - before.transfers,
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
