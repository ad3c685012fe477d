"""The processes of the demo: starts them, hears of it when one fails, and ends them all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from messages import Settings

import hixl_async as hx

PROGRAMS = {"P": "prefill.py", "D": "decode.py", "reference": "reference.py"}

# Seconds: that a process has to leave, that an answer may take, and for the others to say what they saw of a failure.
LEAVE, ANSWER, ALSO = 5.0, 3600.0, 1.0


class Failed(Exception):
    """Something failed; the text says what, for each process that has something to say."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))


class Fleet:
    """Some processes of the demo; an async context manager.

    :param engine: the router's engine, to which they connect when they are ready.
    :param settings: what they are told.
    :param names: which ones; see `PROGRAMS`.
    :raises Failed: on entering, if one ends before it is ready; on leaving, if one does not end as it should.
    """

    def __init__(self, engine: hx.Engine, settings: Settings, *names: str) -> None:
        self._engine = engine
        self._names = names
        self._settings = settings
        self._peers: dict[str, hx.Peer] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ends: dict[str, asyncio.Task[int]] = {}

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        if error is None and any(end.result() for end in self._ends.values()):
            raise Failed(self._ended())

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def address(self, name: str) -> str:
        return self._peers[name].address

    async def ask(self, name: str, service: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to one process, and gives its answer.

        :raises hx.HixlError: as it was raised there, or `hx.PeerLostError` if the process ended.
        """
        return await self._peers[name].request(service, body, timeout=ANSWER)

    async def together(self, asked: dict[str, Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Waits for answers of several processes, by name, as long as all processes live.

        :raises Failed: if an answer is an error, or a process ends. The others then have a moment to say how that looks
            from their side.
        """
        answers = {name: asyncio.create_task(answer) for name, answer in asked.items()}
        all_or_error = asyncio.create_task(asyncio.wait(answers.values(), return_when=asyncio.FIRST_EXCEPTION))
        try:
            await asyncio.wait({all_or_error, *self._ends.values()}, return_when=asyncio.FIRST_COMPLETED)
            # Over at once if all have answered.
            await asyncio.wait(answers.values(), timeout=ALSO)
        finally:
            for task in (all_or_error, *answers.values()):
                task.cancel()
        errors = {name: answer.exception() for name, answer in answers.items() if answer.done()}
        failures = {name: f"{type(error).__name__}: {error}" for name, error in errors.items() if error}
        if failures or self._ended():
            raise Failed(failures | self._ended())
        return {name: answer.result() for name, answer in answers.items()}

    def _ended(self) -> dict[str, str]:
        return {name: _describe(end.result()) for name, end in self._ends.items() if end.done()}

    async def _start(self) -> None:
        for name in self._names:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-X", "faulthandler"),  # a crash in native code leaves a traceback, too
                str(Path(__file__).with_name(PROGRAMS[name])),
                self._settings.to_json(),
                stdin=asyncio.subprocess.DEVNULL,
                # Several threads of BLAS would not add up in the same order each time.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                # Ctrl-C is for the router alone, which then leaves, and the others with it.
                start_new_session=True,
            )
            self._processes[name] = process
            self._ends[name] = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._connected())
        try:
            await asyncio.wait({ready, *self._ends.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._ended():
            raise Failed(self._ended())
        ready.result()

    async def _connected(self) -> None:
        async with aclosing(self._engine.accepted()) as peers:
            async for peer in peers:
                self._peers[peer.name] = peer
                if self._peers.keys() == set(self._names):
                    return

    async def _stop(self) -> None:
        for name, process in self._processes.items():
            if name not in self._peers and process.returncode is None:
                process.terminate()
        # The others end when the router says goodbye.
        await asyncio.gather(*(peer.aclose() for peer in self._peers.values()))
        if self._ends:
            await asyncio.wait(self._ends.values(), timeout=LEAVE)
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*self._ends.values())


def _describe(code: int) -> str:
    if code == 0:
        return "ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; what it said is above"
