"""The two processes of a competitor, led by a third process, which does nothing while they work.

The cost of a competitor is its own, because the loops, threads and memory of others are in other processes.  A competitor
that uses CPU time while it is idle is stopped between its turns.
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

from peers import Competitor

from rig.blocks import Level
from rig.side import Work

__all__ = ["Runner", "RunnerError", "open_runner"]

#: The seconds that a runner may take to get ready, and for one block of work.
PATIENCE = 60.0


class RunnerError(Exception):
    """A competitor that is installed does not work here; the text says how it ended."""


class Runner:
    """The processes of one competitor."""

    def __init__(self, competitor: Competitor, line: Connection, processes: list[SpawnProcess], noise: Path) -> None:
        self.competitor = competitor
        self._line = line
        self._processes = processes
        self._noise = noise
        #: The reason why it does not take part any more; empty while it does.
        self.lost = ""

    def ask(self, work: Work, times: int) -> int | None:
        """Let the initiator do `work`; nanoseconds, or None if it has no way to do it."""
        self.begin(work, times)
        return self.end()

    def begin(self, work: Work, times: int) -> None:
        """Do the first half of `ask`."""
        if self.competitor.spins:
            self._signal(signal.SIGCONT)
        self._line.send((work, times))

    def end(self) -> int | None:
        """Do the second half of `ask`."""
        elapsed = self._answer()
        if self.competitor.spins:
            self._signal(signal.SIGSTOP)
            for process in self._processes:  # no other competitor is measured before they have stopped
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

    def _error(self, what: str) -> RunnerError:
        for process in self._processes:
            process.join(1)  # because its last message is the one that counts
        said = self._noise.read_text(errors="replace").strip().splitlines()
        self.lost = f"{what}: {said[-1] if said else 'it said nothing'}"
        return RunnerError(f"{self.competitor.name}: {self.lost}")

    def cpu_ns(self) -> int:
        """Return the CPU nanoseconds of both processes so far, all threads, including those that have ended."""
        # A process's CPU clock by its id; see clock_getcpuclockid(3).
        return sum(time.clock_gettime_ns(~process.pid << 3 | 2) for process in self._processes if process.pid)

    def level(self, work: Work) -> Level:
        """Return `work` as a level, to be measured in turn with others."""

        async def run(times: int) -> int:
            elapsed = self.ask(work, times)
            assert elapsed is not None, "a competitor is asked only for work that it has a way to do"
            return elapsed

        return Level(self.competitor.name, run, share=work.parts if work.kind == "flight" else 1, cpu=self.cpu_ns)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)


@contextlib.contextmanager
def open_runner(competitor: Competitor, size: int) -> Iterator[Runner]:
    """Start both processes, with `size` bytes of memory on each side.

    :raises RunnerError: if one of them does not get ready.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    left, right = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        noise = Path(folder, "noise")
        common = (competitor.adapter, size, competitor.options, str(noise))
        processes = [
            context.Process(target=_initiate, args=(theirs, left, *common), daemon=True),
            context.Process(target=_receive, args=(right, *common), daemon=True),
        ]
        for process in processes:
            process.start()
        for end in (theirs, left, right):
            end.close()
        runner = Runner(competitor, ours, processes, noise)
        try:
            runner.end()  # of the preparation
            yield runner
        finally:
            runner._signal(signal.SIGCONT)
            ours.close()  # tells the initiator to leave, whose end tells the target
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
    """Redirect the output of libraries to a file, which is read only if something fails."""
    sys.stdout.flush()
    file = os.open(noise, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
