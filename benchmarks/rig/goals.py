"""The goals of hixl_async, and whether the reports of one run meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rig.blocks import Estimate, estimate
from rig.figure import Figure
from rig.interference import INLINE
from rig.table import digits, nbytes, seconds

__all__ = ["Reports", "Row", "goals"]

KIB, MIB = 1 << 10, 1 << 20
#: The cases that some goals name.
LARGE, IDLE, STREAMED = 128 * MIB, "200 connections, 5 s", ("Llama-3-70B", "DeepSeek-V3")
TWO_SIDED_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
NIXL_SPIN, NIXL_ASYNCIO, GLOO = "NIXL noPT, spinning", "NIXL noPT, asyncio", "gloo"
TCP = ("uvloop streams", "sock_recv_into, asyncio", "sock_recv_into, uvloop")


class Row(NamedTuple):
    """One goal, or a figure that has none."""

    #: The figure's name.
    figure: str
    #: The goal in words.
    goal: str
    #: The measured value in words.
    measured: str
    #: The distance from the goal as a part of it, 0 or less if it is met; None if there is no goal, or no figure.
    missed: float | None

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.missed is None:
            return "" if self.measured else "not measured"
        return "met" if self.missed <= 0 else f"missed by {self.missed * 100:.0f} %"


def at_most(figure: str, value: float | None, limit: float, goal: str, text: str) -> Row:
    """Return a row whose `value` should not exceed `limit`."""
    return Row(figure, goal, text if value is not None else "", value / limit - 1 if value is not None else None)


def at_least(figure: str, value: float | None, limit: float, goal: str, text: str) -> Row:
    """Return a row whose `value` should reach `limit`."""
    return Row(figure, goal, text if value is not None else "", 1 - value / limit if value is not None else None)


def unless(row: Row, other: str) -> Row:
    """Return `row`; without a verdict, and with the case that its goal names in `other`, if another case was measured."""
    return row._replace(goal=f"{row.goal} ({other})", missed=None) if other and row.measured else row


class Reports:
    """The JSON reports of one run, by the names of their benchmarks."""

    def __init__(self, reports: dict[str, dict[str, Any]]) -> None:
        self._figures = [
            Figure.from_json(figure)
            for name in ("ladder", "streaming")
            for figure in reports.get(name, {}).get("figures", ())
        ]
        #: The duration of a layer's computation, as a multiple of its transfer's.
        self.slack = float(reports.get("streaming", {}).get("slack", 1.25))
        self._series = reports.get("side_by_side", {}).get("series", ())

    @property
    def loops(self) -> list[str]:
        """The event loops of the run."""
        return list(dict.fromkeys(figure.loop for figure in self._figures)) or ["asyncio", "uvloop"]

    def figure(self, part: str, loop: str, level: str, **words: Any) -> Figure | None:
        """Return the figure of the ladder, or of the streams, that has these attributes."""
        for one in self._figures:
            if (one.part, one.loop, one.level) == (part, loop, level) and all(
                getattr(one, name) == word for name, word in words.items()
            ):
                return one
        return None

    def figures(self, part: str, loop: str) -> list[Figure]:
        """Return all figures of a part."""
        return [figure for figure in self._figures if (figure.part, figure.loop) == (part, loop)]

    def turns(self, kind: str, size: int, competitor: str, what: str = "nanoseconds", parts: int = 1) -> list[float]:
        """Return a competitor's times, or its CPU times, in each turn; empty if it did not take part."""
        for one in self._series:
            if (one["kind"], one["size"], one["parts"], one["competitor"]) == (kind, size, parts, competitor):
                return list(one[what])
        return []

    def ratio(self, ours: list[float], theirs: list[float]) -> Estimate | None:
        """Return the ratio of theirs to ours, turn by turn."""
        if not ours or not theirs:
            return None
        return estimate([them / us for us, them in zip(ours, theirs, strict=True)])


def goals(reports: Reports, loop: str) -> Iterator[Row]:
    """Yield all rows of one event loop, in the order in which the goals were set; every loop has the same rows."""
    for part in (_small, _lists, _flight, _large, _wakes, _streams, _two_sided):
        yield from part(reports, loop)


