"""The driver itself, under the suite that every driver has to pass, wrapped around the shared-memory driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hixl_async.testing import FaultPlan

HERE = Path(__file__).resolve().parent
PLANS = {
    "transparent": FaultPlan(1),
    "half of it pending": FaultPlan(2).pending(chance=0.5),
    "late outcomes": FaultPlan(3).pending(chance=0.3).delay(0.0001, 0.003, part="outcome", chance=0.5),
    "calls that take their time": FaultPlan(4).delay(0.0002, 0.002, verb="call").pending(chance=0.3),
}


# Tests that neither expect memory to be released at once nor measure time.
SUITE = (
    "engine/test_drained", "engine/test_endings", "engine/test_group", "engine/test_lifecycle", "engine/test_notifications",
    "engine/test_requests", "kv/test_end_to_end", "kv/test_faulty",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_over_a_driver_whose_calls_block() -> None:
    suite = [str(HERE.parent / f"{name}.py") for name in SUITE]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--blocking", *suite]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS)
def test_conformance(plan: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--driver", str(HERE / "faulty_shm.py")]
    suite = [str(HERE.parent / "drivers" / name) for name in ("test_vtable.py", "test_conformance.py")]
    environment = {**os.environ, "FAULTY_PLAN": json.dumps(PLANS[plan].spec())}
    done = subprocess.run([*command, *suite], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
