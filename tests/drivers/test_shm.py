"""The implementation of the shm driver; what every driver must do is in test_conformance.py."""

from __future__ import annotations

import ctypes as c
import errno
import fcntl
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import vtable as vt
from conftest import World
from peer import Peer
from vtable import MAY_READ, MAY_WRITE, READ, WRITE

pytestmark = pytest.mark.only("shm")
MIB = 1 << 20
F_GET_SEALS, SHRINK, GROW, SEAL, FUTURE_WRITE = 1034, 2, 4, 1, 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threads", "0"), ("threads", "65"), ("threads", "two"), ("threads", ""), ("threads", "-1"),
        ("inline_bytes", "1e6"), ("ring_bytes", "5000"), ("ring_bytes", "2048"), ("ring_bytes", "134217728"),
        ("chunk_bytes", "100"), ("nowait", "2"),
        ("pending_notes", "0"), ("threads", "99999999999999999999999"),
    ],
)  # fmt: skip
def test_options_are_checked(driver: vt.CDriver, leakless: None, key: str, value: str) -> None:
    with pytest.raises(vt.DriverError, match=key) as caught:
        vt.Instance(driver, {key: value})
    assert caught.value.status == vt.INVALID


def test_unknown_option_names_the_known_ones(driver: vt.CDriver) -> None:
    with pytest.raises(
        vt.DriverError,
        match="there are threads, inline_bytes, chunk_bytes, stream_bytes, ring_bytes, pending_notes, nowait:",
    ):
        vt.Instance(driver, {"colour": "red"})


def test_every_option_is_documented(driver: vt.CDriver) -> None:
    with pytest.raises(vt.DriverError, match="there are") as caught:
        vt.Instance(driver, {"colour": "red"})
    options = str(caught.value).partition("there are ")[2].partition(":")[0].split(", ")
    table = (Path(__file__).parents[2] / "docs" / "shm.md").read_text(encoding="utf-8")
    assert options == re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_limits_follow_the_options(open_instance) -> None:
    limits = open_instance(ring_bytes=4096, inline_bytes=100).limits()
    assert (limits.inline_bytes, limits.note_bytes, limits.alignment) == (100, 1008, 1)


def test_rings_of_different_sizes(open_instance) -> None:
    """A notification must fit the limits of both sides."""
    left, right = vt.join(open_instance(ring_bytes=4096), open_instance(ring_bytes=1 << 20))
    for sender, receiver in ((left, right), (right, left)):
        sender.note(b"t", bytes(1007)).ok(left, right)
        with pytest.raises(vt.DriverError) as caught:
            sender.note(b"t", bytes(1008))
        assert caught.value.status == vt.RANGE
        receiver.instance.until(receiver.notes, receiver)


def test_waiting_notes_are_bounded(open_instance) -> None:
    left, _ = open_instance.pair(ring_bytes=4096, pending_notes=5)
    ops = []
    while (op := vt.unless_busy(left.note, b"n", bytes(900))) is not None:
        ops.append(op)
    assert sum(not op.released for op in ops) == 5
    assert len(ops) <= 5 + 4


@pytest.mark.parametrize(("size", "n"), [(0, 2000), (40, 2000), (1007, 300)])
def test_smallest_ring_wraps_many_times(open_instance, size: int, n: int) -> None:
    left, right = open_instance.pair(ring_bytes=4096, pending_notes=5)
    for i in range(n):
        while vt.unless_busy(left.note, b"", b"%d" % i + bytes(max(0, size - len(str(i))))) is None:
            left.poll()
            right.poll(3)
    left.instance.until(lambda: len(right.notes()) == n, left, right)
    assert [int(text.rstrip(b"\0")) for _, text in right.notes()] == list(range(n))


