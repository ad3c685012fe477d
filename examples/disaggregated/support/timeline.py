"""Events of several processes: collected, merged, and shown as a trace and as a picture.

Every process of a host reads the same clock, CLOCK_MONOTONIC (:func:`time.monotonic_ns`), so their spans
need no alignment. A process sends its timeline as JSON to the one that draws it.

The trace is in `Chrome's trace event format
<https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>`_: open it at
https://ui.perfetto.dev. The picture is an SVG, made to show how much of the transfer hides behind the
computation.
"""

from __future__ import annotations

import json
import math
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

Argument = str | int | float | bool | None


class Track(StrEnum):
    """The tracks that the picture shows, one lane each. Spans on other tracks are in the trace only."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    ARRIVAL = "arrival"
    DECODE = "decode"


@dataclass(frozen=True)
class Span:
    """Something that took from ``start_ns`` to ``end_ns`` on CLOCK_MONOTONIC; a mark if both are the same."""

    process: str
    track: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Argument] = field(default_factory=dict)


class Timeline:
    """Spans of one run, of one or several processes. Spans may be added from any thread.

    :param title: the name of the run, shown above the lanes of the picture.
    """

    def __init__(self, title: str = "", spans: Iterable[Span] = ()) -> None:
        self.title = title
        self.spans = list(spans)

    def add(self, process: str, track: str, name: str, start_ns: int, end_ns: int, **args: Argument) -> None:
        """Add a span. The picture labels it with the argument ``layer`` if there is one, else with ``name``.

        :raises ValueError: if it ends before it starts.
        """
        if end_ns < start_ns:
            raise ValueError(f"span {name!r} ends {start_ns - end_ns} ns before it starts")
        self.spans.append(Span(process, track, name, start_ns, end_ns, args))

    def mark(self, process: str, track: str, name: str, at_ns: int | None = None, **args: Argument) -> None:
        """Add an instant, by default now."""
        now = time.monotonic_ns() if at_ns is None else at_ns
        self.add(process, track, name, now, now, **args)

    @contextmanager
    def measure(self, process: str, track: str, name: str, **args: Argument) -> Iterator[None]:
        """Add the span of the block, also if the block raises."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(process, track, name, start, time.monotonic_ns(), **args)

    def merge(self, other: Timeline) -> None:
        """Add the spans of another timeline of the same host."""
        self.spans.extend(other.spans)

    def on(self, track: str) -> list[Span]:
        """Return the spans of one track of all processes, in the order in which they start."""
        return sorted((span for span in self.spans if span.track == track), key=_start)

    @property
    def start_ns(self) -> int:
        """The start of the first span; 0 if there is none."""
        return min((span.start_ns for span in self.spans), default=0)

    def exposed_ns(self) -> int | None:
        """Return how long after the end of the computation the last keys and values arrived.

        That is what the transfer costs. 0 if all arrived before; None if the timeline has no computation or
        no arrivals.
        """
        computed, arrived = _end(self.on(Track.COMPUTE)), _end(self.on(Track.ARRIVAL))
        if computed is None or arrived is None:
            return None
        return max(0, arrived - computed)

    def to_json(self) -> str:
        """Return the timeline as text, for another process."""
        return json.dumps({"title": self.title, "spans": [asdict(span) for span in self.spans]})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Return the timeline that :meth:`to_json` wrote.

        :raises ValueError: if ``text`` is not JSON.
        :raises KeyError or TypeError: if it is other JSON.
        """
        content = json.loads(text)
        return cls(content["title"], [Span(**span) for span in content["spans"]])

    def to_trace(self) -> str:
        """Return the timeline in Chrome's trace event format (JSON), with times from the first span on."""
        # A viewer expects the spans of one thread to nest; what overlaps goes to further threads of the
        # same name.
        events: list[dict[str, Any]] = []
        threads = 0
        for pid, process in enumerate(dict.fromkeys(span.process for span in self.spans), start=1):
            events.append(_metadata("process_name", pid, 0, name=process))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
            own = [span for span in self.spans if span.process == process]
            for track in dict.fromkeys(span.track for span in own):
                for row in _rows([span for span in own if span.track == track]):
                    threads += 1
                    events.append(_metadata("thread_name", pid, threads, name=track))
                    events.append(_metadata("thread_sort_index", pid, threads, sort_index=threads))
                    events.extend(self._event(span, pid, threads) for span in row)
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def _event(self, span: Span, pid: int, tid: int) -> dict[str, Any]:
        event: dict[str, Any] = {
            "name": span.name,
            "cat": span.track,
            "pid": pid,
            "tid": tid,
            "ts": (span.start_ns - self.start_ns) / 1e3,
            "args": span.args,
        }
        if span.start_ns == span.end_ns:
            return event | {"ph": "i", "s": "t"}  # an instant, as high as its thread
        return event | {"ph": "X", "dur": (span.end_ns - span.start_ns) / 1e3}


