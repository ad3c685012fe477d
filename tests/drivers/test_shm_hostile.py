"""A hostile peer that knows the shm driver's formats: no call stalls, and nothing outside its grants is touched.

``Hostile`` is not a driver: it speaks the formats of ``drivers/shm/*.h`` by hand, and scribbles wherever a peer can.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import fcntl
import mmap
import os
import random
import resource
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator

import pytest
import vtable as vt
from conftest import World
from vtable import MAY_READ, MAY_WRITE, READ, WRITE

pytestmark = pytest.mark.only("shm")
MIB = 1 << 20
PAGE = 4096

USERFAULTFD = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine, -1)
UFFDIO_API, UFFDIO_REGISTER, UFFD_MISSING = 0xC018AA3F, 0xC020AA00, 1
F_ADD_SEALS, F_GET_SEALS, SHRINK, GROW, SEAL = 1033, 1034, 2, 4, 1
LINK_MAGIC, MEM_MAGIC, HALF_MAGIC, VERSION = 0x4B4E4C53, 0x4D454D53, 0x464C4853, 2
# Offsets of shm_half.
MAGIC, CAPACITY, FENCE, HEAD, SIGNALS, WANT_SPACE, FENCED, GONE, TAIL, ARMED = (
    0,
    4,
    8,
    128,
    136,
    144,
    148,
    152,
    256,
    384,
)
WIDE = {HEAD, SIGNALS, TAIL}


def segment(size: int, *, seals: int | None = SHRINK | GROW | SEAL, allocate: bool = True, flags: int = 0) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    if allocate:
        os.posix_fallocate(fd, 0, size)
    if seals is not None:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def link_metadata(
    fds: list[int], capacity: int = 65536, *, magic: int = LINK_MAGIC, version: int = VERSION
) -> vt.CMetadata:
    data = struct.pack("<IIIIII", os.getpid(), magic, version, capacity, 0, 0)
    metadata = vt.CMetadata(len=len(data), nfds=len(fds))
    metadata.data[: len(data)] = data
    metadata.fds[: len(fds)] = fds
    return metadata


def mem_metadata(
    fds: list[int], size: int, *, kind: int = 1, rights: int = 3, address: int = 0, magic: int = MEM_MAGIC
) -> vt.CMetadata:
    data = struct.pack("<IIIIQQ", magic, VERSION, kind, rights, size, address)
    metadata = vt.CMetadata(len=len(data), nfds=len(fds))
    metadata.data[: len(data)] = data
    metadata.fds[: len(fds)] = fds
    return metadata


class Half:
    """The header and the ring of a half, mapped."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)

    def __getitem__(self, at: int) -> int:
        return struct.unpack_from("<Q" if at in WIDE else "<I", self.memory, at)[0]

    def __setitem__(self, at: int, value: int) -> None:
        struct.pack_into(
            "<Q" if at in WIDE else "<I", self.memory, at, value & (0xFFFFFFFFFFFFFFFF if at in WIDE else 0xFFFFFFFF)
        )

    def record(self, at: int, total: int, topic: int, note: int, body: bytes = b"") -> None:
        struct.pack_into("<IIII", self.memory, PAGE + at, total & 0xFFFFFFFF, topic & 0xFFFFFFFF, note & 0xFFFFFFFF, 0)
        self.memory[PAGE + at + 16 : PAGE + at + 16 + len(body)] = body


class Hostile:
    """The other end of ``link``.  ``theirs``: the victim's half, which we write; ``ours``: the half that it writes."""

    def __init__(self, instance: vt.Instance, capacity: int = 65536) -> None:
        self.link = instance.link(1 + len(instance.links))
        metadata = self.link.metadata
        self.theirs = Half(metadata.fds[0])
        self.segment = os.dup(metadata.fds[0])
        self.their_bell = os.dup(metadata.fds[1])  # the read end that the victim passed us
        fd = segment(PAGE + capacity)
        self.ours = Half(fd)
        self.ours[MAGIC], self.ours[CAPACITY], self.ours[ARMED] = HALF_MAGIC, capacity, 1
        read_end, self.bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.read_end = os.dup(read_end)  # of our pipe: shared with the victim
        self.link.connect(link_metadata([fd, read_end], capacity))

    def ring(self, n: int = 1) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.bell, bytes(n))

    def close(self) -> None:
        for fd in (self.segment, self.their_bell, self.bell, self.read_end):
            os.close(fd)
        self.theirs.memory.close()
        self.ours.memory.close()


