"""Fixtures of the driver conformance suite.

``pytest tests/drivers --driver=NAME`` runs it against any driver: one that is installed (entry point), one of the
package, or the file of a module (a path).  What a driver cannot do, by its own capability bits, is skipped with that
reason.  ``--driver=hixl:comm``, ``:cs`` and ``:fab`` choose the back-end; the library is the simulated one of tests/hixlsim.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import vtable as vt


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver", default="shm", help="the driver to test: a name, or the file of a module (default: shm)"
    )
    parser.addoption(
        "--driver-option", action="append", default=[], metavar="KEY=VALUE", help="an option for every instance"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*capabilities): skipped where the driver lacks one of them")
    config.addinivalue_line("markers", "only(driver): about one driver; skipped for others")
    # A sanitizer starts a thread of its own with the first other one, which is not a leak of the test that starts it.
    first = threading.Thread(target=lambda: None)
    first.start()
    first.join()


@pytest.fixture(scope="session")
def driver_name(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--driver", default="shm")


@pytest.fixture(scope="session")
def driver(driver_name: str) -> vt.CDriver:
    try:
        return vt.load(driver_name)
    except ImportError as error:
        pytest.fail(f"the driver {driver_name} is not built: {error}")


@pytest.fixture(scope="session")
def driver_options(request: pytest.FixtureRequest, driver_name: str) -> dict[str, str]:
    options = dict(option.split("=", 1) for option in request.config.getoption("--driver-option", default=[]))
    name, _, backend = driver_name.partition(":")
    if name == "hixl":
        options.setdefault("library", str(hixlsim()))
        if backend:
            options.setdefault("backend", backend)
    return options


@functools.cache
def hixlsim(**how: object) -> Path:
    """The root of the simulated toolkit, built when it is first asked for."""
    root = Path(__file__).resolve().parents[1] / "hixlsim"
    spec = importlib.util.spec_from_file_location("hixlsim_build", root / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Under a sanitizer both sides of the interface have to be built with it.
    preloaded = os.environ.get("LD_PRELOAD", "")
    kind = "thread" if "libtsan" in preloaded else "address" if "libasan" in preloaded else ""
    return module.build(**how, sanitize=kind)


@pytest.fixture(autouse=True)
def _applicable(request: pytest.FixtureRequest, driver: vt.CDriver) -> None:
    name = driver.name.decode()
    for mark in request.node.iter_markers("only"):
        if name not in mark.args:
            pytest.skip(f"about the {mark.args[0]} driver, this is {name}")
    for mark in request.node.iter_markers("needs"):
        for cap in mark.args:
            if not vt.has(driver, cap):
                pytest.skip(f"the {name} driver lacks {cap}")


@pytest.fixture
def leakless() -> Iterator[None]:
    """Assert that nothing of what the test opened is left, to the last descriptor, mapping and thread."""
    with vt.no_leaks():
        yield


class Maker:
    """A maker of instances that are closed, and checked, when the test ends."""

    def __init__(self, driver: vt.CDriver, options: dict[str, str]) -> None:
        self.driver, self.options = driver, options
        self.made: list[vt.Instance] = []

    def __call__(self, **options: object) -> vt.Instance:
        instance = vt.Instance(self.driver, {**self.options, **{key: str(value) for key, value in options.items()}})
        self.made.append(instance)
        return instance

    def pair(self, **options: object) -> tuple[vt.Link, vt.Link]:
        return vt.join(self(**options), self(**options))


@pytest.fixture
def open_instance(leakless: None, driver: vt.CDriver, driver_options: dict[str, str]) -> Iterator[Maker]:
    maker = Maker(driver, driver_options)
    yield maker
    for instance in maker.made:
        instance.close()


@pytest.fixture
def pair(open_instance: Maker) -> tuple[vt.Link, vt.Link]:
    """Two instances in this process, and the two ends of one link."""
    return open_instance.pair()


@pytest.fixture
def world(pair: tuple[vt.Link, vt.Link]) -> World:
    return World(*pair)


class World:
    """A pair with memory on both sides: ``here`` on the left; ``there`` on the right, ``remote`` to the left."""

    def __init__(self, left: vt.Link, right: vt.Link, size: int = 1 << 20) -> None:
        self.left, self.right = left, right
        self.make(size)

    def make(self, size: int) -> None:
        self.size = size
        self.here = self.left.instance.alloc(size)
        self.there = self.right.instance.alloc(size)
        self.remote = self.left.imported(self.there)
        vt.fill(self.here.view, 3)

    def write(self, loff: int, roff: int, length: int, **more: object) -> vt.Op:
        return self.left.submit(vt.WRITE, [(self.here, loff, self.remote, roff, length)], **more)

    def read(self, loff: int, roff: int, length: int, **more: object) -> vt.Op:
        return self.left.submit(vt.READ, [(self.here, loff, self.remote, roff, length)], **more)


@pytest.fixture
def large(open_instance: Maker) -> World:
    """64 MiB, one copy thread and small chunks: transfers that can be caught in the middle."""
    options = {"threads": 1, "chunk_bytes": 65536} if open_instance.driver.name == b"shm" else {}
    return World(*open_instance.pair(**options), size=64 << 20)
