"""Links and instances of the hixl driver: metadata, threads, the end."""

from __future__ import annotations

import re
import struct
import threading
from pathlib import Path

import pytest
import vtable as vt
from conftest import World
from hixl_rig import (
    Maker,
    Sim,
    backend_fixture,  # noqa: F401
    only,
    opened_fixture,  # noqa: F401
    sim_fixture,  # noqa: F401
    wait,
    world_fixture,  # noqa: F401
)
from vtable import MAY_READ, WRITE


def test_connect_by_the_asynchronous_form(opened: Maker, sim: Sim) -> None:
    world = opened.world(connect_via="async")
    world.write(0, 0, world.size).ok(world.left)
    there = world.right.instance.alloc(4096)
    world.left.submit(WRITE, [(world.here, 0, world.left.imported(there), 0, 4096)]).ok(world.left)
    assert there.view == world.here.view[:4096]
    left, right = opened(connect_via="async").link(), opened().link()
    metadata = vt.CMetadata.from_buffer_copy(right.metadata)
    right.stop().wait()
    right.instance.close()
    with pytest.raises(vt.DriverError):
        left.connect(metadata)


def test_a_link_to_itself_is_refused(opened: Maker) -> None:
    instance = opened()
    left, right = instance.link(1), instance.link(2)
    with pytest.raises(vt.DriverError) as caught:
        left.connect(right.metadata)
    assert caught.value.status == vt.INVALID


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:0", "localhost:80", "127.0.0.1:99999", "[::1:80", "a" * 64]
)
@only("cs")
def test_metadata_without_an_address(opened: Maker, address: str) -> None:
    left, right = opened().link(), opened().link()
    size = right.metadata.len
    right.metadata.data[size - 64 : size] = address.encode().ljust(64, b"\0")[:64]
    with pytest.raises(vt.DriverError) as caught:
        left.connect(right.metadata)
    assert caught.value.status == vt.PROTOCOL


@pytest.mark.parametrize("what", ["shorter", "longer", "version", "magic", "no back-end", "unknown back-end"])
@only("comm")
def test_link_metadata_of_another_driver(opened: Maker, what: str) -> None:
    """From a driver of another version, or from no driver at all: no field of the metadata is trusted."""
    left, right = opened().link(), opened().link()
    metadata = right.metadata
    before = bytes(metadata.data[: metadata.len])
    fields = list(struct.unpack("=IIQQQIHH64s", before))
    assert fields[7] == 1
    changes = {"magic": (0, 1), "version": (1, fields[1] + 1), "no back-end": (7, 0), "unknown back-end": (7, 4)}
    if what in changes:
        at, value = changes[what]
        fields[at] = value
        metadata.data[: metadata.len] = struct.pack("=IIQQQIHH64s", *fields)
    else:
        metadata.len += -8 if what == "shorter" else 8
    with pytest.raises(vt.DriverError) as caught:
        left.connect(metadata)
    assert caught.value.status == vt.PROTOCOL


@pytest.mark.parametrize("what", ["shorter", "longer", "magic", "version", "token", "number", "kind", "end"])
@only("comm")
def test_memory_metadata_of_another_driver(world: World, what: str) -> None:
    metadata = world.there.export(MAY_READ)
    fields = list(struct.unpack("=IIQQQQII", bytes(metadata.data[: metadata.len])))
    assert fields[3:5] == [world.there.address, world.size]
    changes = {
        "magic": (0, 1), "version": (1, 99), "token": (2, 1), "number": (5, 0), "kind": (6, 2), "end": (4, (1 << 64) - 1)
    }  # fmt: skip
    if what in changes:
        at, value = changes[what]
        fields[at] = value
        metadata.data[: metadata.len] = struct.pack("=IIQQQQII", *fields)
    else:
        metadata.len += -8 if what == "shorter" else 8
    with pytest.raises(vt.DriverError) as caught:
        world.left.load(metadata, 4096, MAY_READ)
    assert caught.value.status == vt.PROTOCOL


@pytest.mark.parametrize(("ours", "theirs"), [("comm", "cs"), ("cs", "fab"), ("fab", "comm")])
def test_peers_of_different_back_ends(sim: Sim, ours: str, theirs: str) -> None:
    """HIXL is not asked: its answer has no reason, and may take as long as a connect may."""
    with vt.no_leaks():
        a, b = (vt.Instance(vt.load("hixl"), {"library": str(sim.root), "backend": word}) for word in (ours, theirs))
        left, right = a.link(), b.link()
        with pytest.raises(vt.DriverError) as caught:
            left.connect(right.metadata)
        assert caught.value.status == vt.UNSUPPORTED
        text = a.vt.error_text(caught.value.status, caught.value.native).decode()
        assert f"is {ours} here and {theirs} at the peer" in text
        assert sim.count("links") == 0
        a.close()
        b.close()


def test_finalize_overlaps_no_other_call(opened: Maker, sim: Sim) -> None:
    """The simulated library ends the process if it does."""
    for i in range(8):
        left, right = opened.pair()
        world = World(left, right, size=65536)
        sim.set(LATENCY_US=i * 100)
        for k in range(100):
            world.write(k * 8, k * 8, 8, note=(b"n", b"x"))
        for link in (left, right):
            link.stop().wait(left, right)
            link.free()
        left.instance.close()
        right.instance.close()


@only("cs")
def test_finalize_waits_for_connections_that_end(opened: Maker, sim: Sim) -> None:
    """The simulated library ends the process if it does not."""
    left, right = opened.pair()
    sim.set(FAULTS="disconnect_stall=0.2")
    for link in (left, right):
        link.stop().wait(left, right)
        link.free()
    left.instance.close()
    right.instance.close()


def test_threads_have_a_context(opened: Maker, sim: Sim) -> None:
    """In strict mode the library aborts on a call by a thread whose context is gone; and the driver starts new threads."""
    sim.set(STRICT=1)
    for _ in range(3):
        worlds = [opened.world(size=65536) for _ in range(2)]
        sim.set(FAULTS="stall@1=0.05")
        ops = [(w, w.write(i * 8, i * 8, 8, note=(b"n", b""))) for i in range(50) for w in worlds]
        for w, op in ops:
            op.ok(w.left, w.right)
        for w in worlds:
            for link in (w.left, w.right):
                link.stop().wait(w.left, w.right)
                link.instance.close()


def test_an_idle_engine_sleeps(opened: Maker) -> None:
    """It asks for notifications ever less often, and does nothing else."""
    world = opened.world()
    for i in range(20):
        world.write(0, 0, 8, note=(b"n", b"%d" % i)).ok(world.left, world.right)

    def switches() -> int:
        before = sum_of_switches()
        threading.Event().wait(0.1)
        return sum_of_switches() - before

    wait(lambda: switches() <= 20, world, "threads of an idle driver go on waking up")


def sum_of_switches() -> int:
    """Voluntary context switches of the driver's threads so far."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if not (task / "comm").read_text().startswith("hxa-hixl"):
                continue
            total += int(
                re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)[1]
            )
        except OSError:
            continue
    return total
