"""Process D: continues all sequences that have arrived from P together, and notifies the router of each token."""

from __future__ import annotations

import asyncio
from typing import Any

from scheduler.compute import Compute
from scheduler.loss import cause
from scheduler.model import BatchedLlama
from scheduler.policy import LEASE, TTL, Decode
from scheduler.records import Request
from support.worker import Worker, start

import hixl_async as hx

from .cache import Cache
from .messages import PROGRESS, Ask, Note


async def program(worker: Worker) -> None:
    """Serve the router's requests until it leaves."""
    async with hx.kv.Pool(worker.engine, worker.view(), shuffle=2) as pool:
        with Compute(BatchedLlama(worker.model, worker.memory(pool)).step) as compute:
            sequences = Sequences(worker, Cache(pool), compute)
            async with asyncio.TaskGroup() as tasks:
                steps = tasks.create_task(sequences.policy.run())
                await worker.serve_until_router_leaves()
                steps.cancel()


class Sequences:
    """The services of D for the router."""

    prefill: hx.Peer
    """P, once D has met it."""
    router: hx.Peer
    """The router, once it has asked for something."""

    def __init__(self, worker: Worker, cache: Cache, compute: Compute) -> None:
        self.engine = worker.engine
        self.end_token = worker.model.config.end_token
        self.policy = Decode(cache, compute, self._ask, self._tell)
        self._running: dict[int, asyncio.Task[None]] = {}
        cache.serve(self.engine)
        self.engine.serve("meet", self._meet)
        self.engine.serve("generate", self._generate)
        self.engine.serve("cancel", self._cancel)

    async def _meet(self, _router: hx.Peer, body: dict[str, Any]) -> None:
        """Connect to P, which may have been started again."""
        self.prefill = await self.engine.connect(body["address"])

    async def _generate(self, router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Answer with all tokens, because notifications can be dropped."""
        ask = Ask(**body)
        self.router = router
        request = Request(ask.number, ask.prompt, ask.max_tokens, stop=self.end_token)
        task = self._running[ask.number] = asyncio.create_task(self.policy.generate(request, _ignore))
        try:
            await asyncio.wait({task})
            if task.cancelled():
                return {}
            task.result()
            return {"tokens": [sample.token for sample in request.answer]}
        except ExceptionGroup as group:
            raise cause(group) from group
        finally:
            task.cancel()
            del self._running[ask.number]

    async def _cancel(self, _router: hx.Peer, body: dict[str, Any]) -> None:
        """End a request; then its blocks have been given back."""
        if task := self._running.get(body["number"]):
            task.cancel()
            await asyncio.wait({task})

    async def _ask(self, number: int, tokens: list[int], first: int, ticket: dict[str, Any]) -> None:
        body = {"number": number, "tokens": tokens, "first": first, "ticket": ticket}
        await self.prefill.request("prefill", body, timeout=TTL + LEASE)

    def _tell(self, event: str, request: Request) -> None:
        if event == "preempted":
            return
        *before, last = request.tokens
        note = Note(request.number, len(before), last if event == "token" else None)
        self.engine.notify(self.router, PROGRESS, note.to_json().encode())


async def _ignore(_blocks: hx.kv.Blocks) -> None:
    """Ignore the blocks of an answer that is whole."""


if __name__ == "__main__":
    start("D", program)
