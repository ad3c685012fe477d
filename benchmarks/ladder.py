"""The cost of `await engine.write(...)` beside the copy itself, level by level.

::

    python benchmarks/ladder.py                      # tables, under 90 s
    python benchmarks/ladder.py --quick --json       # JSON on standard output, under 15 s
    python benchmarks/ladder.py --json out.json --loop uvloop --parts range notify --sizes 4KiB

A spawned process owns the target region, and this one starts the transfers.  The levels do the same work: a bare memcpy
over the peer's mapped pages, the driver's `submit` in a C loop, the core, the public calls.  They take turns block by block,
and each figure is beside its ratio to the floor, formed within each turn.  On a shared machine trust the ratios of one run,
not the times of two.  No process is pinned to a CPU unless ``--pin`` says so.

The JSON (schema 2)::

    schema        2
    benchmark     "ladder"
    started       ISO 8601, UTC
    seconds       duration of the run
    arguments     the command line
    commit        of the checkout, "+" where it differs; null outside of git
    machine       cpu, cpus, memory_bytes, kernel, libc, load_1min (at the start)
    versions      python, hixl_async, uvloop, numpy, cython; null: not installed
    driver        the driver that carried the transfers
    skipped       parts that cannot be measured here, each with the reason
    figures       a list of:
        part         "range" | "list" | "post" | "flight" | "rate" | "notify" | "stall" | "touch" | "idle" | "device"
        loop         "asyncio" | "uvloop"
        case         the difference between figures of one part: "hot", "cold", ...
        level         "copy" | "driver" | "core" | "ready" | "fresh" for ranges; others name theirs
        verb         "write" | "read" | null
        bytes        of one operation
        descriptors  of one operation
        unit         "ns"
        value        {median, low, high}: nanoseconds of one operation; low and high bound the median's 95 % interval
        cpu_ns       CPU time of this process for one operation, all threads; null where it means nothing
        floor        the level that `ratio` refers to; null: this is the floor
        ratio        {median, low, high} of value / floor within each turn; null for the floor
        blocks       blocks measured
        iterations   operations in each
        extra        further observations by name: in_flight, per_second, ...
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rig import table
from rig.build import BuildError, build
from rig.command import add_json_choice, add_loop_choice, cpus, loops, publish, size
from rig.copies import measure_flight, measure_list, measure_post, measure_range, measure_rate
from rig.device import measure_device
from rig.figure import Figure
from rig.interference import measure_idle, measure_stall, measure_touch
from rig.machine import heading, preamble
from rig.pair import Pair, open_pair, run_loop
from rig.plan import FULL, LEVELS, QUICK, Plan, Skipped
from rig.wakes import measure_notify

PARTS: dict[str, Callable[[Pair, str, Plan], AsyncIterator[Figure]]] = {
    "range": measure_range,
    "list": measure_list,
    "post": measure_post,
    "flight": measure_flight,
    "rate": measure_rate,
    "notify": measure_notify,
    "stall": measure_stall,
    "touch": measure_touch,
    "idle": measure_idle,
    "device": measure_device,
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure await engine.write(...) beside the copy itself, by level.")
    add = parser.add_argument
    add_json_choice(parser)
    add_loop_choice(parser)
    add("--quick", action="store_true", help="fewer sizes, fewer and shorter blocks")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--levels", nargs="+", choices=LEVELS, metavar="LEVEL", help=f"of single ranges: {', '.join(LEVELS)}")
    add("--sizes", nargs="+", type=size, metavar="SIZE", help="of single ranges, such as 8 4KiB 128MiB")
    add("--pin", type=cpus, metavar="A,B", help="a CPU for this process and one for the target, threads and all")
    return parser.parse_args(argv)


async def climb(
    loop: str, plan: Plan, parts: Sequence[str], pin: tuple[int, int] | None
) -> tuple[str, list[Figure], dict[str, str]]:
    """Measure all parts on one pair of processes; the driver's name, the figures, and the parts skipped, with reasons."""
    async with open_pair(loop, plan.region_bytes, pin) as pair:
        figures, skipped = [], {}
        for part in parts:
            print(f"{loop}: {part} ...", file=sys.stderr, flush=True)
            try:
                figures += [figure async for figure in PARTS[part](pair, loop, plan)]
            except Skipped as reason:
                skipped[part] = str(reason)
                print(f"  skipped: {reason}", file=sys.stderr, flush=True)
        return pair.driver, figures, skipped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ladder; the exit code."""
    options = arguments(argv)
    plan = QUICK if options.quick else FULL
    plan = replace(plan, sizes=tuple(options.sizes or plan.sizes), levels=tuple(options.levels or plan.levels))
    try:
        build()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    report = preamble("ladder", sys.argv[1:] if argv is None else argv)
    began = time.monotonic()
    figures: list[Figure] = []
    for loop in loops(options.loop):
        report["driver"], found, report["skipped"] = run_loop(climb(loop, plan, options.parts, options.pin), loop)
        figures += found
    report["seconds"] = round(time.monotonic() - began, 1)
    report["figures"] = [figure.as_json() for figure in figures]
    publish(report, [*heading(report), *render(report)], options.json)
    return 0


def render(report: dict[str, Any]) -> Iterator[str]:
    """Yield the legend and the tables."""
    yield ""
    yield from table.legend()
    yield ""
    yield "Medians over blocks that take turns; xN is the median ratio to the floor (left, or as named) in each turn."
    yield from table.render([Figure.from_json(figure) for figure in report["figures"]])
    for part, why in report.get("skipped", {}).items():
        yield ""
        yield f"{table.TITLES[part]}: skipped, because {why}"


if __name__ == "__main__":
    sys.exit(main())
