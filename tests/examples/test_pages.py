"""The examples of one page each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: The beginning of the last line of each.
LAST = {
    "write.py": "sender wrote 8 MiB: as sent",
    "read_windows.py": "100 rows, 100 times: ",
    "notify.py": "consumed 20 items through 4 slots, 0 dropped",
    "kv_stream.py": "PoolStatistics(free=64, reserved=0, quarantined=0, waiting=0)",
}


@pytest.mark.parametrize("name", LAST)
def test_each_example_runs(name: str) -> None:
    if name == "kv_stream.py":
        pytest.importorskip("numpy")
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith(LAST[name])


@pytest.mark.parametrize("name", LAST)
def test_each_example_fits_a_page(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(LAST)
