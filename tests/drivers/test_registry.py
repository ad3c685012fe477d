"""The lookup of drivers."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hixl_async.drivers._shm import DRIVER

from hixl_async import DriverLoadError, Engine, InvalidArgumentError, drivers


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Return what is installed, in a process that has not looked yet."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(drivers, "_known", dict(drivers._BUILT_IN))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(found))
    return found


async def test_distributions_are_searched_once(installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening an engine must not read a file of each distribution every time, and for a built-in driver not at all."""
    installed.append(EntryPoint("fabric", "hixl_async.drivers._shm:DRIVER", drivers.GROUP))
    drivers.load("fabric")
    monkeypatch.delattr(importlib.metadata, "entry_points")
    drivers.load("fabric")
    monkeypatch.setattr(drivers, "_known", dict(drivers._BUILT_IN))
    async with Engine(drivers=["shm"]):
        pass


def test_a_driver_that_is_installed_later_is_found(installed: list[EntryPoint]) -> None:
    with pytest.raises(DriverLoadError, match="there is no driver 'fabric'; installed: faulty, hixl, shm"):
        drivers.load("fabric")
    installed.append(EntryPoint("fabric", "hixl_async.drivers._shm:DRIVER", drivers.GROUP))
    assert drivers.load("fabric") is drivers.load("shm")
    assert drivers.names() == ["fabric", "faulty", "hixl", "shm"]


def test_another_package_replaces_no_built_in_driver(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("shm", "no_such_module_at_all:DRIVER", drivers.GROUP))
    assert drivers.names() == ["faulty", "hixl", "shm"]
    assert drivers.load("shm") is DRIVER


@pytest.mark.parametrize(
    ("value", "text", "reason"),
    [
        ("zz_driver:DRIVER", "raise RuntimeError('no device')", "RuntimeError: no device"),
        ("zz_driver:DRIVER", "def", "SyntaxError"),
        ("zz_driver:DRIVER", "1 / 0", "ZeroDivisionError"),
        ("zz_driver:DRIVER", "raise SystemExit(3)", "SystemExit: 3"),
        ("zz_driver:DRIVER", "\0", "null bytes"),
        ("zz_driver:DRIVER", "", "no attribute 'DRIVER'"),
        ("zz_driver:DRIVER.table", "DRIVER = 7", "no attribute 'table'"),
        ("zz_driver:DRIVER", "DRIVER = 7", "not a capsule"),
        ("zz_driver", "", "not a capsule"),
        ("os", "", "not a capsule"),
        ("zz_driver:", "", "could not be imported"),
        ("no entry point", "", "could not be imported"),
        ("", "", "could not be imported"),
    ],
)
async def test_a_broken_driver_costs_its_own_row(
    installed: list[EntryPoint],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    value: str,
    text: str,
    reason: str,
) -> None:
    """It costs a row, not the whole list, and a caller that asks for it gets the one error for it."""
    tmp_path.joinpath("zz_driver.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    installed.append(EntryPoint("zz", value, drivers.GROUP))
    with pytest.raises(DriverLoadError, match=f"driver 'zz'.*{reason}"):
        await Engine(drivers=["zz"]).open()
    problems = {driver.name: driver.problem for driver in drivers.available()}
    assert reason in (problems["zz"] or "")
    assert problems["shm"] is None
    sys.modules.pop("zz_driver", None)


@pytest.mark.parametrize("content", [b"[hixl_async.drivers]\nf\xe4bric = os:path\n", b"\xff\xfe\0"])
async def test_a_distribution_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """A broken package of others does not make this one unusable."""
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    folder.joinpath("entry_points.txt").write_bytes(content)
    monkeypatch.setattr(drivers, "_known", dict(drivers._BUILT_IN))
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, "hixl_async"):
        async with Engine(drivers=["shm"]):
            pass
        assert not caplog.records
        with pytest.raises(DriverLoadError, match="there is no driver 'fabric'"):
            await Engine(drivers=["fabric"]).open()
    assert [record.name for record in caplog.records] == ["hixl_async"]
    assert "entry points" in caplog.text
    assert {"faulty", "hixl", "shm"} <= set(drivers.names())


@pytest.mark.parametrize("wrapper", [[], ["faulty"], {}, 7, b"faulty", False, ""])
async def test_a_wrapper_that_is_not_a_name(wrapper: Any) -> None:
    with pytest.raises((InvalidArgumentError, DriverLoadError), match="driver") as caught:
        await Engine(drivers={"shm": {"wrapper": wrapper}}).open()
    if not isinstance(wrapper, str):
        assert caught.type is InvalidArgumentError
        assert caught.match("driver 'shm': option 'wrapper' must be the name of a driver")
