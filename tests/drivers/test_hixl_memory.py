"""Memory of the hixl driver: allocated, registered, known to connections, released."""

from __future__ import annotations

import ctypes as c
import re

import pytest
import vtable as vt
from conftest import World
from hixl_rig import (
    Maker,
    Sim,
    backend_fixture,  # noqa: F401
    only,
    opened_fixture,  # noqa: F401
    settled,
    sim_fixture,  # noqa: F401
    wait,
    warm,
    world_fixture,  # noqa: F401
)
from vtable import MAY_READ, MAY_WRITE, READ, WRITE


def test_memory_that_comes_after_the_connection(world: World, sim: Sim) -> None:
    """A HIXL connection knows only memory registered before, so it is made again after the work in flight has ended."""
    sim.set(LATENCY_US=5000)
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(10)]
    here, there = world.left.instance.alloc(8192), world.right.instance.alloc(8192)
    vt.fill(here.view, 4)
    remote = world.left.imported(there)
    late = [world.left.submit(WRITE, [(here, i * 8, remote, i * 8, 8)]) for i in range(1024)]
    assert settled(world, ops + late) == [vt.OK] * (10 + 1024)
    assert there.view == here.view


@pytest.mark.parametrize("whose", ["ours", "theirs", "that of a signal"])
def test_memory_that_comes_late_on_one_side(world: World, whose: str) -> None:
    here = world.left.instance.alloc(8192) if whose == "ours" else world.here
    remote = world.remote if whose == "ours" else world.left.imported(world.right.instance.alloc(8192))
    if whose == "that of a signal":
        world.left.submit(signal=(remote, 8, 1)).ok(world.left)
    else:
        world.left.submit(WRITE, [(here, 0, remote, 0, 8192)]).ok(world.left)


def test_memory_is_registered_once_each(world: World, sim: Sim) -> None:
    """The same range twice is one handle to HIXL: releasing one must not end the other."""
    buffer = (c.c_uint8 * 8192)()
    first, second = (world.left.instance.register(buffer) for _ in range(2))
    first.release()
    wait(lambda: not world.left.instance.ops, world)
    world.left.submit(WRITE, [(second, 0, world.remote, 0, 8192)]).ok(world.left)


def test_one_range_as_two_kinds_is_refused(world: World) -> None:
    """HIXL would take it, and then refuse every connection."""
    buffer = (c.c_uint8 * 8192)()
    world.left.instance.register(buffer)
    with pytest.raises(vt.DriverError) as caught:
        world.left.instance.register(buffer, kind=vt.DEVICE)
    assert caught.value.status == vt.INVALID


@only("cs")
def test_an_overlap_that_hixl_refuses_is_reported(world: World) -> None:
    buffer = (c.c_uint8 * 8192)()
    world.left.instance.register(buffer)
    part = (c.c_uint8 * 4096).from_buffer(buffer, 100)
    with pytest.raises(vt.DriverError) as caught:
        world.left.instance.register(part)
    assert caught.value.status == vt.INVALID
    assert caught.value.native == 103900


def test_memory_is_released_while_links_live(world: World, sim: Sim) -> None:
    """DeregisterMem is refused while there are connections: they pause when they are idle."""
    extra = [world.left.instance.alloc(4096 * (i + 1)) for i in range(5)]
    regions = sim.count("regions")
    for memory in extra:
        memory.release()
    wait(lambda: not world.left.instance.ops, world, "a memory was not released")
    assert sim.count("regions") == regions - 5
    world.write(0, 0, world.size).ok(world.left)
    assert world.there.view == world.here.view


def test_memory_is_released_under_constant_work(opened: Maker, sim: Sim) -> None:
    """Links that are never idle are held up for a moment; none of their transfers fails."""
    world = opened.world()
    sim.set(LATENCY_US=1000)
    extra = world.left.instance.alloc(4096)
    ops = [world.write(0, 0, 4096) for _ in range(8)]
    extra.release()
    retiring = list(world.left.instance.ops.values())[-1]
    while not retiring.released:
        ops = [op for op in ops if not (op.released and op.ok())]
        while len(ops) < 8:
            ops.append(world.write(0, 0, 4096))
        world.left.take()
        ops[0].wait(world.left)
    assert settled(world, ops) == [vt.OK] * len(ops)


def test_work_waits_for_its_memory(opened: Maker, sim: Sim) -> None:
    """Registration is still under way when the transfer is submitted."""
    world = opened.world()
    buffer = (c.c_uint8 * 65536)()
    vt.fill(memoryview(buffer).cast("B"), 8)
    instance, handle = world.left.instance, c.c_void_p()
    sim.set(FAULTS="register_stall@1=20")
    assert instance.vt.mem_register(instance.handle, c.addressof(buffer), 65536, vt.HOST, 3, c.byref(handle)) == 0
    memory = vt.Memory(instance, handle.value, 65536, c.addressof(buffer), keep=buffer)
    instance.memories.add(memory)
    op = world.left.submit(WRITE, [(memory, 0, world.remote, 0, 65536)])
    world.write(0, 0, 8).ok(world.left)
    assert not op.released
    sim.set(FAULTS="")
    op.ok(world.left)
    assert world.there.view[:65536] == memoryview(buffer).cast("B")


