"""The common part of the three processes: an engine, the model, and an end with the router's.

Each process is a program of its own, started by fleet.py. It opens an engine, loads the model, offers its
services, and then connects to the router (main.py): to be connected means to be ready. When the router leaves
or dies, for whatever reason, the process ends as well, so none is ever left behind, not even a stopped one.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import hixl_async as hx
from hixl_async.testing import FaultPlan, faulty

from . import loops, random_model, weights
from .messages import Settings, Step, tokens_topic
from .model import Array, KvMemory, Llama, OnLayer, PagedCache

BLOCK_TOKENS = 16
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class Abandoned(Exception):
    """The end of a computation whose result is not needed any more."""


@dataclass
class Worker:
    """One process of the demo."""

    settings: Settings
    engine: hx.Engine
    model: Llama
    _leaving: bool = field(default=False, init=False)

    def view(self) -> hx.kv.View:
        """Return hixl_async's description of memory of the shape ``Config.kv_shape``."""
        config = self.model.config
        group = hx.kv.Group.attention(
            config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype="float32"
        )
        return hx.kv.View.ordered(group, blocks=self.settings.pool_blocks, block_tokens=BLOCK_TOKENS)

    def memory(self, pool: hx.kv.Pool) -> KvMemory:
        """Return a pool as the array in which the model computes, so that nothing is copied before or after a transfer."""
        return pool.regions[0].numpy("float32", self.model.config.kv_shape(pool.blocks, BLOCK_TOKENS))

    async def serve_until_router_leaves(self) -> None:
        """Tell the router that this process is ready, and wait until the router leaves."""
        router = await self.engine.connect(self.settings.router)
        gone = asyncio.Event()

        def leave(_reason: hx.HixlError) -> None:
            self._leaving = True
            gone.set()

        router.add_lost_callback(leave)
        await gone.wait()

    async def step(
        self,
        tokens: Sequence[int],
        cache: PagedCache,
        *,
        start: int = 0,
        on_layer: OnLayer | None = None,
        on_layer_done: OnLayer | None = None,
    ) -> Step:
        """Run the model in a thread of its own, so that the loop goes on streaming; see `Llama.forward`."""

        def layer_done(layer: int) -> None:
            if self._leaving:
                raise Abandoned
            if on_layer_done:
                on_layer_done(layer)

        def compute() -> Step:
            began = time.monotonic_ns()
            logits = self.model.forward(tokens, cache, start=start, on_layer=on_layer, on_layer_done=layer_done)
            ended = time.monotonic_ns()
            return Step(int(logits.argmax()), digest(logits), began, ended)

        return await asyncio.to_thread(compute)

    async def decode(self, first: Step, cache: PagedCache, *, start: int, max_tokens: int) -> AsyncIterator[Step]:
        """Go on from a first token, at position `start`, with the likeliest next ones.

        :param max_tokens: including the first.
        """
        step = first
        for position in range(start, start + max_tokens - 1):
            if step.token == self.model.config.end_token:
                return
            step = await self.step([step.token], cache, start=position)
            yield step

    def tell(self, router: hx.Peer, run: int, step: Step | None) -> hx.Transfer:
        """Notify the router of a step; of None when there are no more."""
        return self.engine.notify(router, tokens_topic(run), b"" if step is None else step.to_json().encode())


def start(name: str, program: Callable[[Worker], Awaitable[None]]) -> None:
    """Run a process of the demo: make a `Worker` from the command line, and run `program` with it."""
    if len(sys.argv) != 2:
        sys.exit(f"{sys.argv[0]} is one of the processes of the demo, which main.py starts. Run main.py.")
    settings = Settings.from_json(sys.argv[1])
    # The kernel kills this process when the router has died: that reaches it even if it is stopped.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    async def run() -> None:
        async with hx.Engine("127.0.0.1:0", name=name, drivers=_drivers(settings)) as engine:
            await program(Worker(settings, engine, _warm_model(settings)))

    loops.run(run, settings.loop)


def _drivers(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the driver, wrapped if its link is to be slow or to have faults.

    Between two processes of one host, keys and values travel in a fraction of the time that a CPU needs to compute
    them. Between two hosts they would not, and a paced link shows what streaming is then worth. The copies are real,
    but each happens when a wire of that speed would have delivered it.
    """
    plan = FaultPlan(settings.faults)
    if settings.bytes_per_second is not None:
        plan.bandwidth(settings.bytes_per_second, verb="write")
    if settings.faults is not None:
        plan.delay(0, 0.003, chance=0.3, verb="write").reorder(chance=0.3, verb="write").fail(
            chance=0.003, verb="write"
        )
    return faulty(settings.driver, plan) if plan.spec()["rules"] else {settings.driver: {}}


def _warm_model(settings: Settings) -> Llama:
    checkpoint = random_model.load() if settings.random_model else weights.load()
    model = Llama(checkpoint.config, checkpoint.weights)
    # The first run maps the pages of the weights, which a server does before it takes requests.
    model.forward([0], PagedCache(np.zeros(model.config.kv_shape(1, 1), np.float32), [0]))
    return model


def digest(*arrays: Array) -> str:
    """Return a digest of an array's bytes."""
    sum_ = hashlib.blake2b(digest_size=16)
    for array in arrays:
        sum_.update(np.ascontiguousarray(array).data)
    return sum_.hexdigest()


def kv_digests(cache: PagedCache, tokens: int) -> list[str]:
    """Return, for each layer, the digest of the first `tokens` tokens' keys and values, wherever their blocks lie."""
    return [digest(*cache.read(layer, tokens)) for layer in range(len(cache.memory))]
