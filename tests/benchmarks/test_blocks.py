"""Figures follow from their blocks."""

from __future__ import annotations

import math
import random

import pytest
from rig.blocks import Level, Pace, Series, estimate, interleave
from rig.figure import compare
from rig.table import nbytes, render, seconds


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (15, 3, 11), (20, 5, 14)])
def test_interval_of_a_median(count: int, low: int, high: int) -> None:
    """The ranks are those of the tables of the sign test for 95 %."""
    values = [float(i) for i in range(count)]
    random.Random(count).shuffle(values)
    found = estimate(values)
    assert (found.low, found.median, found.high) == (low, (count - 1) / 2, high)


async def test_levels_take_turns() -> None:
    order: list[str] = []

    def level(name: str, nanoseconds: int, share: int = 1) -> Level:
        async def run(times: int) -> int:
            order.append(name)
            return nanoseconds * times

        return Level(name, run, share)

    series = await interleave([level("a", 100), level("b", 300, 2), level("c", 50)], Pace(blocks=4, seconds=1e-4))
    assert "".join(order[-12:]) == "abcbcacababc"
    assert [one.nanoseconds for one in series] == [[100.0] * 4, [150.0] * 4, [50.0] * 4]
    # At least as many operations as fill a block.
    assert [one.iterations >= math.ceil(1e5 / 300) for one in series] == [True] * 3


async def test_one_slow_moment_makes_no_short_blocks() -> None:
    """A preempted run looks as if a single operation filled the block."""
    runs = 0

    async def run(times: int) -> int:
        nonlocal runs
        runs += 1
        return 10_000_000 if runs == 2 else 100 * times

    (series,) = await interleave([Level("a", run)], Pace(blocks=1, seconds=1e-4))
    assert series.iterations >= 1000


def test_ratios_are_formed_within_a_turn() -> None:
    """The ratio is 2 in every turn, although the machine becomes three times slower meanwhile."""
    floor, level = Series("floor", 1, [10.0, 30.0, 20.0], [1.0] * 3), Series("level", 1, [20.0, 60.0, 40.0], [1.0] * 3)
    first, second = compare([floor, level], part="list", loop="asyncio", case="hot")
    assert (first.floor, first.ratio) == (None, None)
    assert second.floor == "floor"
    assert second.ratio is not None
    assert (second.ratio.low, second.ratio.median, second.ratio.high) == (2, 2, 2)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(3.254, "3.25 ns"), (99.94, "99.9 ns"), (999.6, "1.00 us"), (12_340, "12.3 us"), (5e9, "5.00 s")],
)
def test_times_have_three_digits(nanoseconds: float, text: str) -> None:
    assert seconds(nanoseconds) == text


@pytest.mark.parametrize(("count", "text"), [(8, "8 B"), (4096, "4 KiB"), (5000, "5000 B"), (128 << 20, "128 MiB")])
def test_sizes_are_whole(count: int, text: str) -> None:
    assert nbytes(count) == text


def test_columns_are_aligned() -> None:
    series = [Series("copy", 1, [5.0], [5.0]), Series("driver", 1, [12345.0], [12345.0])]
    figures = [
        figure
        for size in (8, 1 << 20)
        for figure in compare(series, part="range", loop="asyncio", case="hot", verb="write", nbytes=size)
    ]
    lines = [line for line in render(figures) if line.startswith("  ")]
    assert [line.split() for line in lines[1:]] == [
        ["8", "B", "5.00", "ns", "12.3", "us", "x2469", "0.00065", "GB/s"],
        ["1", "MiB", "5.00", "ns", "12.3", "us", "x2469", "84.9", "GB/s"],
    ]
    assert len({line.index("12.3 us") for line in lines[1:]}) == 1
