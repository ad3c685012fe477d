"""hixl_async and its peers, side by side: the same work, in turn, each in a pair of processes of its own.

::

    python benchmarks/side_by_side.py                        # a table, some minutes
    python benchmarks/side_by_side.py --quick --json -       # JSON on standard output, under a minute
    python benchmarks/side_by_side.py --only hixl NIXL --works write flight

A third process asks one pair after the other for a block of work; the CPU time of a competitor is that of both of its
processes.  Competitors that are not installed are left out, and the report says how to get them.  On a shared machine trust
the ratios of one run.

The JSON (schema 2)::

    schema, benchmark ("side_by_side"), started, seconds, arguments, commit, machine, versions: as of ladder.py
    competitors   a list of {name, version, state}; state: "measured", or the reason why not, and how to get it
    absent        competitors without a series of some work: a list of {kind, size, parts, competitor, why}
    series        a list of:
        kind          the kind of work, see `rig.side.ASK`
        size          bytes of one operation, or of each block of a list
        parts         blocks of a list, operations in flight, idle milliseconds
        competitor    its name
        iterations    operations in a block
        nanoseconds   of one operation, a list: one number per turn, so that any two competitors can be compared turn by turn
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

from peers import COMPETITORS, Competitor
from rig.blocks import Pace, Series, estimate, interleave
from rig.command import add_json_choice, publish
from rig.machine import heading, preamble
from rig.runner import Runner, RunnerError, open_runner
from rig.side import ASK, Kind, Work
from rig.table import align, digits, seconds

KIB, MIB = 1 << 10, 1 << 20
#: The size from which on a block is a single operation.
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
    add("--only", nargs="+", metavar="WORD", help="competitors whose name begins so, such as hixl NIXL gloo")
    add("--list", action="store_true", help="show all competitors, and those that are not installed")
    options = parser.parse_args(argv)
    for word in options.only or ():
        if not any(begins(one, word) for one in COMPETITORS):
            parser.error(f"argument --only: no competitor's name begins with {word!r}; --list shows all names")
    return options


def begins(competitor: Competitor, word: str) -> bool:
    """Return True if the competitor's name begins with `word`."""
    return competitor.name.lower().startswith(word.lower())


async def measure(runners: Sequence[Runner], work: Work, quick: bool) -> list[Series]:
    """Measure, in turn, all runners that have a way to do `work`; if one of them fails, measure the others once more."""
    while True:
        try:
            return await _measure([runner for runner in runners if not runner.lost], work, quick)
        except RunnerError as error:
            print(f"  {error}", file=sys.stderr, flush=True)


async def _measure(runners: Sequence[Runner], work: Work, quick: bool) -> list[Series]:
    if work.kind == "idle":
        calm = [runner for runner in runners if not runner.competitor.spins]
        groups = [calm, *([runner] for runner in runners if runner.competitor.spins)]
        return [series for group in groups for series in _rest(group, work)]
    able = [runner for runner in runners if runner.ask(work, 1) is not None]
    large = work.size * (work.parts if work.kind in ("list", "rows", "flight") else 1) >= LARGE
    pace = (QUICK_SLOW if quick else SLOW) if large else (QUICK if quick else FULL)
    return await interleave([runner.level(work) for runner in able], pace)


def _rest(runners: Sequence[Runner], work: Work) -> list[Series]:
    """Measure the CPU time of all idle `runners` at the same time."""
    before = [runner.cpu_ns() for runner in runners]
    for runner in runners:
        runner.begin(work, 1)
    elapsed = [runner.end() for runner in runners]
    spent = [runner.cpu_ns() - first for runner, first in zip(runners, before, strict=True)]
    return [
        Series(runner.competitor.name, 1, [float(took)], [float(cpu)])
        for runner, took, cpu in zip(runners, elapsed, spent, strict=True)
        if took is not None
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; the exit code."""
    options = arguments(argv)
    chosen = [one for one in COMPETITORS if not options.only or any(begins(one, word) for word in options.only)]
    if options.list:
        for one in COMPETITORS:
            print(f"{one.name:34} {f'not installed: {one.install}' if one.missing else one.version or 'installed'}")
        return 0
    most = 16 * MIB if options.quick else 128 * MIB
    works = [work for kind in options.works for work in WORKS[kind] if work.span <= most]
    if options.quick:
        works = [work._replace(parts=500) if work.kind == "idle" else work for work in works]
    report = preamble("side_by_side", sys.argv[1:] if argv is None else argv)
    report["competitors"] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        runners = []
        for one in chosen:
            state = f"not installed: {one.install}"
            if not one.missing:
                try:
                    runners.append(stack.enter_context(open_runner(one, most)))
                    state = "measured"
                except RunnerError as error:
                    state = f"does not work here: {error}"
            report["competitors"].append({"name": one.name, "version": one.version, "state": state})
        series, absent = [], []
        for work in works:
            print(f"{work.describe()} ...", file=sys.stderr, flush=True)
            found = asyncio.run(measure(runners, work, options.quick))
            series += [(work, one) for one in found]
            there = {one.level for one in found}
            absent += [
                (work, runner.competitor.name, runner.lost or runner.competitor.lacks.get(work.kind, ""))
                for runner in runners
                if runner.competitor.name not in there
            ]
    report["seconds"] = round(time.monotonic() - began, 1)
    report["absent"] = [{**work._asdict(), "competitor": name, "why": why} for work, name, why in absent]
    report["series"] = [
        {
            "kind": work.kind,
            "size": work.size,
            "parts": work.parts,
            "competitor": one.level,
            "iterations": one.iterations,
            "nanoseconds": one.nanoseconds,
            "cpu": one.cpu,
        }
        for work, one in series
    ]
    publish(report, [*heading(report), *render(report)], options.json)
    return 0


def render(report: dict[str, Any]) -> Iterator[str]:
    """Yield a table per kind of work; competitors without any figures come first, those without figures of a work below it."""
    for one in report["competitors"]:
        if one["state"] != "measured":
            yield f"{one['name']}: {one['state']}"
    works = {(one["kind"], one["size"], one["parts"]): None for one in report["series"]}
    for work in (Work(*key) for key in works):
        mine = [one for one in report["series"] if (one["kind"], one["size"], one["parts"]) == work]
        first = mine[0]
        yield ""
        yield f"{work.describe()}: {ASK[work.kind]}"
        rows = [["", "median", "95 %", f"to {first['competitor']}", "CPU, both sides", "CPU s per GB"]]
        for one in mine:
            value = estimate(one["nanoseconds"])
            ratio = estimate(
                [mine / theirs for mine, theirs in zip(one["nanoseconds"], first["nanoseconds"], strict=True)]
            )
            cpu = estimate(one["cpu"]).median
            moved = work.size * (work.parts if work.kind in ("list", "rows") else 1)
            rows.append(
                [
                    one["competitor"],
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
            yield f"  without: {'; '.join(one['competitor'] for one in absent if one['why'] == why)} ({why})"


if __name__ == "__main__":
    sys.exit(main())
