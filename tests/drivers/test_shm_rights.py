"""Rights that the kernel enforces between two users that are not root: a reader cannot write, whatever it tries.

Each side is a forked child with a user of its own; the tests need root to make them.
"""

from __future__ import annotations

import ctypes as c
import fcntl
import mmap
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import vtable as vt
from peer import receive, send
from vtable import MAY_READ, MAY_WRITE, READ, WRITE

OWNER, READER = 65534, 65533
SIZE = 16 << 10  # small enough that no thread is started in a forked child

pytestmark = [
    pytest.mark.only("shm"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes processes of two other users, which takes root"),
]


class User:
    """A function that runs as another user, in a forked child (whose interpreter could not be started by that user)."""

    def __init__(self, uid: int, function: Callable[..., Any], *arguments: Any) -> None:
        self.result, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            outcome: tuple[bool, Any] = (False, "died")
            try:
                os.close(self.result)
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                outcome = (True, function(*arguments))
            except BaseException:
                outcome = (False, traceback.format_exc())
            finally:
                os.write(theirs, pickle.dumps(outcome))
                os._exit(0)
        os.close(theirs)

    def join(self) -> Any:
        with os.fdopen(self.result, "rb") as pipe:
            body = pipe.read()
        os.waitpid(self.pid, 0)
        ok, value = pickle.loads(body)
        assert ok, value
        return value


def attempts(fd: int) -> dict[str, Callable[[], Any]]:
    """Every way to change a segment through a descriptor of it."""
    libc = c.CDLL(None, use_errno=True)
    path = f"/proc/self/fd/{fd}"

    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments) != 0:
            raise OSError(c.get_errno(), os.strerror(c.get_errno()))

    libc.mmap.restype = c.c_void_p
    at = libc.mmap(None, c.c_size_t(SIZE), mmap.PROT_READ, mmap.MAP_SHARED, fd, c.c_long(0))
    assert at != c.c_void_p(-1).value, "can't even read"

    def through_proc() -> None:
        memory = os.open("/proc/self/mem", os.O_RDWR)
        try:
            os.pwrite(memory, b"evil", at)
        finally:
            os.close(memory)

    def splice() -> None:
        read_end, write_end = os.pipe()
        os.write(write_end, b"evil")
        os.splice(read_end, fd, 4, offset_dst=0)

    return {
        "mmap for writing": lambda: mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        "mprotect": lambda: call(libc.mprotect, c.c_void_p(at), c.c_size_t(SIZE), mmap.PROT_READ | mmap.PROT_WRITE),
        "our own memory in /proc": through_proc,
        "write": lambda: os.write(fd, b"evil"),
        "pwrite": lambda: os.pwrite(fd, b"evil", 8),
        "splice": splice,
        "reopen for writing": lambda: os.write(os.open(path, os.O_WRONLY), b"evil"),
        "reopen for reading and writing": lambda: mmap.mmap(os.open(path, os.O_RDWR), SIZE),
        "truncate by path": lambda: os.truncate(path, 0),
        "truncate while opening": lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
        "ftruncate": lambda: os.ftruncate(fd, 0),
        "grow": lambda: os.ftruncate(fd, 2 * SIZE),
        "punch a hole": lambda: call(libc.fallocate, fd, 3, c.c_long(0), c.c_long(4096)),
        "zero a range": lambda: call(libc.fallocate, fd, 16, c.c_long(0), c.c_long(4096)),
        "fchmod": lambda: os.fchmod(fd, 0o777),
        "chmod by path": lambda: os.chmod(path, 0o777),
        "fchown": lambda: os.fchown(fd, READER, READER),
        "another seal": lambda: fcntl.fcntl(fd, 1033, 8),
        "an extended attribute": lambda: os.setxattr(fd, "user.x", b"y"),
    }


def owner(driver: vt.CDriver, allowed: int, granted: int, sock: socket.socket) -> bytes:
    with vt.Instance(driver) as instance:
        memory = instance.alloc(SIZE, allowed)
        vt.fill(memory.view, 3)
        before = bytes(memory.view)
        send(sock, os.getpid(), memory.export(granted))
        receive(sock)
        return b"untouched" if bytes(memory.view) == before else b"changed"


