"""Make the modules of the benchmarks importable, which are programs and not a package."""

import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: the demo has a report.py, too


@pytest.fixture(scope="session", autouse=True)
def tracker() -> None:
    """Start multiprocessing's helper, which stays from the first child on, so that its pipe does not look like a leak."""
    resource_tracker.ensure_running()
