from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .build import build
from .probe import Hixl, Library

ZERO = "COMM_PATIENCE_MS FORGET_US LATENCY_US JITTER_US GBPS STRICT RELAY REFUSE_SAME_DEVICE"
DEFAULTS = {"AICPU": 1, "SEED": 1, "HEARTBEAT_MS": 10000, "SILENCE_MS": 120000, "ORDER": "fifo", "FAULTS": ""}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compile before the first test, because that may take longer than a test may."""
    if any(item.path.parent == Path(__file__).parent for item in items):
        build()


@pytest.fixture(scope="session")
def loaded() -> Library:
    return Library(build())


@pytest.fixture
def library(loaded: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library with nothing set, and with a device on this thread."""
    for name in [name for name in os.environ if name.startswith("HIXLSIM_")]:
        monkeypatch.delenv(name)
    for name, value in {**dict.fromkeys(ZERO.split(), 0), **DEFAULTS}.items():
        loaded.set(name, value)
    assert loaded.set_device() == 0
    return loaded


@pytest.fixture(params=["comm", "cs", "fab"])
def backend(request: pytest.FixtureRequest, library: Library, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HIXLSIM_BACKEND", request.param)
    return request.param


@pytest.fixture
def objects(library: Library) -> Iterator[list[Hixl]]:
    """The objects of the test; they are finalized and deleted at its end, and nothing may be left."""
    made: list[Hixl] = []
    yield made
    for each in made:
        each.delete()
    assert [library.count(name) for name in ("links", "regions", "live_requests")] == [0, 0, 0]


@pytest.fixture
def pair(backend: str, library: Library, objects: list[Hixl]) -> tuple[Hixl, Hixl]:
    """Two engines of a back-end, initialised, not connected."""
    for _ in range(2):
        objects.append(Hixl(library))
        assert objects[-1].initialize() == 0
    return objects[0], objects[1]
