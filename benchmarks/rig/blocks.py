"""Timing: rungs take turns in short blocks, and what counts is the median over blocks.

A shared machine has slow seconds and fast ones.  Rungs that are compared are therefore measured in the same seconds:
block by block in turn, and a ratio is formed within each turn before the median is taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Estimate", "Pace", "Rung", "Series", "estimate", "interleave"]

#: Does an operation that many times and gives the elapsed nanoseconds.
Run = Callable[[int], Awaitable[int]]


@dataclass(frozen=True)
class Rung:
    """One way of doing the work."""

    name: str
    run: Run
    #: Operations that count for each one that `run` is asked for: 2 for a round trip of which one way is reported.
    share: int = 1
    #: CPU time so far of those who do the work, in nanoseconds; default: this process, all threads.
    cpu: Callable[[], int] = time.process_time_ns


@dataclass(frozen=True)
class Pace:
    """How much is measured."""

    #: Blocks of each rung.
    blocks: int
    #: Least duration of a block; operations are repeated until they fill it.
    seconds: float


@dataclass
class Series:
    """What the blocks of one rung gave, for one operation each."""

    rung: str
    #: Operations in a block.
    iterations: int
    nanoseconds: list[float] = field(default_factory=list)
    #: CPU time of those who did the work, all threads.
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval; the interval is that of the sorted values and assumes no distribution."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The median of `values`; under 6 values the interval is their whole range, which covers less than 95 %."""
    ordered = sorted(values)
    n, below, cut = len(ordered), 0.0, 0
    # The median lies under the k-th value with the probability that fewer than k of n tosses of a coin show heads.
    while cut < n // 2 and (below := below + math.comb(n, cut) / 2**n) <= 0.025:
        cut += 1
    cut = max(cut, 1)
    return Estimate(statistics.median(ordered), ordered[cut - 1], ordered[n - cut])


async def interleave(rungs: Sequence[Rung], pace: Pace) -> list[Series]:
    """Measures `rungs` in turn, each block starting with the next one, so that none always follows the same other."""
    counts = [await _calibrate(rung, pace.seconds) for rung in rungs]
    series = [Series(rung.name, count * rung.share) for rung, count in zip(rungs, counts, strict=True)]
    for block in range(pace.blocks):
        for step in range(len(rungs)):
            i = (block + step) % len(rungs)
            cpu = rungs[i].cpu()
            elapsed = await rungs[i].run(counts[i])
            cpu = rungs[i].cpu() - cpu
            series[i].nanoseconds.append(elapsed / series[i].iterations)
            series[i].cpu.append(cpu / series[i].iterations)
    return series


async def _calibrate(rung: Rung, seconds: float) -> int:
    """How many operations fill a block; finding out warms up caches, page tables and branch predictors."""
    count, target = 1, seconds * 1e9
    await rung.run(count)
    # Twice: once may have been the scheduler's doing, and a block of a single operation would measure how it begins and ends.
    while (elapsed := await rung.run(count)) < target or (target and (elapsed := await rung.run(count)) < target):
        count = min(count * 10, max(count + 1, math.ceil(count * target / max(elapsed, 1) * 1.1)))
    return count
