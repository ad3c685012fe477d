"""Requests of HIXL: each is asked about until its one answer."""

from __future__ import annotations

import ctypes as c
import os
import random
import re
import socket

import pytest
import vtable as vt
from conftest import World
from hixl_rig import (
    MIB,
    Maker,
    Sim,
    backend_fixture,  # noqa: F401
    logs,
    only,
    opened_fixture,  # noqa: F401
    settled,
    sim_fixture,  # noqa: F401
    wait,
    warm,
    world_fixture,  # noqa: F401
)
from vtable import WRITE


@pytest.mark.parametrize("order", ["fifo", "random"])
def test_each_request_is_asked_until_its_one_answer(opened: Maker, sim: Sim, order: str) -> None:
    """Answers free the request, and on one back-end another request gets its handle at once."""
    sim.set(LATENCY_US=50, JITTER_US=400, ORDER=order)
    world = opened.world()
    chance = random.Random(3)
    places = list(range(256))
    for _ in range(8):
        chance.shuffle(places)
        for i in places:
            world.here.view[i * 4096] = chance.randrange(256)
        ops = [world.write(i * 4096, i * 4096, 4096) for i in places]
        for op in ops:
            op.ok(world.left, world.right)
        assert world.here.view == world.there.view
    assert sim.count("live_requests") == 0


@pytest.mark.parametrize("host", [False, True])
@only("cs")
def test_requests_of_many_links_recycle_each_others_handles(
    opened: Maker, sim: Sim, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three engines at once write to three others: threads submit while others ask."""
    if host:
        monkeypatch.setenv("HIXLSIM_CS", "host")
    sim.set(LATENCY_US=20, JITTER_US=200, ORDER="random")
    a = opened()
    worlds = [warm(World(*vt.join(a, opened()))) for _ in range(3)]
    for turn in range(30):
        ops = [(w, w.write(i * 997, i * 997, 900 + turn)) for i in range(100) for w in worlds]
        for w, op in ops:
            op.ok(w.left)
    for w in worlds:
        for at in range(0, 100 * 997, 997):
            assert w.there.view[at : at + 929] == w.here.view[at : at + 929]


@only("cs")
def test_no_request_is_forgotten_in_place_of_another(opened: Maker, sim: Sim) -> None:
    """A query frees a request before it forgets its address; until then no other request may get the same address."""
    sim.set(FORGET_US=100, LATENCY_US=10, JITTER_US=400, ORDER="random")
    a = opened()
    worlds = [World(*vt.join(a, opened()), size=65536) for _ in range(8)]
    for w in worlds:
        vt.fill(w.here.view, 3)
    chance = random.Random(5)
    ops = []
    for _ in range(320):
        world, at = chance.choice(worlds), chance.randrange(60_000)
        ops.append((world, at, world.write(at, at, 1000)))
    for w, at, op in ops:
        op.ok(w.left)
        assert w.there.view[at : at + 1000] == w.here.view[at : at + 1000]


def shut_sockets(instance: vt.Instance) -> None:
    """Shut down the connections of others in this process with the HIXL of `instance`, as if it had died."""
    port = int(re.search(r"listens at: 127.0.0.1:(\d+)", instance.vt.about(instance.handle).decode())[1])
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as known:
                if known.family == socket.AF_INET and known.getpeername()[1] == port:
                    known.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@only("cs")
def test_dropped_requests_are_not_taken_for_others(opened: Maker, sim: Sim) -> None:
    """With AutoConnect it drops a connection by itself, and then other links' requests may have their addresses."""
    sim.set(HEARTBEAT_MS=10)
    a = opened(AutoConnect=1)
    lost, well = (warm(World(*vt.join(a, opened(AutoConnect=1)))) for _ in range(2))
    sim.set(LATENCY_US=400_000)
    dropped = [lost.write(i * 8, i * 8, 8) for i in range(7)]
    wait(lambda: sim.count("live_requests") == 7, lost)
    shut_sockets(lost.right.instance)
    wait(lambda: sim.count("live_requests") == 0, lost)
    sim.set(LATENCY_US=2000)
    for _ in range(10):
        ops = [well.write(i * 64, i * 64, 64) for i in range(30)]
        assert settled(well, ops) == [vt.OK] * 30
    assert not any(op.completed for op in dropped), "an answer about another request was taken for theirs"
    a.vt.abandon(lost.left.handle, dropped[0].pointer)
    assert settled(lost, dropped) == [vt.TIMEOUT] + [vt.LINK] * 6
    sim.set(LATENCY_US=0)
    lost.write(0, 0, lost.size).ok(lost.left)


@only("cs")
def test_failed_requests_are_not_queried_again(opened: Maker, sim: Sim) -> None:
    """The fixture `sim` counts questions about requests that are gone."""
    world = opened.world(AutoConnect=1)
    sim.set(LATENCY_US=200_000)
    ops = [world.write(i * 8, i * 8, 8) for i in range(10)]
    wait(lambda: sim.count("live_requests") == 10, world)
    sim.set(FAULTS="submit@1=507899")
    ops.append(world.write(0, 0, 8))
    assert settled(world, ops) == [vt.LINK] * 11
    sim.set(LATENCY_US=0)
    world.write(0, 0, world.size).ok(world.left)


def test_batch_queries_where_they_exist(world: World, sim: Sim, backend: str) -> None:
    """One question for all requests where the back-end answers it, one each elsewhere."""
    sim.set(LATENCY_US=300)
    before = sim.count("batches")
    ops = [world.write(i * 64, i * 64, 64) for i in range(512)]
    for op in ops:
        op.ok(world.left)
    assert (sim.count("batches") > before) == (backend == "cs")
    assert logs(world, f"back-end {backend}")


def test_a_request_stays_within_limits_of_hixl(opened: Maker, sim: Sim) -> None:
    world = opened.world(request_descriptors=100)
    before = sim.count("submitted")
    rows = [(world.here, i * 8, world.remote, i * 8, 8) for i in range(1000)]
    world.left.submit(WRITE, rows).ok(world.left)
    assert sim.count("submitted") - before == 10
    assert world.there.view[:8000] == world.here.view[:8000]


def test_mixed_kinds_are_split(opened: Maker, sim: Sim, backend: str) -> None:
    """A request of several kinds of memory reads freed memory on one back-end."""
    left, right = opened.pair()
    world = World(left, right)
    device = c.c_void_p()
    assert sim.acl.aclrtSetDevice(0) == 0
    assert sim.acl.aclrtMalloc(c.byref(device), c.c_size_t(4 * MIB), 0) == 0
    try:
        block = (c.c_uint8 * (2 * MIB)).from_address(device.value)
        other = (c.c_uint8 * (2 * MIB)).from_address(device.value + 2 * MIB)
        vt.fill(memoryview(block).cast("B"), 9)
        ours = left.instance.register(block, kind=vt.DEVICE)
        theirs = left.imported(right.instance.register(other, kind=vt.DEVICE))
        sim.set(LATENCY_US=100, JITTER_US=500, ORDER="random")
        before = sim.count("submitted")
        rows = [
            (local, i * 100, remote, (2 * i + (local is ours)) * 100, 100)
            for i in range(400)
            for local, remote in (
                (ours, theirs),
                (ours, world.remote),
                (world.here, theirs),
                (world.here, world.remote),
            )
        ]
        assert left.submit(WRITE, rows).ok(left, right).bytes == 160_000
        assert sim.count("submitted") - before == 4
        seen, host = memoryview(other).cast("B"), world.there.view
        for i in range(400):
            at = 2 * i * 100
            assert (
                seen[at + 100 : at + 200]
                == host[at + 100 : at + 200]
                == memoryview(block).cast("B")[i * 100 : i * 100 + 100]
            )
            assert seen[at : at + 100] == host[at : at + 100] == world.here.view[i * 100 : i * 100 + 100]
    finally:
        for link in (left, right):
            link.stop().wait(left, right)
            link.instance.close()
        sim.acl.aclrtFree(device)


def test_a_busy_library_is_asked_again(world: World, sim: Sim, backend: str) -> None:
    # The one back-end that says FAILED instead is asked again while there are others in flight.
    sim.set(FAULTS="exhausted@2,3,5" if backend == "fab" else "exhausted@1,2,3,5", LATENCY_US=50_000)
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(8)]
    for op in ops:
        op.ok(world.left)
    assert world.there.view[:32768] == world.here.view[:32768]


