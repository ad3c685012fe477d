"""How drivers are found."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from hixl_async import DriverLoadError, Engine, drivers


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What is installed, in a process that has not looked yet."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(drivers, "_known", {})
    monkeypatch.setattr(drivers, "entry_points", lambda group: list(found))
    return found


async def test_they_are_looked_for_once(installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening an engine must not read a file of each distribution every time."""
    drivers.load("shm")
    monkeypatch.delattr(drivers, "entry_points")
    async with Engine(drivers=["shm"]):
        pass


def test_one_that_is_installed_later_is_found(installed: list[EntryPoint]) -> None:
    with pytest.raises(DriverLoadError, match="there is no driver 'fabric'; installed: faulty, hixl, shm"):
        drivers.load("fabric")
    installed.append(EntryPoint("fabric", "hixl_async.drivers._shm:DRIVER", drivers.GROUP))
    assert drivers.load("fabric") is drivers.load("shm")
    assert drivers.names() == ["fabric", "faulty", "hixl", "shm"]


def test_an_installed_one_goes_before_one_of_ours(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("shm", "no_such_module_at_all:DRIVER", drivers.GROUP))
    with pytest.raises(DriverLoadError, match=r"driver 'shm' \(no_such_module_at_all:DRIVER\) could not be imported"):
        drivers.load("shm")
