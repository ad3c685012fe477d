"""Process D: answers requests; all sequences that have arrived from P are continued together."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from support.model import PagedCache
from support.worker import Worker, kv_digests, start

import hixl_async as hx

from .cache import Cache
from .compute import Compute
from .loss import cause
from .model import BatchedLlama
from .policy import STREAMS, Decode
from .records import Request
from .report import serve_report
from .timeline import Recorder

LONG = 600.0  # seconds


async def program(worker: Worker) -> None:
    """Serve main.py's requests until it leaves."""
    recorder = Recorder()
    async with hx.kv.Pool(worker.engine, worker.view(), shuffle=2) as pool:
        with Compute(recorder.recorded("decode", BatchedLlama(worker.model, worker.memory(pool)).step)) as compute:
            sequences = Sequences(worker, pool, compute, recorder)
            async with asyncio.TaskGroup() as tasks:
                steps = tasks.create_task(sequences.policy.run())
                await worker.serve_until_router_leaves()
                steps.cancel()


class Sequences:
    """The services of D for the router."""

    def __init__(self, worker: Worker, pool: hx.kv.Pool, compute: Compute, recorder: Recorder) -> None:
        self.policy = Decode(Cache(pool), compute, self._ask, self._tell)
        self._engine = worker.engine
        self._end_token = worker.model.config.end_token
        self._memory = worker.memory(pool)
        self._recorder = recorder
        self._running: dict[int, asyncio.Task[None]] = {}
        self._prefills: dict[int, str] = {}  # the address of P, for each request
        self._streams: set[int] = set()  # the requests that are between P and D
        self._victim: tuple[int, asyncio.Event] | None = None
        for service in (self.generate, self.cancel, self.kill):
            self._engine.serve(service.__name__, service)
        serve_report(self._engine, self.policy.cache, recorder)

    async def generate(self, _router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request; with nothing, if it is cancelled.

        :raises hx.HixlError: one of the `LOSSES`, if P is lost.
        """
        self._prefills[body["number"]] = body.pop("prefill")
        request, digests = Request(**body, stop=self._end_token), []

        async def finished(blocks: hx.kv.Blocks) -> None:
            cache, there = PagedCache(self._memory, blocks.ids), len(request.tokens) - 1
            digests.extend(await asyncio.to_thread(kv_digests, cache, there))

        task = self._running[request.number] = asyncio.create_task(self.policy.generate(request, finished))
        try:
            await asyncio.wait({task})
            if task.cancelled():
                return {}
            task.result()  # raises its error
            return {"answer": request.answer, "kv": digests}
        except ExceptionGroup as group:
            raise cause(group) from group
        finally:
            task.cancel()
            del self._running[request.number], self._prefills[request.number]

    async def cancel(self, _router: hx.Peer, body: dict[str, Any]) -> None:
        """Cancel a request, if it is here; the answer comes when it has given everything back."""
        if task := self._running.get(body["number"]):
            task.cancel()
            await asyncio.wait({task})

    async def kill(self, _router: hx.Peer, body: dict[str, Any]) -> None:
        """Kill P or this process as `kill -9` does, when a layer arrives while as many streams as possible are open."""
        killed = asyncio.Event()
        self._victim = body["pid"], killed
        await killed.wait()

    async def _ask(self, number: int, tokens: list[int], first: int, ticket: dict[str, Any]) -> None:
        body = {"number": number, "tokens": tokens, "first": first, "ticket": ticket}
        prefill = await self._engine.connect(self._prefills[number])  # once; then it is connected
        self._streams.add(number)
        try:
            await prefill.request("prefill", body, timeout=LONG)
        finally:
            self._streams.remove(number)

    def _tell(self, event: str, request: Request) -> None:
        self._recorder.tell(event, request.number)
        if event == "layer" and self._victim and len(self._streams) == STREAMS:
            pid, killed = self._victim
            os.kill(pid, signal.SIGKILL)
            self._victim = None
            killed.set()


if __name__ == "__main__":
    start("D", program)