@pytest.mark.parametrize("shift", [0, 1, 15, 16, 63, 64])
def test_streaming_copies(open_instance, shift: int) -> None:
    """Copies past the caches: every alignment, and sizes around a cache line and around the smallest streamed size."""
    world = World(*open_instance.pair(stream_bytes=0), size=300_000)
    model = bytearray(world.size)
    for at, size in enumerate([1, 1023, 1024, 1025, 1024 + 63, 1024 + 64, 4096, 70_001, 200_000]):
        world.write(at, shift, size).ok()
        model[shift : shift + size] = world.here.view[at : at + size]
        assert world.there.view == model
        world.read(shift, at + 1, size).ok()
        assert world.here.view[shift : shift + size] == model[at + 1 : at + 1 + size]


# ---- segments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rights", [0, MAY_READ, MAY_WRITE, MAY_READ | MAY_WRITE])
def test_seals(open_instance, rights: int) -> None:
    memory = open_instance().alloc(10_000, rights)
    fd = next(fd for fd, target in vt.descriptors().items() if "hixl_async:region" in target)
    seals = fcntl.fcntl(fd, F_GET_SEALS)
    assert seals & (SHRINK | GROW | SEAL) == SHRINK | GROW | SEAL
    assert bool(seals & FUTURE_WRITE) == (not rights & MAY_WRITE)
    about = os.fstat(fd)
    assert about.st_size == 12288
    assert about.st_blocks * 512 >= 12288, "not allocated up front"
    assert about.st_mode & 0o777 == 0o400
    memory.view[:] = bytes(10_000)


def test_descriptors_are_closed_on_exec(open_instance) -> None:
    before = set(vt.descriptors())
    left, right = open_instance.pair()
    World(left, right)
    fresh = left.instance.link(55)
    made = set(vt.descriptors()) - before
    assert len(made) >= 8
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in made)
    fresh.free()


def test_more_memory_than_the_machine_has(open_instance) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as about:
        swap = next(int(line.split()[1]) * 1024 for line in about if line.startswith("SwapTotal"))
    with pytest.raises(vt.DriverError) as caught:
        open_instance().alloc(total + swap + MIB)
    assert caught.value.status == vt.NOMEM


def test_out_of_descriptors(open_instance) -> None:
    import resource

    left, right = open_instance.pair()
    memory = right.instance.alloc(4096)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(vt.descriptors()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
    hogs = []
    try:
        while True:
            try:
                hogs.append(os.dup(0))
            except OSError:
                break
        for call in (
            lambda: left.instance.alloc(4096),
            lambda: memory.export(MAY_WRITE),
            lambda: memory.export(MAY_READ),
            lambda: left.instance.link(99),
        ):
            with pytest.raises(vt.DriverError) as caught:
                call()
            assert caught.value.status == vt.NOMEM
    finally:
        for fd in hogs:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    left.imported(memory)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_start_when_needed_and_take_no_signals(open_instance) -> None:
    world = World(*open_instance.pair(threads=3), size=8192)
    assert world.left.instance.stats().threads == 0
    world.write(0, 0, 8192).ok()
    assert world.left.instance.stats().threads == 0, "a small copy needs no thread"
    world.make(8 * MIB)
    world.write(0, 0, 8 * MIB).ok()
    assert world.left.instance.stats().threads == 3
    names = [name for name in vt.threads() if name.startswith("hixl-shm-")]
    assert names == ["hixl-shm-0", "hixl-shm-1", "hixl-shm-2"]
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        if fields["Name"].strip().startswith("hixl-shm-"):
            blocked = int(fields["SigBlk"], 16)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1):
                assert blocked >> (number - 1) & 1


def test_idle_instance_uses_no_cpu(open_instance) -> None:
    world = World(*open_instance.pair(), size=4 * MIB)
    world.write(0, 0, 4 * MIB).ok()

    def used() -> int:
        total = 0
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/stat") as stat:
                name, _, rest = stat.read().partition(") ")
                if "hixl-shm" in name:
                    total += sum(int(field) for field in rest.split()[11:13])
        return total

    world.left.instance.until(lambda: True)
    before = used()
    with world.left.instance.changed:
        world.left.instance.changed.wait(0.2)
    assert used() == before


