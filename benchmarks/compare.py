"""Compare two versions of hixl_async in one run, and fail where the later one is slower.

::

    python benchmarks/compare.py BEFORE                      # against the tree of this file, some minutes
    python benchmarks/compare.py BEFORE AFTER --json out.json
    python benchmarks/compare.py BEFORE --cells write KV --loop uvloop --pairs 40

BEFORE and AFTER are two checkouts, each built in place with an environment of its own (``make build`` in each).  Both run the
same workload, workload.py, and take turns cell by cell: a pair is one block of the one and one block of the other, with the
same number of operations.  Pairs are spread over several starts of the processes (``--starts``), because where the memory of
a process happens to lie can speed it up or slow it down for all of its life.

The ratio after / before is formed within each pair; its median has a 95 % interval that assumes no distribution.  A cell whose
interval lies wholly above ``--limit`` is measured again, with new processes, and fails only if that happens again.

The exit code: 0 if no cell fails, 1 if one does, 2 if a tree cannot be measured.

The JSON (schema 2): schema, benchmark ("compare"), started, seconds, arguments, commit, machine, versions as of ladder.py;
before, after ({tree, commit}), limit, and

    cells   a list of:
        loop, cell
        times       operations in a block
        runs        a list, one entry or two, of {before, after, ratio}: nanoseconds of one operation in each block, and
                    {median, low, high} of the ratios
        error       null, or the reason why there are no figures
        failed      true or false
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rig.blocks import Estimate, estimate
from rig.command import add_json_choice, add_loop_choice, amount, count, existing, loops, publish
from rig.machine import commit, heading, preamble
from rig.table import align, digits, seconds

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE / "workload.py"


class WorkloadError(Exception):
    """A tree cannot be measured; the text says why."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare two versions of hixl_async; fail where the later one is slower."
    )
    add = parser.add_argument
    add(
        "before",
        type=existing,
        metavar="BEFORE",
        help="a checkout that is built in place, with its environment in .venv",
    )
    add("after", type=existing, nargs="?", default=HERE.parent, metavar="AFTER", help="the same; default: this one")
    add_json_choice(parser)
    add_loop_choice(parser)
    add("--pairs", type=count, default=24, metavar="N", help="pairs of blocks for each cell (24)")
    add(
        "--starts",
        type=count,
        default=4,
        metavar="N",
        help="starts of the processes, over which the pairs are spread (4)",
    )
    add("--limit", type=amount, default=1.03, metavar="RATIO", help="largest ratio after / before (1.03)")
    add("--block", type=amount, default=0.01, metavar="SECONDS", help="least duration of a block (0.01)")
    add("--cells", nargs="+", default=[], metavar="TEXT", help="measure only cells whose names contain one of these")
    return parser.parse_args(argv)


# ---- the processes ---------------------------------------------------------------------------------------------------


