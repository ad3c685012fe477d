"""The measurements of one run in which a competitor was better than hixl_async; goals and charts do not show all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rig.side import Work
from rig.table import digits, seconds

__all__ = ["losses"]

OURS = "hixl_async"
#: The measures of a turn of the sweep: their names in words, and 1 where more is better, -1 where less is.
MEASURES = {
    "latency_ns": ("layer latency", -1),
    "exposed_ns": ("exposed", -1),
    "first_token_ns": ("TTFT", -1),
    "tokens_per_s": ("tokens/s", 1),
    "cpu_s_per_GB": ("CPU time", -1),
}


def losses(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each workload, and for each measure of the sweep, in which a competitor had the better median."""
    yield from _works(reports.get("side_by_side", {}).get("series", ()))
    yield from _sweep(reports.get("sweep", {}).get("cases", ()))


def _works(series: list[dict[str, Any]]) -> Iterator[str]:
    works = dict.fromkeys((one["kind"], one["size"], one["parts"]) for one in series)
    for work in (Work(*key) for key in works):
        mine = [one for one in series if (one["kind"], one["size"], one["parts"]) == work]
        ours = [one for one in mine if one["competitor"].startswith(OURS) and "ready" not in one["competitor"]]
        for column, what in (("nanoseconds", "time"), ("cpu", "CPU time")):
            for us in ours:
                if work.kind == "idle" and (column == "nanoseconds" or us["cpu"][0] < us["nanoseconds"][0] / 500):
                    continue  # the time was given, and this little CPU time is the measurement's own
                better = [
                    f"{one['competitor']} {seconds(statistics.median(one[column]))}"
                    for one in mine
                    if not one["competitor"].startswith(OURS)
                    and statistics.median(one[column]) < statistics.median(us[column])
                ]
                if better:
                    value = seconds(statistics.median(us[column]))
                    yield f"{work.describe()}, {what}: {us['competitor']} {value}; {', '.join(better)}"


def _sweep(cases: list[dict[str, Any]]) -> Iterator[str]:
    medians: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for case in cases:
        found = {name: statistics.median(turn[name] for turn in case["turns"]) for name in MEASURES}
        medians.setdefault((case["loop"], case["tokens"], case["requests"]), {})[case["carrier"]] = found
    both = [one for one in medians.values() if OURS in one]
    for them in dict.fromkeys(case["carrier"] for case in cases if case["carrier"] != OURS):
        for name, (words, sign) in MEASURES.items():
            pairs = [(one[OURS][name], one[them][name]) for one in both if them in one]
            lost = [(us, they) for us, they in pairs if (they - us) * sign > 0]
            if lost:
                parts = sorted(abs(they / us - 1) * 100 for us, they in lost)
                by = f"by {digits(statistics.median(parts))} %"
                if len(parts) > 1:
                    by += f" in the median, {digits(parts[0])} % to {digits(parts[-1])} %"
                if name.endswith("_ns"):
                    by += f" ({seconds(statistics.median(us - they for us, they in lost))})"
                yield f"prefill and decode, {words}: {them} in {len(lost)} of {len(pairs)} cases, {by}"
