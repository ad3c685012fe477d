"""The simulated HIXL in this process, and pairs of instances over it, for test_hixl_*.py."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vtable as vt
from conftest import World, hixlsim

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hixl_async" / "drivers" / "hixl"
MIB = 1 << 20
BACKENDS = ("comm", "cs", "fab")
QUIET = {"LATENCY_US": 0, "JITTER_US": 0, "GBPS": 0, "ORDER": "fifo", "FAULTS": "", "SEED": 1, "STRICT": 0, "RELAY": 0,
         "FORGET_US": 0, "HEARTBEAT_MS": 10_000, "SILENCE_MS": 120_000}  # fmt: skip


class Sim:
    """The simulated library in this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.library = c.CDLL(str(root / "lib64" / "libcann_hixl.so"), os.RTLD_LOCAL)
        self.library.hixlsim_count.restype = c.c_int64
        self.acl = c.CDLL(str(root / "lib64" / "libascendcl.so"), os.RTLD_LOCAL)

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            assert self.library.hixlsim_set(name.encode(), str(value).encode()) == 0, (name, value)

    def count(self, name: str) -> int:
        return int(self.library.hixlsim_count(name.encode()))

    def break_links(self) -> None:
        self.library.hixlsim_break(b"")


@pytest.fixture(name="sim")
def sim_fixture() -> Iterator[Sim]:
    sim = Sim(hixlsim())
    sim.set(**QUIET)
    stale = sim.count("stale")
    yield sim
    sim.set(**QUIET)
    assert sim.count("stale") == stale, "a request was asked about after its last answer"
    assert [sim.count(name) for name in ("links", "regions", "live_requests")] == [0, 0, 0]


class Maker:
    def __init__(self, options: dict[str, object]) -> None:
        self.table = vt.load("hixl")
        self.options = options
        self.made: list[vt.Instance] = []

    def __call__(self, **options: object) -> vt.Instance:
        self.made.append(vt.Instance(self.table, {k: str(v) for k, v in {**self.options, **options}.items()}))
        return self.made[-1]

    def pair(self, **options: object) -> tuple[vt.Link, vt.Link]:
        return vt.join(self(**options), self(**options))

    def world(self, size: int = MIB, **options: object) -> World:
        """A pair with memory, after the first transfer: the connections see all memory that there is."""
        return warm(World(*self.pair(**options), size=size))


def warm(world: World) -> World:
    world.read(0, 0, 8).ok(world.left, world.right)
    vt.fill(world.here.view, 3)
    return world


@pytest.fixture(name="backend", params=BACKENDS)
def backend_fixture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(name="opened")
def opened_fixture(sim: Sim, backend: str) -> Iterator[Maker]:
    with vt.no_leaks():
        maker = Maker({"library": sim.root, "backend": backend})
        yield maker
        for instance in maker.made:
            instance.close()


@pytest.fixture(name="world")
def world_fixture(opened: Maker) -> World:
    return opened.world()


def only(*names: str) -> pytest.MarkDecorator:
    """Restrict a test to these back-ends."""
    return pytest.mark.parametrize("backend", names, indirect=True)


def logs(world: World, text: str) -> list[str]:
    return [line for line in world.left.instance.logs + world.right.instance.logs if text in line]


def wait(true: Callable[[], object], world: World, what: str = "timed out") -> None:
    world.left.instance.until(true, world.left, world.right, what=what)


def settled(world: World, ops: list[vt.Op]) -> list[int]:
    wait(lambda: all(op.released for op in ops), world, "an op was not released")
    return [op.status for op in ops]


def facts(instance: vt.Instance) -> dict[str, str]:
    lines = instance.vt.about(instance.handle).decode().splitlines()
    return dict(line.split(": ", 1) for line in lines)
