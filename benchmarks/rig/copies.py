"""The ladder itself: the same copies by memcpy, by the driver, by the core, and by the public calls."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np

from hixl_async import Batch, Engine
from hixl_async.testing import FaultPlan, faulty
from rig.blocks import Level, Pace, interleave
from rig.figure import Figure, compare
from rig.pair import TARGET, Pair
from rig.plan import Plan

__all__ = ["measure_flight", "measure_list", "measure_post", "measure_range", "measure_rate"]

Verb = Literal["write", "read"]
VERBS: tuple[Verb, Verb] = ("write", "read")

BLOCK = 4096
#: The number of descriptors of a list, of lists that take turns so that memory is cold, and of coroutines in flight.
LIST, COLD_LISTS, FLIGHT = 256, 64, 64
FLIGHT_SIZES = (4 << 10, 64 << 10)
POST = 10_000
#: The size from which on the rate is measured.
RATE_FROM = 1 << 20
#: The size from which on a block is a single operation.
LARGE = 16 << 20


def _program(pair: Pair, batches: list[Batch]) -> Any:
    from rig import native  # importable once build() has run

    return native.Program(batches, pair.local.address, pair.mapped)


def _c_levels(pair: Pair, batches: list[Batch]) -> tuple[Level, Level]:
    """Return the bare copies of `batches`, and the same by the driver."""
    program = _program(pair, batches)

    async def copy(times: int) -> int:
        return int(program.copy(times))

    async def submit(times: int) -> int:
        return int(program.submit(times))

    return Level("copy", copy), Level("driver", submit)


# ---- one range -------------------------------------------------------------------------------------------------------


def _range_levels(pair: Pair, verb: Verb, size: int) -> Iterator[Level]:
    engine, kv, remote = pair.engine, pair.local, pair.remote
    a, b, c, d = 0, size, 0, size
    left, right = kv[a:b], remote[c:d]
    batch = Batch(verb, [(left, right)])

    async def prepared(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await engine.submit(batch)
        return perf_counter_ns() - start

    # One function per verb, so that the timed code is what a user writes.
    async def write_ready(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await engine.write(left, right)
        return perf_counter_ns() - start

    async def write_fresh(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await engine.write(kv[a:b], remote[c:d])
        return perf_counter_ns() - start

    async def read_ready(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await engine.read(left, right)
        return perf_counter_ns() - start

    async def read_fresh(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await engine.read(kv[a:b], remote[c:d])
        return perf_counter_ns() - start

    yield from _c_levels(pair, [batch])
    yield Level("core", prepared)
    yield Level("ready", write_ready if verb == "write" else read_ready)
    yield Level("fresh", write_fresh if verb == "write" else read_fresh)


async def measure_range(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure one range in hot memory, for both verbs and every size."""
    for verb in VERBS:
        for size in plan.sizes:
            levels = [level for level in _range_levels(pair, verb, size) if level.name in ("copy", *plan.levels)]
            series = await interleave(levels, plan.pace if size < LARGE else plan.slow_pace)
            for figure in compare(series, part="range", loop=loop, case="hot", verb=verb, nbytes=size):
                yield figure


# ---- lists -----------------------------------------------------------------------------------------------------------


# Arrays are Any here, because before Python 3.12 type checkers do not know that numpy's have the buffer protocol.
def _table(blocks: int) -> Any:
    """Return descriptors of distinct blocks in random order on both sides, as in a paged KV cache."""
    order = np.random.default_rng(1)
    left, right = order.permutation(blocks), order.permutation(blocks)
    return np.stack([left * BLOCK, right * BLOCK, np.full(blocks, BLOCK)], axis=1).astype(np.uint64)


def _list_levels(pair: Pair, verb: Verb, lists: int) -> Iterator[Level]:
    engine, kv, remote = pair.engine, pair.local, pair.remote
    tables: list[Any] = np.split(_table(lists * LIST), lists)
    batches = [Batch(verb, kv, remote, table) for table in tables]
    turn = 0

    async def prepared(times: int) -> int:
        nonlocal turn
        start = perf_counter_ns()
        for _ in range(times):
            turn = (turn + 1) % len(batches)
            await engine.submit(batches[turn])
        return perf_counter_ns() - start

    async def rows(times: int) -> int:
        nonlocal turn
        start = perf_counter_ns()
        for _ in range(times):
            turn = (turn + 1) % len(tables)
            await engine.submit(Batch(verb, kv, remote, tables[turn]))
        return perf_counter_ns() - start

    yield from _c_levels(pair, batches)
    yield Level("prepared", prepared)
    yield Level("rows", rows)