@pytest.fixture(params=["rwf_nowait", "reopened"])
def hostile(request: pytest.FixtureRequest, open_instance) -> Iterator[Hostile]:
    made = Hostile(open_instance(nowait=int(request.param == "rwf_nowait"), ring_bytes=65536))
    yield made
    made.link.stop(dead=True).wait()
    made.link.free()
    made.close()


@contextlib.contextmanager
def prompt(what: str = "a call", cpu: float = 0.5, waits: int = 0) -> Iterator[None]:
    """Assert that the block neither waits for anything nor computes for long.

    A machine that is busy with something else takes the processor away and proves nothing, so what counts is whether
    the thread gave it up by itself, and how much of it it used.
    """
    start, used, waited = time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    yield
    took, used = time.perf_counter() - start, time.thread_time() - used
    waited = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waited
    assert took < 0.005 or waited <= waits, f"{what} waited {waited} times and took {took * 1e3:.1f} ms"
    assert used < cpu, f"{what} used {used * 1e3:.1f} ms of processor time"


def refused(status: tuple[int, ...], call, *args) -> None:
    # Starting the thread that closes a strange descriptor may wait for the thread (ThreadSanitizer's does).
    with prompt(waits=2), pytest.raises(vt.DriverError) as caught:
        call(*args)
    assert caught.value.status in status, str(caught.value)


# ---- descriptors that are not what they should be --------------------------------------------------------------------


