"""Requirements of every driver between two processes, also when one of them is stopped or killed."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
import vtable as vt
from peer import Peer
from vtable import READ, WRITE

MIB = 1 << 20
alloc = pytest.mark.needs("ALLOC")


@pytest.fixture
def peer(leakless: None, driver_name: str, driver_options: dict[str, str]) -> Iterator[Peer]:
    with Peer(driver_name, driver_options) as made:
        yield made


@pytest.fixture
def slow_peer(leakless: None, driver: vt.CDriver, driver_name: str, driver_options: dict[str, str]) -> Iterator[Peer]:
    """A peer with one copy thread: it takes its time, and several batches can have the same target."""
    with Peer(
        driver_name, driver_options | ({"threads": 1, "chunk_bytes": 65536} if driver.name == b"shm" else {})
    ) as made:
        yield made


@pytest.fixture
def instance(peer: Peer, open_instance) -> vt.Instance:
    return open_instance()


@pytest.fixture
def link(peer: Peer, instance: vt.Instance) -> vt.Link:
    return peer.join(instance)


@alloc
@pytest.mark.parametrize("size", [1, 4096, 300_000, 3 * MIB + 5])
def test_write_and_read(peer: Peer, link: vt.Link, size: int) -> None:
    number, remote = peer.region(link, size + 16, seed=4)
    here = link.instance.alloc(size + 16)
    link.submit(READ, [(here, 0, remote, 0, size + 16)]).ok(link)
    assert here.view == peer.call("peek", memory=number, offset=0, length=min(size + 16, 1000)) or size > 900
    vt.fill(here.view, 9)
    link.submit(WRITE, [(here, 3, remote, 7, size)]).ok(link)
    back = link.instance.alloc(size + 16)
    link.submit(READ, [(back, 0, remote, 0, size + 16)]).ok(link)
    assert back.view[7 : 7 + size] == here.view[3 : 3 + size]
    assert peer.call("peek", memory=number, offset=7, length=min(size, 4096)) == here.view[3 : 3 + min(size, 4096)]


@alloc
def test_the_peer_writes_and_reads_ours(peer: Peer, link: vt.Link) -> None:
    ours = link.instance.alloc(2 * MIB)
    there = peer.call("alloc", size=2 * MIB, rights=3, seed=11)
    remote = peer.give(ours)
    peer.call("submit", verb=WRITE, rows=[(there, 0, remote, 0, 2 * MIB)])
    assert ours.view[:4096] == peer.call("peek", memory=there, offset=0, length=4096)
    vt.fill(ours.view, 12)
    peer.call("submit", verb=READ, rows=[(there, 100, remote, 0, 4096)])
    assert ours.view[:4096] == peer.call("peek", memory=there, offset=100, length=4096)


@pytest.mark.needs("NOTIFY")
def test_ping_pong_sleeping(peer: Peer, link: vt.Link) -> None:
    """Both sides sleep on the descriptor between messages: no wake-up may be lost."""
    n = 500
    peer.ask("echo", n=n)
    for i in range(n):
        link.note(b"ping", b"%d" % i).ok(link)
        link.instance.until(lambda: len(link.notes()) == i + 1, link)
    peer.answer()
    assert [text for _, text in link.notes()] == [b"%d" % i for i in range(n)]


@pytest.mark.needs("NOTIFY")
def test_stream_of_notes_faster_than_the_reader(peer: Peer, link: vt.Link) -> None:
    n = 5000
    peer.ask("notes", n=n)
    sent = 0
    while sent < n:
        if vt.unless_busy(link.note, b"n", b"%d" % sent) is None:
            link.instance.until(lambda: len(link.instance.ops) < 500, link)
        else:
            sent += 1
    assert [int(text) for _, text in peer.answer()] == list(range(n))
    link.instance.until(lambda: not link.instance.ops, link)


@pytest.mark.needs("SIGNAL", "NOTIFY", "ALLOC")
def test_data_signal_note(peer: Peer, link: vt.Link) -> None:
    ours = link.instance.alloc(2 * MIB)
    there = peer.call("alloc", size=2 * MIB, rights=3, seed=11)
    remote = peer.give(ours)
    rows = [(there, 0, remote, 64, MIB)]
    peer.call("submit", verb=WRITE, rows=rows, signal=(remote, 0, 77), note=(b"t", b"x"))
    link.instance.until(link.notes, link)
    assert [event.kind for event in link.instance.events] == [vt.SIGNAL, vt.NOTE]
    assert int.from_bytes(ours.view[:8], "little") == 77
    assert ours.view[64:4096] == peer.call("peek", memory=there, offset=0, length=4032)


@pytest.mark.needs("NOTIFY")
def test_orderly_end(peer: Peer, link: vt.Link) -> None:
    link.note(b"last", b"words").ok(link)
    link.stop().wait(link)
    link.free()
    assert peer.call("down")
    assert peer.call("notes", n=1) == [(b"last", b"words")]


# ---- a peer that is killed -------------------------------------------------------------------------------------------


def assert_down(link: vt.Link) -> None:
    if vt.relies_on_control(link.vt):  # it hears of it by link_stop
        link.instance.until(lambda: link.other.ended, link, timeout=5)
        return
    start = time.monotonic()
    link.instance.until(lambda: link.down, link, timeout=5)
    assert link.down.status == vt.LINK
    assert time.monotonic() - start < 1


@pytest.mark.needs("NOTIFY")
def test_killed_peer_is_noticed_after_its_notes(peer: Peer, link: vt.Link) -> None:
    for i in range(3):
        peer.call("submit", verb=WRITE, rows=[], note=(b"n", b"%d" % i))
    if vt.relies_on_control(link.vt):
        link.instance.until(lambda: len(link.notes()) == 3, link)
    peer.kill()
    assert_down(link)
    assert [text for _, text in link.notes()] == [b"0", b"1", b"2"]
    if vt.relies_on_control(link.vt):
        link.stop(dead=True).wait()
    with pytest.raises(vt.DriverError) as caught:
        link.note(b"n")
    assert caught.value.status == vt.LINK
    link.stop(dead=True).wait()


@alloc
def test_the_writer_is_killed_during_a_write(slow_peer: Peer, open_instance) -> None:
    peer, link = slow_peer, slow_peer.join(open_instance())
    ours = link.instance.alloc(64 * MIB)
    there = peer.call("alloc", size=64 * MIB, rights=3, seed=2)
    remote = peer.give(ours)
    ops = [peer.call("submit", verb=WRITE, rows=[(there, 0, remote, 0, 64 * MIB)], wait=False) for _ in range(64)]
    while peer.call("progress", op=ops[0]) == 0:
        pass
    peer.kill()
    assert_down(link)
    fence = link.fence()
    assert not fence.released, "the end of a pipe proves nothing"
    link.stop(dead=True).wait()
    assert fence.released
    assert fence.status == vt.OK


@alloc
@pytest.mark.parametrize("verb", [READ, WRITE])
def test_the_owner_is_killed_during_a_write(peer: Peer, link: vt.Link, verb: int) -> None:
    _, remote = peer.region(link, 64 * MIB, seed=2)
    here = link.instance.alloc(64 * MIB)
    ops = [link.submit(verb, [(here, i * 8 * MIB, remote, i * 8 * MIB, 8 * MIB)]) for i in range(8)]
    peer.kill()
    assert_down(link)
    link.stop(dead=True).wait()
    assert {op.status for op in ops} <= {vt.OK, vt.LINK}


@pytest.mark.needs("NOTIFY")
def test_killed_with_notes_waiting_for_it(peer: Peer, link: vt.Link) -> None:
    peer.call("polling", on=False)
    ops = []
    while len(ops) < 100_000 and (op := vt.unless_busy(link.note, b"n", bytes(1000))) is not None:
        ops.append(op)
    peer.kill()
    assert_down(link)
    if vt.relies_on_control(link.vt):
        link.stop(dead=True).wait()
    link.instance.until(lambda: all(op.released for op in ops), link)
    assert {op.status for op in ops} == {vt.OK, vt.LINK}


def test_killed_before_connect(peer: Peer, instance: vt.Instance) -> None:
    link = instance.link()
    peer.attach(link)
    metadata = peer.call("link")
    peer.kill()
    if vt.relies_on_control(link.vt):
        with pytest.raises(vt.DriverError) as caught:
            link.connect(metadata)
        assert caught.value.status == vt.LINK
    else:
        link.connect(metadata)
        assert_down(link)


# ---- a peer that is stopped ------------------------------------------------------------------------------------------


@alloc
def test_a_stopped_peer_stops_no_other(peer: Peer, link: vt.Link) -> None:
    number, remote = peer.region(link, 4 * MIB)
    here = link.instance.alloc(4 * MIB)
    vt.fill(here.view, 5)
    peer.signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        note = (b"n", bytes(500)) if vt.has(link.vt, "NOTIFY") else None
        for _ in range(2000):
            vt.unless_busy(link.submit, WRITE, [(here, 0, remote, 0, 4096)], note=note)
            link.poll()
        assert time.monotonic() - start < 5, "calls waited for the stopped peer"
        if vt.has(link.vt, "SAME_HOST"):
            link.submit(WRITE, [(here, 0, remote, 0, 4 * MIB)]).ok(link)
        fence = link.fence()
        link.poll()
        assert not fence.released
    finally:
        peer.signal(signal.SIGCONT)
    fence.ok(link)
    link.instance.until(lambda: not link.instance.ops, link)
    assert peer.call("peek", memory=number, offset=0, length=4096) == here.view[:4096]


@alloc
def test_a_stopped_writer_is_fenced_when_it_continues(slow_peer: Peer, open_instance) -> None:
    """SIGSTOP in the middle of a copy, the fence is asked for, SIGCONT: after the answer no byte changes any more."""
    peer, link = slow_peer, slow_peer.join(open_instance())
    ours = link.instance.alloc(64 * MIB)
    there = peer.call("alloc", size=64 * MIB, rights=3, seed=2)
    remote = peer.give(ours)
    ops = [peer.call("submit", verb=WRITE, rows=[(there, 0, remote, 0, 64 * MIB)], wait=False) for _ in range(32)]
    while peer.call("progress", op=ops[0]) == 0:
        pass
    peer.signal(signal.SIGSTOP)
    try:
        fence = link.fence()
        link.poll()
        assert not fence.released, "a stopped process can't have answered"
    finally:
        peer.signal(signal.SIGCONT)
    fence.ok(link)
    ours.view[:] = bytes(64 * MIB)
    assert {peer.call("wait", op=op) for op in ops} <= {vt.OK, vt.LINK}
    assert not any(ours.view.tobytes())


# ---- nothing is left -------------------------------------------------------------------------------------------------


@alloc
def test_nothing_is_left_in_the_file_system(peer: Peer, link: vt.Link) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    peer.region(link, MIB)
    link.instance.alloc(MIB)
    assert (set(os.listdir("/dev/shm")) if before or os.path.isdir("/dev/shm") else set()) <= before
    peer.kill()
    assert_down(link)


@pytest.mark.needs("NOTIFY")
def test_wake_descriptor_is_quiet_when_idle(peer: Peer, link: vt.Link) -> None:
    if link.fd < 0:
        pytest.skip("the driver polls without a descriptor")
    peer.call("submit", verb=WRITE, rows=[], note=(b"n", b""))
    link.instance.until(link.notes, link)
    link.instance.until(lambda: not link.more, link)
    while select.select([link.fd], [], [], 0)[0]:
        link.poll()
    wakes = link.instance.stats().wakes_received
    assert not select.select([link.fd], [], [], 0.05)[0]
    assert link.instance.stats().wakes_received == wakes
