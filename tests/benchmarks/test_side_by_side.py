"""Competitors do the work that they are asked for, and the report has the schema of its docstring."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from peers import COMPETITORS, Competitor
from rig.runner import RunnerError, open_runner
from rig.side import ASK, Work

from .program import report, run

pytestmark = pytest.mark.timeout(120)

KIB = 1 << 10
WORKS = [Work(kind, 4 * KIB, 3 if kind in ("list", "rows", "flight") else 1) for kind in ASK if kind != "idle"]
THERE = [one for one in COMPETITORS if not one.missing]


@pytest.mark.parametrize("competitor", THERE, ids=lambda one: one.name)
def test_a_competitor_that_is_installed(competitor: Competitor) -> None:
    """It checks by itself that its bytes arrive; here it does each work that it has a way to do, more than once."""
    with open_runner(competitor, 1 << 20) as runner:
        took = {work.kind: runner.ask(work, 2) for work in WORKS}
        assert took["write"], "every competitor can write"
        assert all(elapsed is None or elapsed > 0 for elapsed in took.values())
        assert {kind for kind, elapsed in took.items() if elapsed is None} <= competitor.lacks.keys(), "and why not"
        before = runner.cpu_ns()
        assert runner.ask(Work("write", 64 * KIB), 200)
        assert runner.cpu_ns() > before, "the CPU time of the processes that work"


def test_a_failed_start_has_a_reason() -> None:
    broken = Competitor("broken", "no_such_adapter")
    why = "broken: a process of it ended: ModuleNotFoundError.*no_such_adapter"
    with pytest.raises(RunnerError, match=why), open_runner(broken, 1 << 20):
        pass


def test_a_competitor_that_spins_is_stopped_between_its_turns() -> None:
    streams = Competitor("streams", "streams", {"loop": "asyncio"}, spins=True)
    with open_runner(streams, 1 << 20) as runner:
        assert runner.ask(Work("write", 8), 1)
        states = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2] for process in runner._processes]
        assert [state.split()[0] for state in states] == ["T", "T"]
        assert runner.ask(Work("write", 8), 1), "and goes on"


def test_the_report() -> None:
    content = report(
        *("side_by_side.py", "--quick", "--only", "hixl_async, asyncio", "sock", "asyncio streams", "NIXL"),
        *("--works", "write", "list", "idle"),
    )
    states = {one["name"]: one["state"] for one in content["competitors"]}
    assert states["sock_recv_into, asyncio"] == states["hixl_async, asyncio"] == "measured"
    for one in COMPETITORS:
        if one.name in states and one.missing:
            assert states[one.name] == f"not installed: {one.install}"
    found = {(one["kind"], one["size"], one["parts"], one["competitor"]): one for one in content["series"]}
    for one in found.values():
        assert one.keys() == {"kind", "size", "parts", "competitor", "iterations", "nanoseconds", "cpu"}
        assert len(one["nanoseconds"]) == len(one["cpu"]) > 0
        assert min(one["nanoseconds"]) > 0
    # All have the same number of turns, so that any two can be compared turn by turn; a work that one cannot do has no series.
    assert len(found["write", 4 * KIB, 1, "hixl_async, asyncio"]["nanoseconds"]) == 6
    assert len(found["write", 4 * KIB, 1, "sock_recv_into, asyncio"]["nanoseconds"]) == 6
    assert ("list", 4 * KIB, 256, "asyncio streams") in found
    assert ("list", 4 * KIB, 256, "sock_recv_into, asyncio") not in found
    assert {(one["kind"], one["competitor"]): one["why"] for one in content["absent"]} == {
        (kind, one.name): one.lacks[kind]
        for one in COMPETITORS
        for kind in ("list", "idle")
        if states.get(one.name) == "measured" and kind in one.lacks
    }
    assert ("idle", 0, 500, "sock_recv_into, asyncio") in found


def test_the_list_of_competitors() -> None:
    done = run("side_by_side.py", "--list")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(COMPETITORS)
    for one, line in zip(COMPETITORS, lines, strict=True):
        assert line.startswith(one.name)
        assert line.endswith(one.install) is one.missing or not one.install


def test_nothing_is_left_running() -> None:
    with open_runner(COMPETITORS[0], 1 << 20) as runner:
        pids = [process.pid for process in runner._processes]
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
