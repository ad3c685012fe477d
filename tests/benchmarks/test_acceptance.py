"""The acceptance test for NPUs runs, here on the simulated HIXL, and reports its findings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.hixlsim.build import build

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(120)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "ASCEND_HOME_PATH": str(build()), **more}


def test_the_script_passes_and_packs_its_findings(tmp_path: Path) -> None:
    out = tmp_path / "result"
    done = subprocess.run(
        [str(ROOT / "benchmarks" / "ascend_acceptance.sh"), "--total", "4MiB", "--option", "backend=cs"],
        env=environment(OUT=str(out), DEVICES="0,1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED, on host memory only" in done.stdout or importlib.util.find_spec("torch_npu")
    assert "THE ACCELERATORS ARE SIMULATED" in done.stdout
    report = json.loads((out / "acceptance.json").read_text())
    assert report["facts"]["options"] == ["backend=cs"]
    assert report["facts"]["library"]["back-end"] == "cs, by backend=cs"
    assert "back-end: cs, by backend=cs" in (out / "info.txt").read_text()
    assert report["facts"]["allocate_host_ms"] > 0
    assert set(report["checks"].values()) == {"passed"}
    assert {(figure["verb"], figure["block"]) for figure in report["figures"]} == {
        (verb, block) for verb in ("write", "read") for block in (16 << 10, 128 << 10, 2 << 20)
    }
    with tarfile.open(f"{out}.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"acceptance.json", "acceptance.txt", "info.txt", "environment.txt", "kernel.txt"} <= names


def test_failures_are_reported(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "acceptance.py"), "--total", "4MiB", "--json"]
    for faults, word in (("init=507899", "second process did not come up"), ("submit=503900", "FAILED")):
        report = tmp_path / "report.json"
        done = subprocess.run(
            [*command, str(report)], env=environment(HIXLSIM_FAULTS=faults), capture_output=True, text=True
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert word in done.stdout + done.stderr
