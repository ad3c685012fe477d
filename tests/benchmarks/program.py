"""Run a benchmark as a program, as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hixl_async

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `script` of the benchmarks with the package under test, installed or not."""
    settings = {**os.environ, "PYTHONPATH": str(Path(hixl_async.__file__).parents[1]), **environment}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=280)


def report(script: str, *arguments: str) -> dict[str, Any]:
    """Return its report, which is the whole of its standard output."""
    done = run(script, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    assert content["schema"] == 2
    assert content["benchmark"] == script.removesuffix(".py")
    assert content.keys() >= {"started", "seconds", "arguments", "commit", "machine", "versions"}
    return content
