"""HIXL's interface as Python methods, over the plain C of libhixlprobe.so; tests only."""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

SUCCESS = 0
PARAM_INVALID = 103900
TIMEOUT = 103901
NOT_CONNECTED = 103902
ALREADY_CONNECTED = 103903
UNSUPPORTED = 103905
RESOURCE_EXHAUSTED = 203900
FAILED = 503900

WAITING, COMPLETED, TIMED_OUT, BROKEN = range(4)
READ, WRITE = range(2)
DEVICE, HOST = range(2)
NOT_CONNECT, CONNECT_PENDING, CONNECTING, CONNECTED, CONNECT_FAILED, DISCONNECT_PENDING, DISCONNECTING = range(7)

P = ctypes.c_void_p
N = ctypes.c_size_t
S = ctypes.c_char_p
INT = ctypes.c_int32
U64 = ctypes.POINTER(ctypes.c_uint64)
U32 = ctypes.c_uint32

FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "new": (P, []),
    "delete": (None, [P]),
    "initialize": (U32, [P, S, ctypes.POINTER(S), N]),
    "finalize": (None, [P]),
    "register": (U32, [P, ctypes.c_uint64, N, INT, ctypes.POINTER(P)]),
    "deregister": (U32, [P, P]),
    "connect": (U32, [P, S, INT]),
    "disconnect": (U32, [P, S, INT]),
    "connect_async": (U32, [P, S, INT]),
    "disconnect_async": (U32, [P, S, INT]),
    "async_status": (U32, [P, S, ctypes.POINTER(INT)]),
    "async_count": (U32, [P, ctypes.POINTER(N)]),
    "transfer_sync": (U32, [P, S, INT, U64, N, INT]),
    "transfer_async": (U32, [P, S, INT, U64, N, P, ctypes.POINTER(P)]),
    "status": (U32, [P, P, ctypes.POINTER(INT)]),
    "batch": (U32, [P, U32, INT, U64, N, ctypes.POINTER(N)]),
    "send_notify": (U32, [P, S, S, N, S, N, INT]),
    "notifies_new": (P, []),
    "notifies_delete": (None, [P]),
    "notifies_add": (None, [P, S, S]),
    "get_notifies": (U32, [P, P]),
    "notifies_count": (N, [P]),
    "notify_name": (S, [P, N]),
    "notify_text": (S, [P, N]),
    "capability": (U32, [INT, ctypes.POINTER(INT)]),
    "layout": (N, [S]),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Library:
    """One loaded toolkit. ctypes releases the GIL around each call, as HIXL wants."""

    def __init__(self, root: Path) -> None:
        lib = root / "lib64"
        self.acl = ctypes.CDLL(str(lib / "libascendcl.so"))
        self.hixl = ctypes.CDLL(str(lib / "libcann_hixl.so"))
        self.probe = ctypes.CDLL(str(lib / "libhixlprobe.so"))
        self.hixl.hixlsim_count.restype = ctypes.c_int64
        for name, (answer, arguments) in FUNCTIONS.items():
            function = getattr(self.probe, f"probe_{name}")
            function.restype, function.argtypes = answer, arguments

    def __getattr__(self, name: str) -> object:
        return getattr(self.probe, f"probe_{name}")

    def set(self, name: str, value: object) -> None:
        assert self.hixl.hixlsim_set(name.encode(), str(value).encode()) == 0, (name, value)

    def count(self, name: str) -> int:
        return int(self.hixl.hixlsim_count(name.encode()))

    def break_links(self, remote: str = "") -> None:
        self.hixl.hixlsim_break(remote.encode())

    def set_device(self, device: int = 0) -> int:
        return int(self.acl.aclrtSetDevice(device))


