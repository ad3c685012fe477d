"""The ladder runs, and its JSON has the schema of its docstring."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from .program import BENCHMARKS, run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    """A cache that is empty unless a run before compiled the C levels in the same way: with this builder, Cython and compiler.

    The builder itself compiles again if the sources have changed, or Python.
    """
    cython = pytest.importorskip("Cython")
    pytest.importorskip("numpy")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    way = hashlib.sha256((BENCHMARKS / "rig" / "build.py").read_bytes() + cython.__version__.encode() + version)
    return request.config.cache.mkdir("hixl_async-ladder") / way.hexdigest()[:16]


def ladder(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("ladder.py", *arguments, XDG_CACHE_HOME=str(cache))


def check_estimate(value: dict[str, float]) -> None:
    assert value.keys() == {"median", "low", "high"}
    assert 0 <= value["low"] <= value["median"] <= value["high"] < float("inf")


def check_figure(figure: dict[str, Any]) -> None:
    assert figure.keys() == {
        *("part", "loop", "case", "level", "verb", "bytes", "descriptors", "unit", "value", "cpu_ns"),
        *("floor", "ratio", "blocks", "iterations", "extra"),
    }
    assert figure["verb"] in ("write", "read", None)
    assert figure["unit"] == "ns"
    check_estimate(figure["value"])
    assert (figure["floor"] is None) is (figure["ratio"] is None)
    if figure["ratio"] is not None:
        check_estimate(figure["ratio"])
    assert min(figure["blocks"], figure["iterations"]) >= 1


def test_every_part_in_json_and_in_tables(cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "ladder.json"
    done = ladder(cache, "--quick", "--loop", "asyncio", "--sizes", "8", "1MiB", "--json", str(target))
    assert done.returncode == 0, done.stderr
    report = json.loads(target.read_text())
    assert (report["schema"], report["benchmark"]) == (2, "ladder")
    assert report.keys() == {
        *("schema", "benchmark", "started", "seconds", "arguments", "commit", "machine", "versions", "driver"),
        *("skipped", "figures"),
    }
    figures = report["figures"]
    for figure in figures:
        check_figure(figure)
    assert {figure["part"] for figure in figures} - {"device"} == {
        *("range", "list", "post", "flight", "rate", "notify", "stall", "touch", "idle")
    }
    ranges = [(f["verb"], f["bytes"], f["level"]) for f in figures if f["part"] == "range"]
    levels = ("copy", "driver", "core", "ready", "fresh")
    assert ranges == [(verb, size, level) for verb in ("write", "read") for size in (8, 1 << 20) for level in levels]
    # The loop under one large write, and under inline writes without a pause.
    stalls = [(f["level"], f["bytes"]) for f in figures if f["part"] == "stall"]
    assert stalls == [
        (level, size)
        for level, size in (("write", 1 << 20), ("writes", 4096), ("writes", 1 << 20))
        for level in ("idle loop", level)
    ]
    # In the tables, each figure of a range is beside its ratio.
    row = next(line for line in done.stdout.splitlines() if line.startswith("  1 MiB"))
    assert row.count(" x") == len(levels) - 1
    # The part of the GPU is skipped unless torch sees one.
    assert ("device" in report["skipped"]) is ("device" not in {figure["part"] for figure in figures})
    if "device" in report["skipped"]:
        why = report["skipped"]["device"]
        assert why.startswith("torch ")
        assert f"A GPU's memory as the local side: skipped, because {why}" in done.stdout


def test_standard_output_is_json_alone(cache: Path) -> None:
    done = ladder(
        cache, "--quick", "--loop=asyncio", "--parts", "range", "--levels", "fresh", "--sizes", "64", "--json"
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert [figure["level"] for figure in figures] == ["copy", "fresh"] * 2
