"""Notifications and signals over HIXL."""

from __future__ import annotations

import os
import threading

import pytest
import vtable as vt
from conftest import World
from hixl_rig import (
    Maker,
    Sim,
    backend_fixture,  # noqa: F401
    logs,
    only,
    opened_fixture,  # noqa: F401
    sim_fixture,  # noqa: F401
    wait,
    warm,
    world_fixture,  # noqa: F401
)
from vtable import WRITE

LOST = 3  # Message::LOST of protocol.hpp


ODD = [b"", b"\0", b"\0" * 20, b"\xff\xfe\x80", "\u00fc\ud7ff".encode(), bytes(range(256)), b'"\\{}', b"x" * 700, b"y" * 747,
       b"z" * 748, os.urandom(2000), os.urandom(2980), b"w" * 3100, os.urandom(60_000)]  # fmt: skip


@pytest.mark.parametrize("via", ["hixl", "control"])
def test_any_bytes_survive_in_order(opened: Maker, sim: Sim, via: str) -> None:
    """HIXL takes 1,024 bytes of UTF-8 without NUL, and one back-end aborts the process for anything else."""
    world = opened.world(notify_via=via)
    before, carry, said = sim.count("notifies"), world.right.carry, []
    world.right.carry = lambda data: (said.append(data[0]), carry(data))
    sent = [(topic, text) for topic in (b"t", b"\0\xff", b"long" * 50) for text in ODD]
    ops = [world.left.note(*note) for note in sent]
    wait(lambda: len(world.right.notes()) == len(sent), world)
    assert world.right.notes() == sent
    for op in ops:
        op.ok(world.left)
    assert LOST not in said, "some came a second time, by the control connection"
    assert (sim.count("notifies") > before) == (via == "hixl")
    assert len(logs(world, "go over the control connection")) == (via == "hixl"), "said once"


def test_notifications_are_packed(world: World, sim: Sim) -> None:
    before = sim.count("notifies")
    for i in range(1000):
        world.left.instance.until(lambda: len(world.left.instance.ops) < 500, world.left, world.right)
        world.left.note(b"n", b"%d" % i)
    wait(lambda: len(world.right.notes()) == 1000, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(1000))
    assert sim.count("notifies") - before < 900


def test_a_queue_never_overflows(opened: Maker, sim: Sim) -> None:
    """Many senders, a receiver that takes nothing: what it has no room for stays with the sender."""
    b = opened()
    pairs = [vt.join(opened(pending_notes=5000), b) for _ in range(6)]
    n, before = 900, sim.count("notifies")
    for left, _ in pairs:
        for i in range(n):
            left.note(b"n", b"%d %s" % (i, b"x" * 700))
    for left, _ in pairs:
        left.instance.until(lambda: left.instance.stats().notes_sent >= 256, left)  # noqa: B023
    assert sim.count("notifies") - before <= 6 * 256, "sent although the receiver had granted no room"
    for left, right in pairs:
        left.instance.until(lambda: len(right.notes()) == n, left, right)  # noqa: B023
        assert [int(text.split()[0]) for _, text in right.notes()] == list(range(n))
        assert not any("control connection" in line for line in left.instance.logs)


def test_senders_are_distinguished(opened: Maker) -> None:
    """HIXL does not say who sent a notification."""
    b = opened()
    pairs = [vt.join(opened(), b) for _ in range(4)] + [vt.join(opened(), b)]
    for i, (left, _) in enumerate(pairs):
        for k in range(20):
            left.note(b"from", b"%d %d" % (i, k))
    for i, (left, right) in enumerate(pairs):
        left.instance.until(lambda: len(right.notes()) == 20, left, right)  # noqa: B023
        assert right.notes() == [(b"from", b"%d %d" % (i, k)) for k in range(20)]