def test_memory_that_cannot_be_registered(opened: Maker, sim: Sim) -> None:
    world = opened.world()
    sim.set(FAULTS="register=207001")
    instance, handle, address = world.left.instance, c.c_void_p(), c.c_void_p()
    assert instance.vt.mem_alloc(instance.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
    memory = vt.Memory(instance, handle.value, 4096, address.value)
    instance.memories.add(memory)
    with pytest.raises(vt.DriverError) as caught:
        instance.ready(memory)
    assert (caught.value.status, caught.value.native) == (vt.NOMEM, 207001)
    with pytest.raises(vt.DriverError) as caught:
        memory.export(MAY_READ)
    assert caught.value.status == vt.NOMEM
    with pytest.raises(vt.DriverError):
        world.left.submit(READ, [(memory, 0, world.remote, 0, 8)])


def test_memory_before_start(opened: Maker, sim: Sim) -> None:
    """It is registered once the engine is up, and cannot be exported before."""
    instance = opened()
    handle, address = c.c_void_p(), c.c_void_p()
    assert instance.vt.mem_alloc(instance.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
    memory = vt.Memory(instance, handle.value, 4096, address.value)
    instance.memories.add(memory)
    with pytest.raises(vt.DriverError) as caught:
        memory.export(MAY_READ)
    assert caught.value.status == vt.BUSY
    ready = vt.Op(instance)
    ready.accepted("mem_ready", instance.vt.mem_ready(memory.handle, ready.pointer))
    assert not ready.released
    instance.start()
    ready.ok()
    memory.export(MAY_READ | MAY_WRITE)


@only("cs")
def test_memory_of_an_engine_that_cannot_start(opened: Maker, sim: Sim) -> None:
    """A call that waits for its registration fails."""
    sim.set(FAULTS="init=207001")
    instance = opened()
    handle, address = c.c_void_p(), c.c_void_p()
    assert instance.vt.mem_alloc(instance.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
    memory = vt.Memory(instance, handle.value, 4096, address.value)
    instance.memories.add(memory)
    ready = vt.Op(instance)
    ready.accepted("mem_ready", instance.vt.mem_ready(memory.handle, ready.pointer))
    with pytest.raises(vt.DriverError) as caught:
        instance.start()
    assert (caught.value.status, caught.value.native) == (vt.NOMEM, 207001)
    assert ready.wait() == vt.NOMEM


HOST_NIC = '{"version":"1.3","endpoint_list":[{"protocol":"roce","comm_id":"10.0.0.1","placement":"host"}]}'
BY_HOST_NIC = '{"comm_resource_config.protocol_desc":["roce:host"]}'


@pytest.mark.parametrize(
    ("options", "environment", "pinned"),
    [
        ({}, {}, True),
        ({"host_memory": "pages"}, {}, False),
        ({"LocalCommRes": HOST_NIC}, {"SOC": "Ascend950PR_9599"}, False),
        ({"GlobalResourceConfig": BY_HOST_NIC}, {"SOC": "Ascend950PR_9599"}, False),
        ({"LocalCommRes": HOST_NIC, "host_memory": "pinned"}, {"SOC": "Ascend950PR_9599"}, True),
        ({"LocalCommRes": HOST_NIC}, {"SOC": "Ascend910B3"}, True),
        ({}, {"SOC": "Ascend950PR_9599"}, True),
        # Another test may have left a context on this thread.
        ({"LocalCommRes": HOST_NIC, "device": "0"}, {"DEVICES": "0", "MALLOC_HOST": "107002"}, False),
    ],
)
def test_host_memory_is_page_locked(
    sim: Sim,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    environment: dict[str, str],
    pinned: bool,
) -> None:
    """HIXL can register it: page-locked by AscendCL, except for the NIC of a 950's host, which takes no such memory."""
    for name, value in environment.items():
        monkeypatch.setenv(f"HIXLSIM_{name}", value)
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), **options})
        memory = instance.alloc(4096)
        assert bool(sim.acl.hixlsim_memory_kind(c.c_void_p(memory.address))) == pinned
        instance.close()


@only("comm")
def test_memory_that_cannot_be_locked_is_refused(opened: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternative would be memory that HIXL refuses, or takes and then cannot connect with."""
    instance = opened()
    instance.start()
    monkeypatch.setenv("HIXLSIM_MALLOC_HOST", "207001")
    with pytest.raises(vt.DriverError) as caught:
        instance.alloc(4096)
    assert caught.value.status == vt.NOMEM
    assert any("aclrtMallocHost of 0 MiB answered 207001" in line for line in instance.logs)


@only("cs")
def test_an_allocation_waits_for_no_call_of_hixl(opened: Maker, sim: Sim) -> None:
    """Although all threads of the driver are inside of one."""
    a = opened(threads=2)
    worlds = [warm(World(*vt.join(a, opened()))) for _ in range(2)]
    sim.set(FAULTS="stall@1,2=5")
    ops = [world.write(0, 0, 8) for world in worlds]
    for _ in range(50):  # in the meantime both have begun
        handle, address = c.c_void_p(), c.c_void_p()
        assert a.vt.mem_alloc(a.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
        a.memories.add(vt.Memory(a, handle.value, 4096, address.value))
    assert not any(op.released for op in ops)
    sim.set(FAULTS="")
    for world, op in zip(worlds, ops, strict=True):
        op.ok(world.left)


@only("comm")
def test_an_allocation_that_holds_up_the_loop_is_logged(opened: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = opened()
    instance.alloc(4096)
    assert not any("aclrtMallocHost" in line for line in instance.logs)
    monkeypatch.setenv("HIXLSIM_MALLOC_HOST_MS", "120")
    instance.alloc(4096)
    assert any(re.search(r"aclrtMallocHost .* took \d{3,} ms", line) for line in instance.logs)
    opened(host_memory="pages").alloc(4096)
    assert not any("aclrtMallocHost" in line for line in opened.made[-1].logs)
