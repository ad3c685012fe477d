"""Process D: answers requests; all sequences that have arrived from P are continued together."""

from __future__ import annotations

import asyncio
from typing import Any

from support.model import PagedCache
from support.worker import Worker, kv_digests, start

import hixl_async as hx

from .cache import Cache
from .compute import Compute
from .model import BatchedLlama
from .policy import Decode
from .records import Request
from .report import serve_report
from .timeline import Recorder

LONG = 600.0  # seconds


async def program(worker: Worker) -> None:
    """Serve main.py's requests until it leaves."""
    recorder = Recorder()
    async with hx.kv.Pool(worker.engine, worker.view(), shuffle=2) as pool:
        memory = worker.memory(pool)
        with Compute(recorder.recorded("decode", BatchedLlama(worker.model, memory).step)) as compute:
            running: dict[int, asyncio.Task[None]] = {}
            peers: list[hx.Peer] = []

            async def meet(_router: hx.Peer, body: dict[str, Any]) -> None:
                peers.append(await worker.engine.connect(body["address"]))

            async def ask(number: int, tokens: list[int], first: int, ticket: dict[str, Any]) -> None:
                body = {"number": number, "tokens": tokens, "first": first, "ticket": ticket}
                await peers[0].request("prefill", body, timeout=LONG)

            policy = Decode(Cache(pool), compute, ask, lambda event, request: recorder.tell(event, request.number))

            async def generate(_router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
                request, digests = Request(**body, stop=worker.model.config.end_token), []

                async def finished(blocks: hx.kv.Blocks) -> None:
                    cache, there = PagedCache(memory, blocks.ids), len(request.tokens) - 1
                    digests.extend(await asyncio.to_thread(kv_digests, cache, there))

                task = running[request.number] = asyncio.create_task(policy.generate(request, finished))
                try:
                    await asyncio.wait({task})
                    if task.cancelled():
                        return {}
                    task.result()  # raises its error
                    return {"answer": request.answer, "kv": digests}
                finally:
                    task.cancel()

            async def cancel(_router: hx.Peer, body: dict[str, Any]) -> None:
                running[body["number"]].cancel()

            worker.engine.serve("meet", meet)
            worker.engine.serve("generate", generate)
            worker.engine.serve("cancel", cancel)
            serve_report(worker.engine, policy.cache, recorder)
            async with asyncio.TaskGroup() as tasks:
                steps = tasks.create_task(policy.run())
                await worker.serve_until_router_leaves()
                steps.cancel()


if __name__ == "__main__":
    start("D", program)