def test_a_notification_is_sent_once_the_data_is_there(opened: Maker, sim: Sim) -> None:
    """Only COMPLETED orders a notification after a transfer."""
    world = opened.world()
    sim.set(LATENCY_US=2000, JITTER_US=2000, ORDER="random")
    for i in range(1, 30):
        world.here.view[:] = bytes([i]) * world.size
        world.write(0, 0, world.size, note=(b"n", b"%d" % i), signal=None)
        wait(lambda: len(world.right.notes()) == i, world)  # noqa: B023
        assert set(world.there.view[::4096]) == {i}


@only("cs", "comm")
def test_notifications_come_in_the_order_in_which_their_batches_finished(opened: Maker, sim: Sim) -> None:
    """T5 promises no more: requests of one link may overtake each other, also because they are polled in turn."""
    world = opened.world()
    sim.set(LATENCY_US=100, JITTER_US=20000, ORDER="random")
    numbers = {}
    for i in range(100):
        numbers[world.write(i * 8, i * 8, 8, note=(b"n", b"%d" % i))] = i
        if i % 4 == 0:  # whose notification has nothing to wait for
            numbers[world.left.note(b"n", b"%d" % (1000 + i))] = 1000 + i
    wait(lambda: len(world.right.notes()) == len(numbers), world)
    wait(lambda: not world.left.instance.ops, world)
    seen = [int(text) for _, text in world.right.notes()]
    assert seen == [numbers[op] for op in world.left.instance.finished if op in numbers]
    data = [number for number in seen if number < 1000]
    assert data != sorted(data), "nothing overtook anything"


@pytest.mark.parametrize("fault", ["ack_lost@3", "notify@3", "notify@4=1", "ack_delay@3=0.3"])
@only("comm", "cs")
def test_a_broken_notification_connection(opened: Maker, sim: Sim, fault: str) -> None:
    """Spurious, late and missing answers: the rest goes by the control connection, nothing is lost, doubled or reordered."""
    world = opened.world(notify_timeout_ms=100)
    sim.set(FAULTS=fault)
    sent = []
    for i in range(200):
        sent.append((b"n", b"%d" % i))
        world.left.note(*sent[-1]).ok(world.left, world.right)
    wait(lambda: len(world.right.notes()) >= 200, world)
    assert world.right.notes() == sent
    assert len(logs(world, "notifications go over the control connection from here on")) == 1
    sim.set(FAULTS="")
    world.write(0, 0, world.size).ok(world.left)


@only("cs", "fab")
def test_a_full_receiver_is_asked_again(world: World, sim: Sim) -> None:
    sim.set(FAULTS="notify@2,3,7=203900")
    for i in range(20):
        world.left.note(b"n", b"%d" % i).ok(world.left)
    wait(lambda: len(world.right.notes()) == 20, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(20))
    assert not logs(world, "control connection")


def test_lost_notifications_are_requested_again(world: World) -> None:
    """A long one goes by the control connection, and is lost there; the next one comes by HIXL."""
    carry, dropped = world.left.carry, []

    def lossy(data: bytes) -> None:
        if len(data) > 10_000 and not dropped:
            dropped.append(data)
        else:
            carry(data)

    world.left.carry = lossy
    sent = [(b"long", bytes(12_000)), (b"short", b"1"), (b"short", b"2")]
    for note in sent:
        world.left.note(*note).ok(world.left)
    wait(lambda: len(world.right.notes()) == 3, world)
    assert dropped
    assert world.right.notes() == sent


@pytest.mark.parametrize("via", ["hixl", "control"])
def test_large_notifications_do_not_flood_the_control_connection(opened: Maker, via: str) -> None:
    """It gives up a peer that lets more than 512 KiB wait."""
    world = opened.world(notify_via=via)
    sent = [(b"n", b"%03d" % i + bytes(60_000)) for i in range(40)]
    for note in sent:
        world.left.note(*note)
    world.left.instance.until(lambda: sum(map(len, world.right.inbox)) > 60_000)
    seen = 0
    while seen != (seen := sum(map(len, world.right.inbox))):
        threading.Event().wait(0.05)
    assert seen < 256 << 10
    wait(lambda: len(world.right.notes()) == 40, world)
    assert world.right.notes() == sent


