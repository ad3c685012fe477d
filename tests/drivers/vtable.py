"""The driver interface from Python, without the core: a ctypes mirror of ``hxa_driver.h`` and thin objects over it.

``test_vtable.py`` holds the mirror to the header.  Calls release the GIL; the sink's callbacks take it on whatever
thread the driver posts from, and check rule T4 while they are at it.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import importlib
import importlib.util
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

DONE, PENDING = 0, 1
STATUS = (
    "OK", "INVALID", "RANGE", "RIGHTS", "UNSUPPORTED", "NOMEM", "BUSY", "LINK", "CANCELLED", "TIMEOUT", "PROTOCOL",
    "SYSTEM",
)  # fmt: skip
OK, INVALID, RANGE, RIGHTS, UNSUPPORTED, NOMEM, BUSY, LINK, CANCELLED, TIMEOUT, PROTOCOL, SYSTEM = range(len(STATUS))
COMPLETED, RELEASED = 1, 2
READ, WRITE = 0, 1
MAY_READ, MAY_WRITE = 1, 2
HOST, DEVICE = 0, 1
CAPS = ("LOCAL_ANY", "ALLOC", "REGISTER", "SAME_HOST", "SIGNAL", "NOTIFY", "CANCEL", "FDS")
NOTE, SIGNAL, LINK_DOWN, LOG, MESSAGE = 1, 2, 3, 4, 5
METADATA_BYTES, METADATA_FDS, MESSAGE_BYTES = 1024, 4, 40960
DEADLINE = 20.0  # seconds until a wait fails; nothing takes that long unless it hangs


class COp(c.Structure):
    _fields_ = (
        ("next", c.c_void_p),
        ("events", c.c_uint32),
        ("status", c.c_int32),
        ("native", c.c_int32),
        ("scope", c.c_uint32),
        ("failed", c.c_int64),
        ("bytes", c.c_uint64),
        ("owner", c.c_void_p),
        ("scratch", c.c_void_p * 6),
    )


class CDesc(c.Structure):
    _fields_ = (
        ("lmem", c.c_void_p),
        ("loff", c.c_uint64),
        ("rmem", c.c_void_p),
        ("roff", c.c_uint64),
        ("len", c.c_uint64),
    )


class CBatch(c.Structure):
    _fields_ = (
        ("verb", c.c_uint32),
        ("priority", c.c_int32),
        ("n", c.c_size_t),
        ("desc", c.POINTER(CDesc)),
        ("bytes", c.c_uint64),
        ("signal", c.c_void_p),
        ("signal_off", c.c_uint64),
        ("signal_value", c.c_uint64),
        ("topic", c.c_void_p),
        ("topic_len", c.c_uint32),
        ("note_len", c.c_uint32),
        ("note", c.c_void_p),
    )


class CMetadata(c.Structure):
    _fields_ = (
        ("len", c.c_uint32),
        ("nfds", c.c_uint32),
        ("fds", c.c_int * METADATA_FDS),
        ("data", c.c_uint8 * METADATA_BYTES),
    )


class COption(c.Structure):
    _fields_ = (("key", c.c_char_p), ("value", c.c_char_p))


class CLimits(c.Structure):
    _fields_ = tuple((name, c.c_uint64) for name in ("descriptors", "note_bytes", "inline_bytes", "alignment", "caps"))


class CStats(c.Structure):
    _fields_ = tuple(
        (name, c.c_uint64)
        for name in (
            "ops_inline", "ops_queued", "bytes_read", "bytes_written", "notes_sent", "notes_received", "signals_sent",
            "wakes_sent", "wakes_received", "links", "memories", "threads",
        )
    )  # fmt: skip


class CEvent(c.Structure):
    _fields_ = (
        ("link", c.c_uint64),
        ("kind", c.c_uint32),
        ("status", c.c_int32),
        ("topic", c.c_void_p),
        ("data", c.c_void_p),
        ("topic_len", c.c_uint32),
        ("data_len", c.c_uint32),
    )


POST = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_uint32)
EVENT = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(CEvent))


class CSink(c.Structure):
    _fields_ = (("ctx", c.c_void_p), ("post", POST), ("event", EVENT))


HANDLE = c.c_void_p
OUT = c.POINTER(c.c_void_p)
OP = c.POINTER(COp)
FUNCTIONS: dict[str, Any] = {
    "open": (c.c_int, c.POINTER(COption), c.c_size_t, c.POINTER(CSink), OUT, c.c_char_p, c.c_size_t),
    "close": (None, HANDLE),
    "after_fork": (None, HANDLE),
    "limits": (None, HANDLE, c.POINTER(CLimits)),
    "stats": (None, HANDLE, c.POINTER(CStats)),
    "error_text": (c.c_char_p, c.c_int32, c.c_int32),
    "mem_alloc": (c.c_int, HANDLE, c.c_uint64, c.c_uint32, OUT, OUT),
    "mem_register": (c.c_int, HANDLE, c.c_void_p, c.c_uint64, c.c_uint32, c.c_uint32, OUT),
    "mem_export": (c.c_int, HANDLE, c.c_uint32, c.POINTER(CMetadata)),
    "mem_import": (c.c_int, HANDLE, c.POINTER(CMetadata), c.c_uint64, c.c_uint32, OUT, OP),
    "mem_release": (None, HANDLE),
    "link_new": (c.c_int, HANDLE, c.c_uint64, OUT, c.POINTER(CMetadata)),
    "link_connect": (c.c_int, HANDLE, c.POINTER(CMetadata), OP),
    "link_fd": (c.c_int, HANDLE),
    "link_stop": (c.c_int, HANDLE, c.c_int, OP),
    "link_fence": (c.c_int, HANDLE, OP),
    "link_free": (None, HANDLE),
    "submit": (c.c_int, HANDLE, c.POINTER(CBatch), OP),
    "cancel": (c.c_int, HANDLE, OP),
    "progress": (c.c_uint64, HANDLE, OP),
    "poll": (c.c_int, HANDLE, c.c_uint32),
    "start": (c.c_int, HANDLE, OP),
    "shutdown": (c.c_int, HANDLE, OP),
    "mem_ready": (c.c_int, HANDLE, OP),
    "mem_retire": (c.c_int, HANDLE, OP),
    "message": (c.c_int, HANDLE, c.c_char_p, c.c_size_t),
    "abandon": (c.c_int, HANDLE, OP),
    "link_pace": (c.c_int, HANDLE, c.c_uint64),
    "about": (c.c_char_p, HANDLE),
    "mem_borrow": (c.c_int, HANDLE, HANDLE, OUT),
    "mem_return": (None, HANDLE, HANDLE),
    "waits": (c.c_int, HANDLE, OP),
}
#: Functions added to the table later: not every driver has them.
OPTIONAL = (
    "start", "shutdown", "mem_ready", "mem_retire", "message", "abandon", "link_pace", "about", "mem_borrow", "mem_return",
    "waits",
)  # fmt: skip


class CDriver(c.Structure):
    _fields_ = (
        ("abi", c.c_uint32),
        ("size", c.c_uint32),
        ("name", c.c_char_p),
        ("caps", c.c_uint64),
        *((name, c.CFUNCTYPE(*types)) for name, types in FUNCTIONS.items()),
    )


# The mirror by the names of the header.
STRUCTS = {
    "hxa_op": COp, "hxa_desc": CDesc, "hxa_batch": CBatch, "hxa_metadata": CMetadata, "hxa_option": COption,
    "hxa_limits": CLimits, "hxa_stats": CStats, "hxa_event": CEvent, "hxa_sink": CSink, "hxa_driver": CDriver,
}  # fmt: skip


class DriverError(Exception):
    """A call was refused, or an op failed."""

    def __init__(self, what: str, status: int, native: int = 0) -> None:
        super().__init__(f"{what}: {STATUS[status]} (native {native})")
        self.status = status
        self.native = native


def check(what: str, answer: int, native: int = 0) -> int:
    if answer < 0:  # HXA_REFUSAL
        raise DriverError(what, -answer & 0xFF, native or -answer >> 8)
    return answer


def take(metadata: CMetadata) -> CMetadata:
    """Take metadata that is handed to the driver, which owns the descriptors from then on."""
    given = CMetadata.from_buffer_copy(metadata)
    metadata.nfds = 0
    return given


def drop(metadata: CMetadata) -> None:
    """Close the descriptors of metadata that was not taken."""
    for i in range(metadata.nfds):
        os.close(metadata.fds[i])
    metadata.nfds = 0


def load(name: str) -> CDriver:
    """Return the table of a driver, by entry point, by module ``hixl_async.drivers._NAME``, or from a module's file.

    What follows a colon is about options; see ``conftest.py``.
    """
    name = name.partition(":")[0]
    if os.sep in name:
        module_name = os.path.basename(name).partition(".")[0]
        spec = importlib.util.spec_from_file_location(module_name, name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        capsule = module.DRIVER
    elif found := list(entry_points(group="hixl_async.drivers", name=name)):
        capsule = found[0].load()
    else:
        capsule = importlib.import_module(f"hixl_async.drivers._{name}").DRIVER
    get_pointer = c.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c.c_void_p, (c.py_object, c.c_char_p)
    return CDriver.from_address(get_pointer(capsule, b"hixl_async.driver.v1"))


@dataclass(frozen=True)
class Event:
    link: int
    kind: int
    status: int
    topic: bytes
    data: bytes


class Wire:
    """The carrier of one link's messages to the driver in another process; any thread may send, nothing blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.lock = threading.Lock()
        self.waiting: deque[bytes] = deque()
        self.ended = False

    def send(self, data: bytes) -> None:
        with self.lock:
            self.waiting.append(data)
            self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self.waiting:
                self.sock.send(self.waiting[0])
                self.waiting.popleft()

    def receive(self) -> list[bytes]:
        out: list[bytes] = []
        with self.lock:
            self._flush()
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    data = self.sock.recv(1 << 20)
                except ConnectionError:
                    data = b""
                if data:
                    out.append(data)
                else:
                    self.ended = True
        return out


