"""The processes of the demo: starts them, notices when one fails, and ends all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import hixl_async as hx

from .messages import Settings

#: The module of each process, as seen from the demo's folder.
PROGRAMS = {"P": "prefill", "D": "decode", "reference": "support.reference"}

#: Served by every engine, whatever its process is computing.
PING = "hixl.ping"

# Seconds that a process has to leave, that an answer may take, and that others have to report what they saw of a failure.
LEAVE, ANSWER, ALSO = 5.0, 3600.0, 1.0

# Seconds between two checks of a process, and the number of checks in a row without a sign of life: before the user is
# told, before it is given up once it was ready, and before it is given up while it starts.
LOOK, NOTICE, GIVE_UP, START = 1.0, 3, 15, 120


class Failed(Exception):
    """A failure; the text describes it, for each process that has something to report."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))


class NotReady(Failed):
    """Processes that were not ready in time."""


class Silent(Exception):
    """A process that was ready and shows no sign of life any more."""

    def __init__(self, looks: int) -> None:
        super().__init__(f"no sign of life for {looks * LOOK:.0f} s; it is stopped, or hangs")


class Fleet:
    """Some processes of the demo; an async context manager.

    :param engine: the router's engine, to which they connect when they are ready.
    :param settings: their settings.
    :param names: their names; see `PROGRAMS`.
    :param tell: called with messages for the user while one is waited for.
    :raises Failed: on entering, if one ends before it is ready or is not ready in time; on leaving, if one does not end
        as it should.
    """

    def __init__(self, engine: hx.Engine, settings: Settings, *names: str, tell: Callable[[str], None]) -> None:
        self._engine = engine
        self._names = names
        self._settings = settings
        self._tell = tell
        self._peers: dict[str, hx.Peer] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ends: dict[str, asyncio.Task[int]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._silence: dict[str, int] = {}
        """The number of checks in a row in which each ready process was silent."""

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
        """Send a request to one process, and return its answer; for `together`.

        :raises hx.HixlError: as it was raised there, or `hx.PeerLostError` if the process ended.
        :raises Silent: if the process gives no sign of life any more.
        """
        answer = asyncio.create_task(self._peers[name].request(service, body, timeout=ANSWER))
        try:
            await asyncio.wait({answer, self._watches[name]}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Silent(self._silence[name])
            return answer.result()
        finally:
            answer.cancel()

    async def together(self, asked: dict[str, Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Wait for answers of several processes, by name, as long as all processes live.

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
        failures = {name: _state(error) for name, error in errors.items() if error}
        if failures or self._ended():
            # One process's report of another's failure should not stand alone.
            silent = {name: f"Silent: {Silent(looks)}" for name, looks in self._silence.items() if looks >= NOTICE}
            raise Failed(silent | failures | self._ended())
        return {name: answer.result() for name, answer in answers.items()}

    async def over(self) -> None:
        """Wait until a process ends, or gives no sign of life any more."""
        await asyncio.wait({*self._ends.values(), *self._watches.values()}, return_when=asyncio.FIRST_COMPLETED)

    def killed(self) -> bool:
        """Return True if all processes were killed by SIGKILL."""
        return all(process.returncode == -signal.SIGKILL for process in self._processes.values())

    def _ended(self) -> dict[str, str]:
        return {name: _describe(end.result()) for name, end in self._ends.items() if end.done()}

    async def _start(self) -> None:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        for name in self._names:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-X", "faulthandler"),  # a crash in native code leaves a traceback, too
                *("-P", "-m", PROGRAMS[name]),
                self._settings.to_json(),
                stdin=asyncio.subprocess.DEVNULL,
                # Several threads of BLAS would not add in the same order each time.
                env={
                    **os.environ,
                    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
                    "PYTHONPATH": path,
                },
                # Ctrl-C is for the router alone, which then leaves, and the others with it.
                start_new_session=True,
            )
            self._processes[name] = process
            self._ends[name] = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._connected())
        ready_or_end = asyncio.create_task(
            asyncio.wait({ready, *self._ends.values()}, return_when=asyncio.FIRST_COMPLETED)
        )
        try:
            await _comes(ready_or_end, START, self._look_at_start)
        finally:
            ready_or_end.cancel()
            ready.cancel()
        if self._ended():
            raise Failed(self._ended())
        if not ready.done():
            raise NotReady(dict.fromkeys(self._missing(), f"was not ready after {START * LOOK:.0f} s"))
        ready.result()
        self._silence = dict.fromkeys(self._peers, 0)
        self._watches = {name: asyncio.create_task(self._watch(name, peer)) for name, peer in self._peers.items()}

    def _missing(self) -> list[str]:
        return [name for name in self._names if name not in self._peers]

    def _look_at_start(self, looks: int) -> None:
        if looks == GIVE_UP:
            names = " and ".join(self._missing())
            self._tell(f"({names} not ready after {looks * LOOK:.0f} s; after {START * LOOK:.0f} s the demo ends)")

    async def _connected(self) -> None:
        async with aclosing(self._engine.accepted()) as peers:
            async for peer in peers:
                if peer.name in self._names:  # other fleets may start at the same time
                    self._peers[peer.name] = peer
                if self._peers.keys() == set(self._names):
                    return

    async def _watch(self, name: str, peer: hx.Peer) -> None:
        """Ask for signs of life; return when there are none any more."""

        def look(looks: int) -> None:
            self._silence[name] = looks
            if looks == NOTICE:
                self._tell(f"({name} gives no sign of life; after {GIVE_UP * LOOK:.0f} s of that the demo ends)")

        while True:
            answer = asyncio.create_task(peer.request(PING, {}, timeout=ANSWER))
            try:
                if not await _comes(answer, GIVE_UP, look):
                    return
                self._silence[name] = 0
            finally:
                answer.cancel()
            if answer.exception() is not None:  # the peer is lost, and all its pending requests fail
                await asyncio.wait([self._ends[name]])
            await asyncio.sleep(LOOK)

    async def _stop(self) -> None:
        """Let the processes leave, and kill those that do not; at once if it is cancelled."""
        leaving = []
        try:
            for name, process in self._processes.items():
                # A process that is not ready has nothing to lose, and a silent one would not notice anything else.
                if process.returncode is None and self._silence.get(name, NOTICE) >= NOTICE:
                    process.kill()
            for watch in self._watches.values():
                watch.cancel()
            # The others end when the router says goodbye.
            leaving = [asyncio.create_task(peer.aclose()) for peer in self._peers.values()]
            if self._ends:
                await asyncio.wait(self._ends.values(), timeout=LEAVE)
        finally:
            self._kill()
            await asyncio.gather(*self._ends.values())  # at once, because all have ended
        await asyncio.gather(*leaving)

    def _kill(self) -> None:
        """End what still runs, stopped or not; another Ctrl-C has to wait for that."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process in self._processes.values():
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
                    with suppress(ChildProcessError):  # the loop has waited for it
                        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


async def _comes(what: asyncio.Task[Any], within: int, look: Callable[[int], None]) -> bool:
    """Wait until something is done, for a limited number of checks.

    Checks are counted instead of time, because after a Ctrl-Z of this process the others did not cause the delay.

    :param look: called after each check without success, with their number.
    """
    for looks in range(1, within + 1):
        await asyncio.wait([what], timeout=LOOK)
        if what.done():
            return True
        look(looks)
    return False


def _state(error: BaseException) -> str:
    """Return the class and the text of an error; the text of a process's own error has the class already."""
    own = isinstance(error, hx.RemoteError) and error.remote_class != "RemoteError"
    return str(error) if own else f"{type(error).__name__}: {error}"


def _describe(code: int) -> str:
    if code == 0:
        return "ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; what it said is above"
