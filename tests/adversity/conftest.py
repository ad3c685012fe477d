"""Figures of these tests, shown at the end of the run (see tests/conftest.py); no test fails because of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Record a time, given in seconds, under a name."""

    def record(name: str, seconds: float) -> None:
        request.node.user_properties.append((f"{name}, ms", round(seconds * 1e3, 2)))

    return record
