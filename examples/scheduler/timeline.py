"""What happened when: recorded in each process, drawn as text in one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .records import OnLayer, Part, Sample, Step

WIDTH = 100  # columns


class Span(NamedTuple):
    """A time in which something was done for some requests; in seconds, by the clock that all processes of a host share."""

    what: str
    first: float
    last: float
    numbers: list[int]


@dataclass
class Recorder:
    """The record of a process."""

    spans: list[Span] = field(default_factory=list)
    _arriving: dict[int, float] = field(default_factory=dict)

    def recorded(self, what: str, step: Step) -> Step:
        """Return a step that is recorded."""

        def recorded_step(parts: Sequence[Part], on_layer: OnLayer | None) -> list[Sample]:
            began = time.monotonic()
            try:
                return step(parts, on_layer)
            finally:
                self._add(what, began, time.monotonic(), [part.number for part in parts])

        return recorded_step

    def tell(self, event: str, number: int) -> None:
        """Record an event of a request; of a prompt's layers the time from the first one to the event after the last one."""
        now = time.monotonic()
        if event == "layer":
            self._arriving.setdefault(number, now)
        elif (first := self._arriving.pop(number, None)) is not None:
            self._add("arrival", first, now, [number])
        if event == "preempted":
            self._add(event, now, now, [number])

    def _add(self, what: str, first: float, last: float, numbers: list[int]) -> None:
        self.spans.append(Span(what, round(first, 4), round(last, 4), numbers))


def overlaps(spans: Iterable[Span], others: Sequence[Span]) -> int:
    """Return how many spans have a time in common with one of the others that is for another request."""
    return sum(
        any(
            other.first < span.last and span.first < other.last and not set(other.numbers) <= set(span.numbers)
            for other in others
        )
        for span in spans
    )


def draw(lives: dict[int, Span], marks: dict[str, str], spans: Sequence[Span], ends: dict[int, str]) -> list[str]:
    """Return a line of text for each request.

    :param lives: the time in which it was there.
    :param marks: the characters for each kind of span; later ones cover earlier ones.
    :param ends: the character with which its line ends.
    """
    start = min(life.first for life in lives.values())
    scale = (WIDTH - 1) / (max(life.last for life in lives.values()) - start)
    lines = []
    for number, life in sorted(lives.items()):
        line = [" "] * (WIDTH + 1)
        for what, mark in {life.what: ".", **marks}.items():
            for span in (life, *spans):
                if span.what == what and number in span.numbers:
                    first, last = (int((moment - start) * scale) for moment in (span.first, span.last))
                    line[first : last + 1] = mark * (last + 1 - first)
        line[int((life.last - start) * scale) + 1] = ends[number]
        lines.append(f"{number:4} {''.join(line).rstrip()}")
    return lines