def _metadata(kind: str, pid: int, tid: int, **args: Argument) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _start(span: Span) -> int:
    return span.start_ns


def _end(spans: Sequence[Span]) -> int | None:
    return max((span.end_ns for span in spans), default=None)


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few rows as possible, so that none overlap within a row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=_start):
        for row in rows:
            if row[-1].end_ns <= span.start_ns:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


# ------------------------------------------------------------------------------------------- the picture


class Lane(NamedTuple):
    """The appearance of a track in the picture."""

    track: Track
    label: str
    legend: str
    shades: tuple[str, str]
    """Alternate from span to span, so that neighbours can be told apart."""
    ink: str


# Hues of Okabe and Ito, which stay apart for colour-blind readers (https://jfly.uni-koeln.de/color/), with
# an ink that reads well on both shades.
_LANES = (
    Lane(Track.COMPUTE, "P computes", "P computes a layer", ("#0072b2", "#2b83bb"), "#ffffff"),
    Lane(Track.TRANSFER, "K/V travel", "a layer's K/V travel", ("#e69f00", "#f2bd4d"), "#3d2b00"),
    Lane(Track.ARRIVAL, "K/V at D", "they have arrived", ("#009e73", "#009e73"), "#00523b"),
    Lane(Track.DECODE, "D decodes", "D decodes a token", ("#a3467f", "#b45f94"), "#ffffff"),
)
_EXPOSED = "#d55e00"

_STYLE = """
text { font-family: Inter, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; fill: #24292f }
.title { font-size: 17px; font-weight: 600 }
.quiet { fill: #57606a }
.panel { font-size: 13px; font-weight: 600 }
.small { font-size: 9px }
.exposed { fill: #a84300; font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.grid { stroke: #d8dee4; stroke-width: 1 }
.moment { stroke: #57606a; stroke-width: 1; stroke-dasharray: 3 3 }
"""

_WIDTH = 900
_LEFT = 108  # of the plot; lane labels are to its left
_RIGHT = 876
_ROW = {1: 22.0, 2: 14.0, 3: 11.0}  # the height of a lane's rows, by how many it has
_LOW_ROW = 6.0
_GAP = 7.0  # between lanes
_CHARACTER_WIDTHS = {
    **dict.fromkeys("'!,.:;|ijl", 0.32),
    **dict.fromkeys(" frtI()[]", 0.42),
    **dict.fromkeys("mwMW@%", 1.0),
}  # of the font size; all others 0.64


def draw(timelines: Sequence[Timeline], *, title: str, subtitle: str = "", decode_steps: int | None = 6) -> str:
    """Return an SVG, 900 pixels wide, of one or more runs above one another on one time axis.

    Each run starts at the left with the first span that is drawn, and shows its tracks as lanes (see
    :class:`Track`) and the time that its transfer adds to the computation (see
    :meth:`Timeline.exposed_ns`).

    :param timelines: the runs, the first on top.
    :param decode_steps: how many steps of D to show, since usually they are many; None for all.
    :raises ValueError: if there is nothing to draw.
    """
    runs = [_visible(timeline, decode_steps) for timeline in timelines]
    if not any(run.spans for run in runs):
        raise ValueError("there are no spans on the tracks that a picture shows")
    longest = max((_end(run.spans) or 0) - run.start_ns for run in runs)
    picture = _Picture(longest)
    picture.head(title, subtitle)
    for run in runs:
        picture.panel(run)
    return picture.finish(title)


def _visible(timeline: Timeline, decode_steps: int | None) -> Timeline:
    steps = timeline.on(Track.DECODE)[:decode_steps]
    others = [timeline.on(track) for track in (Track.COMPUTE, Track.TRANSFER, Track.ARRIVAL)]
    return Timeline(timeline.title, [span for spans in (*others, steps) for span in spans])