@only("comm", "cs")
def test_a_library_that_stays_busy(opened: Maker, sim: Sim) -> None:
    world = opened.world(busy_ms=20)
    sim.set(FAULTS="exhausted")
    assert world.write(0, 0, 8).wait(world.left) == vt.BUSY
    sim.set(FAULTS="")
    world.write(0, 0, 8).ok(world.left)


@pytest.mark.parametrize("automatic", ["0", "1"])
def test_a_bad_address_fails_no_other_transfer(opened: Maker, sim: Sim, automatic: str) -> None:
    """With AutoConnect a refused address ends the connection and all that is in flight on it."""
    world = opened.world(AutoConnect=automatic)
    sim.set(LATENCY_US=3000)
    op = world.write(0, 0, 4096)
    submitted = sim.count("submitted")
    for _ in range(3):
        with pytest.raises(vt.DriverError) as caught:
            world.write(0, world.size - 8, 16)
        assert caught.value.status == vt.RANGE
    op.ok(world.left)
    assert sim.count("submitted") - submitted <= 1


def test_both_directions_at_once(world: World) -> None:
    """A connection goes one way."""
    back = world.right.imported(world.here)
    vt.fill(world.there.view, 7)
    ops = [world.write(0, MIB // 2, MIB // 4), world.right.submit(WRITE, [(world.there, 0, back, MIB // 2, MIB // 4)])]
    for op in ops:
        op.ok(world.left, world.right)
    assert world.there.view[MIB // 2 : MIB // 4 * 3] == world.here.view[: MIB // 4]
    assert world.here.view[MIB // 2 : MIB // 4 * 3] == world.there.view[: MIB // 4]