def _small(reports: Reports, loop: str) -> Iterator[Row]:
    for slices in ("fresh", "ready"):
        name = f"hixl_async, {loop}" + (", ready slices" if slices == "ready" else "")
        what = f"`await engine.write(...)`, 4 KiB, {slices} slices"
        ours = reports.turns("write", 4 * KIB, name)
        value = estimate(ours).median if ours else None
        yield at_most(what, value, 1000, "<= 1 us", seconds(value or 0))
        for them, limit in ((NIXL_SPIN, 5), (NIXL_ASYNCIO, 20)):
            yield _faster(f"{what}, against {them}", reports.ratio(ours, reports.turns("write", 4 * KIB, them)), limit)


def _faster(what: str, ratio: Estimate | None, limit: float) -> Row:
    return at_least(what, ratio.median if ratio else None, limit, f">= {limit:g}x faster", f"{_interval(ratio)} faster")


def _interval(ratio: Estimate | None) -> str:
    return f"{digits(ratio.median)}x ({digits(ratio.low)}..{digits(ratio.high)})" if ratio else ""


def _ratio_row(what: str, figure: Figure | None, limit: float, goal: str) -> Row:
    value = figure.ratio.median if figure and figure.ratio else None
    text = f"{_interval(figure.ratio)}: {seconds(figure.value.median)}" if figure else ""
    return at_most(what, value, limit, goal, text)


def _lists(reports: Reports, loop: str) -> Iterator[Row]:
    for case in ("hot", "cold"):
        figure = reports.figure("list", loop, "prepared", case=case, verb="write")
        yield _ratio_row(f"256 x 4 KiB, one prepared call, {case}", figure, 1.3, "<= 1.3 x the bare copies")
    touch = reports.figure("touch", loop, "first write")
    yield Row("first touch of fresh memory", "", _interval(touch.ratio) + " a second write" if touch else "", None)


def _flight(reports: Reports, loop: str) -> Iterator[Row]:
    for size in (4 * KIB, 64 * KIB):
        what = f"64 coroutines x {nbytes(size)}"
        for level in ("inline", "threads", "faulty"):
            figure = reports.figure("flight", loop, level, bytes=size)
            rate = figure.extra["per_second"] if figure else None
            depth = figure.extra["in_flight"] if figure else 0.0
            text = f"{(rate or 0) / 1e3:,.0f} k/s, {depth:.0f} in flight"
            if size > 4 * KIB:
                yield Row(f"{what}, {level}", "", text if figure else "", None)
            elif level == "inline":
                yield at_least(f"{what}, {level}", rate, 1e6, ">= 1 M/s", text)
            else:
                goal = ">= 300 k/s, >= 32 in flight"
                yield at_least(f"{what}, {level}", min(rate / 3e5, depth / 32) if rate else None, 1, goal, text)
        ours, theirs = (reports.turns("flight", size, name, parts=64) for name in (f"hixl_async, {loop}", NIXL_SPIN))
        ratio = reports.ratio(ours, theirs)
        if size > 4 * KIB:
            yield Row(f"{what}, against {NIXL_SPIN}", "", f"{_interval(ratio)} as many" if ratio else "", None)
        else:
            yield at_least(
                f"{what}, against {NIXL_SPIN}",
                ratio.median if ratio else None,
                4,
                ">= 4x",
                f"{_interval(ratio)} as many",
            )


