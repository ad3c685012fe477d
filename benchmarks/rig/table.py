"""Figures for people: one aligned table per part, every figure with its ratio to the floor of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rig.blocks import Estimate
from rig.figure import Figure

__all__ = ["align", "digits", "nbytes", "render", "seconds"]

#: What the columns and rows are, in words.
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
    "streaming": "What is left of the transfer when the computation is over",
    "notify": "Write + notify, one way, until the other process's coroutine runs",
    "stall": "The longest gap of a 1 ms ticker on the loop",
    "touch": "Memory that nobody has touched",
    "idle": "CPU time of an idle engine",
    "device": "A GPU's memory as the local side",
}


def seconds(nanoseconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= 0.9995 * size:
            return f"{digits(nanoseconds / size)} {unit}"
    return f"{digits(nanoseconds)} ns"


def nbytes(count: int) -> str:
    """A count of bytes in the largest unit that keeps it whole."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def digits(value: float) -> str:
    """Three of them."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(ratio: Estimate) -> str:
    return f"x{digits(ratio.median)}"


def _interval(ratio: Estimate) -> str:
    return f"x{digits(ratio.low)}..{digits(ratio.high)}"


def render(figures: Sequence[Figure]) -> Iterator[str]:
    """The lines of all tables."""
    for part, title in TITLES.items():
        mine = [figure for figure in figures if figure.part == part]
        for loop in dict.fromkeys(figure.loop for figure in mine):
            of_loop = [figure for figure in mine if figure.loop == loop]
            yield ""
            yield f"{title} ({loop})"
            yield from _matrix(of_loop) if part == "range" else _rows(of_loop)


def legend() -> Iterator[str]:
    """What the rungs are."""
    for rung, text in LEGEND.items():
        yield f"  {rung:7} {text}"


def _matrix(figures: Sequence[Figure]) -> Iterator[str]:
    """A row per size and a column per rung."""
    rungs = list(dict.fromkeys(figure.rung for figure in figures))
    cells = {(figure.verb, figure.bytes, figure.rung): figure for figure in figures}
    for verb in dict.fromkeys(figure.verb for figure in figures):
        rows = [[verb or "", *rungs, f"{rungs[-1]}, rate"]]
        for size in dict.fromkeys(figure.bytes for figure in figures):
            line = [cells[verb, size, rung] for rung in rungs]
            rate = f"{digits(size / line[-1].value.median)} GB/s"
            rows.append([nbytes(size), *(_cell(figure) for figure in line), rate])
        yield from align(rows)


def _cell(figure: Figure) -> str:
    ratio = f"{_times(figure.ratio):>6}" if figure.ratio is not None else ""
    return f"{seconds(figure.value.median):>7} {ratio}".rstrip()


def _rows(figures: Sequence[Figure]) -> Iterator[str]:
    """A row per figure."""
    rows = [["", "rung", "median", "95 %", "ratio", "95 %", "to", "CPU"]]
    for figure in figures:
        value, ratio = figure.value, figure.ratio
        extra = ", ".join(f"{name.replace('_', ' ')} {_number(number)}" for name, number in figure.extra.items())
        several = figure.blocks > 1
        rows.append(
            [
                " ".join(filter(None, (figure.verb, figure.case, nbytes(figure.bytes) if figure.bytes else ""))),
                figure.rung,
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
    """Rows of cells as lines of columns."""
    table = list(rows)
    width = max(len(row) for row in table)
    padded = [[*row, *[""] * (width - len(row))] for row in table]
    widths = [max(len(row[column]) for row in padded) for column in range(width)]
    for row in padded:
        # Words to the left, numbers to the right; a row's first cell is always a word.
        cells = [
            cell.ljust(size) if column == 0 or cell[:1].isalpha() else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