# ---- registered memory: process_vm_readv / writev --------------------------------------------------------------------


def unreachable(peer: Peer, link: vt.Link) -> str | None:
    number = peer.call("register", size=4096, rights=3, seed=1)
    try:
        link.load(peer.call("export", memory=number, rights=3), 4096, 3).release()
    except vt.DriverError as error:
        return f"{vt.STATUS[error.status]}, {os.strerror(error.native)}"
    return None


@pytest.fixture
def other(leakless: None, driver_name: str, open_instance):
    with Peer(driver_name) as peer:
        link = peer.join(open_instance())
        if why := unreachable(peer, link):
            pytest.skip(f"process_vm_readv to another process: {why}")
        yield peer, link


@pytest.mark.parametrize("size", [1, 4096, 100_001, 5 * MIB])
def test_registered_in_another_process(other: tuple[Peer, vt.Link], size: int) -> None:
    peer, link = other
    number = peer.call("register", size=size + 64, rights=3, seed=8)
    remote = link.load(peer.call("export", memory=number, rights=3), size + 64, 3)
    assert remote.op.answer == vt.DONE
    here = link.instance.alloc(size + 64)
    link.submit(READ, [(here, 0, remote, 0, size + 64)]).ok(link)
    assert here.view[:4096] == peer.call("peek", memory=number, offset=0, length=4096)
    vt.fill(here.view, 21)
    assert link.submit(WRITE, [(here, 7, remote, 13, size)]).ok(link).raw.failed in (0, -1)
    assert peer.call("peek", memory=number, offset=13, length=min(size, 4096)) == here.view[7 : 7 + min(size, 4096)]


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_registered_lists(other: tuple[Peer, vt.Link], n: int) -> None:
    """More descriptors than one call takes, mixed with mapped memory."""
    peer, link = other
    number = peer.call("register", size=n * 100, rights=3, seed=8)
    remote = link.load(peer.call("export", memory=number, rights=3), n * 100, 3)
    _, mapped = peer.region(link, n * 100, seed=9)
    here = link.instance.alloc(n * 100)
    link.submit(
        READ, [(here, i * 100, mapped if i % 10 == 5 else remote, (n - 1 - i) * 100, 100) for i in range(n)]
    ).ok(link)
    model, other_model = bytearray(n * 100), bytearray(n * 100)
    vt.fill(memoryview(model), 8)
    vt.fill(memoryview(other_model), 9)
    for i in range(n):
        expected = (other_model if i % 10 == 5 else model)[(n - 1 - i) * 100 :][:100]
        assert here.view[i * 100 : i * 100 + 100] == expected


@pytest.mark.parametrize("length", [40_000, 2 * MIB])
def test_registered_memory_that_went_away(other: tuple[Peer, vt.Link], length: int) -> None:
    """Inline and threaded: the op says which descriptor, and how many bytes moved before."""
    peer, link = other
    number = peer.call("register", size=4 * MIB, rights=3, seed=8)
    remote = link.load(peer.call("export", memory=number, rights=3), 4 * MIB, 3)
    peer.call("forbid", memory=number, offset=3 * MIB, length=4096)
    here = link.instance.alloc(4 * MIB)
    op = link.submit(
        READ, [(here, 0, remote, 0, 8), (here, 8, remote, 8192, length), (here, 3 * MIB, remote, 3 * MIB - 8, 100)]
    )
    assert op.wait(link) == vt.RANGE
    assert op.raw.native == errno.EFAULT
    assert op.raw.failed == 2
    assert op.bytes >= 8
    assert b"not mapped" in link.vt.error_text(vt.RANGE, errno.EFAULT)
    link.submit(READ, [(here, 0, remote, 0, 3 * MIB)]).ok(link)


