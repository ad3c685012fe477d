"""The policy: which requests go on, which tokens are computed next, and who gives way.  Copy this file.

It knows neither the model nor the processes: `compute` computes a step in a thread, `ask` has a prompt prefilled by P, and
`tell` hears of events.  Blocks of earlier prompts are kept in cache.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hixl_async import BusyError, Peer, RangeError
from hixl_async.kv import Blocks

from .cache import Cache
from .compute import Compute
from .records import Part, Request, Sample

CHUNK = 256  # the most tokens of a prompt that are computed at once
BATCH = 16  # the most sequences that are continued at once
STREAMS = 3  # the most prompts that are between P and D: later ones find more beginnings, and hold no blocks
TTL, LEASE = 300.0, 60.0  # seconds: until P opens a stream, and then without a sign of life


@dataclass
class Prefill:
    """The policy of P: chunks of all prompts in turn."""

    cache: Cache
    compute: Compute

    async def prefill(self, number: int, tokens: list[int], first: int, peer: Peer, ticket: dict[str, Any]) -> None:
        """Compute a prompt chunk by chunk, and push its layers from position `first` on."""
        async with AsyncExitStack() as held:
            held.callback(self.cache.make_way)
            beginning, rest = await self.cache.reserve(tokens, held)
            blocks = await held.enter_async_context(beginning + rest if beginning else rest.share())
            out = await held.enter_async_context(self.cache.pool.open_stream(peer, ticket))
            for layer in self.cache.pool.views[0].group.layers if first < rest.start else ():
                out.push(layer, blocks, tokens=(first, rest.start))  # here already, but not at D
            for start in range(rest.start, len(tokens), CHUNK):
                end = min(start + CHUNK, len(tokens))
                push = partial(out.push, source=blocks, tokens=(max(first, start), end)) if first < end else None
                # Steps are computed in the order of the calls, so the chunks of a long prompt alternate with others'.
                (sample,) = await self.compute([Part(number, tokens[start:end], start, blocks.ids)], [blocks], push)
            self.cache.keep(tokens, blocks)
            await out.finish(json.dumps(sample).encode())


@dataclass
class Decode:
    """The policy of D: a coroutine for each request, and one that continues all that have arrived."""

    cache: Cache
    compute: Compute
    ask: Callable[[int, list[int], int, dict[str, Any]], Coroutine[Any, Any, object]]
    tell: Callable[[str, Request], None] = lambda event, request: None
    batch: dict[Request, Blocks] = field(default_factory=dict)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    streams: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STREAMS))

    async def generate(self, request: Request, finished: Callable[[Blocks], Awaitable[None]]) -> None:
        """Answer a request, and call `finished` with its blocks; cancelling it gives everything back.

        :raises RangeError: if it does not fit into the pool, and could never end.
        """
        if len(request.prompt) + request.max_tokens > self.cache.tokens:
            raise RangeError(
                f"{len(request.prompt)} + {request.max_tokens} tokens, and the pool holds {self.cache.tokens}"
            )
        while not request.done:  # again after each preemption, with the answer so far as a part of the prompt
            async with AsyncExitStack() as held:
                held.callback(self.cache.make_way)
                async with self.streams:
                    blocks = await self._receive(request, held)
                if not request.done:
                    request.left_batch.clear()
                    self.batch[request] = blocks
                    held.callback(self.batch.pop, request, None)
                    self.work.set()
                    await request.left_batch.wait()
                if request.done:
                    await finished(blocks)

    async def _receive(self, request: Request, held: AsyncExitStack) -> Blocks:
        tokens = request.tokens
        beginning, rest = await self.cache.reserve(tokens, held)
        stream = rest.stream(tokens=(rest.start, len(tokens)), ttl=TTL, lease=LEASE)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.ask(request.number, tokens, rest.start, stream.ticket()))
            async for _layer in stream:
                self.tell("layer", request)
            request.answer.append(Sample(*json.loads(await stream.finished())))
        await stream.drained()
        self.tell("token", request)
        blocks = await held.enter_async_context(beginning + rest if beginning else rest.share())
        await rest.aclose()
        self.cache.keep(tokens, blocks)
        return blocks

    async def run(self) -> None:
        """Compute one step after the other, as long as there are sequences."""
        while await self.work.wait():
            for request in list(self.batch):
                self._grow(request)
            batch = dict(list(self.batch.items())[:BATCH])
            if not batch:
                self.work.clear()
                continue
            parts = [request.end(blocks.ids) for request, blocks in batch.items()]
            for request, sample in zip(batch, await self.compute(parts, [*batch.values()]), strict=True):
                if request in self.batch:  # else it was cancelled meanwhile
                    request.answer.append(sample)
                    self.tell("token", request)
                    if request.done:
                        self._leave(request)

    def _grow(self, request: Request) -> None:
        """Make room for a token; if the pool is full, the youngest sequence gives up its blocks, and comes again."""
        while request in self.batch:
            try:
                self.batch[request].extend_nowait(tokens=len(request.tokens), priority=1)
                return
            except BusyError:
                if not self.cache.drop():
                    youngest = max(self.batch, key=lambda request: request.number)
                    self.tell("preempted", youngest)
                    _ = self.batch[youngest].aclose()
                    self._leave(youngest)

    def _leave(self, request: Request) -> None:
        del self.batch[request]
        request.left_batch.set()
