"""A process as the router sees it: it may be killed at any time, and is started again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from support.fleet import PING, Failed, Fleet, NotReady, Silent
from support.messages import Settings

import hixl_async as hx

#: The errors of a request to a process that is not there any more.
GONE = (hx.PeerDownError, Silent)


class Process:
    """A process that is started again whenever it was killed or hangs.

    :param engine: the router's engine.
    :param settings: the settings of the process.
    :param name: its name, one of the fleet's `PROGRAMS`.
    """

    def __init__(self, engine: hx.Engine, settings: Settings, name: str) -> None:
        self.name = name
        self.starts = 0
        self._engine, self._settings = engine, settings
        self._leaving = asyncio.Event()
        self._fleet: asyncio.Future[Fleet] = engine.loop.create_future()  # pending while the process is not there

    async def run(self) -> None:
        """Start the process whenever it is not there, until `leave`.

        :raises Failed: if it is not ready in time, or ends in another way.
        """
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            while not leaving.done():
                await self._run_once(leaving)
        finally:
            leaving.cancel()

    async def _run_once(self, leaving: asyncio.Task[Any]) -> None:
        fleet = Fleet(self._engine, self._settings, self.name, tell=print)
        try:
            async with fleet:
                self.starts += 1
                self._fleet.set_result(fleet)
                over = asyncio.create_task(fleet.over())
                await asyncio.wait({over, leaving}, return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
        except Failed as failure:
            if leaving.done() or isinstance(failure, NotReady) or not fleet.killed():
                raise
        finally:
            self._lose(fleet)

    def leave(self) -> None:
        """Let the process end."""
        self._leaving.set()

    async def pid(self) -> int:
        """Return the process's number, once it is there."""
        return (await self._there()).pids()[self.name]

    async def address(self) -> str:
        """Return the address of the process's engine, once it answers."""
        while True:
            fleet = await self._there()
            with suppress(*GONE):
                await self._ask(fleet, PING, {})
                return fleet.address(self.name)

    async def ask(self, service: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request once the process is there, and return the answer.

        :raises hx.HixlError: as it was raised there, or `hx.PeerDownError` if the process ended.
        :raises Silent: if the process gives no sign of life any more.
        """
        return await self._ask(await self._there(), service, body)

    async def _there(self) -> Fleet:
        return await asyncio.shield(self._fleet)

    async def _ask(self, fleet: Fleet, service: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await fleet.ask(self.name, service, body)
        except GONE:
            self._lose(fleet)
            raise

    def _lose(self, fleet: Fleet) -> None:
        """Use a fleet no more; requests wait for the next one."""
        if self._fleet.done() and self._fleet.result() is fleet:
            self._fleet = self._engine.loop.create_future()