def _large(reports: Reports, loop: str) -> Iterator[Row]:
    figure = reports.figure("range", loop, "fresh", verb="write", bytes=LARGE)
    speed = 1 / figure.ratio.median if figure and figure.ratio else None
    yield at_least("128 MiB write", speed, 0.95, ">= 0.95 x memcpy", f"{digits(speed or 0)} x memcpy")
    stall = reports.figure("stall", loop, "write")
    value = stall.value.median if stall else None
    text = f"{seconds(value or 0)}, the ticker's 1 ms included"
    size = stall.bytes if stall else LARGE
    row = at_most(f"the loop's longest gap under a {nbytes(size)} write", value, 2e6, "< 2 ms", text)
    yield unless(row, "" if size == LARGE else f"of {nbytes(LARGE)}")
    for size in INLINE:
        busy = reports.figure("stall", loop, "writes", bytes=size)
        text = f"{seconds(busy.value.median)}, {_interval(busy.ratio)} an idle loop's" if busy else ""
        if busy and "worst_ms" in busy.extra:
            text += f"; the worst of {busy.blocks}: {digits(busy.extra['worst_ms'])} ms"
            text += f", in CPU time {digits(busy.extra['cpu_ms'])} ms"
        yield Row(f"the loop's longest gap under {nbytes(size)} writes without a pause", "", text, None)
    posted = reports.figure("post", loop, "posted")
    value = posted.value.median if posted else None
    yield at_most("10,000 descriptors, array in: loop time of the post", value, 5e5, "<= 0.5 ms", seconds(value or 0))
    landed = reports.figure("post", loop, "landed")
    text = f"{seconds(landed.value.median)}, {_interval(landed.ratio)} the bare copies" if landed else ""
    yield Row("10,000 descriptors, array in: until the last is complete", "", text, None)
    for rate in (one for one in reports.figures("rate", loop) if one.level == "fresh"):
        what = f"CPU s per GB, {nbytes(rate.bytes)} writes"
        text = f"{_interval(rate.ratio)}: {digits(rate.extra['cpu_s_per_GB'])} s"
        yield at_most(what, rate.ratio.median if rate.ratio else None, 1.2, "<= 1.2 x memcpy's", text)


def _wakes(reports: Reports, loop: str) -> Iterator[Row]:
    figure = reports.figure("notify", loop, "write + notify")
    what = "write + notify until the other process's coroutine runs"
    yield _ratio_row(what, figure, 1.25, "<= 1.25 x a bare eventfd")
    theirs = reports.turns("notify", 8, NIXL_SPIN)
    if theirs:
        yield Row(f"{what}, by {NIXL_SPIN} on both sides", "", seconds(estimate(theirs).median), None)
    idle = next((one for one in reports.figures("idle", loop) if one.level == "engine"), None)
    value = idle.value.median / 1e9 if idle else None
    case = idle.case if idle else IDLE
    row = at_most(f"idle engine, {case}", value, 0.02, "< 0.02 CPU s", f"{value or 0:.4f} s")
    yield unless(row, "" if case == IDLE else f"of {IDLE}")


def _streams(reports: Reports, loop: str) -> Iterator[Row]:
    for figure in (one for one in reports.figures("streaming", loop) if one.level == "exposed"):
        what = f"layer streaming, {figure.case}, TP8, {nbytes(figure.bytes)} a layer: exposed"
        other = "" if figure.case in STREAMED else f"of {' and '.join(STREAMED)}"
        row = _ratio_row(what, figure, 1.3, "<= 1.3 x one layer")
        yield unless(row, other or ("" if reports.slack >= 1 else "where computing takes as long as the transfer"))


def _two_sided(reports: Reports, loop: str) -> Iterator[Row]:
    ours = f"hixl_async, {loop}"
    for kind, told in (("write", ""), ("deliver", ", receiver told and answering")):
        for size in TWO_SIDED_SIZES:
            there = [name for name in TCP if reports.turns(kind, size, name)]
            best = min(there, key=lambda name: estimate(reports.turns(kind, size, name)).median, default=TCP[-1])
            for them in (best, GLOO):
                less = [
                    (1 - ratio.median) * 100 if ratio else None
                    for ratio in (
                        reports.ratio(*(reports.turns(kind, size, name, column) for name in (them, ours)))
                        for column in ("nanoseconds", "cpu")
                    )
                ]
                yield _lower(f"{nbytes(size)} against {them}{told}", less[0], less[1], kind == "write")


def _lower(what: str, latency: float | None, cpu: float | None, aimed: bool) -> Row:
    goal = "latency >= 40 %, CPU >= 60 % lower" if aimed else ""
    if latency is None or cpu is None:
        return Row(what, goal, "", None)
    text = ", ".join(
        f"{word} {abs(less):.0f} % {'lower' if less >= 0 else 'higher'}"
        for word, less in (("latency", latency), ("CPU", cpu))
    )
    return Row(what, goal, text, max(1 - latency / 40, 1 - cpu / 60) if aimed else None)