def reader(sock: socket.socket) -> dict[str, str]:
    pid, metadata = receive(sock)
    done = {}
    tries = attempts(metadata.fds[0])
    if pid != os.getpid():
        tries["the owner's descriptor in /proc"] = lambda: os.listdir(f"/proc/{pid}/fd")
        tries["the owner's memory"] = lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR)
    for what, attempt in tries.items():
        try:
            attempt()
        except (OSError, ValueError) as error:
            done[what] = f"refused: {error}"
        else:
            done[what] = "worked"
    send(sock, "done")
    return done


@pytest.mark.parametrize("allowed", [MAY_READ, MAY_READ | MAY_WRITE], ids=["none may write", "others may write"])
def test_a_reader_cannot_write(driver: vt.CDriver, allowed: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        one = User(OWNER, owner, driver, allowed, MAY_READ, ours)
        two = User(READER, reader, theirs)
        outcome, state = two.join(), one.join()
    assert not [what for what, result in outcome.items() if result == "worked"]
    assert len(outcome) >= 18
    assert state == b"untouched"


def use(driver: vt.CDriver, what: str, sock: socket.socket) -> str:
    """One side of a link between two users; the reader imports, the owner exports."""
    with vt.Instance(driver) as instance:
        link = instance.link()
        send(sock, None, link.metadata)
        link.connect(receive(sock)[1])
        if what == "owner":
            memory = instance.alloc(SIZE, MAY_READ | MAY_WRITE)
            vt.fill(memory.view, 3)
            buffer = (c.c_uint8 * 64)()
            send(sock, None, memory.export(MAY_READ))
            send(sock, None, memory.export(MAY_WRITE))
            send(sock, None, instance.register(buffer).export(MAY_READ))
            receive(sock)
            link.note(b"t", b"from the owner").ok(link)
            instance.until(link.notes, link)
            return "written" if memory.view[8:12] == memory.view[0:4] else "not written"
        readable = link.load(receive(sock)[1], SIZE, MAY_READ)
        readable.op.ok(link)
        writable = link.load(receive(sock)[1], SIZE, MAY_WRITE)
        writable.op.ok(link)
        here = instance.alloc(SIZE, 0)
        link.submit(READ, [(here, 0, readable, 0, SIZE)]).ok(link)
        link.submit(WRITE, [(here, 0, writable, 8, 4)]).ok(link)
        try:
            link.load(receive(sock)[1], 64, MAY_READ)
            answer = "reached registered memory of another user"
        except vt.DriverError as error:
            answer = f"{vt.STATUS[error.status]}: {instance.vt.error_text(error.status, error.native).decode()}"
        send(sock, "done")
        link.note(b"t", b"from the reader").ok(link)
        instance.until(link.notes, link)
        return answer


@pytest.mark.parametrize("other", [READER, 0], ids=["another user", "root"])
def test_two_users_work_together(driver: vt.CDriver, other: int) -> None:
    """Reading, permitted writing, notifications both ways; registered memory is refused, and the error says why.

    Root could reach it, but would wait at page faults that the other user serves.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        one, two = User(OWNER, use, driver, "owner", ours), User(other, use, driver, "reader", theirs)
        answer, state = two.join(), one.join()
    assert state == "written"
    assert answer.startswith("RIGHTS"), answer
    assert "user" in answer
    assert "ptrace_scope" in answer


def test_old_kernels_doorbell_between_two_users(driver: vt.CDriver) -> None:
    """Before 6.4 the receiver reopens the pipe of another user: the mode that the maker gave it allows that."""

    def side(sock: socket.socket) -> str:
        with vt.Instance(driver, {"nowait": "0"}) as instance:
            link = instance.link()
            send(sock, None, link.metadata)
            link.connect(receive(sock)[1])
            link.note(b"t", b"x").ok(link)
            instance.until(link.notes, link)
            send(sock, "done")
            receive(sock)
            return "ok"

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        one, two = User(OWNER, side, ours), User(READER, side, theirs)
        assert (one.join(), two.join()) == ("ok", "ok")