async def measure_list(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure 256 scattered blocks of 4 KiB in one call, in hot and in cold memory."""
    for verb in VERBS:
        for case, lists in (("hot", 1), ("cold", COLD_LISTS)):
            series = await interleave(list(_list_levels(pair, verb, lists)), plan.pace)
            for figure in compare(
                series, part="list", loop=loop, case=case, verb=verb, nbytes=LIST * BLOCK, descriptors=LIST
            ):
                yield figure


async def measure_post(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure 10,000 descriptors in one call: the time for which the loop is held, and the time until the last is done."""
    engine, kv, remote = pair.engine, pair.local, pair.remote
    rows = _table(POST)

    async def posted(times: int) -> int:
        held = 0
        for _ in range(times):
            start = perf_counter_ns()
            transfer = engine.submit(Batch("write", kv, remote, rows))
            held += perf_counter_ns() - start
            await transfer
        return held

    async def landed(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await engine.submit(Batch("write", kv, remote, rows))
        return perf_counter_ns() - start

    copy, driver = _c_levels(pair, [Batch("write", kv, remote, rows)])
    series = await interleave([copy, driver, Level("landed", landed), Level("posted", posted)], plan.pace)
    for figure in compare(
        series, part="post", loop=loop, case="array in", verb="write", nbytes=POST * BLOCK, descriptors=POST
    ):
        # The CPU time of the threads that run beside the post is not the post's.
        yield replace(figure, cpu_ns=None) if figure.level == "posted" else figure


# ---- many at once ----------------------------------------------------------------------------------------------------


async def measure_flight(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure 64 coroutines that each write block after block: inside the call, by the driver's threads, and by `faulty`.

    `threads` copies nothing inside the call.  `faulty` stands for a network: a thread of its own completes every operation,
    without a delay.
    """
    name = pair.driver
    async with (
        Engine(None, drivers={name: {"inline_bytes": 0}}) as threads,
        Engine(None, drivers=faulty(name, FaultPlan(seed=1).pending())) as slow,
    ):
        for size in FLIGHT_SIZES:
            copy, _ = _c_levels(pair, [Batch("write", pair.local, pair.remote, [(0, 0, size)])])
            depths: dict[str, list[int]] = {"inline": [], "threads": [], "faulty": []}
            levels = [copy, _writers(pair.engine, pair.local, pair.remote, size, "inline", depths["inline"])]
            for label, engine in (("threads", threads), ("faulty", slow)):
                peer = await engine.connect(pair.peer.address)
                local = engine.allocate(f"local-{size}", FLIGHT * size)
                levels.append(_writers(engine, local, await peer.region(TARGET), size, label, depths[label]))
            # A block must be long in comparison with the start of 64 tasks.
            series = await interleave(levels, Pace(plan.pace.blocks, plan.pace.seconds * 5))
            for figure in compare(series, part="flight", loop=loop, case="hot", verb="write", nbytes=size):
                extra = {"per_second": 1e9 / figure.value.median}
                if figure.level in depths:
                    extra["in_flight"] = statistics.median(depths[figure.level])
                yield replace(figure, extra=extra)


def _writers(engine: Engine, local: Any, target: Any, size: int, label: str, depths: list[int]) -> Level:
    """64 writers; before each of its writes, the last one records how many operations are in flight."""

    async def writer(i: int, times: int) -> None:
        a, b = i * size, (i + 1) * size
        for _ in range(times):
            if i == FLIGHT - 1:
                depths.append(engine.in_flight)
            await engine.write(local[a:b], target[a:b])

    async def run(times: int) -> int:
        start = perf_counter_ns()
        await asyncio.gather(*(writer(i, times) for i in range(FLIGHT)))
        return perf_counter_ns() - start

    return Level(label, run, share=FLIGHT)


# ---- at full speed ---------------------------------------------------------------------------------------------------


async def measure_rate(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure the CPU time of large writes, one after another, beside the bare copy's."""
    for size in (size for size in plan.sizes if size >= RATE_FROM):
        levels = [level for level in _range_levels(pair, "write", size) if level.name in ("copy", "fresh")]
        series = await interleave(levels, plan.pace if size < LARGE else plan.slow_pace)
        by_cpu = [replace(one, nanoseconds=one.cpu) for one in series]
        for figure, one in zip(
            compare(by_cpu, part="rate", loop=loop, case="CPU time", verb="write", nbytes=size), series, strict=True
        ):
            extra = {
                "GB_per_second": size / statistics.median(one.nanoseconds),
                "cpu_s_per_GB": figure.value.median / size,
            }
            yield replace(figure, cpu_ns=None, extra=extra)