def strange_descriptors(tmp: str) -> Iterator[tuple[str, int]]:
    size = 65536 + PAGE
    yield "unsealed", segment(size, seals=None)
    yield "may shrink", segment(size, seals=GROW)
    yield "may grow", segment(size, seals=SHRINK)
    yield "too small", segment(size - PAGE)
    yield "sparse", segment(size, allocate=False)
    holey = segment(size)
    libc = c.CDLL(None, use_errno=True)
    assert libc.fallocate(holey, 3, c.c_long(PAGE), c.c_long(PAGE)) == 0
    yield "with a hole", holey
    yield "empty", segment(0, allocate=False)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.ftruncate(plain, size)
    yield "a memfd that can't be sealed", plain
    with contextlib.suppress(OSError):
        yield "of huge pages", segment(2 * MIB, allocate=False, flags=4)
    file = os.open(os.path.join(tmp, "file"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.ftruncate(file, size)
    yield "a file", file
    yield "a directory", os.open(tmp, os.O_RDONLY | os.O_CLOEXEC)
    yield "/dev/zero", os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
    yield "/dev/null", os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.close(write_end)
    yield "a pipe", read_end
    one, two = socket.socketpair()
    two.close()
    yield "a socket", one.detach()
    yield "an eventfd", os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield "a path", os.open(tmp, os.O_PATH | os.O_CLOEXEC)


def test_import_of_strange_descriptors(open_instance) -> None:
    left, right = open_instance.pair()
    with tempfile.TemporaryDirectory() as tmp:
        for what, fd in strange_descriptors(tmp):
            for rights in (MAY_READ, MAY_WRITE):
                try:
                    refused((vt.PROTOCOL,), left.load, mem_metadata([os.dup(fd)], 65536 + PAGE), 65536 + PAGE, rights)
                except AssertionError as error:
                    raise AssertionError(f"{what}: {error}") from None
            os.close(fd)
    refused((vt.PROTOCOL,), left.load, mem_metadata([], PAGE), PAGE, MAY_READ)
    refused((vt.PROTOCOL,), left.load, mem_metadata([-1], PAGE), PAGE, MAY_READ)
    refused((vt.PROTOCOL,), left.load, mem_metadata([segment(PAGE), segment(PAGE)], PAGE), PAGE, MAY_READ)
    assert left.instance.stats().memories == 0
    left.imported(right.instance.alloc(PAGE))


def test_import_of_lying_metadata(open_instance) -> None:
    left, _ = open_instance.pair()
    top = (1 << 64) - 1
    for size in (top, top - PAGE + 1, 1 << 63, 1 << 48, PAGE + 1):
        refused((vt.PROTOCOL, vt.NOMEM), left.load, mem_metadata([segment(PAGE)], size), size, MAY_READ)
    refused((vt.PROTOCOL,), left.load, mem_metadata([segment(PAGE)], PAGE, kind=9), PAGE, MAY_READ)
    refused((vt.PROTOCOL,), left.load, mem_metadata([segment(PAGE)], PAGE, magic=1), PAGE, MAY_READ)
    refused((vt.PROTOCOL,), left.load, mem_metadata([segment(PAGE)], PAGE, kind=2, address=4096), PAGE, MAY_READ)
    refused((vt.PROTOCOL, vt.RIGHTS), left.load, mem_metadata([], PAGE, kind=2), PAGE, MAY_READ)
    refused((vt.PROTOCOL, vt.RIGHTS), left.load, mem_metadata([], PAGE, kind=2, address=top - 5), PAGE, MAY_READ)
    reader = segment(PAGE)
    reopened = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(reader)
    refused((vt.PROTOCOL, vt.RIGHTS), left.load, mem_metadata([reopened], PAGE), PAGE, MAY_WRITE)


def reopened_pipe(flags: int) -> int:
    """A pipe for which the kernel refuses RWF_NOWAIT; for reading and writing, it never ends either."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    made = os.open(f"/proc/self/fd/{read_end}", flags | os.O_CLOEXEC)
    os.write(write_end, b"x")
    os.close(read_end)
    os.close(write_end)
    return made


@pytest.mark.parametrize("nowait", [1, 0], ids=["rwf_nowait", "reopened"])
def test_connect_to_strange_descriptors(open_instance, nowait: int) -> None:
    instance = open_instance(nowait=nowait)
    cookies = iter(range(1, 1000))

    def connect(metadata: vt.CMetadata) -> None:
        link = instance.link(next(cookies))
        try:
            link.connect(metadata)
        finally:
            link.free()

    def pipe() -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.close(write_end)
        return read_end

    def half(capacity: int = 65536, magic: int = HALF_MAGIC) -> int:
        fd = segment(PAGE + 65536)
        memory = Half(fd)
        memory[MAGIC], memory[CAPACITY] = magic, capacity
        memory.memory.close()
        return fd

    with tempfile.TemporaryDirectory() as tmp:
        for what, fd in strange_descriptors(tmp):
            try:
                refused((vt.PROTOCOL,), connect, link_metadata([os.dup(fd), pipe()]))
                if what != "a pipe":
                    refused((vt.PROTOCOL,), connect, link_metadata([half(), os.dup(fd)]))
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
            os.close(fd)
        named = os.path.join(tmp, "fifo")
        os.mkfifo(named)
        refused((vt.PROTOCOL,), connect, link_metadata([half(), os.open(named, os.O_RDONLY | os.O_NONBLOCK)]))
    write_end = os.pipe2(os.O_CLOEXEC)
    os.close(write_end[0])
    refused((vt.PROTOCOL,), connect, link_metadata([half(), write_end[1]]))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), reopened_pipe(os.O_RDWR)]))
    if nowait:  # without it the driver reopens the pipe itself, so that this one is like any other
        refused((vt.PROTOCOL,), connect, link_metadata([half(), reopened_pipe(os.O_RDONLY)]))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), pipe()], 65536 - 16))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), pipe()], 0))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), pipe()], 1 << 31))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), pipe()], 131072))
    refused((vt.PROTOCOL,), connect, link_metadata([half(4096), pipe()], 65536))
    refused((vt.PROTOCOL,), connect, link_metadata([half(magic=3), pipe()]))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), pipe()], version=1))
    refused((vt.PROTOCOL,), connect, link_metadata([half()]))
    refused((vt.PROTOCOL,), connect, link_metadata([half(), pipe(), pipe()]))
    reopened = half()
    reader = os.open(f"/proc/self/fd/{reopened}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(reopened)
    refused((vt.PROTOCOL,), connect, link_metadata([reader, pipe()]))
    connect(link_metadata([half(), pipe()]))


def page_that_never_comes() -> tuple[int, int]:
    """A descriptor, and the address of a page whose fault waits forever, because this process does not answer it."""
    libc = c.CDLL(None, use_errno=True)
    fd = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        pytest.skip(f"userfaultfd: {os.strerror(c.get_errno())}")
    libc.mmap.restype = c.c_void_p
    at = libc.mmap(
        None, c.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    fcntl.ioctl(fd, UFFDIO_API, struct.pack("<QQQ", 0xAA, 0, 0))
    fcntl.ioctl(fd, UFFDIO_REGISTER, struct.pack("<QQQQ", at, PAGE, UFFD_MISSING, 0))
    return fd, at


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("version", [1, VERSION], ids=["the format that had an address", "today's, and more"])
def test_connecting_reads_no_memory_of_the_peer(open_instance, version: int) -> None:
    """A process may serve its own page faults, and so stall a reader of its memory: tested in a child, which is killed."""
    (faults, at), instance = page_that_never_comes(), open_instance()
    fd, (read_end, write_end) = segment(PAGE + 65536), os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    half = Half(fd)
    half[MAGIC], half[CAPACITY] = HALF_MAGIC, 65536
    half.memory.close()
    link = instance.link(1)
    data = struct.pack("<IIIIQQ", os.getpid(), LINK_MAGIC, version, 65536, 1, at)
    metadata = vt.CMetadata(len=len(data), nfds=2)
    metadata.data[: len(data)], metadata.fds[:2] = data, [fd, read_end]
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            link.connect(metadata)
        except vt.DriverError as error:
            os._exit(error.status)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == vt.PROTOCOL
    for left in (fd, read_end, write_end, faults):
        os.close(left)


def test_connect_twice(open_instance) -> None:
    a, b, d = open_instance(), open_instance(), open_instance()
    left, _ = vt.join(a, b)
    refused((vt.INVALID,), left.connect, d.link(5).metadata)


# ---- the notification ring -------------------------------------------------------------------------------------------

NONSENSE = {
    "head beyond the capacity": lambda h: (h.theirs.record(0, 32, 5, 3), h.theirs.__setitem__(HEAD, 65536 + 16)),
    "head far away": lambda h: (h.theirs.record(0, 32, 5, 3), h.theirs.__setitem__(HEAD, 1 << 63)),
    "head at the end of all numbers": lambda h: h.theirs.__setitem__(HEAD, (1 << 64) - 16),
    "head between records": lambda h: h.theirs.__setitem__(HEAD, 24),
    "length 0": lambda h: h.theirs.record(0, 0, 0, 0),
    "length 8": lambda h: h.theirs.record(0, 8, 0, 0),
    "length beyond what is there": lambda h: h.theirs.record(0, 2048, 16, 2016),
    "length beyond everything": lambda h: h.theirs.record(0, 0xFFFFFFF0, 16, 0xFFFFFFD0),
    "length that is not what its parts make": lambda h: h.theirs.record(0, 64, 1, 1),
    "topic longer than the record": lambda h: h.theirs.record(0, 32, 64, 0),
    "lengths that overflow 32 bits": lambda h: h.theirs.record(0, 32, 0xFFFFFFF0, 0x20),
    "note over the limit": lambda h: (h.theirs.record(0, 20016, 0, 20000), h.theirs.__setitem__(HEAD, 32768)),
    "topic over the limit": lambda h: (h.theirs.record(0, 20016, 20000, 0), h.theirs.__setitem__(HEAD, 32768)),
    "a skip that is too short": lambda h: h.theirs.record(0, 16, 0xFFFFFFFF, 0),
    "a skip beyond head": lambda h: h.theirs.record(0, 65536, 0xFFFFFFFF, 0),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_in_the_ring(hostile: Hostile, what: str) -> None:
    hostile.theirs[HEAD] = 1024
    NONSENSE[what](hostile)
    hostile.ring()
    link = hostile.link
    with prompt():
        link.poll()
    assert link.down is not None
    assert link.down.status == vt.PROTOCOL
    assert link.notes() == []
    for _ in range(3):
        hostile.ring()
        hostile.theirs[HEAD] = random.getrandbits(64)
        with prompt():
            assert link.poll() == 0
    refused((vt.LINK,), link.note, b"t")


def test_nonsense_after_good_records(hostile: Hostile) -> None:
    hostile.theirs.record(0, 32, 5, 3, b"topicabc")
    hostile.theirs.record(32, 0, 0, 0)
    hostile.theirs[HEAD] = 64
    hostile.ring()
    hostile.link.poll()
    assert hostile.link.notes() == [(b"topic", b"abc")]
    assert hostile.link.down.status == vt.PROTOCOL


@pytest.mark.parametrize("tail", [16, 1 << 40, (1 << 64) - 16, 1 << 63])
def test_nonsense_tail(hostile: Hostile, tail: int) -> None:
    """The victim sends; the peer's claim of what it has read makes no sense.  It is checked once the ring seems full."""
    link = hostile.link
    first = link.note(b"t", bytes(10_000)).ok()
    assert first.answer == vt.DONE
    hostile.ours[TAIL] = tail if tail != 16 else 65536
    ops = []
    with prompt("sending"), contextlib.suppress(vt.DriverError):
        ops.extend(link.note(b"t", bytes(10_000)) for _ in range(20))
    link.poll()
    assert link.down is not None
    assert link.down.status == vt.PROTOCOL
    assert all(op.wait() in (vt.OK, vt.LINK) for op in ops)


def test_a_tail_that_jumps_back(hostile: Hostile) -> None:
    link, ops = hostile.link, []
    for _ in range(6):
        link.note(b"t", bytes(9000)).ok()
    hostile.ours[TAIL] = 9024
    ops.extend(link.note(b"t", bytes(9000)) for _ in range(2))
    hostile.ours[TAIL] = 0
    with contextlib.suppress(vt.DriverError):
        ops.extend(link.note(b"t", bytes(9000)) for _ in range(3))
    link.poll()
    assert link.down.status == vt.PROTOCOL
    for op in ops:
        op.wait()


def scribble(target: Hostile, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        at = chance.choice([HEAD, TAIL]) if chance.random() < 0.001 else chance.choice([SIGNALS, WANT_SPACE, ARMED])
        half = target.ours if at in (TAIL, ARMED) else target.theirs
        half[at] = chance.choice([0, 1, 16, 32, 1024, 65536, chance.getrandbits(64)])
        if chance.random() < 0.02:
            target.theirs[HEAD] += 32
        nonsense = chance.random() < 0.001
        target.theirs.record(chance.randrange(128) * 32, 65536 if nonsense else 32, chance.choice([0, 5, 9]), 3)
        target.ring()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_random_writes_stall_and_crash_nothing(open_instance) -> None:
    """Another process changes the words and the ring at random while the victim sends and polls."""
    instance, rounds, slowest = open_instance(ring_bytes=65536), 0, 0.0
    for seed in range(10):
        target = Hostile(instance)
        pid = os.fork()
        if pid == 0:
            try:
                scribble(target, seed)
            finally:
                os._exit(1)
        try:
            end = time.monotonic() + 0.05
            while time.monotonic() < end and target.link.down is None:
                start = time.monotonic()
                target.link.poll(16)
                with contextlib.suppress(vt.DriverError):
                    target.link.note(b"t", bytes(300))
                slowest = max(slowest, time.monotonic() - start)
                rounds += 1
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        target.link.stop(dead=True).wait()
        target.link.free()
        target.close()
    assert rounds > 10
    # A pipe has a mutex, whose holder may lose the processor: on a busy machine that takes a time slice or two.
    assert slowest < 1


# ---- doorbells -------------------------------------------------------------------------------------------------------


def test_stuffed_doorbell(hostile: Hostile) -> None:
    """However often the peer rings, a poll takes one page of rings and returns."""
    fcntl.fcntl(hostile.bell, 1031, 1 << 20)  # F_SETPIPE_SZ
    for _ in range(300):
        hostile.ring(PAGE)
    hostile.theirs.record(0, 32, 5, 3, b"topicabc")
    hostile.theirs[HEAD] = 32
    with prompt():
        assert hostile.link.poll() == 0
    assert hostile.link.notes() == [(b"topic", b"abc")]
    assert hostile.link.instance.stats().wakes_received <= PAGE


def test_doorbell_made_blocking(hostile: Hostile) -> None:
    """The read end is one description in both processes: its O_NONBLOCK is the peer's to clear."""
    os.set_blocking(hostile.read_end, True)
    for _ in range(3):
        with prompt("a poll of an empty doorbell"):
            hostile.link.poll()
    assert hostile.link.down is None


def test_doorbell_that_cannot_be_read_any_more(open_instance) -> None:
    """A splice takes RWF_NOWAIT from the shared description: the link breaks, instead of waking the victim forever."""
    made = Hostile(open_instance(nowait=1, ring_bytes=65536))
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.splice(made.read_end, writer, 1, flags=os.SPLICE_F_NONBLOCK)
    made.ring()
    for _ in range(3):
        with prompt():
            assert made.link.poll() == 0
    assert [(event.kind, event.status) for event in made.link.instance.events] == [(vt.LINK_DOWN, vt.PROTOCOL)]
    made.link.stop(dead=True).wait()
    made.link.free()
    made.close()
    os.close(reader)
    os.close(writer)


def test_full_doorbell_made_blocking(hostile: Hostile) -> None:
    """The peer never reads its doorbell, always claims to sleep, and clears O_NONBLOCK where it can."""
    os.set_blocking(hostile.their_bell, True)
    with prompt("9,000 rings", cpu=5.0):
        for _ in range(9000):
            hostile.ours[ARMED] = 1
            hostile.theirs[WANT_SPACE] = 1
            hostile.theirs[HEAD] = hostile.theirs[HEAD]
            hostile.theirs.record(hostile.theirs[HEAD] % 65536, 16, 0, 0)
            hostile.theirs[HEAD] += 16
            hostile.link.poll()
    assert hostile.link.instance.stats().wakes_sent <= PAGE
    assert hostile.link.down is None


def test_stolen_wakes(hostile: Hostile) -> None:
    """The peer reads the victim's wake-ups itself: nothing is lost but time, and only on this link."""
    hostile.theirs.record(0, 32, 5, 3, b"topicabc")
    hostile.theirs[HEAD] = 32
    hostile.ring()
    os.read(hostile.read_end, 100)
    hostile.theirs[ARMED] = 0
    hostile.link.poll()
    assert hostile.link.notes() == [(b"topic", b"abc")]


def test_a_closed_doorbell_is_reported_once(hostile: Hostile) -> None:
    os.close(hostile.bell)
    hostile.bell = os.dup(0)
    for _ in range(3):
        with prompt():
            hostile.link.poll()
    assert hostile.link.down.status == vt.LINK
    assert [event.kind for event in hostile.link.instance.events] == [vt.LINK_DOWN]


# ---- the words of a half ---------------------------------------------------------------------------------------------


def test_endless_signals(hostile: Hostile) -> None:
    for i in range(1, 100):
        hostile.theirs[SIGNALS] = random.getrandbits(64)
        with prompt():
            hostile.link.poll()
        assert hostile.link.signals() <= i


def test_waiting_for_room_that_is_never_made(hostile: Hostile) -> None:
    """want_space is cleared behind our back, tail stands still: polls do not spin."""
    ops = [hostile.link.note(b"t", bytes(10_000)) for _ in range(10)]
    assert not ops[-1].released
    for _ in range(5):
        hostile.ours[WANT_SPACE] = 0
        with prompt():
            assert hostile.link.poll() == 0


def test_a_lie_about_the_fence_harms_the_liar(hostile: Hostile) -> None:
    hostile.theirs[FENCED] = 1
    with prompt():
        hostile.link.fence().ok()


def test_fence_and_gone_flapping(hostile: Hostile) -> None:
    for i in range(50):
        hostile.ours[FENCE] = i % 2
        hostile.theirs[GONE] = i % 3
        with prompt():
            hostile.link.poll()
    assert [event.kind for event in hostile.link.instance.events] == [vt.LINK_DOWN]


def test_holes_punched_into_the_half(hostile: Hostile) -> None:
    """F_SEAL_SHRINK does not forbid it, and the pages come back as zeros: a broken link at worst."""
    libc = c.CDLL(None, use_errno=True)
    for offset, length in ((0, PAGE), (PAGE, 65536), (0, PAGE + 65536)):
        hostile.link.note(b"t", bytes(100)) if hostile.link.down is None else None
        assert libc.fallocate(hostile.segment, 3, c.c_long(offset), c.c_long(length)) == 0
        with prompt():
            hostile.link.poll()
    for attempt in (lambda: os.ftruncate(hostile.segment, PAGE), lambda: os.ftruncate(hostile.segment, MIB)):
        with pytest.raises(PermissionError):
            attempt()


# ---- regions ---------------------------------------------------------------------------------------------------------


def test_a_grant_cannot_be_resized(open_instance) -> None:
    memory = open_instance().alloc(2 * PAGE)
    for rights in (MAY_READ, MAY_WRITE):
        metadata = memory.export(rights)
        for size in (0, PAGE, 3 * PAGE):
            with pytest.raises(OSError, match=r"Operation not permitted|Invalid argument"):
                os.ftruncate(metadata.fds[0], size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(metadata.fds[0], F_ADD_SEALS, 8)
        vt.drop(metadata)
    assert memory.view[:] == bytes(2 * PAGE)


def test_holes_punched_into_a_region_while_it_is_used(open_instance) -> None:
    """The owner punches holes into its own region while we copy: zeros come, no SIGBUS."""
    world = World(*open_instance.pair(), size=8 * MIB)
    metadata = world.there.export(MAY_WRITE)
    libc = c.CDLL(None, use_errno=True)
    ops = []
    for i in range(20):
        ops.append(world.write(0, 0, 8 * MIB) if i % 2 else world.read(0, 0, 8 * MIB))
        assert libc.fallocate(metadata.fds[0], 3, c.c_long(i * 65536), c.c_long(65536)) == 0
        ops[-1].ok()
    vt.drop(metadata)


def test_guard_around_a_region(open_instance) -> None:
    """A batch reaches no byte behind the region, although mappings end with the page."""
    left, right = open_instance.pair()
    there, here = right.instance.alloc(100), left.instance.alloc(200)
    remote = left.imported(there)
    for verb in (READ, WRITE):
        with pytest.raises(vt.DriverError):
            left.submit(verb, [(here, 0, remote, 0, 101)])
        with pytest.raises(vt.DriverError):
            left.submit(verb, [(here, 0, remote, 100, 1)])
    left.submit(WRITE, [(here, 0, remote, 0, 100)]).ok(left)
