"""Contestants do what they are asked, and the report is what its docstring says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from peers import CONTESTANTS, Contestant
from rig.side import ASK, Work
from rig.team import TeamError, open_team

from .program import report, run

pytestmark = pytest.mark.timeout(120)

KIB = 1 << 10
WORKS = [Work(kind, 4 * KIB, 3 if kind in ("list", "rows", "flight") else 1) for kind in ASK if kind != "idle"]
THERE = [one for one in CONTESTANTS if not one.missing]


@pytest.mark.parametrize("contestant", THERE, ids=lambda one: one.name)
def test_a_contestant_that_is_installed(contestant: Contestant) -> None:
    """It shows by itself that its bytes arrive; here it does everything that it has a way to do, more than once."""
    with open_team(contestant, 1 << 20) as team:
        took = {work.kind: team.ask(work, 2) for work in WORKS}
        assert took["write"], "everybody can write"
        assert all(elapsed is None or elapsed > 0 for elapsed in took.values())
        assert {kind for kind, elapsed in took.items() if elapsed is None} <= contestant.lacks.keys(), "and why not"
        before = team.cpu_ns()
        assert team.ask(Work("write", 64 * KIB), 200)
        assert team.cpu_ns() > before, "the CPU time of the processes that work"


def test_who_fails_to_start_says_why() -> None:
    broken = Contestant("broken", "no_such_adapter")
    why = "broken: a process of it ended: ModuleNotFoundError.*no_such_adapter"
    with pytest.raises(TeamError, match=why), open_team(broken, 1 << 20):
        pass


def test_one_that_spins_is_stopped_between_its_turns() -> None:
    streams = Contestant("streams", "streams", {"loop": "asyncio"}, spins=True)
    with open_team(streams, 1 << 20) as team:
        assert team.ask(Work("write", 8), 1)
        states = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2] for process in team._processes]
        assert [state.split()[0] for state in states] == ["T", "T"]
        assert team.ask(Work("write", 8), 1), "and goes on"


def test_the_report() -> None:
    content = report(
        *("side_by_side.py", "--quick", "--only", "hixl_async, asyncio", "sock", "asyncio streams", "NIXL"),
        *("--works", "write", "list", "idle"),
    )
    states = {one["name"]: one["state"] for one in content["contestants"]}
    assert states["sock_recv_into, asyncio"] == states["hixl_async, asyncio"] == "measured"
    for one in CONTESTANTS:
        if one.name in states and one.missing:
            assert states[one.name] == f"not installed: {one.install}"
    found = {(one["kind"], one["size"], one["parts"], one["contestant"]): one for one in content["series"]}
    for one in found.values():
        assert one.keys() == {"kind", "size", "parts", "contestant", "iterations", "nanoseconds", "cpu"}
        assert len(one["nanoseconds"]) == len(one["cpu"]) > 0
        assert min(one["nanoseconds"]) > 0
    # The same number of turns for all, so that any two can be compared turn by turn; no way to do it, no series.
    assert len(found["write", 4 * KIB, 1, "hixl_async, asyncio"]["nanoseconds"]) == 6
    assert len(found["write", 4 * KIB, 1, "sock_recv_into, asyncio"]["nanoseconds"]) == 6
    assert ("list", 4 * KIB, 256, "asyncio streams") in found
    assert ("list", 4 * KIB, 256, "sock_recv_into, asyncio") not in found
    assert {(one["kind"], one["contestant"]): one["why"] for one in content["absent"]} == {
        (kind, one.name): one.lacks[kind]
        for one in CONTESTANTS
        for kind in ("list", "idle")
        if states.get(one.name) == "measured" and kind in one.lacks
    }
    assert ("idle", 0, 500, "sock_recv_into, asyncio") in found


def test_the_list_of_contestants() -> None:
    done = run("side_by_side.py", "--list")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(CONTESTANTS)
    for one, line in zip(CONTESTANTS, lines, strict=True):
        assert line.startswith(one.name)
        assert line.endswith(one.install) is one.missing or not one.install


def test_nothing_is_left_running() -> None:
    with open_team(CONTESTANTS[0], 1 << 20) as team:
        pids = [process.pid for process in team._processes]
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
