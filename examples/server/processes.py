"""P and D: started, introduced to each other, and started again whenever one of them ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import NamedTuple

from support.fleet import PROGRAMS, Failed, Fleet, Silent
from support.messages import Settings

import hixl_async as hx

PROGRAMS.update(P="server.prefill", D="server.decode")

LOOK, PAUSE = 0.1, 1.0  # seconds: between two looks at a process, and after one that did not start


class Pair(NamedTuple):
    """P and D that know each other."""

    prefill: Fleet
    decode: Fleet


class Processes:
    """P and D; an async context manager.

    :param engine: the router's engine.
    :param settings: the settings of both.
    :param tell: called with messages for the user.
    :raises Failed: on entering, if one of them does not start.
    """

    def __init__(self, engine: hx.Engine, settings: Settings, tell: Callable[[str], None]) -> None:
        self.states: dict[str, dict[str, int]] = {}
        """The blocks of each process that is there: the number in each state."""
        self.starts: Counter[str] = Counter()
        self._engine = engine
        self._settings = settings
        self._tell = tell
        self._fleets: dict[str, Fleet] = {}
        self._pair: Pair | None = None
        self._changed = asyncio.Condition()
        self._starting = asyncio.Lock()  # a fleet takes every process that connects for its own
        self._meeting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Processes:
        self._tasks = [asyncio.create_task(self._keep(name)) for name in ("P", "D")]
        ready = asyncio.create_task(self.pair())
        try:
            await asyncio.wait({ready, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        except BaseException:
            await self._stop()
            raise
        finally:
            ready.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    @property
    def ready(self) -> bool:
        """True while both are there."""
        return self._pair is not None

    def pids(self) -> dict[str, int]:
        """Return the process ids of those that are there."""
        return {name: pid for fleet in self._fleets.values() for name, pid in fleet.pids().items()}

    async def pair(self) -> Pair:
        """Return P and D, once both are there."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pair is not None)
        assert self._pair is not None
        return self._pair

    def doubt(self, pair: Pair) -> None:
        """Have both meet again before they are used again, because a request has found one of them lost."""
        if self._pair is pair:
            self._pair = None

    async def _keep(self, name: str) -> None:
        """Start a process again and again."""
        while True:
            try:
                await self._run(name)
            except (Failed, hx.HixlError, OSError) as failure:
                if not self.starts[name]:
                    raise
                self._tell(f"{failure}; it is started again")
                await asyncio.sleep(0 if name in self.states else PAUSE)
            finally:
                self.states.pop(name, None)

    async def _run(self, name: str) -> None:
        """Run a process once.

        :raises Failed: when it has ended.
        """
        async with AsyncExitStack() as held:
            async with self._starting:
                fleet = Fleet(self._engine, self._settings, name, tell=self._tell)
                await held.enter_async_context(fleet)
            self.starts[name] += 1
            self._fleets[name] = fleet
            held.callback(self._lose, name)
            while True:
                answers = await fleet.together({name: fleet.ask(name, "state", {})})
                self.states[name] = answers[name]
                await self._introduce()
                await asyncio.sleep(LOOK)

    async def _introduce(self) -> None:
        """Connect D with P, if that is missing."""
        async with self._meeting:
            if self._pair is not None or len(self._fleets) < 2:
                return
            pair = Pair(self._fleets["P"], self._fleets["D"])
            with suppress(hx.HixlError, Silent):  # one of them has ended; this comes again when there is another
                await pair.decode.ask("D", "meet", {"address": pair.prefill.address("P")})
                if pair == (self._fleets.get("P"), self._fleets.get("D")):
                    async with self._changed:
                        self._pair = pair
                        self._changed.notify_all()

    def _lose(self, name: str) -> None:
        del self._fleets[name]
        self._pair = None

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
