"""The results of a run in words and pictures, from the JSON of the benchmarks: RESULTS.md, DETAILS.md, the README's charts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from rig import charts
from rig.blocks import estimate
from rig.goals import Reports, Row, goals
from rig.losses import losses
from rig.table import digits, nbytes, seconds

__all__ = ["details", "draw", "summary"]

#: A report by its benchmark's name.
Found = dict[str, dict[str, Any]]
#: Makes the lines of a report.
Render = Callable[[dict[str, Any]], Iterable[str]]

TITLES = {
    "ladder": "The ladder: bare copy, driver, core, engine",
    "side_by_side": "Side by side with its peers",
    "streaming": "Layer by layer over a paced link",
    "sweep": "Prefill and decode, one-sided and two-sided",
}


# ---- words -----------------------------------------------------------------------------------------------------------


def summary(reports: Found, links: Sequence[str]) -> Iterator[str]:
    """Yield RESULTS.md, a page: what was measured, the goals met and missed, and where competitors are ahead.

    :param links: lines that say where more is to be found.
    """
    first = next(iter(reports.values()))
    yield "# Results"
    yield ""
    yield "Written by `benchmarks/report.py`, which `make bench` runs. Medians, and ratios to a floor or a peer of the same"
    yield "run; their 95 % interval is in brackets. Ratios are formed within each turn, so that a slower clock or less memory"
    yield "bandwidth, which slows both sides, cancels out."
    yield ""
    memory = f"{first['machine']['memory_bytes'] / 2**30:.0f} GiB"
    about = first["machine"]
    yield f"- Machine: {about['cpu']}, {about['cpus']} CPUs, {memory}, Linux {about['kernel']}, {about['libc']}"
    yield f"- Date: {first['started'][:10]}; commit: {', '.join(_commits(reports))}"
    yield f"- Versions: {', '.join(f'{name} {number}' for name, number in first['versions'].items() if number)}"
    yield from _peers(reports.get("side_by_side", {}).get("competitors", ()))
    yield from (f"- {line}" for line in links)
    yield ""
    yield "## Goals"
    yield ""
    yield from _goals(Reports(reports), lambda row: bool(row.goal))
    yield ""
    yield from _losses(reports)


def details(reports: Found, renders: dict[str, Render], pictures: Sequence[str], remarks: str) -> Iterator[str]:
    """Yield the full report: every figure, with the tables of all benchmarks; `remarks` follow the goals."""
    yield "# All results"
    yield ""
    yield "Ratios are formed within each turn, so what slows both sides of a turn cancels out. It does not where one side spins"
    yield "(NIXL's progress thread, ucxx, gloo, and programs that poll for notifications), because a process that spins needs a"
    yield "whole CPU, and loses time slices to all other processes."
    yield ""
    for name, report in reports.items():
        words = [word for word in report["arguments"] if word != "--json" and not word.endswith(".json")]
        yield (
            f"- `python benchmarks/{' '.join([f'{name}.py', *words])}`: {report['started']}, {report['seconds']:g} s, "
            f"load {report['machine']['load_1min']:.1f} at the start"
        )
    yield ""
    yield "## Figures and goals"
    yield ""
    yield from _goals(Reports(reports), lambda row: True)
    yield ""
    yield from _losses(reports)
    if remarks:
        yield remarks.strip()
        yield ""
    for picture in pictures:
        yield f"![{Path(picture).stem}]({picture})"
        yield ""
    for name, report in reports.items():
        yield f"## {TITLES[name]}"
        yield ""
        yield "```"
        yield from dropwhile(operator.not_, renders[name](report))
        yield "```"
        yield ""


def _commits(reports: Found) -> Iterable[str]:
    return dict.fromkeys(report["commit"] or "unknown" for report in reports.values())


def _losses(reports: Found) -> Iterator[str]:
    yield "## Where others are ahead"
    yield ""
    lines = list(losses(reports))
    yield from (f"- {line}" for line in lines)
    if not lines:
        yield "Nowhere in this run."
    yield ""


def _goals(reports: Reports, shown: Callable[[Row], bool]) -> Iterator[str]:
    """Yield the number of goals met, those that are missed, and a table of the rows to be shown, two columns per event loop."""
    loops = reports.loops
    lines = list(zip(*(goals(reports, loop) for loop in loops), strict=True))
    aimed = [(row, loop) for line in lines for row, loop in zip(line, loops, strict=True) if row.goal]
    met = sum(row.verdict == "met" for row, _ in aimed)
    missed = [
        f"{row.figure} ({loop}) by {row.missed * 100:.0f} %" for row, loop in aimed if row.missed and row.missed > 0
    ]
    silent = sum(row.missed is None for row, _ in aimed)
    yield f"{met} of {len(aimed)} are met" + (f", {silent} were not measured" if silent else "") + "."
    yield ""
    if missed:
        yield "Missed:"
        yield ""
        yield from (f"- {text}" for text in missed)
        yield ""
    yield f"| | goal |{''.join(f' {loop} | |' for loop in loops)}"
    yield f"|---|---|{'---|---|' * len(loops)}"
    for line in filter(lambda line: shown(line[0]), lines):
        cells = "".join(f" {row.measured} | {row.verdict} |" for row in line)
        yield f"| {line[0].figure} | {line[0].goal} |{cells}"


def _peers(competitors: Iterable[dict[str, str]]) -> Iterator[str]:
    peers = [one for one in competitors if not one["name"].startswith("hixl_async")]
    measured = [" ".join(filter(None, (one["name"], one["version"]))) for one in peers if one["state"] == "measured"]
    if measured:
        yield f"- Peers: {'; '.join(measured)}"
    for state in dict.fromkeys(one["state"] for one in peers if one["state"] != "measured"):
        yield f"- {'; '.join(one['name'] for one in peers if one['state'] == state)}: {state}"


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw(reports: Found) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the pictures that can be drawn."""
    if "side_by_side" in reports:
        series = reports["side_by_side"]["series"]
        panels = [
            charts.Panel(title, _bars(series, kind, size, count, column, share))
            for title, kind, size, count, column, share in (
                ("One 4 KiB write, awaited", "write", 4096, 1, "nanoseconds", 1),
                ("256 blocks of 4 KiB in one prepared call", "list", 4096, 256, "nanoseconds", 1),
                ("One 16 MiB write, awaited", "write", 16 << 20, 1, "nanoseconds", 1),
                ("64 writes of 4 KiB in flight, the time of one", "flight", 4096, 64, "nanoseconds", 1),
            )
        ]
        subtitle = "Two processes on one host, medians of one run, logarithmic; shorter is better"
        if panels := [panel for panel in panels if panel.bars]:
            yield "latency.svg", charts.bars("How long a transfer takes", subtitle, panels)
        panels = [
            charts.Panel(f"{nbytes(size)} after {nbytes(size)}", _bars(series, "write", size, 1, "cpu", size))
            for size in (64 << 10, 1 << 20, 16 << 20)
        ]
        subtitle = "CPU seconds of both processes for one GB, logarithmic; shorter is better"
        if panels := [panel for panel in panels if panel.bars]:
            yield "cpu.svg", charts.bars("What a transfer costs", subtitle, panels)
    if "sweep" in reports:
        yield "sweep.svg", _sweep(reports["sweep"])


