"""Figures as text: one aligned table per part, every figure with its ratio to the floor of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rig.blocks import Estimate
from rig.figure import Figure

__all__ = ["align", "digits", "nbytes", "render", "seconds"]

#: The levels of single ranges, in words.
LEGEND = {
    "copy": "memcpy in C, over the same mapped pages of the peer's segment",
    "driver": "the driver's submit, called in a C loop on the engine's link",
    "core": "await engine.submit(batch), batch prepared",
    "ready": "await engine.write(left, right), slices made before",
    "fresh": "await engine.write(kv[a:b], remote[c:d])",
}

TITLES = {
    "range": "One range, hot memory",
    "list": "256 blocks of 4 KiB in random order on both sides, one call",
    "post": "10,000 blocks of 4 KiB, one call, array in",
    "flight": "64 coroutines, each writes block after block (time per write)",
    "rate": "CPU time of one large write",
    "streaming": "The transfer that is left when the computation is over",
    "notify": "Write + notify, one way, until the other process's coroutine runs",
    "stall": "The longest gap of a 1 ms ticker on the loop",
    "touch": "Untouched memory",
    "idle": "CPU time of an idle engine",
    "device": "A GPU's memory as the local side",
}


def seconds(nanoseconds: float) -> str:
    """Return a time with three digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= 0.9995 * size:
            return f"{digits(nanoseconds / size)} {unit}"
    return f"{digits(nanoseconds)} ns"


def nbytes(count: int) -> str:
    """Return a count of bytes in the largest unit that keeps it whole."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def digits(value: float) -> str:
    """Return a number with three digits."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(ratio: Estimate) -> str:
    return f"x{digits(ratio.median)}"


def _interval(ratio: Estimate) -> str:
    return f"x{digits(ratio.low)}..{digits(ratio.high)}"


def render(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of all tables."""
    for part, title in TITLES.items():
        mine = [figure for figure in figures if figure.part == part]
        for loop in dict.fromkeys(figure.loop for figure in mine):
            of_loop = [figure for figure in mine if figure.loop == loop]
            yield ""
            yield f"{title} ({loop})"
            yield from _matrix(of_loop) if part == "range" else _rows(of_loop)


def legend() -> Iterator[str]:
    """Yield the lines that explain the levels."""
    for level, text in LEGEND.items():
        yield f"  {level:7} {text}"


def _matrix(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a row per size, with a column per level."""
    levels = list(dict.fromkeys(figure.level for figure in figures))
    cells = {(figure.verb, figure.bytes, figure.level): figure for figure in figures}
    for verb in dict.fromkeys(figure.verb for figure in figures):
        rows = [[verb or "", *levels, f"{levels[-1]}, rate"]]
        for size in dict.fromkeys(figure.bytes for figure in figures):
            line = [cells[verb, size, level] for level in levels]
            rate = f"{digits(size / line[-1].value.median)} GB/s"
            rows.append([nbytes(size), *(_cell(figure) for figure in line), rate])
        yield from align(rows)


def _cell(figure: Figure) -> str:
    ratio = f"{_times(figure.ratio):>6}" if figure.ratio is not None else ""
    return f"{seconds(figure.value.median):>7} {ratio}".rstrip()


def _rows(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a row per figure."""
    rows = [["", "level", "median", "95 %", "ratio", "95 %", "to", "CPU"]]
    for figure in figures:
        value, ratio = figure.value, figure.ratio
        extra = ", ".join(f"{name.replace('_', ' ')} {_number(number)}" for name, number in figure.extra.items())
        several = figure.blocks > 1
        rows.append(
            [
                " ".join(filter(None, (figure.verb, figure.case, nbytes(figure.bytes) if figure.bytes else ""))),
                figure.level,
                seconds(value.median),
                f"{seconds(value.low)} .. {seconds(value.high)}" if several else "",
                _times(ratio) if ratio else "",
                _interval(ratio) if ratio and several else "",
                figure.floor or "floor",
                seconds(figure.cpu_ns) if figure.cpu_ns is not None else "",
                extra,
            ]
        )
    yield from align(rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else digits(value)


def align(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows of cells as lines with aligned columns."""
    table = list(rows)
    width = max(len(row) for row in table)
    padded = [[*row, *[""] * (width - len(row))] for row in table]
    widths = [max(len(row[column]) for row in padded) for column in range(width)]
    for row in padded:
        # Words are aligned to the left, numbers to the right; a row's first cell is always a word.
        cells = [
            cell.ljust(size) if column == 0 or cell[:1].isalpha() else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
