"""Two users that are not root on one host: with a secret they work together, and rights hold against every attempt.

Each side is a forked child with a user of its own (whose interpreter that user could not start), with an engine and a loop of
its own; making them takes root.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
import socket
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from puppet import Puppet

from hixl_async import AccessError, AuthenticationError, Engine
from hixl_async.testing import engine_pair

OWNER, READER = 65531, 65532
SECRET = b"shared between two users"
SIZE = 16 << 10  # small: no threads in a forked child

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes processes of two other users, which takes root"),
]


class Talk:
    """Lines between the two children."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._rest = b""

    async def say(self, line: str) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, line.encode() + b"\n")

    async def hear(self) -> str:
        while b"\n" not in self._rest:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 1024)
            assert data, "the other side is gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


Side = Callable[[Talk], Awaitable[None]]


def _child(uid: int, side: Side, sock: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # A process that was started by that user would be: /proc/self belongs to it.
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE

        async def run() -> None:
            async with asyncio.timeout(30):
                await side(Talk(sock))

        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop).run(run())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def both(owner: Side, reader: Side) -> None:
    """Run the two sides as two users, and expect both to end without an error."""
    _load_everything()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pids = [_child(OWNER, owner, ours), _child(READER, reader, theirs)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert statuses == [0, 0]


def _load_everything() -> None:
    """Import all modules that are imported late, because the other user may not be allowed to read the files."""

    async def use() -> None:
        async with engine_pair(secret=SECRET) as pair:
            _, remote = await pair.region("kv", 8)
            await pair.left.write(b"12345678", remote)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(use())
    "localhost".encode("idna")


# -- working together


async def _work_owner(talk: Talk) -> None:
    async with Engine("127.0.0.1:0", name="owner", secret=SECRET) as engine:
        written = engine.allocate("written", SIZE, access="write")
        read = engine.allocate("read", SIZE, access="read")
        engine.register("borrowed", bytearray(64), access="read-write")
        memoryview(read)[:] = b"r" * SIZE
        notes = engine.notifications("from the reader")
        await talk.say(engine.address)
        note = await notes.get()
        assert (note.peer.name, note.payload) == ("reader", b"done")
        assert bytes(memoryview(written)) == b"w" * SIZE
        await engine.notify(note.peer, "from the owner", b"seen")
        assert await talk.hear() == "done"


async def _work_reader(talk: Talk) -> None:
    async with Engine(name="reader", secret=SECRET) as engine:
        peer = await engine.connect(await talk.hear())
        assert peer.same_host
        notes = engine.notifications("from the owner")
        await engine.write(b"w" * SIZE, await peer.region("written"), notify=("from the reader", b"done"))
        back = bytearray(SIZE)
        await engine.read(back, await peer.region("read"))
        assert back == b"r" * SIZE
        with pytest.raises(AccessError):
            engine.write(b"x", (await peer.region("read"))[0:1])
        # The kernel lets no user reach into another user's process; the error says what to do.
        with pytest.raises(AccessError, match=r"another user.*allocate"):
            await peer.region("borrowed")
        assert (await notes.get()).payload == b"seen"
        await talk.say("done")


def test_two_users_work_together() -> None:
    both(_work_owner, _work_reader)


# -- without a secret


async def _closed_owner(talk: Talk) -> None:
    async with Engine("127.0.0.1:0", name="owner") as engine:
        await talk.say(engine.address)
        assert await talk.hear() == "refused"
        assert engine.peers == ()


async def _closed_reader(talk: Talk) -> None:
    async with Engine(name="reader") as engine:
        with pytest.raises(AuthenticationError, match="user"):
            await engine.connect(await talk.hear())
        await talk.say("refused")


def test_without_a_secret_another_user_is_refused() -> None:
    both(_closed_owner, _closed_reader)


# -- rights


async def _guarding_owner(talk: Talk) -> None:
    """Offer writable memory too, so that the reader's descriptor belongs to an inode that can be written."""
    async with Engine("127.0.0.1:0", name="owner", secret=SECRET) as engine:
        regions = [
            engine.allocate("sealed", SIZE, access="read"),
            engine.allocate("shared", SIZE, access="read-write", grant=lambda peer: "read"),
            engine.allocate("private", SIZE, access="none"),
        ]
        for region in regions:
            memoryview(region)[:] = b"o" * SIZE
        await talk.say(engine.address)
        await talk.say(str(os.getpid()))
        await talk.say(str(regions[2]._number))
        await talk.say(str(regions[2].address))
        assert await talk.hear() == "tried"
        for region in regions:
            assert bytes(memoryview(region)) == b"o" * SIZE, region


async def _intruding_reader(talk: Talk) -> None:
    address, pid, private, where = (
        await talk.hear(),
        int(await talk.hear()),
        int(await talk.hear()),
        int(await talk.hear()),
    )
    actor = await Puppet.dial(address, secret=SECRET, name="reader")
    await actor.up()
    worked = []
    for name in ("sealed", "shared"):
        metadata = await actor.get(name)
        assert mmap.mmap(metadata.fds[0], SIZE, mmap.MAP_SHARED, mmap.PROT_READ)[:4] == b"oooo"
        for what, attempt in _attempts(metadata.fds[0], pid, where).items():
            try:
                attempt()
            except (OSError, ValueError):
                continue
            worked.append(f"{name}: {what}")
    actor.say("region.get", call=7, id=private)
    if (await actor.hear("region.metadata", "failure")).kind != "failure":
        worked.append("the private region's metadata")
    await actor.aclose()
    await talk.say("tried")
    assert not worked


def _attempts(fd: int, pid: int, where: int) -> dict[str, Callable[[], Any]]:
    """Every way to write what one may read, or to get at the owner's process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.process_vm_writev.restype = libc.process_vm_readv.restype = ctypes.c_ssize_t
    path = f"/proc/self/fd/{fd}"
    mapped = libc.mmap(None, ctypes.c_size_t(SIZE), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    buffer = ctypes.create_string_buffer(b"evil")

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    here, there = Piece(ctypes.addressof(buffer), 4), Piece(where, 4)

    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def by_proc_mem(of: str, at: int) -> None:
        memory = os.open(f"/proc/{of}/mem", os.O_RDWR)
        try:
            os.pwrite(memory, b"evil", at)
        finally:
            os.close(memory)

    both_sides = ctypes.byref(here), 1, ctypes.byref(there), 1, 0
    return {
        "write": lambda: os.pwrite(fd, b"evil", 0),
        "map for writing": lambda: mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        "mprotect": lambda: call(libc.mprotect, ctypes.c_void_p(mapped), ctypes.c_size_t(SIZE), 3),
        "our own memory by /proc": lambda: by_proc_mem("self", mapped),
        "reopen for writing": lambda: os.pwrite(os.open(path, os.O_RDWR), b"evil", 0),
        "reopen and truncate": lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
        "truncate": lambda: os.truncate(path, 0),
        "punch a hole": lambda: call(libc.fallocate, fd, 3, ctypes.c_long(0), ctypes.c_long(4096)),
        "chmod": lambda: os.chmod(path, 0o777),
        "fchmod": lambda: os.fchmod(fd, 0o777),
        "another seal": lambda: fcntl.fcntl(fd, 1033, 8),
        "the owner's memory by /proc": lambda: by_proc_mem(str(pid), where),
        "the owner's descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "process_vm_writev": lambda: call(libc.process_vm_writev, pid, *both_sides),
        "process_vm_readv": lambda: call(libc.process_vm_readv, pid, *both_sides),
        "ptrace": lambda: call(libc.ptrace, 16, pid, None, None),
        "a signal": lambda: os.kill(pid, 0),
    }


def test_a_reader_cannot_write_in_any_way() -> None:
    both(_guarding_owner, _intruding_reader)


# -- a user that dies


async def _surviving_owner(talk: Talk) -> None:
    async with Engine("127.0.0.1:0", name="owner", secret=SECRET) as engine:
        region = engine.allocate("written", SIZE, access="write")
        accepted = engine.accepted()
        await talk.say(engine.address)
        peer = await accepted.get()
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        peer.add_lost_callback(lambda error: lost.done() or lost.set_result(error))
        assert await talk.hear() == "written"
        await lost
        await peer.fenced()
        assert region.pins == 0


async def _dying_reader(talk: Talk) -> None:
    engine = await Engine(name="reader", secret=SECRET).open()
    peer = await engine.connect(await talk.hear())
    await engine.write(b"w" * SIZE, await peer.region("written"))
    await talk.say("written")
    os._exit(0)


def test_the_death_of_another_users_process_is_confirmed() -> None:
    both(_surviving_owner, _dying_reader)