class _Box(NamedTuple):
    """A span's place in the picture."""

    left: float
    right: float
    y: float
    layer: int | None
    label: str
    tooltip: str

    @property
    def width(self) -> float:
        # Half a pixel short keeps neighbours apart; a short span stays visible.
        return max(self.right - self.left - 0.5, 1.0)


def _labelled(boxes: Sequence[_Box]) -> list[_Box]:
    """Return those whose label fits; if some layers' labels don't, every fifth or tenth layer, to count from."""
    fitting = [box for box in boxes if _text_width(box.label, 9) <= box.width]
    layers = [box for box in boxes if box.layer is not None]
    if len(fitting) == len(boxes) or not layers:
        return fitting
    pitch = (layers[-1].right - layers[0].left) / len(layers)
    for step in (5, 10):
        if _text_width("00", 9) <= pitch * step * 0.6:
            return [box for box in layers if box.layer is not None and box.layer % step == 0]
    return []


class _Picture:
    """An SVG that grows downwards."""

    def __init__(self, longest_ns: int) -> None:
        self._longest_ns = max(longest_ns, 1)
        self._tick_ns = _nice_step(self._longest_ns / 8)
        self._root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
        self._y = 0.0

    def head(self, title: str, subtitle: str) -> None:
        self._text(24, 34, title, "title")
        self._y = 34
        if subtitle:
            self._text(24, 54, subtitle, "quiet")
            self._y = 54
        self._legend(self._y + 24)
        self._y += 24

    def panel(self, run: Timeline) -> None:
        """Draw one run: a heading, a line for annotations, and the lanes."""
        self._text(24, self._y + 34, run.title, "panel")
        notes = self._y + 56
        top = notes + 8
        lanes = [(lane, _rows(run.on(lane.track))) for lane in _LANES]
        bottom = top + sum(_lane_height(rows) + _GAP for _, rows in lanes) - _GAP
        self._grid(top - 4, bottom + 4)
        self._exposed(run, notes, top - 4, bottom + 4)
        for lane, rows in lanes:
            self._lane(lane, rows, run.start_ns, top)
            top += _lane_height(rows) + _GAP
        self._y = bottom + 4

    def finish(self, title: str) -> str:
        self._axis(self._y)
        height = self._y + 36
        self._root.set("viewBox", f"0 0 {_WIDTH} {height:.0f}")
        self._root.set("width", str(_WIDTH))
        self._root.set("height", f"{height:.0f}")
        head = [ET.Element("title"), ET.Element("style"), ET.Element("rect")]
        head[0].text, head[1].text = _printable(title), _STYLE
        head[2].attrib.update(width=str(_WIDTH), height=f"{height:.0f}", fill="#ffffff")
        self._root[:0] = head
        ET.indent(self._root)
        return ET.tostring(self._root, encoding="unicode") + "\n"

    def _legend(self, y: float) -> None:
        x = 24.0
        for lane in _LANES:
            if lane.track is Track.ARRIVAL:
                self._arrival(x + 6, y - 10, 12, lane.shades[0])
            else:
                self._rect(x, y - 10, 12, 12, lane.shades[0])
            self._text(x + 18, y, lane.legend, "quiet")
            x += 18 + _text_width(lane.legend, 12) + 22
        self._rect(x, y - 10, 12, 12, _EXPOSED, opacity=0.3)
        self._text(x + 18, y, "D waits for K/V: exposed", "quiet")

    def _grid(self, top: float, bottom: float) -> None:
        self._rect(_LEFT, top, _RIGHT - _LEFT, bottom - top, "#f6f8fa")
        for tick in self._ticks():
            self._line(self._x(tick), top, bottom, "grid")

    def _exposed(self, run: Timeline, notes: float, top: float, bottom: float) -> None:
        exposed, computed = run.exposed_ns(), _end(run.on(Track.COMPUTE))
        if exposed is None or computed is None:
            return
        left, right = self._x(computed - run.start_ns), self._x(computed + exposed - run.start_ns)
        if right > left:
            self._rect(left, top, right - left, bottom - top, _EXPOSED, opacity=0.16)
        self._line(left, notes - 8, bottom, "moment")
        label = f"exposed {_milliseconds(exposed)}"
        if left + 6 + _text_width(label, 12) <= _RIGHT:
            self._text(left + 6, notes, label, "exposed")
        else:
            self._text(left - 6, notes, label, "exposed end")

    def _lane(self, lane: Lane, rows: list[list[Span]], start_ns: int, top: float) -> None:
        height = _lane_height(rows)
        self._text(_LEFT - 10, top + height / 2 + 4, lane.label, "end")
        row_height = height / max(len(rows), 1)
        boxes = [
            self._box(span, top + number * row_height, start_ns) for number, row in enumerate(rows) for span in row
        ]
        boxes.sort(key=lambda box: box.left)
        for number, box in enumerate(boxes):
            if lane.track is Track.ARRIVAL:
                self._arrival(box.right, box.y, row_height, lane.shades[0], box.tooltip)
            else:
                bar = row_height - (len(rows) > 1)  # a pixel of distance between rows
                self._rect(box.left, box.y, box.width, bar, lane.shades[number % 2], box.tooltip)
        if lane.track is not Track.ARRIVAL and row_height > _LOW_ROW:
            for box in _labelled(boxes):
                middle = box.left + box.width / 2
                self._text(middle, box.y + row_height / 2 + 3, box.label, "small middle", lane.ink)

    def _box(self, span: Span, y: float, start_ns: int) -> _Box:
        left, right = self._x(span.start_ns - start_ns), self._x(span.end_ns - start_ns)
        layer = span.args.get("layer")
        return _Box(
            left=left,
            right=right,
            y=y,
            layer=layer if isinstance(layer, int) else None,
            label=_printable(span.name.strip() if layer is None else str(layer)),
            tooltip=_printable(f"{span.name}: {_milliseconds(span.end_ns - span.start_ns)}"),
        )

    def _arrival(self, x: float, y: float, height: float, colour: str, tooltip: str = "") -> None:
        self._rect(x - 1, y, 2, height, colour, tooltip)

    def _axis(self, y: float) -> None:
        for tick in self._ticks():
            self._text(self._x(tick), y + 18, f"{tick / 1e6:g}", "quiet middle")
        self._text(_LEFT - 10, y + 18, "ms", "quiet end")

    def _ticks(self) -> list[int]:
        count = int(self._longest_ns / self._tick_ns)
        return [round(number * self._tick_ns) for number in range(count + 1)]

    def _x(self, since_start_ns: float) -> float:
        return _LEFT + since_start_ns / self._longest_ns * (_RIGHT - _LEFT)

    def _rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        tooltip: str = "",
        opacity: float = 1,
    ) -> None:
        rect = self._element("rect", x=x, y=y, width=width, height=height)
        rect.set("fill", colour)
        if opacity < 1:
            rect.set("fill-opacity", f"{opacity:g}")
        if tooltip:
            ET.SubElement(rect, "title").text = tooltip

    def _line(self, x: float, top: float, bottom: float, style: str) -> None:
        self._element("line", x1=x, x2=x, y1=top, y2=bottom).set("class", style)

    def _text(self, x: float, y: float, text: str, style: str, colour: str = "") -> None:
        element = self._element("text", x=x, y=y)
        element.set("class", style)
        if colour:
            element.set("style", f"fill: {colour}")
        element.text = _printable(text)

    def _element(self, kind: str, **numbers: float) -> ET.Element:
        written = {name: f"{value:.2f}".rstrip("0").rstrip(".") for name, value in numbers.items()}
        return ET.SubElement(self._root, kind, written)


def _lane_height(rows: Sequence[Sequence[Span]]) -> float:
    count = max(len(rows), 1)
    return count * _ROW.get(count, _LOW_ROW)


def _nice_step(least: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _text_width(text: str, size: float) -> float:
    """About the width in pixels, in one of the wider fonts that a viewer may choose."""
    return size * sum(_CHARACTER_WIDTHS.get(character, 0.64) for character in text)


def _milliseconds(duration_ns: int) -> str:
    milliseconds = duration_ns / 1e6
    return f"{milliseconds:.1f} ms" if 0 < milliseconds < 10 else f"{milliseconds:.0f} ms"


def _printable(text: str) -> str:
    """Replace control characters, which a decoded token may have and XML forbids."""
    return "".join(character if character.isprintable() else "\N{MIDDLE DOT}" for character in text)
