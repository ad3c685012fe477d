"""The demo's timeline: what other processes and viewers get, and that the picture is whole and legible."""

from __future__ import annotations

import json
import random
import re
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import pairwise

import pytest
from support.timeline import Span, Timeline, Track, draw

MS = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"


def run_of(
    *, streamed: bool, layers: int = 30, layer_ms: float = 13, wire_ms: float = 10, in_flight: int = 1
) -> Timeline:
    """A made-up run: K/V are ready a fifth into a layer, and travel at once or after the last layer."""
    seed = random.Random(0)
    timeline = Timeline("Streamed" if streamed else "After prefill")
    origin, now, link_free = 10**15, 0.0, 0.0
    ready = []
    for layer in range(layers):
        took = layer_ms * seed.uniform(0.85, 1.15)
        timeline.add("P", Track.COMPUTE, f"layer {layer}", at(origin, now), at(origin, now + took), layer=layer)
        ready.append(now + took / 5)
        now += took
    arrived = 0.0
    for layer in range(layers):
        start = max(ready[layer] if streamed else now, link_free)
        arrived = start + wire_ms
        link_free = start + wire_ms / in_flight
        timeline.add("P", Track.TRANSFER, f"layer {layer}", at(origin, start), at(origin, arrived), layer=layer)
        timeline.mark("D", Track.ARRIVAL, f"layer {layer}", at(origin, arrived), layer=layer)
    step = max(now, arrived)
    for token in (" The", " capital", "\n", " <&> \x04", "\N{REPLACEMENT CHARACTER}", " is", " Paris", "."):
        timeline.add("D", Track.DECODE, token, at(origin, step), at(origin, step + 40))
        step += 40
    return timeline


def at(origin_ns: int, milliseconds: float) -> int:
    return origin_ns + round(milliseconds * MS)


def test_add_rejects_a_span_that_ends_before_it_starts() -> None:
    with pytest.raises(ValueError, match="ends 5 ns before it starts"):
        Timeline().add("P", Track.COMPUTE, "layer 0", 10, 5)


def test_measure_records_a_block_that_raises() -> None:
    timeline = Timeline()
    before = time.monotonic_ns()
    with pytest.raises(KeyError), timeline.measure("P", Track.COMPUTE, "layer 0", layer=0):
        raise KeyError
    [span] = timeline.spans
    assert before <= span.start_ns <= span.end_ns <= time.monotonic_ns()
    assert span.args == {"layer": 0}


def test_spans_survive_the_way_through_json() -> None:
    sent = run_of(streamed=True)
    received = Timeline.from_json(sent.to_json())
    assert received.title == sent.title
    assert received.spans == sent.spans


def test_merge_puts_spans_of_processes_on_one_clock() -> None:
    prefill, decode = Timeline("run"), Timeline()
    prefill.add("P", Track.COMPUTE, "layer 0", 100, 300)
    decode.mark("D", Track.ARRIVAL, "layer 0", 250)
    prefill.merge(decode)
    assert prefill.start_ns == 100
    assert prefill.on("arrival") == [Span("D", "arrival", "layer 0", 250, 250)]


@pytest.mark.parametrize(("arrived", "exposed"), [(250, 0), (300, 0), (350, 50)])
def test_exposed_time_is_the_time_after_the_computation(arrived: int, exposed: int) -> None:
    timeline = Timeline()
    assert timeline.exposed_ns() is None
    timeline.add("P", Track.COMPUTE, "layer 0", 100, 300)
    assert timeline.exposed_ns() is None
    timeline.mark("D", Track.ARRIVAL, "layer 0", 240)
    timeline.mark("D", Track.ARRIVAL, "layer 1", arrived)
    assert timeline.exposed_ns() == exposed


