"""What these tests measured is shown at the end of the run; nothing is judged by it but that it came to an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

_figures: dict[str, list[float]] = {}


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Iterator[Callable[[str, float], None]]:
    """Records a figure in milliseconds under a name."""

    def record(name: str, seconds: float) -> None:
        request.node.user_properties.append((name, round(seconds * 1e3, 2)))
        _figures.setdefault(name, []).append(seconds * 1e3)

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _figures:
        terminalreporter.section("figures, in milliseconds")
        for name, values in sorted(_figures.items()):
            terminalreporter.write_line(
                f"{name:60} median {median(values):8.2f}   worst {max(values):8.2f}   of {len(values)}"
            )
