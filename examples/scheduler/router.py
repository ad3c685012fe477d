"""The router: sends requests to D, and sends them again if P or D is lost before the answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, NamedTuple

from support.fleet import Silent

import hixl_async as hx

from .loss import is_loss
from .process import GONE, Process
from .timeline import Span

TRIES = 20  # of a request


class Planned(NamedTuple):
    """A request to come."""

    number: int
    delay: float
    """Seconds after the one before."""
    prompt: list[int]
    max_tokens: int
    cancel_after: float | None
    """Seconds after its start, if it has not ended by then."""


class Router:
    """The way of requests to P and D.

    :param prefill: P.
    :param decode: D.
    """

    def __init__(self, prefill: Process, decode: Process) -> None:
        self.lives: dict[int, Span] = {}
        """The time that each request took."""
        self.losses: list[Span] = []
        """The times at which a request was lost, and sent again."""
        self._prefill, self._decode = prefill, decode
        self._killing = asyncio.Lock()

    async def answer(self, request: Planned) -> dict[str, Any]:
        """Return D's answer; an empty one if the request is cancelled."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(request.cancel_after) as patience:
                return await self._generate(request)
        except TimeoutError:
            if not patience.expired():
                raise
            await self._cancel(request)
            return {}
        finally:
            self.lives[request.number] = Span("life", began, time.monotonic(), [request.number])

    async def _generate(self, request: Planned) -> dict[str, Any]:
        for _ in range(TRIES - 1):
            try:
                return await self._try(request)
            except (hx.HixlError, Silent) as error:
                if isinstance(error, hx.HixlError) and not is_loss(error):
                    raise
            now = time.monotonic()
            self.losses.append(Span("loss", now, now, [request.number]))
        return await self._try(request)

    async def _try(self, request: Planned) -> dict[str, Any]:
        body = {"number": request.number, "prompt": request.prompt, "max_tokens": request.max_tokens}
        return await self._decode.ask("generate", {**body, "prefill": await self._prefill.address()})

    async def _cancel(self, request: Planned) -> None:
        with suppress(*GONE):  # then the request is gone as well
            await self._decode.ask("cancel", {"number": request.number})

    async def kill(self, victim: Process) -> None:
        """Have D kill a process in the midst of streams, once those asked for before are dead."""
        async with self._killing:
            try:
                await self._decode.ask("kill", {"pid": await victim.pid()})
            except GONE:
                if victim is not self._decode:
                    raise