def test_registered_memory_of_a_dead_process(other: tuple[Peer, vt.Link]) -> None:
    peer, link = other
    number = peer.call("register", size=4096, rights=3, seed=8)
    remote = link.load(peer.call("export", memory=number, rights=3), 4096, 3)
    here = link.instance.alloc(4096)
    peer.kill()
    op = link.submit(READ, [(here, 0, remote, 0, 4096)])
    assert op.wait(link) == vt.LINK
    assert (op.raw.native, op.raw.scope) == (errno.ESRCH, 1)


def test_registered_in_this_process(pair) -> None:
    left, right = pair
    buffer = (c.c_uint8 * 5000)()
    vt.fill(memoryview(buffer).cast("B"), 2)
    memory = right.instance.register(buffer, MAY_READ)
    try:
        remote = left.imported(memory, MAY_READ)
    except vt.DriverError as error:
        pytest.skip(f"process_vm_readv to ourselves: {os.strerror(error.native)}")
    here = left.instance.alloc(5000)
    left.submit(READ, [(here, 0, remote, 0, 5000)]).ok(left)
    assert here.view == memoryview(buffer).cast("B")


@pytest.mark.parametrize("size", [0, 8, 2 * MIB])
def test_registered_memory_takes_signals(other: tuple[Peer, vt.Link], size: int) -> None:
    """Bare ones, and after data that was copied in the call or by a thread."""
    peer, link = other
    number = peer.call("register", size=4 * MIB, rights=3, seed=8)
    remote = link.load(peer.call("export", memory=number, rights=3), 4 * MIB, 3)
    here = link.instance.alloc(max(size, 8))
    descriptors = [(here, 0, remote, 0, size)] if size else []
    link.submit(WRITE, descriptors, signal=(remote, 4 * MIB - 8, 0x1122334455667788)).ok(link)
    word = link.instance.alloc(8)
    link.submit(READ, [(word, 0, remote, 4 * MIB - 8, 8)]).ok(link)
    assert bytes(word.view) == (0x1122334455667788).to_bytes(8, sys.byteorder)
    with pytest.raises(vt.DriverError) as caught:
        link.submit(signal=(remote, 4 * MIB - 4, 1))
    assert caught.value.status in (vt.INVALID, vt.RANGE)


@pytest.mark.parametrize("size", [0, 2 * MIB])
def test_a_signal_that_cannot_be_stored(other: tuple[Peer, vt.Link], size: int) -> None:
    peer, link = other
    number = peer.call("register", size=4096, rights=3, seed=8)
    remote = link.load(peer.call("export", memory=number, rights=3), 4096, 3)
    _, there = peer.region(link, 4 * MIB)
    here = link.instance.alloc(2 * MIB)
    peer.kill()
    op = link.submit(WRITE, [(here, 0, there, 0, size)] if size else [], signal=(remote, 0, 1))
    assert op.wait(link) == vt.LINK


def test_a_number_that_is_not_the_peers_own(open_instance) -> None:
    """The kernel's number leads to another process than the one that made the link, so its memory is not offered."""
    a, b = open_instance(), open_instance()
    left, right = a.link(1), b.link(2)
    right.metadata.data[16] ^= 1
    left.connect(right.metadata)
    with pytest.raises(vt.DriverError) as caught:
        left.imported(b.register((c.c_uint8 * 64)()))
    assert (caught.value.status, caught.value.native) == (vt.RIGHTS, errno.ESRCH)