class Workload:
    """One tree's pair of processes."""

    def __init__(self, tree: Path, loop: str) -> None:
        self._tree = tree
        command = [str(tree / ".venv" / "bin" / "python"), str(WORKLOAD), "--loop", loop]
        try:
            self._process = subprocess.Popen(
                command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        except OSError as error:
            raise WorkloadError(f"{tree}: {error}; build it first: make build") from None
        hello = self._read()
        if Path(hello["package"]).resolve() != (tree / "hixl_async").resolve():
            self.close()
            raise WorkloadError(f"the interpreter of {tree} imports hixl_async from {hello['package']}")
        self.cells: list[str] = hello["cells"]

    def run(self, cell: str, times: int) -> int:
        """Do the work of `cell` so many times; nanoseconds.

        :raises RuntimeError: if the cell fails; the text is the workload's.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"cell": cell, "times": times}) + "\n")
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self._tree}: {answer['error']}")
        return int(answer["ns"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise WorkloadError(f"the workload ended in {self._tree}; its own message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End both processes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Blocks of one cell, in pairs; nanoseconds of one operation."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Estimate:
        """Of after to before, pair by pair."""
        return estimate([after / before for before, after in zip(self.before, self.after, strict=True)])


@dataclass
class Cell:
    """One thing that both trees do."""

    loop: str
    cell: str
    #: Operations in a block.
    times: int = 0
    runs: list[Run] = field(default_factory=list)
    error: str | None = None

    def slower(self, limit: float) -> bool:
        """True if the interval of the last run lies wholly above `limit`."""
        return bool(self.runs) and self.runs[-1].ratio.low > limit

    def failed(self, limit: float) -> bool:
        """True if it was slower twice, or has no figures."""
        return self.error is not None or (len(self.runs) > 1 and self.slower(limit))

    def as_json(self, limit: float) -> dict[str, Any]:
        """Plain data; the schema is above."""
        runs = [{**asdict(run), "ratio": asdict(run.ratio)} for run in self.runs]
        return {**asdict(self), "runs": runs, "failed": self.failed(limit)}


def measure(trees: tuple[Path, Path], cells: Sequence[Cell], options: argparse.Namespace) -> None:
    """Append a run to each of the cells, which are all of one event loop."""
    for cell in cells:
        cell.runs.append(Run())
    starts = min(options.starts, options.pairs)
    for start in range(starts):
        pairs = options.pairs // starts + (start < options.pairs % starts)
        with ExitStack() as stack:
            before, after = (stack.enter_context(Workload(tree, cells[0].loop)) for tree in trees)
            for cell in cells:
                if cell.error is None:
                    print(f"{cell.loop}, start {start + 1} of {starts}: {cell.cell} ...", file=sys.stderr, flush=True)
                    try:
                        _take_pairs(cell, before, after, pairs, options.block)
                    except RuntimeError as error:
                        cell.error = str(error)
                        cell.runs.pop()


def _take_pairs(cell: Cell, before: Workload, after: Workload, pairs: int, seconds: float) -> None:
    warm = max(_calibrate(workload, cell.cell, seconds) for workload in (before, after))
    cell.times = cell.times or warm
    run = cell.runs[-1]
    for pair in range(pairs):
        sides = [(before, run.before), (after, run.after)]
        for workload, blocks in sides if pair % 2 else reversed(sides):
            blocks.append(workload.run(cell.cell, cell.times) / cell.times)


def _calibrate(workload: Workload, cell: str, seconds: float) -> int:
    """Return how many operations fill a block; this also warms up caches, page tables and branch predictors."""
    times, target = 1, seconds * 1e9
    workload.run(cell, times)
    while (elapsed := workload.run(cell, times)) < target:
        times = min(times * 10, max(times + 1, math.ceil(times * target / elapsed * 1.1)))
    return times


def names(trees: tuple[Path, Path], loop: str, wanted: Sequence[str]) -> list[str]:
    """The cells that both trees have and that are wanted."""
    both: list[list[str]] = []
    for tree in trees:
        with Workload(tree, loop) as workload:
            both.append(workload.cells)
    return [name for name in both[0] if name in both[1] and (not wanted or any(word in name for word in wanted))]


def compare(trees: tuple[Path, Path], options: argparse.Namespace) -> list[Cell]:
    """Measure every cell on every loop; those that are slower once more."""
    cells = []
    for loop in loops(options.loop):
        found = [Cell(loop, name) for name in names(trees, loop, options.cells)]
        if not found:
            raise WorkloadError(f"no cell has one of these in its name: {', '.join(options.cells)}")
        measure(trees, found, options)
        again = [cell for cell in found if cell.slower(options.limit)]
        if again:
            measure(trees, again, options)
        cells += found
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; the exit code."""
    options = arguments(argv)
    trees = (options.before.resolve(), options.after.resolve())
    report = preamble("compare", sys.argv[1:] if argv is None else argv)
    began = time.monotonic()
    try:
        cells = compare(trees, options)
    except WorkloadError as error:
        print(error, file=sys.stderr)
        return 2
    report["seconds"] = round(time.monotonic() - began, 1)
    report["limit"] = options.limit
    for side, tree in zip(("before", "after"), trees, strict=True):
        report[side] = {"tree": str(tree), "commit": commit(tree)}
    report["cells"] = [cell.as_json(options.limit) for cell in cells]
    publish(report, [*heading(report), *render(report)], options.json)
    return 1 if any(cell.failed(options.limit) for cell in cells) else 0


def render(report: dict[str, Any]) -> Iterator[str]:
    """A table per event loop, and the verdict."""
    for side in ("before", "after"):
        yield f"{side}: {report[side]['tree']}, commit {report[side]['commit'] or 'unknown'}"
    for loop in dict.fromkeys(cell["loop"] for cell in report["cells"]):
        yield ""
        yield f"Time of one operation, and after / before within each pair ({loop})"
        rows = [["", "before", "after", "ratio", "95 %", "pairs", ""]]
        rows += [row for cell in report["cells"] if cell["loop"] == loop for row in _rows(cell, report["limit"])]
        yield from align(rows)
    failed = [cell for cell in report["cells"] if cell["failed"]]
    yield ""
    yield f"{len(failed)} of {len(report['cells'])} cells failed: above x{report['limit']:g} twice, or without figures."


def _rows(cell: dict[str, Any], limit: float) -> Iterator[list[str]]:
    for run in cell["runs"]:
        ratio = Estimate(**run["ratio"])
        yield [
            cell["cell"],
            *(seconds(estimate(run[side]).median) for side in ("before", "after")),
            f"x{ratio.median:.3f}",
            f"{ratio.low:.3f}..{digits(ratio.high) if ratio.high > 10 else f'{ratio.high:.3f}'}",
            str(len(run["before"])),
            f"above x{limit:g}" if ratio.low > limit else "",
        ]
    if cell["error"]:
        yield [cell["cell"], cell["error"]]


if __name__ == "__main__":
    sys.exit(main())