def test_trace_has_what_perfetto_needs() -> None:
    timeline = run_of(streamed=True, wire_ms=30, in_flight=4)
    trace = json.loads(timeline.to_trace())
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(processes.values()) == {"P", "D"}
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    shown = [event for event in events if event["ph"] != "M"]
    assert len(shown) == len(timeline.spans)
    for event in shown:
        assert names[event["pid"], event["tid"]] == event["cat"]
        assert event["ts"] >= 0
    first = next(event for event in shown if event["cat"] == "compute")
    assert first["ts"] == 0
    assert first["dur"] == (timeline.spans[0].end_ns - timeline.spans[0].start_ns) / 1000
    assert first["args"] == {"layer": 0}


def test_trace_spreads_overlapping_spans_over_threads() -> None:
    """Perfetto drops a span that overlaps another of its thread without lying inside it."""
    trace = json.loads(run_of(streamed=True, wire_ms=30, in_flight=4).to_trace())
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) > 3
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start + 1e-3


def test_picture_is_well_formed_whatever_the_tokens_are() -> None:
    svg = draw([run_of(streamed=True)], title="a < b & \x00", subtitle='"quoted"', decode_steps=None)
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("width") == "900"
    assert not re.search("[\x00-\x08]", svg)
    assert "<&> \N{MIDDLE DOT}" in [element.text for element in root.iter(f"{SVG}text")]


def test_picture_shows_every_layer_and_the_first_steps_of_both_runs() -> None:
    streamed, after = run_of(streamed=True), run_of(streamed=False)
    root = ET.fromstring(draw([streamed, after], title="Prefill and decode", decode_steps=3))
    tooltips = [element.text or "" for element in root.iter(f"{SVG}title")]
    for layer in range(30):
        assert sum(text.startswith(f"layer {layer}:") for text in tooltips) == 2 * 3
    assert sum(text.endswith(": 40 ms") for text in tooltips) == 2 * 3
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"Streamed", "After prefill", "exposed 300 ms"} <= set(texts)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([run_of(streamed=True), run_of(streamed=False)], id="two runs"),
        pytest.param([run_of(streamed=True, wire_ms=30, in_flight=4)], id="four in flight"),
        pytest.param([run_of(streamed=True, wire_ms=30, in_flight=12)], id="twelve in flight"),
        pytest.param([run_of(streamed=False, layers=92, layer_ms=2, wire_ms=0.01)], id="92 short layers"),
        pytest.param([run_of(streamed=True, layers=1)], id="one layer"),
    ],
)
def test_texts_overlap_neither_one_another_nor_the_edge(runs: list[Timeline]) -> None:
    title = "Prefill on P, decode on D: SmolLM2-135M, prompt of 128 tokens"
    root = ET.fromstring(draw(runs, title=title, subtitle="5.9 MB of K/V over a link of 20 MB/s"))
    boxes = [box_of(element) for element in root.iter(f"{SVG}text")]
    for left, top, right, bottom in boxes:
        assert left >= 0
        assert right <= 900
        assert top >= 0
        assert bottom <= float(root.get("height", "0"))
    boxes.sort()
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            apart = other[0] >= one[2] or other[1] >= one[3] or other[3] <= one[1]
            assert apart, (one, other)


def test_picture_needs_spans() -> None:
    timeline = Timeline()
    timeline.add("P", "a track of its own", "request", 0, 10)
    with pytest.raises(ValueError, match="no spans"):
        draw([timeline], title="empty")


def test_picture_of_a_moment() -> None:
    timeline = Timeline("only a mark")
    timeline.mark("D", Track.ARRIVAL, "layer 0", 7)
    ET.fromstring(draw([timeline], title="a moment"))


def box_of(text: ET.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text in a typical sans-serif font."""
    styles = (text.get("class") or "").split()
    size = 17 if "title" in styles else 13 if "panel" in styles else 9 if "small" in styles else 12
    width = 0.52 * size * len(text.text or "")
    x, y = float(text.get("x", "0")), float(text.get("y", "0"))
    left = x - width if "end" in styles else x - width / 2 if "middle" in styles else x
    return left, y - 0.75 * size, left + width, y + 0.2 * size
