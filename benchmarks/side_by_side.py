"""hixl_async and its peers, side by side: the same work, in turn, each in a pair of processes of its own.

::

    python benchmarks/side_by_side.py                        # a table, some minutes
    python benchmarks/side_by_side.py --quick --json -       # JSON on standard output, under a minute
    python benchmarks/side_by_side.py --only hixl NIXL --works write flight

A third process asks one pair after the other for a block of work, and both of its processes count as its CPU time.
What is not installed is left out, and the report says how to get it.  On a shared machine trust the ratios of one run.

The JSON (schema 1)::

    schema, benchmark ("side_by_side"), started, seconds, arguments, commit, machine, versions: as of ladder.py
    contestants   a list of {name, version, state}; state: "measured", or why not, and how to get it
    absent        who is not among the series of some work: a list of {kind, size, parts, contestant, why}
    series        a list of:
        kind          what was done, see `rig.side.ASK`
        size          bytes of one operation, or of each block of a list
        parts         blocks of a list, operations in flight, idle milliseconds
        contestant    who did it
        iterations    operations in a block
        nanoseconds   of one operation, a list: one number per turn, so that any two contestants can be compared turn by turn
        cpu           CPU nanoseconds of one operation, both processes, per turn
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from peers import CONTESTANTS, Contestant
from rig.blocks import Pace, Series, estimate, interleave
from rig.command import add_json_choice, publish
from rig.machine import heading, preamble
from rig.side import ASK, Kind, Work
from rig.table import align, digits, seconds
from rig.team import Team, TeamError, open_team

KIB, MIB = 1 << 10, 1 << 20
#: From here on an operation takes a block by itself.
LARGE = 8 * MIB

WORKS: dict[Kind, tuple[Work, ...]] = {
    "write": tuple(Work("write", size) for size in (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB)),
    "list": (Work("list", 4 * KIB, 256),),
    "rows": (Work("rows", 4 * KIB, 256), Work("rows", 4 * KIB, 10_000)),
    "flight": (Work("flight", 4 * KIB, 64), Work("flight", 64 * KIB, 64)),
    "notify": (Work("notify", 8),),
    "deliver": tuple(Work("deliver", size) for size in (4 * KIB, 64 * KIB, MIB, 16 * MIB)),
    "idle": (Work("idle", parts=5000),),
}

FULL, SLOW = Pace(15, 0.004), Pace(9, 0.0)
QUICK, QUICK_SLOW = Pace(6, 0.0005), Pace(6, 0.0)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="hixl_async and its peers, side by side.")
    add = parser.add_argument
    add_json_choice(parser)
    add("--quick", action="store_true", help="smaller sizes, fewer and shorter blocks")
    add("--works", nargs="+", choices=WORKS, default=list(WORKS), metavar="WORK", help=f"of {', '.join(WORKS)}")
    add("--only", nargs="+", metavar="WORD", help="contestants whose name begins so, such as hixl NIXL gloo")
    add("--list", action="store_true", help="shows who could take part, and what is not installed")
    options = parser.parse_args(argv)
    for word in options.only or ():
        if not any(begins(one, word) for one in CONTESTANTS):
            parser.error(f"argument --only: nobody's name begins with {word!r}; --list shows who there is")
    return options


def begins(contestant: Contestant, word: str) -> bool:
    """Whether `word` is the beginning of its name."""
    return contestant.name.lower().startswith(word.lower())


async def measure(teams: Sequence[Team], work: Work, quick: bool) -> list[Series]:
    """All teams that have a way to do `work`, in turn; once more without one that breaks down over it."""
    while True:
        try:
            return await _measure([team for team in teams if not team.lost], work, quick)
        except TeamError as error:
            print(f"  {error}", file=sys.stderr, flush=True)


async def _measure(teams: Sequence[Team], work: Work, quick: bool) -> list[Series]:
    if work.kind == "idle":
        calm = [team for team in teams if not team.contestant.spins]
        groups = [calm, *([team] for team in teams if team.contestant.spins)]
        return [series for group in groups for series in _rest(group, work)]
    able = [team for team in teams if team.ask(work, 1) is not None]
    large = work.size * (work.parts if work.kind in ("list", "rows", "flight") else 1) >= LARGE
    pace = (QUICK_SLOW if quick else SLOW) if large else (QUICK if quick else FULL)
    return await interleave([team.rung(work) for team in able], pace)


def _rest(teams: Sequence[Team], work: Work) -> list[Series]:
    """CPU time while nothing happens, of all `teams` beside one another."""
    before = [team.cpu_ns() for team in teams]
    for team in teams:
        team.begin(work, 1)
    elapsed = [team.end() for team in teams]
    spent = [team.cpu_ns() - first for team, first in zip(teams, before, strict=True)]
    return [
        Series(team.contestant.name, 1, [float(took)], [float(cpu)])
        for team, took, cpu in zip(teams, elapsed, spent, strict=True)
        if took is not None
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all; the exit code."""
    options = arguments(argv)
    chosen = [one for one in CONTESTANTS if not options.only or any(begins(one, word) for word in options.only)]
    if options.list:
        for one in CONTESTANTS:
            print(f"{one.name:34} {f'not installed: {one.install}' if one.missing else one.version or 'there'}")
        return 0
    most = 16 * MIB if options.quick else 128 * MIB
    works = [work for kind in options.works for work in WORKS[kind] if work.span <= most]
    if options.quick:
        works = [work._replace(parts=500) if work.kind == "idle" else work for work in works]
    report = preamble("side_by_side", sys.argv[1:] if argv is None else argv)
    report["contestants"] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        teams = []
        for one in chosen:
            state = f"not installed: {one.install}"
            if not one.missing:
                try:
                    teams.append(stack.enter_context(open_team(one, most)))
                    state = "measured"
                except TeamError as error:
                    state = f"does not work here: {error}"
            report["contestants"].append({"name": one.name, "version": one.version, "state": state})
        series, absent = [], []
        for work in works:
            print(f"{work.describe()} ...", file=sys.stderr, flush=True)
            found = asyncio.run(measure(teams, work, options.quick))
            series += [(work, one) for one in found]
            there = {one.rung for one in found}
            absent += [
                (work, team.contestant.name, team.lost or team.contestant.lacks.get(work.kind, ""))
                for team in teams
                if team.contestant.name not in there
            ]
    report["seconds"] = round(time.monotonic() - began, 1)
    report["absent"] = [{**work._asdict(), "contestant": name, "why": why} for work, name, why in absent]
    report["series"] = [
        {
            "kind": work.kind,
            "size": work.size,
            "parts": work.parts,
            "contestant": one.rung,
            "iterations": one.iterations,
            "nanoseconds": one.nanoseconds,
            "cpu": one.cpu,
        }
        for work, one in series
    ]
    publish(report, [*heading(report), *render(report)], options.json)
    return 0


