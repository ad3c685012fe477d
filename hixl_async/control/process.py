"""The process at the other end of a Unix socket: its credentials, and a descriptor that reports its death."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from typing import NamedTuple

__all__ = [
    "Credentials",
    "LocalUser",
    "has_ended",
    "is_ending",
    "open_pidfd",
    "peer_credentials",
    "start_time",
    "why_unknown",
]

_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5; the socket module has no name for it
_PF_EXITING = 0x4  # linux/sched.h
_UCRED = struct.Struct("iII")
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Credentials(NamedTuple):
    """The process at the other end of a Unix socket, according to the kernel (``SO_PEERCRED``)."""

    #: Its process id; 0 if it is in a PID namespace that ours cannot see.
    pid: int
    #: Its effective user id.
    uid: int
    #: Its effective group id.
    gid: int


class LocalUser(NamedTuple):
    """Our own user, and the facts by which another process's user is distinguished from it."""

    #: Our effective user id.
    uid: int
    #: The id that stands for every user without a name in our user namespace; usually 65534, "nobody".
    overflow_uid: int
    #: True if every user has a name here, so that no other user is shown as `overflow_uid`.
    all_mapped: bool
    #: The reason why `all_mapped` is unknown and assumed to be False; "" if it is known.
    missing: str = ""

    @classmethod
    def current(cls) -> LocalUser:
        """Read the facts about our own user from the kernel.

        :raises OSError: if the system has no descriptor left.
        """
        missing = ""
        try:
            overflow_uid = int(_read("/proc/sys/kernel/overflowuid"))
        except (OSError, ValueError) as error:
            overflow_uid = 65534
            missing = why_unknown(error)
        try:
            # user_namespaces(7): lines of "first inside, first outside, how many"; the initial one maps all ids but -1
            mapped = sum(int(line.split()[2]) for line in _read("/proc/self/uid_map").splitlines())
        except (OSError, ValueError, IndexError) as error:
            mapped = 0
            missing = why_unknown(error)
        return cls(os.geteuid(), overflow_uid, mapped >= 0xFFFFFFFF, missing)

    def objection(self, other: Credentials) -> str | None:
        """Return why `other` is not known to be the same user, or None if it is."""
        if other.uid != self.uid:
            return f"it runs as user {other.uid}, this side as user {self.uid}"
        if other.uid == self.overflow_uid and self.missing:
            return f"user {other.uid} may stand for others, which this side could not find out: {self.missing}"
        if other.uid == self.overflow_uid and not self.all_mapped:
            return f"user {other.uid} stands for every user without a name in this user namespace"
        return None


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the process that connected `sock`, or that listened for it."""
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def start_time(pid: int | None = None) -> str:
    """Return the start time of a process, in the kernel's ticks, or "" if it cannot be read; ours if `pid` is None.

    A process id and a start time together identify one process for as long as the machine runs.

    :raises OSError: if the system has no descriptor left.
    """
    try:
        return _stat(pid)[19]  # proc(5): field 22
    except OSError as error:
        why_unknown(error)
        return ""


def is_ending(pid: int) -> bool | None:
    """Return True if the kernel is ending a process, False if it is not, and None if that cannot be told.

    The kernel closes the sockets of a process that ends, then frees its memory, and only then makes its pidfd readable.
    """
    try:
        return bool(int(_stat(pid)[6]) & _PF_EXITING)  # proc(5): field 9, of the process's first thread
    except (OSError, ValueError, IndexError):
        return None


def open_pidfd(sock: socket.socket, credentials: Credentials, started: str) -> int | None:
    """Return a descriptor that becomes readable when the process at the other end of `sock` has died.

    Return None if this kernel or namespace has no descriptor that certainly refers to that process.

    :param started: the start time that the process itself stated, to verify its id on kernels before 6.5.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    if credentials.pid <= 0 or not started:
        return None
    try:
        pidfd = os.pidfd_open(credentials.pid)
    except OSError:
        return None
    # The id may have passed to a new process before pidfd_open.  If the process that has it now started at the time that our
    # peer stated, and is still alive afterwards, it is our peer.
    with contextlib.suppress(OSError):
        if start_time(credentials.pid) == started and not has_ended(pidfd):
            return pidfd
    os.close(pidfd)
    return None


def why_unknown(error: Exception) -> str:
    """Return the reason why something cannot be read from the kernel, for messages.

    :raises OSError: if the reason is a lack of descriptors or memory, which may pass.
    """
    if isinstance(error, OSError):
        if error.errno in _EXHAUSTED:
            raise error
        return f"{error.filename}: {error.strerror}"
    return str(error)


def has_ended(pidfd: int) -> bool:
    """Return True if the process of a pidfd has ended; it is readable then."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _stat(pid: int | None) -> list[str]:
    """Return the fields of a process from the third on: the name before them may contain anything."""
    stat = _read(f"/proc/{'self' if pid is None else pid}/stat")
    return stat[stat.rindex(")") + 2 :].split()


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
