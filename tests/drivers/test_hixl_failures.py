"""Failures of requests and links, and the recovery from them."""

from __future__ import annotations

import ctypes as c
import re
import socket
import threading

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


@pytest.mark.parametrize(
    "fault", ["transfer@3", "submit@3", "query@3", "submit@3=507899", "query@5=103902", "submit@3=103902"]
)
def test_a_failed_connection_is_made_again(world: World, sim: Sim, backend: str, fault: str) -> None:
    if fault == "submit@3" and backend == "fab":
        fault = "submit@3=507000"  # FAILED may mean that there are too many, and is taken for that
    sim.set(LATENCY_US=200, FAULTS=fault)
    before = sim.count("submitted")
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(20)]
    pieces = dict(enumerate(ops))
    if fault == "transfer@3" and backend == "comm":  # which is never reported there
        wait(lambda: ops[1].released and sim.count("submitted") - before >= 3, world)  # so that it is in flight
        world.left.instance.vt.abandon(world.left.handle, ops[2].pointer)
        wait(lambda: ops[2].released, world)
        assert pieces.pop(2).status == vt.TIMEOUT
    ops = [*pieces.values()]
    statuses = settled(world, ops)
    assert set(statuses) <= {vt.OK, vt.LINK}
    assert fault == "submit@3=103902" or 2 not in pieces or vt.LINK in statuses
    assert all(op.raw.scope == 0 for op in ops), "the link itself is up"
    for i, op in pieces.items():
        if op.status == vt.OK:
            assert world.there.view[i * 4096 : i * 4096 + 4096] == world.here.view[i * 4096 : i * 4096 + 4096]
        elif backend != "comm" or fault != "transfer@3":
            assert op.raw.native != 0
    sim.set(FAULTS="")
    world.write(0, 0, world.size).ok(world.left)
    assert world.there.view == world.here.view
    assert world.left.down is None


def test_a_failure_stays_with_its_link(opened: Maker, sim: Sim) -> None:
    a = opened()
    hurt, well = (warm(World(*vt.join(a, opened()))) for _ in range(2))
    sim.set(LATENCY_US=300_000)
    kept = [well.write(i * 4096, i * 4096, 4096) for i in range(10)]
    wait(lambda: sim.count("live_requests") == 10, well)
    sim.set(FAULTS="submit@1=507899")
    doomed = hurt.write(0, 0, 8)
    assert doomed.wait(hurt.left) == vt.LINK
    assert not kept[0].released
    assert settled(well, kept) == [vt.OK] * 10


def test_memory_is_held_until_the_connection_is_cut(world: World, sim: Sim) -> None:
    """COMPLETED comes at the failure, RELEASED when nothing can touch the memory any more."""
    sim.set(FAULTS="hang@1;disconnect_stall@1=60", LATENCY_US=100)
    ops = [world.write(0, 0, 4096), world.write(4096, 4096, 4096)]
    wait(lambda: sim.count("live_requests") == 2 or ops[1].released, world)
    world.left.instance.vt.abandon(world.left.handle, ops[0].pointer)
    wait(lambda: ops[0].completed, world)
    assert not ops[0].released, "Disconnect has not returned yet"
    assert ops[0].raw.status == vt.TIMEOUT
    sim.set(FAULTS="")  # which ends the stall
    settled(world, ops)
    assert ops[0].history == [vt.COMPLETED, vt.RELEASED]


@pytest.mark.parametrize("form", ["slow", "full"])
def test_memory_is_held_until_an_asynchronous_disconnect_is_over(opened: Maker, sim: Sim, form: str) -> None:
    """It may take longer than its timeout, and there may be no room for it at first."""
    pool = '{"connect_pool.thread_num":1,"connect_pool.task_queue_capacity":1}'
    a = opened(connect_via="async", connect_timeout_ms=300, GlobalResourceConfig=pool)
    worlds = [warm(World(*vt.join(a, opened()))) for _ in range({"slow": 1, "full": 3}[form])]
    sim.set(FAULTS="hang;disconnect_stall@1=" + {"slow": "0.5", "full": "0.4"}[form], LATENCY_US=100)
    ops = [world.write(0, 0, 4096) for world in worlds]
    wait(lambda: sim.count("live_requests") == len(ops), worlds[0])
    for world, op in zip(worlds, ops, strict=True):
        world.left.instance.vt.abandon(world.left.handle, op.pointer)

    def over() -> bool:
        released = sum(op.released for op in ops)
        assert sim.count("live_requests") <= len(ops) - released, "released while HIXL may still read it"
        return released == len(ops)

    wait(over, worlds[0])
    assert [op.status for op in ops] == [vt.TIMEOUT] * len(ops)
    sim.set(FAULTS="", LATENCY_US=0)
    for world in worlds:
        world.write(0, 0, world.size).ok(world.left)
        assert world.there.view == world.here.view