def _bars(series: list[dict[str, Any]], kind: str, size: int, count: int, column: str, share: int) -> list[charts.Bar]:
    found = []
    for one in series:
        if (one["kind"], one["size"], one["parts"]) == (kind, size, count) and "ready" not in one["competitor"]:
            value = estimate(one[column]).median / share
            text = digits(value) if column == "cpu" else seconds(value)
            found.append(charts.Bar(one["competitor"], value, text, one["competitor"].startswith("hixl_async")))
    return sorted(found, key=lambda bar: bar.value)


def _sweep(report: dict[str, Any]) -> str:
    cases = [case for case in report["cases"] if case["loop"] == report["cases"][-1]["loop"]]
    counts = sorted({case["requests"] for case in cases})
    bands = []
    for measure, what in (
        ("exposed_ns", "From the end of prefill until decoding can begin"),
        ("first_token_ns", "From the arrival of all requests until decoding can begin: time to first token"),
    ):
        plots = []
        for tokens in sorted({case["tokens"] for case in cases}):
            lines = [
                charts.Curve(
                    carrier,
                    [
                        estimate([turn[measure] for turn in case["turns"]]).median / 1e6
                        for count in counts
                        for case in cases
                        if (case["tokens"], case["requests"], case["carrier"]) == (tokens, count, carrier)
                    ],
                )
                for carrier in dict.fromkeys(case["carrier"] for case in cases)
            ]
            plots.append(charts.Plot(f"{tokens} tokens", [str(count) for count in counts], lines))
        bands.append(charts.Band(what, plots))
    title = f"{report['model']}, one of {report['ranks']} ranks: from prefill to decode"
    subtitle = f"Medians over requests, by requests at once; {cases[0]['loop']}, logarithmic; lower is better"
    return charts.curves(title, subtitle, bands, "ms")
