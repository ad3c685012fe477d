"""Timing: levels take turns in short blocks, and the result is the median over blocks.

The speed of a shared machine changes from second to second.  Levels that are compared are therefore measured in the same
seconds: they take turns block by block, and a ratio is formed within each turn before the median is taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Estimate", "Level", "Pace", "Series", "estimate", "interleave"]

#: Does an operation so many times and returns the elapsed nanoseconds.
Run = Callable[[int], Awaitable[int]]


@dataclass(frozen=True)
class Level:
    """One way of doing the work."""

    name: str
    run: Run
    #: The number of operations that each requested one counts for: 2 for a round trip of which one way is reported.
    share: int = 1
    #: The CPU time so far of the processes that do the work, in nanoseconds; default: this process, all threads.
    cpu: Callable[[], int] = time.process_time_ns


@dataclass(frozen=True)
class Pace:
    """The amount of measuring."""

    #: Blocks of each level.
    blocks: int
    #: Least duration of a block; operations are repeated until they fill it.
    seconds: float


@dataclass
class Series:
    """The results of one level's blocks, for one operation each."""

    level: str
    #: Operations in a block.
    iterations: int
    nanoseconds: list[float] = field(default_factory=list)
    #: CPU nanoseconds of the processes that did the work, all threads.
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval; the interval is that of the sorted values and assumes no distribution."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of `values` with its interval; below 6 values, that is their range, which covers less than 95 %."""
    ordered = sorted(values)
    n, below, cut = len(ordered), 0.0, 0
    # The median lies under the k-th value with the probability that fewer than k of n tosses of a coin show heads.
    while cut < n // 2 and (below := below + math.comb(n, cut) / 2**n) <= 0.025:
        cut += 1
    cut = max(cut, 1)
    return Estimate(statistics.median(ordered), ordered[cut - 1], ordered[n - cut])


async def interleave(levels: Sequence[Level], pace: Pace) -> list[Series]:
    """Measure `levels` in turn; each round starts with the next one, so that no level always follows the same other."""
    counts = [await _calibrate(level, pace.seconds) for level in levels]
    series = [Series(level.name, count * level.share) for level, count in zip(levels, counts, strict=True)]
    for block in range(pace.blocks):
        for step in range(len(levels)):
            i = (block + step) % len(levels)
            cpu = levels[i].cpu()
            elapsed = await levels[i].run(counts[i])
            cpu = levels[i].cpu() - cpu
            series[i].nanoseconds.append(elapsed / series[i].iterations)
            series[i].cpu.append(cpu / series[i].iterations)
    return series


async def _calibrate(level: Level, seconds: float) -> int:
    """Return how many operations fill a block; this also warms up caches, page tables and branch predictors."""
    count, target = 1, seconds * 1e9
    await level.run(count)
    # Twice, because the scheduler may have caused the first one, and a block that is too short measures its own overhead.
    while (elapsed := await level.run(count)) < target or (target and (elapsed := await level.run(count)) < target):
        count = min(count * 10, max(count + 1, math.ceil(count * target / max(elapsed, 1) * 1.1)))
    return count
