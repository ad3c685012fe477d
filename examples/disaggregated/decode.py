"""Process D: lends blocks of its memory to P, and decodes from the keys and values that arrive there."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from support.messages import DecodeRequest, Report, Step, arrivals_topic
from support.model import PagedCache
from support.timeline import Timeline, Track
from support.worker import Worker, kv_digests, start

import hixl_async as hx

STALL = 60.0  # seconds


async def program(worker: Worker) -> None:
    # Peers may write into the pool (that is its default access): P, into the blocks for which it gets a ticket.
    async with hx.kv.Pool(worker.engine, worker.view(), shuffle=2) as pool:
        decode = Decode(worker, pool)
        worker.engine.serve("ticket", decode.ticket)
        worker.engine.serve("decode", decode.decode)
        await worker.serve_until_router_leaves()


class Decode:
    """The services of D: for P a ticket, for the router the rest of the answer."""

    def __init__(self, worker: Worker, pool: hx.kv.Pool) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.pool = pool
        self.memory = worker.memory(pool)
        # By run; P may ask for one before the router has asked for the run.
        self.tickets: defaultdict[int, asyncio.Future[dict[str, Any]]] = defaultdict(self.engine.loop.create_future)

    async def ticket(self, _prefill: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Return the ticket with which P may fill the blocks of a run, as soon as they are reserved."""
        ticket = await self.tickets[body["run"]]
        del self.tickets[body["run"]]
        return ticket

    async def decode(self, router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Decode from what P brings; notify the router of each token, and answer with a report."""
        request = DecodeRequest(**body)
        timeline = Timeline()
        async with self.pool.reserve(tokens=request.prompt_tokens + request.max_tokens) as blocks:
            # P fills the blocks of the prompt, and D those of its continuation. If nothing comes for a minute, something
            # is wrong. The default of 10 s suits accelerators; here K/V may be sent after the prefill, and then the
            # first layer waits until a CPU has computed all of them.
            stream = blocks.stream(tokens=(0, request.prompt_tokens), lease=STALL)
            self.tickets[request.run].set_result(stream.ticket())
            async for layer in stream:
                timeline.mark("D", Track.ARRIVAL, f"layer {layer}", layer=layer)
                self.engine.notify(router, arrivals_topic(request.run), str(layer).encode())
            first = Step.from_json(await stream.finished())
            await self.worker.tell(router, request.run, first)
            # The model reads where P wrote.
            cache = PagedCache(self.memory, blocks.ids)
            async for step in self.worker.decode(
                first, cache, start=request.prompt_tokens, max_tokens=request.max_tokens
            ):
                await self.worker.tell(router, request.run, step)
            await self.worker.tell(router, request.run, None)
            return Report(kv_digests(cache, request.prompt_tokens), list(blocks.ids), timeline.to_json()).body()


if __name__ == "__main__":
    start("D", program)