class Memory:
    """A page-aligned block of this process, with an address."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.block = mmap.mmap(-1, max(size, 1))
        self.view = (ctypes.c_char * max(size, 1)).from_buffer(self.block)
        self.addr = ctypes.addressof(self.view)

    def fill(self, data: bytes, at: int = 0) -> None:
        ctypes.memmove(self.addr + at, data, len(data))

    def read(self, size: int | None = None, at: int = 0) -> bytes:
        return ctypes.string_at(self.addr + at, self.size if size is None else size)


class Hixl:
    """One object. Methods return the raw status, followed by the other results."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.this = library.new()
        self.id = ""

    def initialize(self, id: str | None = None, options: Mapping[str, str] | None = None) -> int:
        self.id = f"127.0.0.1:{free_port()}" if id is None else id
        flat = [text.encode() for pair in (options or {}).items() for text in pair]
        return self.library.initialize(self.this, self.id.encode(), (S * len(flat))(*flat), len(flat) // 2)

    def finalize(self) -> None:
        self.library.finalize(self.this)

    def delete(self) -> None:
        self.library.delete(self.this)

    def register(self, addr: int, size: int, kind: int = HOST) -> tuple[int, int]:
        handle = P()
        status = self.library.register(self.this, addr, size, kind, ctypes.byref(handle))
        return status, handle.value or 0

    def memory(self, size: int = 1 << 16) -> Memory:
        block = Memory(size)
        assert self.register(block.addr, size)[0] == SUCCESS
        return block

    def deregister(self, handle: int) -> int:
        return self.library.deregister(self.this, handle)

    def connect(self, to: str | Hixl, ms: int = 2000) -> int:
        return self.library.connect(self.this, name(to), ms)

    def disconnect(self, to: str | Hixl, ms: int = 2000) -> int:
        return self.library.disconnect(self.this, name(to), ms)

    def connect_async(self, to: str | Hixl, ms: int = 2000) -> int:
        return self.library.connect_async(self.this, name(to), ms)

    def disconnect_async(self, to: str | Hixl, ms: int = 2000) -> int:
        return self.library.disconnect_async(self.this, name(to), ms)

    def async_status(self, to: str | Hixl) -> int:
        status = INT()
        assert self.library.async_status(self.this, name(to), ctypes.byref(status)) == SUCCESS
        return status.value

    def transfer_sync(self, to: str | Hixl, op: int, ops: Iterable[tuple[int, int, int]], ms: int = 2000) -> int:
        flat = [word for each in ops for word in each]
        return self.library.transfer_sync(
            self.this, name(to), op, (ctypes.c_uint64 * len(flat))(*flat), len(flat) // 3, ms
        )

    def transfer(
        self, to: str | Hixl, op: int, ops: Iterable[tuple[int, int, int]], user_data: int = 0
    ) -> tuple[int, int]:
        flat = [word for each in ops for word in each]
        req = P()
        words = (ctypes.c_uint64 * len(flat))(*flat)
        status = self.library.transfer_async(
            self.this, name(to), op, words, len(flat) // 3, user_data, ctypes.byref(req)
        )
        return status, req.value or 0

    def write(self, to: str | Hixl, here: int, there: int, size: int) -> int:
        status, req = self.transfer(to, WRITE, [(here, there, size)])
        assert status == SUCCESS, status
        return req

    def status(self, req: int) -> tuple[int, int]:
        status = INT()
        answer = self.library.status(self.this, req, ctypes.byref(status))
        return answer, status.value

    def batch(self, most: int = 0xFFFFFFFF, skip_waiting: bool = True) -> tuple[int, list[tuple[int, int, int]]]:
        room = 1 << 14
        rows = (ctypes.c_uint64 * (3 * room))()
        count = N()
        answer = self.library.batch(self.this, most, skip_waiting, rows, room, ctypes.byref(count))
        return answer, [(rows[3 * i], rows[3 * i + 1], rows[3 * i + 2]) for i in range(count.value)]

    def notify(self, to: str | Hixl, title: str | bytes, text: str | bytes, ms: int = 2000) -> int:
        title, text = (each.encode() if isinstance(each, str) else each for each in (title, text))
        return self.library.send_notify(self.this, name(to), title, len(title), text, len(text), ms)

    def notifies(self, before: Iterable[tuple[str, str]] = ()) -> list[tuple[str, str]]:
        vector = self.library.notifies_new()
        try:
            for title, text in before:
                self.library.notifies_add(vector, title.encode(), text.encode())
            assert self.library.get_notifies(self.this, vector) == SUCCESS
            return [
                (self.library.notify_name(vector, i).decode(), self.library.notify_text(vector, i).decode())
                for i in range(self.library.notifies_count(vector))
            ]
        finally:
            self.library.notifies_delete(vector)


def name(to: str | Hixl) -> bytes:
    return (to.id if isinstance(to, Hixl) else to).encode()