@pytest.mark.parametrize("pid", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_pid_that_is_not_the_peers(open_instance, pid: int) -> None:
    """The core writes the kernel's number, or 0; a process other than the one that made the link is detected."""
    a, b = open_instance(), open_instance()
    left, right = a.link(1), b.link(2)
    right.metadata.data[:4] = pid.to_bytes(4, "little")
    left.connect(right.metadata)
    right.connect(left.metadata)
    buffer = (c.c_uint8 * 64)()
    memory = b.register(buffer)
    with pytest.raises(vt.DriverError) as caught:
        left.imported(memory)
    assert caught.value.status == vt.RIGHTS
    assert caught.value.native in (errno.ESRCH, errno.EPERM, errno.EINVAL, errno.EFAULT)
    text = left.vt.error_text(vt.RIGHTS, caught.value.native)
    assert b"allocate" in text
    left.imported(b.alloc(4096))  # memory that travels as a descriptor needs no pid


# ---- fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_fork(open_instance) -> None:
    """The child drops every descriptor, and the parent notices nothing."""
    world = World(*open_instance.pair(), size=2 * MIB)
    world.write(0, 0, 2 * MIB).ok()
    pid = os.fork()
    if pid == 0:
        try:
            for link in (world.left, world.right):
                link.vt.after_fork(link.instance.handle)
            left = [target for target in vt.descriptors().values() if "hixl_async" in target]
            imported = [line for line in vt.mappings() if "hixl_async:link" in line]
            world.here.view[0] = 1  # memory of ours is still there, shared with the parent
            os._exit(0 if not left and not imported else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    world.write(0, 0, 2 * MIB, note=(b"n", b"x")).ok(world.left)
    world.right.instance.until(world.right.notes, world.right)
    assert world.there.view == world.here.view


def test_a_child_does_not_keep_the_link_of_a_dead_parent_open(leakless: None, driver_name: str, open_instance) -> None:
    """Killed parent, living child that called after_fork: the peer sees the end of the link."""
    with Peer(driver_name) as peer:
        link = peer.join(open_instance())
        child = peer.call("fork")
        try:
            peer.kill()
            link.instance.until(lambda: link.down, link, timeout=5)
        finally:
            os.kill(child, signal.SIGKILL)


# ---- limits of bandwidth ---------------------------------------------------------------------------------------------


def test_a_limit_holds_one_link_back_and_not_the_others(open_instance) -> None:
    a, b = open_instance(), open_instance()
    (slow, peer1), (fast, peer2) = vt.join(a, b), vt.join(a, b)
    here, there, other = a.alloc(4 * MIB), b.alloc(4 * MIB), b.alloc(4 * MIB)
    vt.fill(here.view)
    remote1, remote2 = slow.imported(there), fast.imported(other)
    vt.check("link_pace", slow.vt.link_pace(slow.handle, 4 * MIB))
    start = time.perf_counter()
    held = [slow.submit(WRITE, [(here, i * MIB, remote1, i * MIB, MIB)]) for i in range(4)]
    tiny = slow.submit(WRITE, [(here, 0, remote1, 0, 8)])
    for _ in range(10):
        fast.submit(WRITE, [(here, 0, remote2, 0, 4 * MIB)]).ok(fast, peer2)
    assert not held[-1].released, "the other link waited for the slow one"
    for op in [*held, tiny]:
        op.ok(slow, peer1)
    # The first hundredth of a second is free.
    assert time.perf_counter() - start >= 4 / 4 - 0.02
    assert there.view == here.view
    assert other.view == here.view


def test_a_limit_that_is_lifted(open_instance) -> None:
    left, right = open_instance.pair()
    world = World(left, right, 8 * MIB)
    vt.check("link_pace", left.vt.link_pace(left.handle, MIB))
    op = world.write(0, 0, 8 * MIB)
    left.instance.until(lambda: left.progress(op) > 0, what="no progress")
    vt.check("link_pace", left.vt.link_pace(left.handle, 0))
    assert op.ok(left, right).bytes == 8 * MIB
    assert world.write(0, 0, 8).answer == vt.DONE


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_work_that_a_limit_holds_back_can_be_ended(open_instance, how: str) -> None:
    left, right = open_instance.pair()
    world = World(left, right, 8 * MIB)
    vt.check("link_pace", left.vt.link_pace(left.handle, 1000))
    ops = [world.write(0, 0, 8 * MIB) for _ in range(3)]
    if how == "cancel":
        assert [left.cancel(op) for op in ops] == [1, 1, 1]
        assert {op.wait(left, right) for op in ops} == {vt.CANCELLED}
    else:
        left.stop().wait(left)
        assert {op.wait() for op in ops} == {vt.LINK}