class Op:
    """One op and what became of it; keeps everything alive that the driver may touch until it is released."""

    def __init__(self, instance: Instance, keep: Any = None) -> None:
        self.raw = COp()
        self.instance = instance
        self.keep = keep
        self.history: list[int] = []  # what was posted, in order
        self.answer = DONE
        instance.ops[c.addressof(self.raw)] = self

    @property
    def pointer(self) -> Any:
        return c.byref(self.raw)

    def accepted(self, what: str, answer: int) -> Op:
        self.answer = answer
        if answer != PENDING:
            assert not self.history, f"{what} answered {answer} and posted {self.history}"
            del self.instance.ops[c.addressof(self.raw)]
        check(what, answer, self.raw.native)
        return self

    @property
    def completed(self) -> bool:
        return self.answer == DONE or any(events & COMPLETED for events in self.history)

    @property
    def released(self) -> bool:
        return self.answer == DONE or any(events & RELEASED for events in self.history)

    @property
    def status(self) -> int:
        assert self.completed
        return self.raw.status if self.answer == PENDING else OK

    @property
    def bytes(self) -> int:
        return self.raw.bytes

    def wait(self, *links: Link, timeout: float = DEADLINE) -> int:
        """Return the status once the op is released; poll the links meanwhile."""
        self.instance.until(lambda: self.released, *links, timeout=timeout, what="an op was not released")
        return self.status

    def ok(self, *links: Link) -> Op:
        status = self.wait(*links)
        if status != OK:
            raise DriverError("op", status, self.raw.native)
        return self


