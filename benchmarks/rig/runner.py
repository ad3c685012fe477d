"""The two processes of a contestant, led by a third one, which does nothing while they work.

What a contestant costs is its own: loops, threads and memory of others are in other processes.  One that burns CPU
while it is idle is stopped between its turns.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from peers import Contestant

from rig.blocks import Rung
from rig.side import Work

__all__ = ["Team", "TeamError", "open_team"]

#: Seconds that a team may take to get ready, and for one block of work.
PATIENCE = 60.0


class TeamError(Exception):
    """A contestant that is installed does not work here; the text says how it ended."""


class Team:
    """A contestant at work."""

    def __init__(self, contestant: Contestant, line: Connection, processes: list[SpawnProcess], noise: Path) -> None:
        self.contestant = contestant
        self._line = line
        self._processes = processes
        self._noise = noise
        #: Why it takes part in nothing any more; empty while it does.
        self.lost = ""

    def ask(self, work: Work, times: int) -> int | None:
        """Lets the initiator do `work`; nanoseconds, or None if it has no way to do it."""
        self.begin(work, times)
        return self.end()

    def begin(self, work: Work, times: int) -> None:
        """The first half of `ask`."""
        if self.contestant.spins:
            self._signal(signal.SIGCONT)
        self._line.send((work, times))

    def end(self) -> int | None:
        """The second half of `ask`."""
        elapsed = self._answer()
        if self.contestant.spins:
            self._signal(signal.SIGSTOP)
            for process in self._processes:  # nobody else is measured before they have stopped
                os.waitid(os.P_PID, process.pid or 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return elapsed

    def _answer(self) -> int | None:
        if not self._line.poll(PATIENCE):
            raise self._error("it does not answer")
        try:
            answer: int | None = self._line.recv()
        except EOFError:
            raise self._error("a process of it ended") from None
        return answer

    def _error(self, what: str) -> TeamError:
        for process in self._processes:
            process.join(1)  # its last words are the ones that count
        said = self._noise.read_text(errors="replace").strip().splitlines()
        self.lost = f"{what}: {said[-1] if said else 'it said nothing'}"
        return TeamError(f"{self.contestant.name}: {self.lost}")

    def cpu_ns(self) -> int:
        """CPU time of both processes so far, all threads, those that have ended too."""
        # A process's CPU clock by its id; see clock_getcpuclockid(3).
        return sum(time.clock_gettime_ns(~process.pid << 3 | 2) for process in self._processes if process.pid)

    def rung(self, work: Work) -> Rung:
        """`work` as something to be measured in turn with others."""

        async def run(times: int) -> int:
            elapsed = self.ask(work, times)
            assert elapsed is not None, "asked for nothing that it has no way to do"
            return elapsed

        return Rung(self.contestant.name, run, share=work.parts if work.kind == "flight" else 1, cpu=self.cpu_ns)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)


@contextlib.contextmanager
def open_team(contestant: Contestant, size: int) -> Iterator[Team]:
    """Starts both processes, with `size` bytes of memory on each side.

    :raises TeamError: if one of them does not get ready.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    left, right = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        noise = Path(folder, "noise")
        common = (contestant.adapter, size, contestant.options, str(noise))
        processes = [
            context.Process(target=_initiate, args=(theirs, left, *common), daemon=True),
            context.Process(target=_receive, args=(right, *common), daemon=True),
        ]
        for process in processes:
            process.start()
        for end in (theirs, left, right):
            end.close()
        team = Team(contestant, ours, processes, noise)
        try:
            team.end()  # of getting ready
            yield team
        finally:
            team._signal(signal.SIGCONT)
            ours.close()  # the initiator's sign to leave, and its end is the target's
            for process in processes:
                process.join(3)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


# ---- in the processes ------------------------------------------------------------------------------------------------


def _initiate(
    leader: Connection, line: Connection, adapter: str, size: int, options: dict[str, str], noise: str
) -> None:
    _begin(noise)
    initiator: Any = importlib.import_module(f"peers.{adapter}").Initiator(line, size, options)
    leader.send(0)
    with contextlib.suppress(EOFError):
        while True:
            work, times = leader.recv()
            leader.send(initiator.run(work, times))
    os._exit(0)  # some libraries do not survive an orderly exit


def _receive(line: Connection, adapter: str, size: int, options: dict[str, str], noise: str) -> None:
    _begin(noise)
    with contextlib.suppress(EOFError, ConnectionError):
        importlib.import_module(f"peers.{adapter}").target(line, size, options)
    os._exit(0)


def _begin(noise: str) -> None:
    """What libraries print goes to a file, which is read only if something fails."""
    sys.stdout.flush()
    file = os.open(noise, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
