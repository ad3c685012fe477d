"""Makes what the benchmarks share importable: they are programs to run, not a package."""

import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: the demo has a report.py, too


@pytest.fixture(scope="session", autouse=True)
def tracker() -> None:
    """The helper that multiprocessing starts with the first child stays, and its pipe is no leak of a test."""
    resource_tracker.ensure_running()