@dataclass(eq=False)
class Memory:
    instance: Instance
    handle: int
    size: int
    address: int | None = None  # ours only
    op: Op | None = None  # imported: the import
    keep: Any = None
    released: bool = False

    @property
    def view(self) -> memoryview:
        return memoryview((c.c_uint8 * self.size).from_address(self.address)).cast("B")

    def export(self, rights: int) -> CMetadata:
        metadata = CMetadata()
        check("mem_export", self.instance.vt.mem_export(self.handle, rights, c.byref(metadata)))
        return metadata

    def release(self) -> None:
        if self.released:
            return
        self.released = True
        self.instance.memories.discard(self)
        if self.address is None or not self.instance.vt.mem_retire:
            self.instance.vt.mem_release(self.handle)
            return
        op = Op(self.instance, self.keep)
        op.accepted("mem_retire", self.instance.vt.mem_retire(self.handle, op.pointer))


class Link:
    def __init__(self, instance: Instance, cookie: int) -> None:
        handle, self.metadata = c.c_void_p(), CMetadata()
        self.instance, self.cookie, self.vt = instance, cookie, instance.vt
        check("link_new", self.vt.link_new(instance.handle, cookie, c.byref(handle), c.byref(self.metadata)))
        self.handle = handle.value
        self.down: Event | None = None
        self.stopped: Op | None = None
        self.freed = False
        self.more = False
        self.inbox: deque[bytes] = deque()  # messages of the driver at the other end
        self.other: Link | Wire | None = None
        instance.links[cookie] = self

    def carry(self, data: bytes) -> None:
        """Carry a message of the driver here to the one at the other end; called by its threads."""
        if isinstance(self.other, Wire):
            self.other.send(data)
        elif self.other is not None:
            self.other.inbox.append(data)

    def take(self) -> None:
        """Give the driver what the other end said, as the loop of this side would."""
        if isinstance(self.other, Wire):
            self.inbox.extend(self.other.receive())
        while self.inbox and not self.freed:
            data = self.inbox.popleft()
            self.vt.message(self.handle, data, len(data))

    def connect(self, metadata: CMetadata) -> Link:
        op = Op(self.instance)
        op.accepted("link_connect", self.vt.link_connect(self.handle, c.byref(take(metadata)), op.pointer)).ok()
        self.more = True  # the core polls once, whatever the descriptor says
        return self

    @property
    def fd(self) -> int:
        return self.vt.link_fd(self.handle)

    def poll(self, budget: int = 64) -> int:
        self.take()
        answer = self.vt.poll(self.handle, budget)
        assert answer in (0, 1)
        self.more = bool(answer)
        return answer

    def notes(self) -> list[tuple[bytes, bytes]]:
        return [
            (event.topic, event.data)
            for event in self.instance.events
            if event.link == self.cookie and event.kind == NOTE
        ]

    def signals(self) -> int:
        return sum(event.link == self.cookie and event.kind == SIGNAL for event in self.instance.events)

    def load(self, metadata: CMetadata, size: int, rights: int) -> Memory:
        """Import without waiting; ``memory.op`` tells when it is usable."""
        handle, op = c.c_void_p(), Op(self.instance)
        op.accepted(
            "mem_import",
            self.vt.mem_import(self.handle, c.byref(take(metadata)), size, rights, c.byref(handle), op.pointer),
        )
        memory = Memory(self.instance, handle.value, size, op=op)
        self.instance.memories.add(memory)
        return memory

    def imported(self, memory: Memory, rights: int = MAY_READ | MAY_WRITE) -> Memory:
        """Export and import in one, for two instances in one process."""
        loaded = self.load(memory.export(rights), memory.size, rights)
        loaded.op.ok(self)
        return loaded

    def submit(
        self,
        verb: int = WRITE,
        descs: Iterable[tuple[Any, int, Memory, int, int]] = (),
        *,
        signal: tuple[Memory, int, int] | None = None,
        note: tuple[bytes, bytes] | None = None,
        priority: int = 0,
    ) -> Op:
        """``descs``: (local Memory or None, offset or address, remote Memory, offset, length)."""
        rows = [
            (local and local.handle, loff, remote.handle, roff, length) for local, loff, remote, roff, length in descs
        ]
        array = (CDesc * max(1, len(rows)))(*rows)
        batch = CBatch(verb=verb, priority=priority, n=len(rows), desc=array, bytes=sum(row[4] for row in rows))
        keep = [batch, array]
        if signal is not None:
            batch.signal, batch.signal_off, batch.signal_value = signal[0].handle, signal[1], signal[2]
        if note is not None:
            topic, text = (c.create_string_buffer(part, len(part) + 1) for part in note)
            batch.topic, batch.topic_len, batch.note, batch.note_len = (
                c.addressof(topic),
                len(note[0]),
                c.addressof(text),
                len(note[1]),
            )
            keep += [topic, text]
        op = Op(self.instance, keep)
        return op.accepted("submit", self.vt.submit(self.handle, c.byref(batch), op.pointer))

    def note(self, topic: bytes, text: bytes = b"") -> Op:
        return self.submit(note=(topic, text))

    def cancel(self, op: Op) -> int:
        return self.vt.cancel(self.handle, op.pointer)

    def progress(self, op: Op) -> int:
        return self.vt.progress(self.handle, op.pointer)

    def fence(self) -> Op:
        op = Op(self.instance)
        return op.accepted("link_fence", self.vt.link_fence(self.handle, op.pointer))

    def stop(self, dead: bool = False) -> Op:
        self.stopped = Op(self.instance)
        return self.stopped.accepted("link_stop", self.vt.link_stop(self.handle, int(dead), self.stopped.pointer))

    def free(self) -> None:
        if not self.freed:
            self.freed = True
            drop(self.metadata)
            del self.instance.links[self.cookie]
            self.vt.link_free(self.handle)


