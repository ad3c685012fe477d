"""The capabilities of this machine's kernel and its limits, found by trying them rather than by the kernel's version."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
from collections.abc import Callable
from typing import NamedTuple

from .container import memory_limit

__all__ = ["Finding", "findings"]

# Values of the kernel's headers for which Python has no name in every supported version.
_F_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_WRITE = 23
_SO_PEERPIDFD = 77
_SO_PASSRIGHTS = 83

#: The open files of one connected peer: its socket, doorbells, and descriptors of its process.
FILES_PER_PEER = 7


class Finding(NamedTuple):
    """The result of one probe."""

    #: The name of the probe, e.g. ``"memfd seals"``.
    name: str
    #: ``"ok"``; ``"limited"``: it works with restrictions; ``"missing"``: the shm driver cannot work here.
    state: str
    #: The finding, e.g. ``"1024 files"``.
    found: str
    #: The consequence, as a sentence.
    verdict: str


def findings() -> list[Finding]:
    """Return all that `hixl-async info` shows about the machine."""
    return [probe() for probe in _PROBES]


def _memfd() -> Finding:
    name = "memfd seals"
    try:
        fd = os.memfd_create("hixl-async-info", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding(name, "missing", _why(error), "no region can be allocated; does a seccomp filter forbid it?")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return Finding(name, "missing", "no /proc", "a region cannot be given to readers; mount /proc")
    except OSError as error:
        return Finding(name, "missing", _why(error), "rights on regions cannot be enforced; Linux 5.1 can")
    finally:
        os.close(fd)
    return Finding(name, "ok", "shrink, grow, future write", "the kernel enforces sizes and rights of regions")


def _populate() -> Finding:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            return Finding(
                "populate", "limited", _why(error), "first transfers pay for page faults; Linux 5.14 need not"
            )
    return Finding("populate", "ok", "MADV_POPULATE_WRITE", "imported regions are mapped ahead of the first transfer")


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "pidfd", "limited", _why(error), "a peer's death cannot be confirmed, its blocks stay in quarantine"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return Finding(
                "pidfd", "ok", "pidfd_open", "a peer's process is found by id and start time, and its death is seen"
            )
    return Finding(
        "pidfd", "ok", "pidfd_open, SO_PEERPIDFD", "a peer's process is known for certain, and its death is seen"
    )


def _descriptors_refused() -> Finding:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            ours.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        except OSError:
            return Finding(
                "SO_PASSRIGHTS", "ok", "no", "unwanted descriptors are closed on arrival; Linux 6.16 refuses them"
            )
    return Finding("SO_PASSRIGHTS", "ok", "yes", "the kernel refuses unwanted descriptors")


def _doorbell() -> Finding:
    reader, writer = os.pipe()
    try:
        os.preadv(reader, [bytearray(1)], -1, os.RWF_NOWAIT)
    except BlockingIOError:
        return Finding("doorbell", "ok", "RWF_NOWAIT on pipes", "a wake-up is read without ever blocking the loop")
    except OSError as error:
        return Finding("doorbell", "ok", _why(error), "doorbells use one more descriptor per peer; Linux 6.4 saves it")
    finally:
        os.close(reader)
        os.close(writer)
    return Finding("doorbell", "limited", "an empty pipe was readable", "report this: it should be impossible")


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _process_vm() -> Finding:
    name = "process_vm"
    here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    local, remote = (_Vector(ctypes.addressof(buffer), 8) for buffer in (here, there))
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    size = ctypes.c_ulong
    if call(os.getpid(), ctypes.byref(local), size(1), ctypes.byref(remote), size(1), size(0)) < 0:
        why = _why(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
        return Finding(name, "limited", why, "engine.register() is of no use to peers here; engine.allocate() works")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope is None or scope == "0":
        return Finding(
            name,
            "ok",
            "allowed" + (", no yama" if scope is None else ", ptrace_scope 0"),
            "engine.register() works between processes of one user",
        )
    return Finding(
        name,
        "limited",
        f"ptrace_scope {scope}",
        "engine.register() works for peers that are privileged"
        + (" or our ancestors; " if scope == "1" else "; ")
        + "engine.allocate() works for all",
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "unlimited", "room for any number of peers")
    peers = max(0, soft - 64) // FILES_PER_PEER
    state = "ok" if peers >= 64 else "limited"
    advice = f"; ulimit -n raises it up to {hard}" if soft != hard else ""
    return Finding("open files", state, f"{soft}", f"room for about {peers} peers in a process{advice}")


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return Finding("locked memory", "ok", found, "shm locks none; drivers of network cards and NPUs do")


def _memory() -> Finding:
    available = next(
        (line.split()[1] for line in (_read("/proc/meminfo") or "").splitlines() if "MemAvailable" in line), "0"
    )
    verdict = "regions take their memory at allocate, and count as shared memory of their owner"
    limit = memory_limit()
    if limit is not None and limit[0] < int(available) << 10:
        return Finding(
            "memory", "ok", f"{limit[0] >> 20} MiB for this container", f"{verdict}; {limit[1]} is the limit"
        )
    return Finding("memory", "ok", f"{int(available) >> 20} GiB available", verdict)


def _overcommit() -> Finding:
    mode = _read("/proc/sys/vm/overcommit_memory")
    if mode == "2":
        return Finding(
            "overcommit", "limited", "strict", "mapping a peer's region counts against this machine's commit limit"
        )
    return Finding(
        "overcommit", "ok", {"0": "heuristic", "1": "always"}.get(mode or "", "unknown"), "mappings cost no commit"
    )


def _huge_pages() -> Finding:
    modes = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or "unknown"
    mode = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else modes
    if mode in ("always", "within_size", "force"):
        return Finding("huge pages", "ok", mode, "regions use huge pages: fewer page faults and TLB misses")
    return Finding("huge pages", "ok", mode, "regions use small pages; shmem_enabled in /sys/kernel/mm says so")


def _dev_shm() -> Finding:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "ok", "not there", "not used: regions are anonymous files (memfd)")
    found = f"{room.f_bavail * room.f_frsize >> 20} MiB free"
    return Finding("/dev/shm", "ok", found, "not used: regions are anonymous files (memfd), so its size is no limit")


def _why(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return None


_PROBES: tuple[Callable[[], Finding], ...] = (
    _memfd,
    _pidfd,
    _doorbell,
    _populate,
    _process_vm,
    _descriptors_refused,
    _files,
    _memlock,
    _memory,
    _overcommit,
    _huge_pages,
    _dev_shm,
)