def test_a_dead_stream_answers_waiting_forever(world: World, sim: Sim) -> None:
    """It cannot be cancelled: the op is abandoned, the connection is closed, all ops on it fail, and the link goes on."""
    sim.set(FAULTS="hang@2", LATENCY_US=100)
    before = sim.count("submitted")
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(5)]
    assert ops[0].wait(world.left) == vt.OK
    wait(lambda: sim.count("submitted") - before == 5, world)
    assert world.left.cancel(ops[1]) == 0
    world.left.instance.vt.abandon(world.left.handle, ops[1].pointer)
    statuses = settled(world, ops)
    assert statuses[1] == vt.TIMEOUT
    assert set(statuses[2:]) <= {vt.OK, vt.LINK}
    sim.set(FAULTS="")
    world.write(0, 0, world.size).ok(world.left)
    assert world.there.view == world.here.view


def test_abandoned_before_it_began(opened: Maker, sim: Sim) -> None:
    world = opened.world(in_flight=1)
    sim.set(FAULTS="hang@1")
    first, second = world.write(0, 0, 8), world.write(8, 8, 8)
    wait(lambda: sim.count("live_requests") == 1, world)
    world.left.instance.vt.abandon(world.left.handle, second.pointer)
    assert second.wait(world.left) == vt.TIMEOUT
    assert not first.released, "that one was not abandoned"
    world.left.instance.vt.abandon(world.left.handle, first.pointer)
    assert first.wait(world.left) == vt.TIMEOUT


@pytest.mark.parametrize("end", ["cancel", "abandon", "stop"])
@only("comm")
def test_work_that_is_ended_right_after_its_submission_ends(opened: Maker, sim: Sim, end: str) -> None:
    """The strand of the endpoint always finds the op before the call that ends it."""
    a = opened()
    b = opened()
    world = warm(World(*vt.join(a, b)))
    for i in range({"cancel": 200, "abandon": 10, "stop": 20}[end]):
        ops = [world.write(k * 8, k * 8, 8) for k in range(i % 3 + 1)]
        if end == "cancel":
            early = world.left.cancel(ops[-1])
            assert (ops[-1].wait(world.left) == vt.CANCELLED) == bool(early)
        elif end == "abandon":
            a.vt.abandon(world.left.handle, ops[-1].pointer)
            assert ops[-1].wait(world.left) in (vt.OK, vt.TIMEOUT)
        else:
            world.left.stop().wait(world.left)
            assert all(op.released for op in ops)
            world.left.free()
            world = World(*vt.join(a, b), size=4096)


def test_a_link_that_cannot_be_reconnected_is_down(world: World, sim: Sim) -> None:
    sim.set(FAULTS="connect;submit@1", LATENCY_US=100)
    ops = [world.write(i * 8, i * 8, 8) for i in range(10)]
    assert set(settled(world, ops)) <= {vt.OK, vt.LINK}
    wait(lambda: world.left.down, world)
    assert b"cannot be connected" in world.left.down.data
    assert world.left.down.status == vt.LINK
    with pytest.raises(vt.DriverError) as caught:
        world.write(0, 0, 8)
    assert caught.value.status == vt.LINK


def test_heartbeats_keep_links_and_silence_loses_none(opened: Maker, sim: Sim, backend: str) -> None:
    """COMM's server drops a client that is silent for two minutes; one that was only stopped goes on all the same."""
    sim.set(HEARTBEAT_MS=10, SILENCE_MS=60000)
    world = opened.world(notify_timeout_ms=50)
    sent = 0

    def one() -> None:
        nonlocal sent
        sent += 1
        world.left.submit(WRITE, [(world.here, 0, world.remote, 0, 4096)], note=(b"n", b"%d" % sent)).ok(
            world.left, world.right
        )

    one()
    sim.set(SILENCE_MS=0)
    if backend == "comm":
        while not logs(world, "control connection"):
            one()
            world.right.poll()
    sim.set(SILENCE_MS=60000)
    for _ in range(20):
        one()
    wait(lambda: len(world.right.notes()) == sent, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(1, sent + 1))
    assert world.left.down is None
    assert world.right.down is None


@only("comm", "fab")
def test_a_link_that_a_heartbeat_dropped(opened: Maker, sim: Sim) -> None:
    """With AutoConnect HIXL drops a dead peer by itself."""
    sim.set(HEARTBEAT_MS=10)
    world = opened.world(AutoConnect="1")
    assert sim.count("links") >= 1
    world.right.stop().wait(world.left, world.right)
    world.right.free()
    world.right.instance.close()
    world.left.instance.until(lambda: sim.count("links") == 0, world.left)
    assert world.left.stop().wait(world.left) == vt.OK


def test_no_listener(opened: Maker) -> None:
    a, b = opened(), opened()
    left, right = a.link(), b.link()
    metadata = vt.CMetadata.from_buffer_copy(right.metadata)
    right.stop().wait()
    b.close()
    with pytest.raises(vt.DriverError) as caught:
        left.connect(metadata)
    assert caught.value.status == vt.LINK
    assert caught.value.native != 0