@dataclass(eq=False)
class Instance:
    """An opened driver with a sink of its own."""

    vt: CDriver
    options: dict[str, str] = field(default_factory=dict)
    on_event: Callable[[Event], None] | None = None

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.ops: dict[int, Op] = {}
        self.finished: list[Op] = []
        self.events: list[Event] = []
        self.violations: list[str] = []
        self.links: dict[int, Link] = {}
        self.memories: set[Memory] = set()
        self.closed = False
        self.started = False
        self.logs: list[str] = []
        self.sink = CSink(None, POST(lambda *what: self._post(*what)), EVENT(self._event))
        options = [(key.encode(), str(value).encode()) for key, value in self.options.items()]
        array = (COption * max(1, len(options)))(*options)
        handle, error = c.c_void_p(), c.create_string_buffer(400)
        answer = self.vt.open(array, len(options), c.byref(self.sink), c.byref(handle), error, len(error))
        if answer < 0:
            raise DriverError(error.value.decode(), -answer)
        self.handle = handle.value

    # The sink.  Both may run on any thread, and never raise: what is wrong is remembered.

    def _post(self, _ctx: int, address: int, events: int) -> None:
        with self.changed:
            op = self.ops.get(address)
            if op is None:
                self.violations.append(f"events {events} for an op that is not accepted, or was released before")
                return
            seen = 0
            for before in op.history:
                seen |= before
            if events & seen or not events or events & ~3 or (events & RELEASED and not (events | seen) & COMPLETED):
                self.violations.append(f"events {events} after {op.history}")
            op.history.append(events)
            if events & RELEASED:
                del self.ops[address]
                self.finished.append(op)
            self.changed.notify_all()

    def _event(self, _ctx: int, event: Any) -> None:
        raw = event.contents
        seen = Event(
            raw.link, raw.kind, raw.status, c.string_at(raw.topic, raw.topic_len), c.string_at(raw.data, raw.data_len)
        )
        if seen.kind == LOG:
            self.logs.append(seen.data.decode())
            return
        if seen.kind == MESSAGE:
            link = self.links.get(seen.link)
            if link is None:
                self.violations.append("a message for a link that is gone")
            else:
                link.carry(seen.data)
            return
        with self.changed:
            self.events.append(seen)
            if seen.kind == LINK_DOWN and seen.link in self.links:
                if self.links[seen.link].down is not None:
                    self.violations.append("LINK_DOWN twice")
                self.links[seen.link].down = seen
            self.changed.notify_all()
        if self.on_event is not None:
            self.on_event(seen)

    # Calls.

    def limits(self) -> CLimits:
        out = CLimits()
        self.vt.limits(self.handle, c.byref(out))
        return out

    def stats(self) -> CStats:
        out = CStats()
        self.vt.stats(self.handle, c.byref(out))
        return out

    def start(self) -> None:
        """Start the driver, before the first link or memory, if it has something to start."""
        if self.started or not self.vt.start:
            return
        self.started = True
        op = Op(self)
        op.accepted("start", self.vt.start(self.handle, op.pointer)).ok()

    def ready(self, memory: Memory) -> Memory:
        """Return memory once peers may be told of it."""
        if self.vt.mem_ready:
            op = Op(self)
            op.accepted("mem_ready", self.vt.mem_ready(memory.handle, op.pointer)).ok()
        return memory

    def alloc(self, size: int, rights: int = MAY_READ | MAY_WRITE) -> Memory:
        self.start()
        handle, address = c.c_void_p(), c.c_void_p()
        check("mem_alloc", self.vt.mem_alloc(self.handle, size, rights, c.byref(handle), c.byref(address)))
        memory = Memory(self, handle.value, size, address.value)
        self.memories.add(memory)
        return self.ready(memory)

    def register(self, buffer: Any, rights: int = MAY_READ | MAY_WRITE, kind: int = HOST) -> Memory:
        self.start()
        handle, size, address = c.c_void_p(), c.sizeof(buffer), c.addressof(buffer)
        check("mem_register", self.vt.mem_register(self.handle, address, size, kind, rights, c.byref(handle)))
        memory = Memory(self, handle.value, size, address, keep=buffer)
        self.memories.add(memory)
        return self.ready(memory)

    def link(self, cookie: int = 7) -> Link:
        self.start()
        return Link(self, cookie)

    def until(self, true: Callable[[], Any], *links: Link, timeout: float = DEADLINE, what: str = "timed out") -> None:
        """Wait, polling the links as a loop would: when their descriptor is readable or a poll left work behind."""
        end = time.monotonic() + timeout
        while not true():
            if time.monotonic() > end:
                raise AssertionError(f"{what}: {true}")
            for link in links:
                link.take()
            watched = {link.fd: link for link in links if not link.freed and link.fd >= 0 and link.down is None}
            busy = [link for link in watched.values() if link.more]
            if watched:
                readable = select.select(list(watched), [], [], 0 if busy else 0.002)[0]
                for link in {*busy, *(watched[fd] for fd in readable)}:
                    link.poll()
            else:
                with self.changed:
                    if not true():
                        self.changed.wait(0.001)

    def close(self) -> None:
        """End whatever is left, close, and fail if the driver broke a rule or kept something."""
        if self.closed:
            return
        self.closed = True
        for link in list(self.links.values()):
            if link.stopped is None:
                link.stop(dead=True)
            elif not link.stopped.released:
                with contextlib.suppress(DriverError):
                    link.stop(dead=True)
            link.stopped.wait()
            link.free()
        self.until(lambda: not self.ops, what="ops are left")
        for memory in list(self.memories):
            memory.release()
        self.until(lambda: not self.ops, what="memories are left")
        stats = self.stats()
        assert (stats.links, stats.memories) == (0, 0), f"gauges: {stats.links} links, {stats.memories} memories"
        if self.started and self.vt.shutdown:
            op = Op(self)
            op.accepted("shutdown", self.vt.shutdown(self.handle, op.pointer)).ok()
        self.vt.close(self.handle)
        assert not self.violations, self.violations

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def unless_busy(call: Callable[..., Op], *arguments: Any, **more: Any) -> Op | None:
    """Return what the call returns, or None if it was refused for lack of room."""
    try:
        return call(*arguments, **more)
    except DriverError as error:
        if error.status != BUSY:
            raise
        return None