def test_notifications_outlive_a_new_connection(world: World) -> None:
    """One back-end forgets what the peer has not fetched when the sender disconnects."""
    for i in range(50):
        world.left.note(b"n", b"%d" % i)
        if i % 10 == 5:
            there = world.right.instance.alloc(4096)
            world.left.submit(WRITE, [(world.here, 0, world.left.imported(there), 0, 4096)])
    wait(lambda: len(world.right.notes()) == 50 and not world.left.instance.ops, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(50))


@only("comm")
def test_notifications_lost_by_a_disconnect_are_sent_again_unasked(opened: Maker, sim: Sim) -> None:
    """The peer would miss it in the end, and ask; but only after a second."""
    left, right = vt.join(opened(), opened(notes_poll_ms=1000))  # which fetches nothing before the connection is cut
    world = warm(World(left, right))
    said, carry = [], right.carry
    right.carry = lambda data: (said.append(data), carry(data))
    notifies = sim.count("notifies")
    for i in range(20):
        left.note(b"n", b"%d" % i).ok(left)
    assert sim.count("notifies") > notifies
    assert not right.notes()
    there = right.instance.alloc(4096)  # a new connection sees it, the old one does not
    left.submit(WRITE, [(world.here, 0, left.imported(there), 0, 4096)]).ok(left)
    wait(lambda: len(right.notes()) == 20, world)
    assert [int(text) for _, text in right.notes()] == list(range(20))
    assert not [data for data in said if data[0] == 3], "the peer had to ask"


def test_signals_wake_in_both_ways(opened: Maker) -> None:
    for via in ("hixl", "control"):
        world = opened.world(notify_via=via)
        for i in range(1, 20):
            before = world.right.signals()
            world.left.submit(signal=(world.remote, 8 * i, i)).ok(world.left)
            wait(lambda: world.right.signals() > before, world)  # noqa: B023
            assert int.from_bytes(world.there.view[8 * i : 8 * i + 8], "little") == i
        assert len(world.right.notes()) == 0


@pytest.mark.parametrize(
    "message",
    [b"", b"\x00", b"\x09", b"\x01", b"\x02\x01", b"\x02" + bytes(15), b"\x02" + b"\xff" * 16, b"\x04abc",
     b"\x04" + bytes(20), b"\x04" + (1).to_bytes(8, "little") + b"\0\0\0\0" + b"\xff\xff\xff\x7f" + b"\x05\0\0\0hello",
     b"\x04" + (1 << 40).to_bytes(8, "little") + b"\0\0\0\0" + b"\x06\0\0\0" + b"\x06\0\0\0helloo",
     b"\x04" + (1).to_bytes(8, "little") + b"\0\0\0\0" + b"\x06\0\0\0" + b"\x06\0\0\0" + b"\x02\xff\xff\0\0x"],
)  # fmt: skip
@only("cs")
def test_malformed_messages_end_the_link(world: World, message: bytes) -> None:
    assert world.right.vt.message(world.right.handle, message, len(message)) == -vt.PROTOCOL
    wait(lambda: world.right.down, world)
    assert b"malformed" in world.right.down.data


@only("cs")
def test_a_hostile_sender_is_not_waited_for(world: World) -> None:
    """Numbers far ahead, and more than may be held for an earlier one."""
    piece = (
        b"\x04"
        + (2).to_bytes(8, "little")
        + b"\0\0\0\0"
        + (60_000).to_bytes(4, "little")
        + b"\x05\0\0\0"
        + b"\x02\0\0\0\0"
    )
    for i in range(2, 600):
        data = piece[:1] + i.to_bytes(8, "little") + piece[9:]
        if world.right.vt.message(world.right.handle, data, len(data)) != 0:
            break
    else:
        raise AssertionError("everything was taken")
    wait(lambda: world.right.down, world)
