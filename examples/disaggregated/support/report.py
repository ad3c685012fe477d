"""The demo's output: progress, text as it is generated, comparisons and measurements."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import zip_longest
from shutil import get_terminal_size
from statistics import median
from typing import NamedTuple

from .router import Run
from .timeline import Track
from .tokenizer import TextStream, Tokenizer

_WIDTH = 100  # of a line, at most
_LABEL, _COLUMN = 38, 22  # of a table


class ReaderLeft(Exception):
    """The reader of the output has closed it, as `head` does when it has enough."""


class Console:
    """Standard output, and standard error for failures.

    :param quiet: print results only.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal can't show
        self._quiet = quiet
        self._terminal = sys.stdout.isatty()
        self._width = min(_WIDTH, get_terminal_size((_WIDTH, 24)).columns)
        self._stage = ""
        self._transient = False
        self._line_begun = False

    def line(self, text: str = "") -> None:
        """Print a line."""
        if not self._quiet:
            self._write(f"{text}\n")

    def heading(self, text: str) -> None:
        """Print a line that begins a section."""
        self.line(f"\n{f'── {text} ':─<{self._width}}\n")

    def paragraphs(self, text: str, indent: str = "") -> None:
        """Print running text, each of its lines wrapped."""
        for line in text.splitlines():
            wrapped = textwrap.fill(line, self._width, initial_indent=indent, subsequent_indent=indent)
            self.line(wrapped or indent.rstrip())

    def notice(self, text: str) -> None:
        """Print a line, and end one that is begun."""
        self.line(f"\n{text}" if self._line_begun and not self._transient else text)

    def piece(self, text: str) -> None:
        """Print a piece of a line."""
        if not self._quiet and text:
            self._write(text)

    def result(self, text: str) -> None:
        """Print a line that is shown even if only results are wanted."""
        self._write(f"{text}\n")

    def fail(self, text: str) -> None:
        """Report a failure on standard error."""
        self._write("\n" if self._line_begun else "")
        print(text, file=sys.stderr)

    def progress(self, stage: str, detail: str = "") -> None:
        """Show progress: on a terminal until the next text comes, elsewhere by a line for each new stage."""
        if self._quiet or (self._line_begun and not self._transient):
            return
        if self._terminal:
            self._write(f"{stage} {detail}".rstrip()[: self._width - 1])
            self._transient = True
        elif stage != self._stage:
            self._write(f"({stage} ...)\n")
        self._stage = stage

    def _write(self, text: str) -> None:
        if text:
            self._line_begun = not text.endswith("\n")
        if self._transient:
            self._transient = False
            text = f"\r\x1b[K{text}"
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            # The rest of its buffer would fail once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise ReaderLeft from None


class Typewriter:
    """The output of an answer as its tokens come."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer)

    def token(self, token: int) -> None:
        if not self._tokenizer.is_special(token):
            self._console.piece(self._text.feed(token))

    def finish(self) -> None:
        self._console.piece(f"{self._text.finish()}\n")


Column = dict[str, str]
"""Figures, by what they are."""


def timing(run: Run, *, expected_exposed: str = "") -> Column:
    """Return the time spent in each part. An indented row is a part of the one above it.

    :param expected_exposed: what the exposed transfer should be, for comparison.
    """
    prefill, *further = run.steps
    column = {
        "time to first token": milliseconds(run.heard_ns[0] - run.asked_ns),
        "  dispatch": milliseconds(prefill.start_ns - run.asked_ns),
        "  prefill": milliseconds(prefill.end_ns - prefill.start_ns),
    }
    if (exposed := run.timeline.exposed_ns()) is not None:
        column["  transfer exposed after the prefill"] = milliseconds(exposed)
    if expected_exposed:
        column["    expected"] = expected_exposed
    if further:
        column["each further token"] = milliseconds(median(step.end_ns - step.start_ns for step in further))
    return column


def traffic(run: Run) -> Column:
    """Return what P sent to D, and where it lay: in unordered blocks, different ones on the two sides."""
    sent = run.reports["P"]
    transfers = run.timeline.on(Track.TRANSFER)
    return {
        "K/V sent": size(sent.transferred),
        "  per layer": f"{size(sent.transferred / len(sent.kv))} in {sent.transfers / len(sent.kv):g} transfer",
        "  time under way, per layer": milliseconds(median(span.end_ns - span.start_ns for span in transfers)),
        "  from P's blocks": _blocks(sent.blocks),
        "  to D's blocks": _blocks(run.reports["D"].blocks),
    }


def _blocks(table: Sequence[int]) -> str:
    shown = 3
    return ", ".join(map(str, table[:shown])) + (", ..." if len(table) > shown else "")


class Comparison(NamedTuple):
    """The part of something that is equal in two answers."""

    what: str
    total: int
    different: list[int]
    """The positions at which it is not."""

    @property
    def identical(self) -> bool:
        return self.total > 0 and not self.different

    def __str__(self) -> str:
        same = f"{self.total - len(self.different)} of {self.total}"
        return same if self.identical else f"{same}, DIFFERENT"


def compare(run: Run, alone: Run) -> list[Comparison]:
    """Compare an answer of P and D with the reference's, which may be longer if more was asked for."""
    found, expected = run.steps, alone.steps[: run.max_tokens]
    kv = alone.reports["reference"].kv
    return [
        _compare("tokens equal", [step.token for step in found], [step.token for step in expected]),
        _compare("logits bit-identical", [step.logits for step in found], [step.logits for step in expected]),
        _compare("K/V bytes identical in P (layers)", run.reports["P"].kv, kv),
        _compare("K/V bytes identical in D (layers)", run.reports["D"].kv, kv),
    ]


def _compare(what: str, found: Sequence[str | int], expected: Sequence[str | int]) -> Comparison:
    pairs = list(zip_longest(found, expected))
    return Comparison(what, len(pairs), [place for place, (one, other) in enumerate(pairs) if one != other])


def table(names: Sequence[str], *groups: Sequence[Column]) -> str:
    """Return groups of rows with a column for each of the names. The first column decides the order of rows."""
    lines = [_row("", names)]
    for columns in groups:
        rows = dict.fromkeys(row for column in columns for row in column)
        lines += ["", *(_row(row, [column.get(row, "") for column in columns]) for row in rows)]
    return "\n".join(lines)


def _row(label: str, cells: Sequence[str]) -> str:
    return (f"{label:<{_LABEL}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()


def milliseconds(nanoseconds: float) -> str:
    value = nanoseconds / 1e6
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def size(nbytes: float) -> str:
    """Return a number of bytes as text for people."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