def join(a: Instance, b: Instance) -> tuple[Link, Link]:
    """Connect two links of one process with each other."""
    left, right = a.link(1 + len(a.links)), b.link(101 + len(b.links))
    left.other, right.other = right, left
    left.connect(right.metadata)
    right.connect(left.metadata)
    return left, right


def has(vt: CDriver, *caps: str) -> bool:
    return all(vt.caps >> CAPS.index(cap) & 1 for cap in caps)


def relies_on_control(vt: CDriver) -> bool:
    """True if the driver relies on the control connection to notice that a peer is gone."""
    return bool(vt.message)


def fill(view: memoryview, seed: int = 1) -> None:
    """Bytes that differ everywhere; fast for any size."""
    pattern = bytes((i * 131 + (i >> 8) * 7 + seed * 29) & 255 for i in range(4099))
    view[:] = (pattern * (len(view) // len(pattern) + 1))[: len(view)]


def descriptors() -> dict[int, str]:
    out = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            out[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return out


def mappings() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "hixl_async" in line and "memfd" in line]


def threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return sorted(names)


def holdings() -> dict[str, Counter[str]]:
    """Return what a process holds; descriptors by number and target."""
    return {
        "descriptors": Counter(f"{fd} -> {target}" for fd, target in descriptors().items()),
        "mappings": Counter(mappings()),
        "threads": Counter(threads()),
    }


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Assert that nothing is held afterwards that was not held before."""
    before = holdings()
    yield
    end = time.monotonic() + 2  # a joined thread is seen in /proc a little longer
    while True:
        left = {what: now - before[what] for what, now in holdings().items()}
        if not any(left.values()) or time.monotonic() > end:
            break
        os.sched_yield()
    assert not any(left.values()), f"left behind: {left}"
