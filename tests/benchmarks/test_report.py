"""Goals, losses, pictures, and the whole report from existing JSON."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from rig.charts import Band, Bar, Curve, Panel, Plot, bars, curves
from rig.goals import NIXL_ASYNCIO, NIXL_SPIN, Reports, Row, goals
from rig.losses import losses

from .program import report, run

pytestmark = pytest.mark.timeout(120)

SVG = "{http://www.w3.org/2000/svg}"


def figure(part: str, level: str, ratio: float | None, value: float = 1e6, **words: Any) -> dict[str, Any]:
    estimate = {"median": value, "low": value, "high": value}
    return {
        "part": part,
        "loop": "asyncio",
        "case": "hot",
        "level": level,
        "verb": "write",
        "bytes": 4096,
        "descriptors": 1,
        "unit": "ns",
        "value": estimate,
        "cpu_ns": None,
        "floor": "copy",
        "ratio": None if ratio is None else {"median": ratio, "low": ratio * 0.9, "high": ratio * 1.1},
        "blocks": 7,
        "iterations": 1,
        "extra": {},
        **words,
    }


def series(competitor: str, nanoseconds: list[float]) -> dict[str, Any]:
    return {
        "kind": "write",
        "size": 4096,
        "parts": 1,
        "competitor": competitor,
        "iterations": 1,
        "nanoseconds": nanoseconds,
        "cpu": nanoseconds,
    }


def rows(ladder: Sequence[dict[str, Any]] = (), side_by_side: Sequence[dict[str, Any]] = ()) -> dict[str, Row]:
    found = goals(Reports({"ladder": {"figures": ladder}, "side_by_side": {"series": side_by_side}}), "asyncio")
    return {row.figure: row for row in found}


def test_ratios_to_a_peer_are_formed_turn_by_turn() -> None:
    """Both become ten times slower in the second turn; their ratio stays."""
    found = Reports({"side_by_side": {"series": []}}).ratio([10, 100, 20], [60, 600, 120])
    assert found is not None
    assert (found.low, found.median, found.high) == (6, 6, 6)


def test_met_and_missed() -> None:
    found = rows(
        [figure("list", "prepared", 1.56), figure("list", "prepared", 1.2, case="cold")],
        [series("hixl_async, asyncio", [500.0, 400.0, 600.0])],
    )
    first = "`await engine.write(...)`, 4 KiB, fresh slices"
    assert (found[first].measured, found[first].verdict) == ("500 ns", "met")
    assert found["256 x 4 KiB, one prepared call, hot"].verdict == "missed by 20 %"
    assert found["256 x 4 KiB, one prepared call, cold"].verdict == "met"


def test_ten_times_faster_is_enough_for_one_and_half_for_the_other() -> None:
    side = [series("hixl_async, asyncio", [1.0]), series(NIXL_SPIN, [10.0]), series(NIXL_ASYNCIO, [10.0])]
    first = list(goals(Reports({"side_by_side": {"series": side}}), "asyncio"))[:3]
    assert [row.figure.rpartition(" against ")[2] for row in first[1:]] == [NIXL_SPIN, NIXL_ASYNCIO]
    assert [row.verdict for row in first] == ["met", "met", "missed by 50 %"]


def test_flight_needs_rate_and_depth() -> None:
    fast = {"per_second": 4e5, "in_flight": 16.0}
    found = rows([figure("flight", "threads", 2.0, extra=fast)])
    row = found["64 coroutines x 4 KiB, threads"]
    assert (row.measured, row.verdict) == ("400 k/s, 16 in flight", "missed by 50 %")


def test_the_speed_of_a_copy_is_the_inverse_of_its_time() -> None:
    found = rows([figure("range", "fresh", 1 / 0.96, bytes=128 << 20)])
    assert found["128 MiB write"].verdict == "met"
    found = rows([figure("range", "fresh", 1 / 0.76, bytes=128 << 20)])
    assert found["128 MiB write"].verdict == "missed by 20 %"


def test_a_goal_is_met_only_by_what_it_names() -> None:
    """Other cases of a rough run are shown without a verdict."""
    quick = [
        figure("stall", "write", 1.0, bytes=16 << 20),
        figure("idle", "engine", 0.0, 1e6, case="8 connections, 1 s"),
        figure("streaming", "exposed", 1.1, case="Llama-3-8B"),
    ]
    found = rows(quick)
    for what, goal in (
        ("the loop's longest gap under a 16 MiB write", "< 2 ms (of 128 MiB)"),
        ("idle engine, 8 connections, 1 s", "< 0.02 CPU s (of 200 connections, 5 s)"),
        (
            "layer streaming, Llama-3-8B, TP8, 4 KiB a layer: exposed",
            "<= 1.3 x one layer (of Llama-3-70B and DeepSeek-V3)",
        ),
    ):
        row = found[what]
        assert (row.goal, bool(row.measured), row.verdict) == (goal, True, "")
    full = [
        figure("stall", "write", 1.0, bytes=128 << 20),
        figure("idle", "engine", 0.0, 1e6, case="200 connections, 5 s"),
        figure("streaming", "exposed", 1.1, case="Llama-3-70B"),
    ]
    assert [row.verdict for row in rows(full).values() if row.measured] == ["met"] * 3
    report = {"slack": 0.5, "figures": full}
    (row,) = (row for row in goals(Reports({"streaming": report}), "asyncio") if "streaming" in row.figure)
    assert (row.goal, row.verdict) == ("<= 1.3 x one layer (where computing takes as long as the transfer)", "")


def test_the_worst_stall_under_inline_writes_is_shown() -> None:
    found = rows([figure("stall", "writes", 1.1, 1.2e6, extra={"worst_ms": 3.4, "cpu_ms": 1.3})])
    row = found["the loop's longest gap under 4 KiB writes without a pause"]
    assert row.measured == "1.20 ms, 1.10x (0.99..1.21) an idle loop's; the worst of 7: 3.40 ms, in CPU time 1.30 ms"
    assert (row.goal, row.verdict) == ("", "")


def test_losses() -> None:
    side = [series("hixl_async, asyncio", [10.0, 20.0]), series("NIXL", [9.0, 18.0]), series("gloo", [30.0, 60.0])]
    keys = ("latency_ns", "exposed_ns", "first_token_ns", "last_token_ns", "tokens_per_s", "cpu_s_per_GB")
    ours, theirs = dict.fromkeys(keys, 2e6), {**dict.fromkeys(keys, 3e6), "first_token_ns": 1e6}
    cases = [
        {"loop": "asyncio", "carrier": name, "tokens": 512, "requests": 1, "turns": [turn]}
        for name, turn in (("hixl_async", ours), ("sockets", theirs))
    ]
    assert list(losses({"side_by_side": {"series": side}, "sweep": {"cases": cases}})) == [
        "write, 4 KiB, time: hixl_async, asyncio 15.0 ns; NIXL 13.5 ns",
        "write, 4 KiB, CPU time: hixl_async, asyncio 15.0 ns; NIXL 13.5 ns",
        "prefill and decode, TTFT: sockets in 1 of 1 cases, by 50.0 % (1.00 ms)",
        "prefill and decode, tokens/s: sockets in 1 of 1 cases, by 50.0 %",
    ]
    assert list(losses({})) == []


def test_against_the_better_of_two() -> None:
    times = {"hixl_async, asyncio": 30.0, "uvloop streams": 50.0, "sock_recv_into, asyncio": 90.0, "gloo": 300.0}
    found = rows(side_by_side=[series(name, [time]) for name, time in times.items()])
    row = found["4 KiB against uvloop streams"]
    assert (row.measured, row.verdict) == ("latency 40 % lower, CPU 40 % lower", "missed by 33 %")
    assert found["4 KiB against gloo"].verdict == "met"


def test_rows_that_were_not_measured() -> None:
    found = rows()
    assert {row.verdict for row in found.values()} <= {"not measured"}
    assert len(found) > 25


def test_bars() -> None:
    svg = bars("T", "S", [Panel("P", [Bar("ours", 10, "10 us", True), Bar("<theirs>", 1000, "1 ms")])])
    root = ET.fromstring(svg)
    first, second = (one for one in root.iter(f"{SVG}rect") if one.get("rx"))
    assert first.get("fill") != second.get("fill")
    # Two decades between them, and the first is on the axis' left end.
    assert float(first.get("width", 0)) == 2
    assert float(second.get("width", 0)) > 300
    assert "<theirs>" in {one.text for one in root.iter(f"{SVG}text")}


def test_curves() -> None:
    plots = [Plot("A", ["1", "2"], [Curve("x", [1, 10]), Curve("y", [5, 50])]), Plot("B", ["1"], [Curve("x", [3])])]
    root = ET.fromstring(curves("T", "S", [Band("R", plots)], "ms"))
    lines = [one.get("points", "").split() for one in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [2, 2, 1]
    # More is higher: a smaller y.
    low, high = (float(point.split(",")[1]) for point in lines[0])
    assert low > high


def test_the_report(tmp_path: Path) -> None:
    """The report is made from the smallest reports of two benchmarks."""
    reports = tmp_path / "reports"
    reports.mkdir()
    for name, arguments in (
        ("side_by_side", ("--only", "hixl_async, asyncio", "sock_recv_into, asyncio", "--works", "write")),
        (
            "sweep",
            ("--loop", "asyncio", "--tokens", "32", "--requests", "1", "2", "--carriers", "hixl_async", "sockets"),
        ),
    ):
        (reports / f"{name}.json").write_text(json.dumps(report(f"{name}.py", "--quick", *arguments)))
    remarks = tmp_path / "remarks.md"
    remarks.write_text("## Remarks\n\nIt was raining.\n")
    done = run("report.py", "--from", str(reports), "--out", str(tmp_path / "out"), "--remarks", str(remarks))
    assert done.returncode == 0, done.stderr
    summary, details = ((tmp_path / "out" / name).read_text() for name in ("RESULTS.md", "DETAILS.md"))
    for text in (summary, details):
        assert "| `await engine.write(...)`, 4 KiB, fresh slices | <= 1 us | " in text
        assert "## Where others are ahead" in text
        # Every line of a table has as many cells as its head.
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert {line.count("|") for line in table} == {7}
        # The missed goals, and those not measured, come before the table.
        assert " are met, " in text
    # One page: no figures without a goal, and no tables of benchmarks.
    assert "4 KiB against gloo, receiver told" in details
    assert "4 KiB against gloo, receiver told" not in summary
    assert "```" not in summary
    assert "[remarks.md](remarks.md)" in summary
    assert "`python benchmarks/side_by_side.py --quick --only" in details
    for name in ("latency", "cpu", "sweep"):
        assert f"![{name}]({name}.svg)" in details
        assert ET.parse(tmp_path / "out" / f"{name}.svg").getroot().tag == f"{SVG}svg"
    assert details.index("## Figures and goals") < details.index("It was raining.") < details.index("## Side by side")


def test_it_runs_the_benchmarks_that_it_reports(tmp_path: Path) -> None:
    done = run("report.py", "--quick", "--only", "streaming", "--to", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "streaming.json").read_text())["benchmark"] == "streaming"
    text = (tmp_path / "out" / "DETAILS.md").read_text()
    assert "layer streaming, Llama-3-70B" in text
    # Calculated values are marked, and the legend is there; remarks were not given.
    assert text.count("whole (calculated)") == 1 + 2 * text.count("The transfer that is left when")
    assert "Computing is simulated" in text
    assert "## Remarks" not in text
    (tmp_path / "empty").mkdir()
    assert run("report.py", "--from", str(tmp_path / "empty")).returncode == 1
