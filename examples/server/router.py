"""The router: brings requests to P and D, and brings them to others if one of these dies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from support.fleet import Silent
from support.weights import Config

import hixl_async as hx

from .admission import Admission
from .errors import failed, lost, stopping
from .generation import Generation
from .messages import PROGRESS, Note
from .metrics import Metrics
from .processes import Pair, Processes

PATIENCE = 60.0  # seconds that a request waits for P and D to be there
HISTORY = 40  # requests that have ended and are still shown

#: The errors of D that mean that P is lost.
LOST = {"PeerDownError", "PeerLostError", "RequestLostError"}


class Router:
    """The dispatch of requests.

    :param engine: the engine that D notifies of tokens.
    :param admission: refuses requests for which there is no room.
    :param retries: how often a request is asked again because a process has died.
    """

    def __init__(
        self,
        engine: hx.Engine,
        processes: Processes,
        config: Config,
        admission: Admission,
        metrics: Metrics,
        *,
        retries: int,
    ) -> None:
        self.current: dict[int, Generation] = {}
        """The requests that are under way,"""
        self.ended: deque[Generation] = deque(maxlen=HISTORY)
        """and some that were."""
        self._engine = engine
        self._processes = processes
        self._config = config
        self._admission = admission
        self._metrics = metrics
        self._retries = retries
        self._numbers = itertools.count(1)

    async def listen(self) -> None:
        """Hear of layers and tokens, until the engine closes."""
        async with self._engine.notifications(PROGRESS) as notes:
            async for each in notes:
                note = Note.from_json(each.payload)
                if generation := self.current.get(note.number):
                    before = generation.last
                    if generation.hear(note):
                        self._metrics.token(generation, before)

    @asynccontextmanager
    async def generation(self, prompt: list[int], max_tokens: int) -> AsyncIterator[Generation]:
        """Have an answer generated; leaving ends that, and then its blocks have been given back.

        :raises ApiError: if there is no room for it.
        """
        with self._admission.admitted(len(prompt) + max_tokens):
            generation = Generation(next(self._numbers), prompt, max_tokens, self._config.end_token)
            self.current[generation.number] = generation
            work = asyncio.create_task(self._work(generation))
            generation.begin(work)
            try:
                yield generation
            finally:
                work.cancel()
                await asyncio.wait({work})
                del self.current[generation.number]
                generation.ended = time.monotonic()
                generation.outcome = _outcome(generation, work)
                self.ended.append(generation)
                self._metrics.end(generation)

    def stop(self) -> None:
        """End all requests, because the server is being stopped."""
        for generation in self.current.values():
            generation.fail(stopping())

    async def _work(self, generation: Generation) -> None:
        """Ask P and D for the tokens, and again if one of them dies; their computations give the same tokens each time.

        :raises ApiError: if that fails.
        """
        while not generation.done:
            pair = await self._pair()
            try:
                await self._ask(pair, generation)
            except (hx.PeerDownError, Silent) as error:
                reason = f"process D has died: {error}"
            except hx.HixlError as error:
                if not isinstance(error, hx.RemoteError) or error.remote_class not in LOST:
                    raise failed(str(error)) from error
                reason = f"process P has died: {error}"
            else:
                return
            self._processes.doubt(pair)
            generation.tries += 1
            if generation.tries > self._retries:
                raise lost(reason)

    async def _pair(self) -> Pair:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._processes.pair()
        except TimeoutError:
            raise lost("the processes that serve requests are not there") from None

    async def clear(self) -> None:
        """Give back the blocks of earlier prompts, in both pools.

        :raises ApiError: if a process has died.
        """
        pair = await self._pair()
        try:
            await pair.prefill.ask("P", "clear", {})
            await pair.decode.ask("D", "clear", {})
        except (hx.PeerDownError, Silent) as error:
            raise lost(str(error)) from error

    async def _ask(self, pair: Pair, generation: Generation) -> None:
        ask = generation.rest()
        try:
            answer = await pair.decode.ask("D", "generate", ask.body())
        except asyncio.CancelledError:
            with suppress(hx.HixlError, Silent):  # then D has died, and holds nothing
                await pair.decode.ask("D", "cancel", {"number": ask.number})
            raise
        # Nearly always, all of them were heard of before.
        heard = len(generation.prompt) + len(generation.tokens) - len(ask.prompt)
        generation.add(answer["tokens"][heard:])


def _outcome(generation: Generation, work: asyncio.Task[None]) -> str:
    if generation.stopped:
        return "finished"
    if work.cancelled():
        return "cancelled"
    return "failed" if work.exception() else "finished"
