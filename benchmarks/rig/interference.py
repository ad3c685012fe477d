"""What must not be felt: the loop under a large transfer, memory that is touched for the first time, an idle engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from time import perf_counter_ns

from rig.blocks import Rung, Series, estimate, interleave
from rig.figure import Figure, compare
from rig.pair import Pair
from rig.plan import Plan

__all__ = ["measure_idle", "measure_stall", "measure_touch"]

#: Bytes of writes that are done inside of the call: a usual one, and the largest.
INLINE = (4 << 10, 1 << 20)


class Ticker:
    """A timer of one millisecond; remembers the longest time between two of its ticks, and the loop's CPU time in such."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = perf_counter_ns()
        self._cpu = time.thread_time_ns()
        self._worst = self.worst_cpu = 0
        self._timer = self._loop.call_later(0.001, self._tick)

    def _tick(self) -> None:
        self._look()
        self._timer = self._loop.call_later(0.001, self._tick)

    def _look(self) -> None:
        now = perf_counter_ns()
        self._worst = max(self._worst, now - self._last)
        self._last = now
        cpu = time.thread_time_ns()
        self.worst_cpu = max(self.worst_cpu, cpu - self._cpu)
        self._cpu = cpu

    def stop(self) -> int:
        """The longest gap so far, the one until now included; nanoseconds."""
        self._timer.cancel()
        self._look()
        return self._worst


async def measure_stall(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """The longest gap of a 1 ms ticker on a loop at work, beside the same ticker on an idle one.

    While the largest write is awaited, which threads carry out, and while a coroutine writes without a pause.
    """
    engine, kv, remote = pair.engine, pair.local, pair.remote
    size = max(plan.sizes)
    seconds = 0.0

    async def write(_: int) -> int:
        nonlocal seconds
        start = perf_counter_ns()
        ticker = Ticker()
        await engine.write(kv[:size], remote[:size])
        worst = ticker.stop()
        seconds = (perf_counter_ns() - start) / 1e9
        return worst

    async def idle(_: int) -> int:
        ticker = Ticker()
        await asyncio.sleep(seconds)
        return ticker.stop()

    await write(1)
    series = await interleave([Rung("idle loop", idle), Rung("write", write)], plan.slow_pace)
    for figure in _gaps(series, loop, "longest gap", size):
        yield figure
    seconds = plan.busy_seconds
    for size in INLINE:
        cpu: list[int] = []
        series = await interleave([Rung("idle loop", idle), _busy(pair, size, seconds, cpu)], plan.slow_pace)
        for figure in _gaps(series, loop, "no pause", size):
            if figure.rung == "writes":  # without what the scheduler gave to others
                figure.extra["cpu_ms"] = max(cpu) / 1e6
            yield figure


def _gaps(series: list[Series], loop: str, case: str, size: int) -> Iterator[Figure]:
    """Beside the medians of the longest gaps, the longest of all."""
    figures = compare(series, part="stall", loop=loop, case=case, verb="write", nbytes=size, cpu=False)
    for figure, one in zip(figures, series, strict=True):
        yield replace(figure, extra={"worst_ms": max(one.nanoseconds) / 1e6})


def _busy(pair: Pair, size: int, seconds: float, cpu: list[int]) -> Rung:
    """A coroutine that awaits nothing but writes that are done at once; `cpu` gets the longest gaps in the loop's CPU time."""
    engine, kv, remote = pair.engine, pair.local, pair.remote

    async def write(_: int) -> int:
        end = perf_counter_ns() + round(seconds * 1e9)
        ticker = Ticker()
        while perf_counter_ns() < end:
            await engine.write(kv[:size], remote[:size])
        worst = ticker.stop()
        cpu.append(ticker.worst_cpu)
        return worst

    return Rung("writes", write)


async def measure_touch(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Importing a fresh region, the first write into it from memory that is fresh as well, and the second write."""
    size = plan.touch
    again, first, imported = Series("second write", 1), Series("first write", 1), Series("import", 1)
    for turn in range(plan.slow_pace.blocks):
        name = (await pair.ask("fresh", size=size))["name"]
        start = perf_counter_ns()
        remote = await pair.peer.region(name)
        imported.nanoseconds.append(perf_counter_ns() - start)
        async with pair.engine.allocate(f"touch-{turn}", size) as local:
            for series in (first, again):
                start = perf_counter_ns()
                await pair.engine.write(local[:], remote[:])
                series.nanoseconds.append(perf_counter_ns() - start)
    for figure in compare([again, first, imported], part="touch", loop=loop, case="fresh", verb="write", nbytes=size):
        yield figure


async def measure_idle(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """CPU time of an engine with many connections on which nothing happens."""
    await pair.ask("dial", count=plan.connections, address=pair.engine.address)
    await asyncio.sleep(0.2)  # handshakes settle
    theirs = (await pair.ask("cpu"))["ns"]
    ours = time.process_time_ns()
    await asyncio.sleep(plan.idle_seconds)
    ours = time.process_time_ns() - ours
    theirs = (await pair.ask("cpu"))["ns"] - theirs
    await pair.ask("hang_up")
    for rung, spent in (("engine", ours), ("clients", theirs)):
        yield Figure(
            part="idle",
            loop=loop,
            case=f"{plan.connections} connections, {plan.idle_seconds:g} s",
            rung=rung,
            verb=None,
            bytes=0,
            descriptors=0,
            unit="ns",
            value=estimate([spent]),
            cpu_ns=None,
            floor="one core",
            ratio=estimate([spent / (plan.idle_seconds * 1e9)]),
            blocks=1,
            iterations=1,
            extra={},
        )