def render(report: dict[str, Any]) -> Iterator[str]:
    """A table per kind of work; who could not be measured at all comes first, and who is not in a table below it."""
    for one in report["contestants"]:
        if one["state"] != "measured":
            yield f"{one['name']}: {one['state']}"
    works = {(one["kind"], one["size"], one["parts"]): None for one in report["series"]}
    for work in (Work(*key) for key in works):
        mine = [one for one in report["series"] if (one["kind"], one["size"], one["parts"]) == work]
        first = mine[0]
        yield ""
        yield f"{work.describe()}: {ASK[work.kind]}"
        rows = [["", "median", "95 %", f"to {first['contestant']}", "CPU, both sides", "CPU s per GB"]]
        for one in mine:
            value = estimate(one["nanoseconds"])
            ratio = estimate(
                [mine / theirs for mine, theirs in zip(one["nanoseconds"], first["nanoseconds"], strict=True)]
            )
            cpu = estimate(one["cpu"]).median
            moved = work.size * (work.parts if work.kind in ("list", "rows") else 1)
            rows.append(
                [
                    one["contestant"],
                    seconds(value.median),
                    f"{seconds(value.low)} .. {seconds(value.high)}",
                    f"x{digits(ratio.median)}",
                    seconds(cpu),
                    digits(cpu / moved) if moved >= MIB else "",
                ]
            )
        yield from align(rows)
        absent = [one for one in report.get("absent", ()) if (one["kind"], one["size"], one["parts"]) == work]
        for why in dict.fromkeys(one["why"] for one in absent):
            yield f"  not here: {'; '.join(one['contestant'] for one in absent if one['why'] == why)} ({why})"


if __name__ == "__main__":
    sys.exit(main())