@pytest.mark.parametrize("fault", ["connect@1=103903", "connect_late@1"])
def test_already_connected_is_normal(opened: Maker, sim: Sim, fault: str) -> None:
    """It may mean that there is no such connection, or that a Connect was answered too late."""
    sim.set(FAULTS=fault)
    world = opened.world()
    world.write(0, 0, 4096).ok(world.left)
    assert world.there.view[:4096] == world.here.view[:4096]


@pytest.mark.parametrize("call", ["stall@1=60", "connect_stall@1=60"])
def test_a_link_that_blocks_does_not_stall_others(opened: Maker, sim: Sim, call: str) -> None:
    a = opened()
    if call.startswith("stall"):
        stuck, free = (warm(World(*vt.join(a, opened()))) for _ in range(2))
        sim.set(FAULTS=call)
        slow = stuck.write(0, 0, 8)
    else:
        free = warm(World(*vt.join(a, opened())))
        sim.set(FAULTS=call)
        left, right = a.link(50), opened().link(51)
        left.other, right.other = right, left
        slow = vt.Op(a)
        slow.accepted("link_connect", a.vt.link_connect(left.handle, c.byref(right.metadata), slow.pointer))
    sizes = [1, 4096, MIB // 2]
    for i in range(20):
        free.write(0, 0, sizes[i % 3]).ok(free.left)
        free.left.note(b"n", b"%d" % i).ok(free.left)
    free.right.instance.until(lambda: len(free.right.notes()) == 20, free.left, free.right)
    blocked = "TransferAsync" if call.startswith("stall") else "Connect"
    a.until(lambda: any(f"{blocked} lasts" in line for line in a.logs))
    assert not slow.released, "the others had to wait"
    sim.set(FAULTS="")  # which ends the stall
    assert slow.wait() == vt.OK
    free.left.instance.until(lambda: any("moves again" in line for line in a.logs))


@only("comm", "cs")
def test_abandoned_inside_a_call_that_does_not_return(opened: Maker, sim: Sim) -> None:
    """The call may use the memory until it returns, and no Disconnect gets past it: one would only delay other links."""
    a = opened()
    stuck, free = (warm(World(*vt.join(a, opened()))) for _ in range(2))
    sim.set(LATENCY_US=100_000)
    early = stuck.write(4096, 4096, 8)
    wait(lambda: sim.count("live_requests") == 1, stuck)
    sim.set(FAULTS="stall@1=60", LATENCY_US=0)
    inside, after = stuck.write(0, 0, 8), stuck.write(8, 8, 8)
    a.until(lambda: any("TransferAsync lasts" in line for line in a.logs))
    for op in (early, inside, after):
        a.vt.abandon(stuck.left.handle, op.pointer)
    for _ in range(20):
        free.write(0, 0, 4096).ok(free.left)
    assert not inside.released, "its memory is in use"
    stopped = stuck.left.stop()
    for _ in range(20):
        free.write(0, 0, 4096).ok(free.left)
    assert not stopped.released
    sim.set(FAULTS="")
    stopped.ok(stuck.left)
    assert {op.wait(stuck.left) for op in (early, inside, after)} <= {vt.OK, vt.TIMEOUT, vt.LINK}
    assert after.status in (vt.TIMEOUT, vt.LINK)
    a.until(lambda: any("TransferAsync took" in line for line in a.logs))
    free.write(0, 0, free.size).ok(free.left)


class Mute:
    """Accept connections where an engine should listen, and never send a byte."""

    def __init__(self, port: int = 0) -> None:
        self.server = socket.create_server(("127.0.0.1", port), backlog=64)
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.close()


@pytest.mark.parametrize("via", ["threads", "async"])
@only("comm")
def test_an_engine_that_accepts_and_never_answers(opened: Maker, via: str) -> None:
    """HIXL waits without a limit for its answer: a link that is not wanted any more, and the engine, end all the same."""
    a = opened(connect_via=via, connect_timeout_ms=100)
    free = warm(World(*vt.join(a, opened())))
    with Mute() as mute:
        left, right = a.link(50), free.right.instance.link(51)
        left.other, right.other = right, left
        size = right.metadata.len
        right.metadata.data[size - 64 : size] = mute.address.encode().ljust(64, b"\0")
        joining = vt.Op(a)
        joining.accepted("link_connect", a.vt.link_connect(left.handle, c.byref(right.metadata), joining.pointer))
        threading.Event().wait(0.3)
        free.write(0, 0, free.size).ok(free.left)
        assert not joining.released, "HIXL's time is up, but it waits"
        left.stop().ok(left)
        assert joining.wait() == vt.LINK
        assert any("Connect" in line and "no answer" in line for line in a.logs)
        free.write(0, 0, free.size).ok(free.left)
        left.free()
        a.close()


@only("comm")
def test_an_engine_that_falls_silent(opened: Maker) -> None:
    """Disconnect waits for its answer as well."""
    a, b = opened(connect_timeout_ms=100), opened()
    world = warm(World(*vt.join(a, b)))
    port = int(re.search(r"listens at: 127.0.0.1:(\d+)", b.vt.about(b.handle).decode())[1])
    b.close()
    with Mute(port):
        world.left.stop().ok(world.left)
        world.left.free()
        a.close()
