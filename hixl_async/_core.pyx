# cython: freethreading_compatible=False
"""The hot path: slots, transfers, region slices, batches, submit and drain.

Invariants; the code cites them where it relies on them, and tests/core has a test for each.

C1   The slot (a `Transfer`) is owned by the flight from accepted submit to release: one INCREF in `_track`, one DECREF in
     `_settle`, nowhere else.
C2   An accepted submit gets exactly one completion, then one release; a refused one gets neither.  Failure and
     safe-to-unpin are two events: a deadline causes the first, only the driver gives the second.
C3   Driver threads hold no GIL and touch no Python object; they only post to the mailbox.
C4   Awaitables are resolved on the loop's thread alone.  A waiting task is resumed directly only from `drain`, where no
     task is current; everything else goes through call_soon.
C5   Cancelling ends the wait.  It never unpins memory.
C6   Every descriptor is validated (alive, in bounds, right access, no overflow) before any is posted: all or nothing.
C7   Close refuses new work, drains within a deadline, and leaks, loudly, what a device might still write.
C8   A coroutine that only awaits finished operations still yields: `credit`.  A drain is capped: DRAIN_OPS, DRAIN_SECONDS.
C9   An engine belongs to one loop; a foreign loop raises WrongLoopError.
C10  After fork() the child's calls raise EngineForkedError and tear nothing down for the parent.
C11  Data before signal before notification: the drivers' rule T5; the core hands all three over in one batch.
C12  The GIL is held for copies estimated below ~100 us and released above.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.math cimport INFINITY
from libc.string cimport memcpy, memset

from .driver cimport *

import asyncio
from asyncio import CancelledError, InvalidStateError
from asyncio import _get_running_loop as running_loop

from . import errors
from .types import TransferState

cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept, void (*)() noexcept, void (*)() noexcept)

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil
    int PyContext_Enter(object) except -1
    int PyContext_Exit(object) except -1
    object PyContext_CopyCurrent()
    void PyErr_SetObject(object, object)
    bint PySlice_Check(object)

cdef extern from "hxa_mailbox.h" nogil:
    int hxa_mailbox_open(hxa_mailbox *box)
    void hxa_mailbox_signal(hxa_mailbox *box)
    void hxa_mailbox_post(void *ctx, hxa_op *op, uint32_t events)
    void hxa_mailbox_event(void *ctx, const hxa_event *event)
    hxa_op *hxa_mailbox_take_ops(hxa_mailbox *box)
    hxa_letter *hxa_mailbox_take_letters(hxa_mailbox *box)
    uint32_t hxa_mailbox_events(hxa_op *op)
    void hxa_mailbox_disarm(hxa_mailbox *box)
    int hxa_mailbox_arm(hxa_mailbox *box)
    void hxa_mailbox_close(hxa_mailbox *box)
    void free(void *)

cdef extern from *:
    """
    /* An awaitable with am_send costs a sixth of one that raises StopIteration; Cython has no syntax for the slot. */
    static void hxa_set_am_send(PyObject *type, sendfunc send) {
        PyTypeObject *t = (PyTypeObject *)type;
        t->tp_as_async->am_send = send;
        PyType_Modified(t);
    }
    static inline PyObject *hxa_slice_start(PyObject *s) { return ((PySliceObject *)s)->start; }
    static inline PyObject *hxa_slice_stop(PyObject *s) { return ((PySliceObject *)s)->stop; }
    static inline PyObject *hxa_slice_step(PyObject *s) { return ((PySliceObject *)s)->step; }
    """
    ctypedef int PySendResult
    PySendResult PYGEN_RETURN, PYGEN_NEXT, PYGEN_ERROR
    ctypedef PySendResult (*sendfunc)(PyObject *, PyObject *, PyObject **) noexcept
    void hxa_set_am_send(object, sendfunc)
    PyObject *hxa_slice_start(object)
    PyObject *hxa_slice_stop(object)
    PyObject *hxa_slice_step(object)

cdef enum: ACTIVE, DONE, FAILED, CANCELLED

# C8: how much finished work a task may await before it must yield.  One operation costs 1 + bytes / 16 KiB; 128 is roughly
# a tenth of a millisecond of small operations, against 3 to 6 us for the yield.
cdef enum: CREDIT = 128, CREDIT_SHIFT = 14
cdef enum: DRAIN_OPS = 256, POLL_EVENTS = 256
cdef double DRAIN_SECONDS = 0.001
# C12: a cold copy of this much takes about 100 us.
cdef enum: GIL_BYTES = 384 << 10

cdef uint64_t fork_generation = 0

cdef void _forked() noexcept nogil:
    global fork_generation
    fork_generation += 1

pthread_atfork(NULL, NULL, _forked)

cdef object Task = asyncio.Task
cdef dict PRIORITIES = {"low": HXA_PRIORITY_LOW, "normal": HXA_PRIORITY_NORMAL, "high": HXA_PRIORITY_HIGH}
cdef dict VERBS = {"read": HXA_READ, "write": HXA_WRITE}
cdef tuple OUTCOMES = (TransferState.ACTIVE, TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED)

EVENT_NOTE = HXA_EVENT_NOTE
EVENT_SIGNAL = HXA_EVENT_SIGNAL
EVENT_LINK_DOWN = HXA_EVENT_LINK_DOWN
EVENT_LOG = HXA_EVENT_LOG

CAP_ALLOC = HXA_CAP_ALLOC
CAP_REGISTER = HXA_CAP_REGISTER
CAP_SAME_HOST = HXA_CAP_SAME_HOST
CAP_NOTIFY = HXA_CAP_NOTIFY

CAPABILITIES = {
    HXA_CAP_LOCAL_ANY: "any local buffer",
    HXA_CAP_ALLOC: "allocate",
    HXA_CAP_REGISTER: "register",
    HXA_CAP_SAME_HOST: "same host only",
    HXA_CAP_SIGNAL: "signal",
    HXA_CAP_NOTIFY: "notify",
    HXA_CAP_CANCEL: "cancel",
    HXA_CAP_FDS: "descriptor passing",
}


# ---- errors ----------------------------------------------------------------------------------------------------------------

cdef object _error(Driver driver, int status, int native, str what, str peer, object index=None):
    """The one gate from a driver's status to an exception."""
    cdef const char *text = NULL
    if driver is not None and driver.table.error_text != NULL:
        text = driver.table.error_text(status, native)
    detail = text.decode("utf-8", "replace") if text != NULL else f"status {status}"
    if status == HXA_E_LINK:
        kind = errors.PeerLostError
    elif status == HXA_E_TIMEOUT:
        kind = errors.TransferTimeoutError
    elif status == HXA_E_RIGHTS:
        kind = errors.AccessError
    elif status == HXA_E_RANGE:
        kind = errors.RangeError
    elif status == HXA_E_BUSY:
        kind = errors.BusyError
    elif status == HXA_E_PROTOCOL:
        kind = errors.ProtocolError
    elif status == HXA_E_INVALID:
        kind = errors.InvalidArgumentError
    elif status in (HXA_E_UNSUPPORTED, HXA_E_NOMEM):
        kind = errors.DriverError
    else:
        kind = errors.TransferError
    where = f" (peer {peer!r})" if peer else ""
    return kind(f"{what}: {detail}{where}", peer=peer, index=index, native=native or None)


class _Unretrieved:
    """Travels with a failed transfer; when both die unseen, the loop's exception handler hears of it."""

    __slots__ = ("exception", "loop", "text")

    def __init__(self, loop, text, exception):
        self.loop, self.text, self.exception = loop, text, exception

    def __del__(self):
        if self.exception is not None and not self.loop.is_closed():
            self.loop.call_exception_handler(
                {"message": f"{self.text} failed and nobody awaited it", "exception": self.exception}
            )


# ---- memory ----------------------------------------------------------------------------------------------------------------

cdef class Memory:
    """Memory that transfers may name: a window of ours, or a peer's after import."""

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        return _slice(self, 0, self.size, key)

    cdef int _unpin(self) except -1:
        self.flights -= 1
        if not self.alive and self.flights == 0:
            self._let_go()
        return 0

    cdef int _let_go(self) except -1:
        """Retired, and no flight or peer holds it any more."""
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        return self._bury()

    def retire(self):
        """No new work from now on; the drivers' handles go when the last flight, peer and view are gone."""
        if self.alive:
            self.alive = False
            if self.flights == 0:
                self._let_go()

    def drained(self):
        """Waits until no flight touches this memory any more.

        :return: an awaitable; cancelling it only ends the wait.
        """
        return self.core._drained(self, 0, self.size)

    def released(self):
        """Waits until the memory is closed, and no flight and no peer holds it; cancelling only ends the wait.

        :return: an awaitable.
        """
        waiter = self.core.loop.create_future()
        if not self.alive and self.flights == 0:
            waiter.set_result(None)
        elif self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)
        return waiter

    cdef int _bury(self) except -1:
        """Releases the driver's handles now, or on the loop's thread where that is still running (header, T2)."""
        if self.alive or self.flights or self.exports:
            return 0
        if not self.core.finished and PyThread_get_thread_ident() != self.core.thread:
            self.core.graveyard.append(self)
            hxa_mailbox_signal(self.core.box)
            return 0
        return self._release()

    cdef int _release(self) except -1:
        raise NotImplementedError

    def pin(self):
        """Holds the memory beyond `retire`, for a peer that has it mapped; `unpin` undoes it."""
        self.flights += 1

    def unpin(self):
        """Undoes one `pin`."""
        self._unpin()

    @property
    def pins(self):
        """How many flights and peers hold this memory."""
        return self.flights


cdef class LocalMemory(Memory):
    """Memory of this process, known to the drivers."""

    def __dealloc__(self):
        PyBuffer_Release(&self.source)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.alive:
            raise errors.ClosedError("this region was closed; take its views before")
        PyBuffer_FillInfo(view, self, self.address, self.size, self.readonly, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1
        if self.exports == 0 and not self.alive:
            self._bury()

    @property
    def address(self):
        """Address of the first byte in this process."""
        return <size_t>self.address

    cdef int _release(self) except -1:
        cdef Driver driver
        cdef int i
        for i in range(MAX_DRIVERS):
            if self.mems[i] != NULL:
                driver = self.core.drivers[i]
                driver.table.mem_release(self.mems[i])
                self.mems[i] = NULL
                driver._forget()
        if self.address != NULL:
            self.address = NULL
            self.core.local_memories -= 1
        PyBuffer_Release(&self.source)
        self.owner = None
        return 0

    def export(self, Driver driver, uint32_t rights):
        """The card that lets a peer of `driver` import this memory: ``(bytes, descriptors)``, descriptors owned by the caller."""
        cdef hxa_card card
        if self.mems[driver.index] == NULL:
            raise errors.DriverError(f"driver {driver.name!r} does not know this memory")
        memset(&card, 0, sizeof(card))
        cdef int answer = driver.table.mem_export(self.mems[driver.index], rights, &card)
        if answer:
            raise _error(driver, -answer, 0, "export of a region", None)
        return _unpack_card(&card)

    def known_to(self, Driver driver):
        """True if `driver` can export this memory."""
        return self.mems[driver.index] != NULL


cdef class RemoteMemory(Memory):
    """A peer's memory, imported over one link."""

    cdef int _release(self) except -1:
        cdef Driver driver = self.link.driver
        if self.mems[driver.index] != NULL:
            driver.table.mem_release(self.mems[driver.index])
            self.mems[driver.index] = NULL
            self.core.remote_memories -= 1
            driver._forget()
        return 0


@cython.final
@cython.freelist(64)
cdef class Slice:
    """A range of bytes of a region; made by ``region[a:b]``."""

    def __getitem__(self, key):
        return _slice(self.memory, self.offset, self.length, key)

    def __len__(self):
        return self.length

    def __repr__(self):
        return f"{self.memory!r}[{self.offset}:{self.offset + self.length}]"

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef Memory memory = self.memory
        if memory.address == NULL:
            raise BufferError("a remote range has no memory here; read it into a local one")
        if not memory.alive:
            raise errors.ClosedError("this region was closed; take its views before")
        PyBuffer_FillInfo(view, self, memory.address + self.offset, self.length, (<LocalMemory>memory).readonly, flags)
        memory.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        cdef Memory memory = self.memory
        memory.exports -= 1
        if memory.exports == 0 and not memory.alive:
            memory._bury()

    def drained(self):
        """Waits until no flight touches this range any more, those included whose handle was lost.

        :return: an awaitable; cancelling it only ends the wait.
        """
        return self.memory.core._drained(self.memory, self.offset, self.length)


cdef inline uint64_t _bound(PyObject *value, uint64_t default, str name) except? <uint64_t>-1:
    if value == <PyObject *>None:
        return default
    try:
        return <object>value
    except (OverflowError, TypeError):
        raise errors.RangeError(
            f"slice {name} is {<object>value!r}; slices count bytes from 0, and never reach outside"
        ) from None


cdef Slice _slice(Memory memory, uint64_t base, uint64_t size, object key):
    if not PySlice_Check(key):
        raise errors.InvalidArgumentError(f"index with a slice of bytes such as region[0:4096], not with {key!r}")
    cdef PyObject *step = hxa_slice_step(key)
    if step != <PyObject *>None and <object>step != 1:
        raise errors.RangeError(f"slice step is {<object>step!r}; only contiguous ranges (step 1) can be moved")
    cdef uint64_t start = _bound(hxa_slice_start(key), 0, "start")
    cdef uint64_t stop = _bound(hxa_slice_stop(key), size, "stop")
    if start > stop or stop > size:
        raise errors.RangeError(f"range [{start}:{stop}] lies outside of {size} bytes; slices are never clamped")
    cdef Slice piece = Slice.__new__(Slice)
    piece.memory = memory
    piece.offset = base + start
    piece.length = stop - start
    return piece


# ---- batches ---------------------------------------------------------------------------------------------------------------

cdef Slice _whole(object side, str name, type kind):
    """A region or a range of one, as a range."""
    cdef Slice piece
    if isinstance(side, Slice):
        piece = side
    elif isinstance(side, Memory):
        piece = Slice.__new__(Slice)
        piece.memory = side
        piece.length = piece.memory.size
    else:
        raise errors.InvalidArgumentError(f"{name} must be a region or a range of one, not {type(side).__name__}")
    if not isinstance(piece.memory, kind):
        raise errors.InvalidArgumentError(
            f"{name} must be {'local: a region of this engine' if kind is LocalMemory else 'a region of a peer'}, "
            f"not {piece.memory!r}"
        )
    return piece


cdef object _rows(object rows):
    """Any N x 3 table of 64-bit integers as a typed view, without copying where it already is one."""
    from array import array
    if not PyObject_CheckBuffer(rows):
        flat = array("Q")
        try:
            for triple in rows:
                loff, roff, length = triple
                flat.extend((loff, roff, length))
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                "rows must be triples (local offset, remote offset, length) of integers in 0..2**64-1"
            ) from error
        if not flat:
            raise errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")
        return memoryview(flat).cast("B").cast("Q", (len(flat) // 3, 3))
    view = memoryview(rows)
    if view.ndim != 2 or view.shape[1] != 3:
        raise errors.InvalidArgumentError(
            f"rows must have shape (N, 3): local offset, remote offset, length; got {tuple(view.shape)}"
        )
    if view.shape[0] == 0:
        raise errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")
    if view.itemsize != 8 or view.format.lstrip("@=<") not in ("Q", "L", "q", "l"):
        raise errors.InvalidArgumentError(f"rows must hold 64-bit integers (uint64), not format {view.format!r}")
    if not view.c_contiguous:
        raise errors.BufferTypeError("rows must be C-contiguous; pass numpy.ascontiguousarray(rows)")
    # A negative int64 becomes a huge offset here, and the bounds check names it.
    return view.cast("B").cast("Q", view.shape)


cdef int _check_access(Memory remote, uint32_t verb) except -1:
    cdef uint32_t needed = HXA_RIGHT_READ if verb == HXA_READ else HXA_RIGHT_WRITE
    if remote.rights & needed == 0:
        word = "read" if verb == HXA_READ else "write"
        raise errors.AccessError(f"{remote!r} does not grant {word!r}; its owner decides that by access= at allocate or register")
    return 0


@cython.final
cdef class Batch:
    """A prepared list of copies: one peer, one direction, N descriptors, one completion.  May be submitted many times.

    ``Batch(verb, local, remote, rows)`` takes an N x 3 C-contiguous buffer of 64-bit integers (numpy, array, memoryview) or
    a sequence of triples: local offset, remote offset, length, in bytes, counted from the start of `local` and `remote`
    (regions or ranges of them).  ``Batch(verb, parts)`` takes a sequence of ``(local, remote, rows)`` or ``(local_slice,
    remote_slice)``.  Everything is validated here, once.

    :param verb: ``"read"`` (remote to local) or ``"write"`` (local to remote).
    :raises InvalidArgumentError: if `verb`, a part or the shape of `rows` is malformed, or there is no descriptor.
    :raises RangeError: if a descriptor has length 0 or reaches outside; its number is in `index`.
    :raises AccessError: if the remote region does not grant `verb`.
    """

    def __cinit__(self, verb, local, remote=None, rows=None):
        cdef list parts = []
        cdef Slice left, right
        cdef size_t total = 0
        try:
            self.verb = VERBS[verb]
        except (KeyError, TypeError):
            raise errors.InvalidArgumentError(f"verb must be 'read' or 'write', not {verb!r}") from None
        self.memories = []
        for part in [(local, remote, rows)] if remote is not None else local:
            if len(part) not in (2, 3):
                raise errors.InvalidArgumentError("each part is (local, remote, rows) or (local_slice, remote_slice)")
            left = _whole(part[0], "local", LocalMemory)
            right = _whole(part[1], "remote", RemoteMemory)
            table = _rows(part[2]) if len(part) == 3 and part[2] is not None else None
            self._adopt(left.memory, right.memory)
            parts.append((left, right, table))
            total += 1 if table is None else table.shape[0]
        if total == 0:
            raise errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")
        if total > self.link.driver.descriptor_limit:
            raise errors.InvalidArgumentError(
                f"{total} descriptors are more than the {self.link.driver.descriptor_limit} that driver "
                f"{self.link.driver.name!r} takes at once; split the batch"
            )
        self.desc = <hxa_desc *>PyMem_Malloc(total * sizeof(hxa_desc))
        if self.desc == NULL:
            raise MemoryError()
        for left, right, table in parts:
            if table is None:
                self._add_slices(left, right)
            else:
                self._add_rows(left, right, table)

    def __dealloc__(self):
        PyMem_Free(self.desc)

    def __len__(self):
        return self.count

    def __repr__(self):
        return f"<Batch {'write' if self.verb == HXA_WRITE else 'read'}: {self.count} copies, {self.nbytes} bytes>"

    cdef int _adopt(self, LocalMemory local, RemoteMemory remote) except -1:
        """One peer per batch, the right access, and each memory pinned once."""
        if self.link is None:
            self.link = remote.link
        elif self.link is not remote.link:
            raise errors.InvalidArgumentError("all parts of a batch must belong to one peer; make one batch per peer")
        _check_access(remote, self.verb)
        if self.verb == HXA_READ and local.readonly:
            raise errors.BufferTypeError("the local region was registered from a read-only buffer; it cannot be read into")
        if local not in self.memories:
            self.memories.append(local)
        if remote not in self.memories:
            self.memories.append(remote)
        return 0

    cdef int _add_slices(self, Slice left, Slice right) except -1:
        if left.length != right.length or left.length == 0:
            raise errors.RangeError(
                f"descriptor {self.count}: {left.length} local and {right.length} remote bytes; lengths must be equal and not 0",
                index=self.count,
            )
        _fill(&self.desc[self.count], left.memory, left.offset, right.memory, right.offset, left.length, self.link.driver)
        self.count += 1
        self.nbytes += left.length
        return 0

    cdef int _add_rows(self, Slice left, Slice right, const uint64_t[:, ::1] table) except -1:
        cdef Py_ssize_t i, n = table.shape[0], bad = -1
        cdef uint64_t loff, roff, length, moved = 0
        cdef hxa_desc *desc = self.desc + self.count
        cdef hxa_desc first
        if left.length and right.length:
            _fill(&first, left.memory, left.offset, right.memory, right.offset, 1, self.link.driver)
        cdef uint64_t lsize = left.length, rsize = right.length
        with nogil:
            for i in range(n):
                loff = table[i, 0]
                roff = table[i, 1]
                length = table[i, 2]
                # By subtraction, for loff + length may overflow 64 bits.
                if length == 0 or length > lsize or loff > lsize - length or length > rsize or roff > rsize - length:
                    bad = i
                    break
                desc[i] = first
                desc[i].loff += loff
                desc[i].roff += roff
                desc[i].len = length
                moved += length
        if bad >= 0:
            raise errors.RangeError(
                f"descriptor {self.count + bad} (local {table[bad, 0]}, remote {table[bad, 1]}, length {table[bad, 2]}) is "
                f"empty or reaches outside (local {lsize}, remote {rsize} bytes)",
                index=self.count + bad,
            )
        self.count += n
        self.nbytes += moved
        return 0


cdef inline void _fill(hxa_desc *desc, Memory local, uint64_t loff, Memory remote, uint64_t roff, uint64_t length,
                       Driver driver) noexcept:
    desc.lmem = local.mems[driver.index]
    desc.loff = loff if desc.lmem != NULL else <uint64_t>local.address + loff
    desc.rmem = remote.mems[driver.index]
    desc.roff = roff
    desc.len = length


# ---- transfers -------------------------------------------------------------------------------------------------------------

cdef class _Drain:
    """One future that waits for the release of several flights."""

    cdef object future
    cdef Py_ssize_t missing

    cdef int _one(self) except -1:
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(None)
        return 0


@cython.final
@cython.freelist(128)
cdef class Transfer:
    """One accepted read, write or batch; a future: await it, or give it to gather, wait, wait_for, timeout or shield.

    Its result is the number of bytes moved.  It began when it was called; awaiting only waits.  After a failure or a
    cancellation the contents of the target range are undefined, and the local memory stays pinned until `drained`.
    """

    def __repr__(self):
        what = "control" if self.control else "write" if self.batch.verb == HXA_WRITE else "read"
        peer = f" {'to' if self.batch.verb == HXA_WRITE else 'from'} {self.link.peer!r}" if self.link is not None else ""
        held = " pinned" if self.flying else ""
        return f"<Transfer {what}{peer} of {self.batch.bytes} bytes, {OUTCOMES[self.outcome].value}{held}>"

    # -- future protocol: https://docs.python.org/3/library/asyncio-extending.html and Lib/asyncio/futures.py

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        cdef PyObject *value
        cdef PySendResult sent = _transfer_send(<PyObject *>self, NULL, &value)
        if sent == PYGEN_ERROR:
            self._raise()
        result = <object>value
        Py_DECREF(result)
        if sent == PYGEN_RETURN:
            raise StopIteration(result)
        return result

    def get_loop(self):
        """The event loop of the engine."""
        return self.core.loop

    @property
    def _loop(self):
        return self.core.loop

    def done(self):
        """True once the outcome is known; see `drained` for the memory."""
        return self.outcome != ACTIVE

    def cancelled(self):
        """True if `cancel` ended it."""
        return self.outcome == CANCELLED

    def result(self):
        """Bytes moved.

        :raises InvalidStateError: if it is not done.
        :raises TransferError: if it failed.
        :raises CancelledError: if it was cancelled.
        """
        if self.outcome == DONE:
            return self.op.bytes
        self._raise()

    def exception(self):
        """The failure, or None.

        :raises InvalidStateError: if it is not done.
        :raises CancelledError: if it was cancelled.
        """
        if self.outcome == DONE:
            return None
        if self.outcome == FAILED:
            return self._failure()
        self._raise()

    cdef object _failure(self):
        if self.unretrieved is not None:
            self.unretrieved.exception = None
            self.unretrieved = None
        return self.exc

    def _raise(self):
        if self.outcome == FAILED:
            raise self._failure()
        if self.outcome == CANCELLED:
            raise CancelledError()
        raise InvalidStateError("the transfer is not done")

    def add_done_callback(self, fn, *, context=None):
        """Calls ``fn(transfer)`` on the loop once the outcome is known."""
        if context is None:
            context = PyContext_CopyCurrent()
        if self.outcome != ACTIVE:
            self.core.call_soon(fn, self, context=context)
        elif self.callback is None:
            self.callback, self.context = fn, context
        elif self.callbacks is None:
            self.callbacks = [(fn, context)]
        else:
            self.callbacks.append((fn, context))

    def remove_done_callback(self, fn):
        """Removes every registration of `fn`; returns how many there were."""
        cdef int removed = 0
        if self.callback is not None and self.callback == fn:
            self.callback = self.context = None
            removed = 1
        if self.callbacks is not None:
            kept = [pair for pair in self.callbacks if pair[0] != fn]
            removed += len(self.callbacks) - len(kept)
            self.callbacks = kept
        return removed

    def cancel(self, msg=None):
        """Ends the wait and asks the driver to stop; False if the outcome is known already.

        Bytes that are on their way may still land, and the memory stays pinned until `drained` (C5).
        """
        if self.outcome != ACTIVE:
            return False
        self._resolve(CANCELLED, None)
        self._stop()
        return True

    # -- beyond futures

    @property
    def state(self):
        """The outcome so far, a `TransferState`."""
        return OUTCOMES[self.outcome]

    @property
    def nbytes(self):
        """Bytes that it is to move."""
        return self.batch.bytes

    def progress(self):
        """Bytes that have landed so far, as far as the driver can tell."""
        if self.outcome == ACTIVE and self.flying and self.link is not None and self.link.link != NULL:
            return self.link.driver.table.progress(self.link.link, &self.op)
        return self.op.bytes

    def drained(self):
        """Waits until nothing reads or writes the local memory any more, whatever the outcome was.

        :return: an awaitable; cancelling it only ends the wait.
        """
        return self.core._drained_transfers([self] if self.flying else [])

    # -- life of the slot

    cdef int _resolve(self, int outcome, object exc) except -1:
        """The only place where an outcome is set (C4)."""
        cdef object callback = self.callback, context = self.context, pair
        cdef Core core = self.core
        self.outcome = outcome
        core.in_flight -= 0 if self.control else 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if outcome != DONE and not self.control:
            core.n_failed += 1
        if outcome == FAILED:
            self.exc = exc
            if not self.control:
                self.unretrieved = _Unretrieved(core.loop, repr(self), exc)
        self.callback = self.context = None
        callbacks, self.callbacks = self.callbacks, None
        # Only a task's own wake-up may run at once: other callbacks may rely on call_soon's order.
        cdef bint direct = core.draining and isinstance(getattr(callback, "__self__", None), Task)
        if callback is not None and not direct:
            core.call_soon(callback, self, context=context)
        for pair in callbacks or ():
            core.call_soon(pair[0], self, context=pair[1])
        # Last, for what the task raises (KeyboardInterrupt, SystemExit) passes through here.
        if direct and not _resume(callback, context, self):
            core.call_soon(callback, self, context=context)
        return 0

    cdef int _stop(self) except -1:
        """Asks the driver to give up; what that means for the memory comes with the release."""
        cdef const hxa_driver *table
        if self.flying and self.link is not None and self.link.link != NULL:
            table = self.link.driver.table
            if table.cancel != NULL:
                table.cancel(self.link.link, &self.op)
        return 0

    def _expire(self, double seconds):
        """The explicit deadline passed."""
        self.timer = None
        self._time_out(f"missed its deadline of {seconds:g} s")

    def _time_out(self, str why):
        if self.outcome == ACTIVE:
            exc = errors.TransferTimeoutError(
                f"{self!r} {why}; the contents of its target are undefined, await transfer.drained() before reusing memory",
                peer=self.link.peer if self.link is not None else None,
            )
            self._resolve(FAILED, exc)
            self._stop()

    cdef int _unpin(self) except -1:
        """Lets go of everything that the flight held; called once, at the release or when submit was refused or done."""
        cdef Memory memory
        cdef object local = self.local
        self.local = None
        PyBuffer_Release(&self.view)
        if type(local) is Batch:
            for memory in (<Batch>local).memories:
                memory._unpin()
        elif isinstance(local, LocalMemory):
            (<Memory>local)._unpin()
        memory = self.remote
        if memory is not None:
            self.remote = None
            memory._unpin()
        memory = self.signal
        if memory is not None:
            self.signal = None
            memory._unpin()
        self.topic = self.note = None
        return 0


cdef bint _resume(object callback, object context, Transfer transfer) except -1:
    """Runs a task's wake-up now, in its context; False if that context is entered already."""
    try:
        PyContext_Enter(context)
    except RuntimeError:
        return False
    try:
        callback(transfer)
    finally:
        PyContext_Exit(context)
    return True


cdef PySendResult _transfer_send(PyObject *me, PyObject *value, PyObject **result) noexcept:
    cdef Transfer self = <Transfer>me
    cdef object out
    if self.outcome == ACTIVE:
        self._asyncio_future_blocking = True
        out = self
    elif self.outcome == DONE:
        if self.core.credit <= 0:
            # C8: a bare yield sends the task once around the loop; the next send brings the result.
            self.core.credit = CREDIT
            out = None
        else:
            self.core.credit -= 1 + <int>(self.op.bytes >> CREDIT_SHIFT)
            out = self.op.bytes
            Py_INCREF(out)
            result[0] = <PyObject *>out
            return PYGEN_RETURN
    else:
        result[0] = NULL
        if self.outcome == CANCELLED:
            PyErr_SetObject(CancelledError, None)
        else:
            out = self._failure()
            PyErr_SetObject(type(out), out)
        return PYGEN_ERROR
    Py_INCREF(out)
    result[0] = <PyObject *>out
    return PYGEN_NEXT


hxa_set_am_send(Transfer, _transfer_send)


# ---- drivers and links -----------------------------------------------------------------------------------------------------

cdef tuple _unpack_card(hxa_card *card):
    return (
        PyBytes_FromStringAndSize(<char *>card.data, card.len),
        [card.fds[i] for i in range(card.nfds)],
    )


cdef int _pack_card(hxa_card *card, bytes data, list fds) except -1:
    cdef Py_ssize_t i
    memset(card, 0, sizeof(hxa_card))
    if len(data) > HXA_CARD_BYTES or len(fds) > HXA_CARD_FDS:
        raise errors.ProtocolError(f"a card of {len(data)} bytes and {len(fds)} descriptors is over the limit")
    memcpy(card.data, <char *>data, len(data))
    card.len = <uint32_t>len(data)
    for i in range(len(fds)):
        card.fds[i] = fds[i]
    card.nfds = <uint32_t>len(fds)
    return 0


def table_problem(capsule):
    """Why `capsule` is no driver table that this core understands, or None."""
    cdef const hxa_driver *table
    if not PyCapsule_IsValid(capsule, HXA_DRIVER_CAPSULE):
        return f"{capsule!r} is not a capsule named {HXA_DRIVER_CAPSULE.decode()!r}"
    table = <const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)
    if table.abi != HXA_DRIVER_ABI:
        return f"it was built for driver interface {table.abi}, this core has {HXA_DRIVER_ABI}; rebuild it"
    if table.size < sizeof(hxa_driver):
        return f"its table has {table.size} bytes, this core needs {sizeof(hxa_driver)}; rebuild it"
    return None


def table_capabilities(capsule):
    """The capability bits of a driver's table."""
    return (<const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)).caps


cdef class Driver:
    """An opened driver."""

    def __cinit__(self, Core core, capsule, str name, dict options):
        cdef hxa_option pairs[16]
        cdef hxa_limits limits
        cdef char text[512]
        cdef Py_ssize_t i
        problem = table_problem(capsule)
        if problem is not None:
            raise errors.DriverLoadError(f"driver {name!r}: {problem}")
        if len(core.drivers) == MAX_DRIVERS:
            raise errors.InvalidArgumentError(f"an engine takes at most {MAX_DRIVERS} drivers")
        if len(options) > 16:
            raise errors.InvalidArgumentError(f"driver {name!r}: at most 16 options")
        self.core, self.capsule, self.options, self.name = core, capsule, options, name
        self.table = <const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)
        encoded = []
        for key, value in options.items():
            # A driver that wraps another gets the other's table by its address.
            if PyCapsule_IsValid(value, HXA_DRIVER_CAPSULE):
                value = hex(<size_t>PyCapsule_GetPointer(value, HXA_DRIVER_CAPSULE))
            encoded.append((str(key).encode(), str(value).encode()))
        for i in range(len(encoded)):
            pairs[i].key = <bytes>encoded[i][0]
            pairs[i].value = <bytes>encoded[i][1]
        text[0] = 0
        cdef size_t count = len(encoded)
        cdef int answer
        with nogil:
            answer = self.table.open(pairs, count, &core.sink, &self.instance, text, sizeof(text))
        if answer:
            self.instance = NULL
            reason = text.decode("utf-8", "replace") or str(_error(self, -answer, 0, "open", None))
            kind = errors.InvalidArgumentError if -answer == HXA_E_INVALID else errors.DriverError
            raise kind(f"driver {name!r} could not be opened: {reason}")
        memset(&limits, 0, sizeof(limits))
        self.table.limits(self.instance, &limits)
        self.capabilities = limits.caps if limits.caps else self.table.caps
        self.note_limit = limits.note_bytes
        self.descriptor_limit = limits.descriptors
        self.inline_limit = limits.inline_bytes
        self.alignment = limits.alignment
        self.index = len(core.drivers)
        core.drivers.append(self)

    def __repr__(self):
        return f"<Driver {self.name!r}>"

    def stats(self):
        """The driver's own counters and gauges, by name."""
        cdef hxa_stats stats
        if self.instance == NULL:
            return {}
        self.table.stats(self.instance, &stats)
        return stats

    def link_new(self, uint64_t cookie, str peer):
        """Our half of a link: ``(link, card bytes, card descriptors)``."""
        cdef hxa_card card
        cdef Link link = Link.__new__(Link)
        link.driver, link.cookie, link.peer, link.fd = self, cookie, peer, -1
        memset(&card, 0, sizeof(card))
        cdef int answer = self.table.link_new(self.instance, cookie, &link.link, &card)
        if answer:
            link.link = NULL
            raise _error(self, -answer, 0, "new link", peer)
        data, fds = _unpack_card(&card)
        return link, data, fds

    def after_fork(self):
        """In a child of fork(): closes the child's copies of descriptors."""
        if self.instance != NULL and self.table.after_fork != NULL:
            self.table.after_fork(self.instance)

    def close(self):
        """Closes the driver now, or when the last view of its memory is dropped."""
        self.closing = True
        self._close_if_unused()

    cdef int _forget(self) except -1:
        self.memories -= 1
        if self.closing:
            self._close_if_unused()
        return 0

    def _close_if_unused(self):
        cdef hxa_instance *instance = self.instance
        if self.memories == 0 and instance != NULL:
            with nogil:
                self.table.close(instance)
            self.instance = NULL
            self.core._dispose()


cdef class Link:
    """One driver's way to one peer."""

    def connect(self, bytes data, list fds):
        """Joins our half with the peer's card; the driver owns `fds` from here on.

        :return: an awaitable.
        """
        cdef hxa_card card
        cdef Transfer call = self.driver.core._control(self)
        _pack_card(&card, data, fds)
        return self.driver.core._answer(call, self.driver.table.link_connect(self.link, &card, &call.op), "connect")

    def watch(self):
        """From here on work may be submitted, and the loop polls the link when its descriptor is readable."""
        self.up = True
        self.fd = self.driver.table.link_fd(self.link)
        if self.fd >= 0:
            self.driver.core.loop.add_reader(self.fd, self.poll)
            self.poll()

    def refuse(self):
        """No new work: the driver reported that the link is down."""
        self.up = False

    def poll(self):
        """Takes what the peer sent; again on the next pass of the loop while there is more."""
        self.poll_scheduled = False
        if self.link == NULL or self.fd < 0:
            return
        cdef Core core = self.driver.core
        # Events land in the mailbox; we empty it ourselves below, so no signal is needed.
        core.box.armed = 0
        if self.driver.table.poll(self.link, POLL_EVENTS) and not self.poll_scheduled:
            self.poll_scheduled = True
            core.call_soon(self.poll)
        core.drain()

    def import_memory(self, RemoteMemory memory, bytes data, list fds, uint64_t size, uint32_t rights):
        """Maps a peer's exported memory into `memory`; the driver owns `fds` from here on.

        :return: an awaitable; `memory` is usable once it is done, and must be retired in any case.
        """
        cdef hxa_card card
        cdef Core core = self.driver.core
        cdef Transfer call = core._control(self)
        cdef int index = self.driver.index
        _pack_card(&card, data, fds)
        memory.core, memory.link, memory.size, memory.rights = core, self, size, rights
        cdef int answer = self.driver.table.mem_import(self.link, &card, size, rights, &memory.mems[index], &call.op)
        if answer < 0:
            memory.mems[index] = NULL
        else:
            memory.alive = True
            self.driver.memories += 1
            core.remote_memories += 1
        return core._answer(call, answer, "import of a region")

    def fence(self):
        """Waits until the peer can no longer touch memory of ours through this link; it may never come.

        :return: an awaitable.
        """
        cdef Transfer call = self.driver.core._control(self)
        return self.driver.core._answer(call, self.driver.table.link_fence(self.link, &call.op), "fence")

    def stop(self, bint dead):
        """Refuses new work and ends what runs; `dead`: the peer's process is known to be gone.  Idempotent.

        :return: an awaitable, done when no thread of ours works for this link any more.
        """
        cdef Core core = self.driver.core
        cdef Transfer call
        self.up = False
        if self.fd >= 0:
            core.loop.remove_reader(self.fd)
            self.fd = -1
        if self.stopping is None or (dead and not self.stopping.done()):
            call = core._control(self)
            self.stopping = core._answer(call, self.driver.table.link_stop(self.link, dead, &call.op), "stop of a link")
        return self.stopping

    def free(self):
        """Gives the link back; only after `stop` is done and all its flights are released."""
        cdef hxa_link *link = self.link
        self.link = NULL
        if link != NULL:
            self.driver.table.link_free(link)


# ---- the core --------------------------------------------------------------------------------------------------------------

cdef class Core:
    """What an `Engine` is made of: one loop, one mailbox, drivers, and the flights between them."""

    def __cinit__(self, *args, **kwargs):
        self.closed = True
        self.finished = True

    def _open(self, loop, handler, double stall):
        """Binds the core to `loop`; `handler(kind, cookie, status, topic, data)` hears what drivers report."""
        self.box = <hxa_mailbox *>PyMem_RawMalloc(sizeof(hxa_mailbox))
        if self.box == NULL:
            raise MemoryError()
        cdef int error = hxa_mailbox_open(self.box)
        if error:
            PyMem_RawFree(self.box)
            self.box = NULL
            raise OSError(-error, "eventfd")
        self.sink.ctx = self.box
        self.sink.post = <void (*)(void *, hxa_op *, uint32_t) noexcept nogil>hxa_mailbox_post
        self.sink.event = <void (*)(void *, const hxa_event *) noexcept nogil>hxa_mailbox_event
        self.loop, self.handler, self.call_soon, self.stall = loop, handler, loop.call_soon, stall
        self.thread = PyThread_get_thread_ident()
        self.generation = fork_generation
        self.drivers, self.graveyard = [], []
        self.credit = CREDIT
        self.closed = self.finished = False
        loop.add_reader(self.box.fd, self.drain)

    cdef int _check(self) except -1:
        if self.closed or self.generation != fork_generation or running_loop() is not self.loop:
            self._refuse()
        return 0

    def _refuse(self):
        if self.loop is not None and self.generation != fork_generation:
            raise errors.EngineForkedError(
                "this engine was opened before fork(); open one in each process, for example in the worker's start-up hook"
            )
        if self.closed:
            raise errors.ClosedError("the engine is closed" if self.loop is not None else
                                     "the engine is not open; use 'async with Engine(...)' or await engine.open()")
        raise errors.WrongLoopError(
            "an engine belongs to the event loop in which it was opened; only push and ready of KV streams are legal elsewhere"
        )

    def _must_be_open(self):
        """Raises what any call on a closed, forked or foreign engine raises."""
        self._check()

    @property
    def forked(self):
        """True in a process that was forked after this engine was opened."""
        return self.loop is not None and self.generation != fork_generation

    # -- memory

    def _adopt(self, LocalMemory memory, Driver driver, uint64_t size, uint32_t rights):
        """Lets `driver` allocate `size` bytes for `memory`."""
        cdef void *address = NULL
        cdef int answer = driver.table.mem_alloc(driver.instance, size, rights, &memory.mems[driver.index], &address)
        if answer:
            memory.mems[driver.index] = NULL
            raise _error(driver, -answer, 0, f"allocation of {size} bytes", None)
        self._own(memory, <char *>address, size, rights)
        driver.memories += 1

    def _borrow(self, LocalMemory memory, buffer, uint32_t rights):
        """Takes the memory of a buffer object, which stays pinned and cannot be resized meanwhile."""
        try:
            PyObject_GetBuffer(buffer, &memory.source, PyBUF_WRITABLE)
        except (BufferError, ValueError, TypeError):  # read-only, or no contiguous memory: the second try tells
            try:
                PyObject_GetBuffer(buffer, &memory.source, PyBUF_SIMPLE)
            except (BufferError, ValueError, TypeError) as error:
                raise errors.BufferTypeError(
                    f"{type(buffer).__name__} has no contiguous memory to register: {error}"
                ) from error
        memory.readonly = memory.source.readonly
        if memory.readonly and rights & HXA_RIGHT_WRITE:
            PyBuffer_Release(&memory.source)
            raise errors.BufferTypeError("a read-only buffer cannot be registered with write access")
        if memory.source.len == 0:
            PyBuffer_Release(&memory.source)
            raise errors.RangeError("the buffer is empty; there is nothing to register")
        self._own(memory, <char *>memory.source.buf, memory.source.len, rights)

    def _borrow_address(self, LocalMemory memory, owner, size_t address, uint64_t size, uint32_t rights):
        """Takes memory by address; `owner` is kept alive."""
        memory.owner = owner
        self._own(memory, <char *>address, size, rights)

    cdef int _own(self, LocalMemory memory, char *address, uint64_t size, uint32_t rights) except -1:
        memory.core, memory.address, memory.size, memory.rights, memory.alive = self, address, size, rights, True
        self.local_memories += 1
        return 0

    def _register(self, LocalMemory memory, Driver driver, uint32_t kind):
        """Makes `memory` known to a further driver."""
        cdef int answer = driver.table.mem_register(
            driver.instance, memory.address, memory.size, kind, memory.rights, &memory.mems[driver.index])
        if answer:
            memory.mems[driver.index] = NULL
            raise _error(driver, -answer, 0, f"registration of {memory.size} bytes", None)
        driver.memories += 1

    # -- work

    def write(self, local, remote, *, notify=None, signal=None, deadline=None, priority=None):
        """Copies `local` into the peer's memory; done means that the bytes are there.

        :param local: a range of a local region, or any contiguous buffer (bytes, numpy, memoryview, CPU tensor).
        :param remote: a range of a remote region, of the same length.
        :param notify: ``(topic, payload)``: one notification to the peer after the data; str and bytes.
        :param signal: ``(remote range of 8 bytes, value)``: one 64-bit word stored after the data.
        :param deadline: seconds from now in which it must finish, progress or not; default: no limit but the stall check.
        :param priority: ``"low"``, ``"normal"`` or ``"high"``.
        :return: a `Transfer`, already started.
        :raises RangeError: if a range is empty, outside of its region, or the lengths differ.
        :raises AccessError: if the region does not grant writing.
        :raises BufferTypeError: if `local` has no contiguous memory.
        :raises PeerLostError: if the peer is gone.
        :raises StaleRegionError: if the remote region was closed.
        :raises BusyError: if a bounded queue of the driver is full.
        """
        return self._single(HXA_WRITE, local, remote, notify, signal, deadline, priority)

    def read(self, local, remote, *, notify=None, signal=None, deadline=None, priority=None):
        """Copies from the peer's memory into `local`; done means that the bytes are here.

        Parameters and errors as for `write`; `local` must be writable.
        """
        return self._single(HXA_READ, local, remote, notify, signal, deadline, priority)

    cdef Transfer _single(self, uint32_t verb, object local, object remote, object notify, object signal,
                          object deadline, object priority):
        cdef Transfer transfer
        cdef Slice left, right
        cdef RemoteMemory target
        cdef Link link
        cdef uint64_t length
        self._check()
        # C6: everything is checked before anything is pinned or posted.
        if type(remote) is not Slice or not isinstance((<Slice>remote).memory, RemoteMemory):
            right = _whole(remote, "remote", RemoteMemory)
        else:
            right = <Slice>remote
        target = <RemoteMemory>right.memory
        link = target.link
        if link.driver.core is not self:
            raise errors.InvalidArgumentError(f"{target!r} belongs to another engine")
        if not target.alive or not link.up:
            _raise_gone(target)
        _check_access(target, verb)
        transfer = Transfer.__new__(Transfer)
        transfer.core = self
        transfer.link = link
        transfer.batch.verb = verb
        if type(local) is Slice:
            left = <Slice>local
            length = left.length
            self._pin_slice(transfer, left, verb, link)
        elif isinstance(local, Memory):
            left = _whole(local, "local", LocalMemory)
            length = left.length
            self._pin_slice(transfer, left, verb, link)
        else:
            length = self._pin_buffer(transfer, local, verb, link)
        if length != right.length or length == 0:
            transfer._unpin()
            raise errors.RangeError(
                f"{length} local and {right.length} remote bytes; the lengths must be equal and not 0"
            )
        transfer.desc.rmem = target.mems[link.driver.index]
        transfer.desc.roff = right.offset
        transfer.desc.len = length
        transfer.remote = target
        target.flights += 1
        transfer.batch.n = 1
        transfer.batch.desc = &transfer.desc
        transfer.batch.bytes = length
        self._launch(transfer, notify, signal, deadline, priority)
        return transfer

    cdef int _pin_slice(self, Transfer transfer, Slice left, uint32_t verb, Link link) except -1:
        cdef Memory memory = left.memory
        if memory.address == NULL or memory.core is not self:
            _whole(left, "local", LocalMemory)
            raise errors.ClosedError(f"{memory!r} is closed or belongs to another engine")
        if not memory.alive:
            raise errors.ClosedError(f"{memory!r} was closed; no new work may use it")
        if verb == HXA_READ and (<LocalMemory>memory).readonly:
            raise errors.BufferTypeError("the local region was registered from a read-only buffer; it cannot be read into")
        transfer.desc.lmem = memory.mems[link.driver.index]
        transfer.desc.loff = left.offset if transfer.desc.lmem != NULL else <uint64_t>memory.address + left.offset
        transfer.local = memory
        memory.flights += 1
        return 0

    cdef uint64_t _pin_buffer(self, Transfer transfer, object local, uint32_t verb, Link link) except? <uint64_t>-1:
        if link.driver.capabilities & HXA_CAP_LOCAL_ANY == 0:
            raise errors.BufferTypeError(
                f"driver {link.driver.name!r} moves registered memory only; use engine.register(name, buffer) and its ranges"
            )
        if not PyObject_CheckBuffer(local):
            address, size, owner = self._address_of(local, verb == HXA_READ)
            transfer.local = owner
            transfer.desc.loff = address
            return size
        try:
            PyObject_GetBuffer(local, &transfer.view, PyBUF_WRITABLE if verb == HXA_READ else PyBUF_SIMPLE)
        except (BufferError, ValueError, TypeError) as error:
            raise errors.BufferTypeError(
                f"local {type(local).__name__} cannot be used: {error}; it must be contiguous"
                + (" and writable to be read into" if verb == HXA_READ else "")
            ) from error
        transfer.desc.loff = <uint64_t>transfer.view.buf
        return transfer.view.len

    def _address_of(self, local, writable):
        """``(address, bytes, owner)`` of an object without the buffer protocol; `Engine` knows more kinds."""
        raise errors.BufferTypeError(f"local must be a region's range or a contiguous buffer, not {type(local).__name__}")

    def submit(self, Batch batch, *, notify=None, signal=None, deadline=None, priority=None):
        """Starts a prepared batch; parameters and errors as for `write`.

        :return: a `Transfer`, already started; its result is the sum of the lengths.
        """
        cdef Transfer transfer
        cdef Memory memory
        self._check()
        if batch is None:
            raise errors.InvalidArgumentError("batch must be a Batch, not None")
        if batch.link.driver.core is not self:
            raise errors.InvalidArgumentError("the batch belongs to another engine")
        for memory in batch.memories:
            if not memory.alive:
                _raise_gone(memory)
        if not batch.link.up:
            _raise_gone(batch.memories[1])
        transfer = Transfer.__new__(Transfer)
        transfer.core, transfer.link, transfer.local = self, batch.link, batch
        for memory in batch.memories:
            memory.flights += 1
        transfer.batch.verb = batch.verb
        transfer.batch.n = batch.count
        transfer.batch.desc = batch.desc
        transfer.batch.bytes = batch.nbytes
        self._launch(transfer, notify, signal, deadline, priority)
        return transfer

    def _post_note(self, Link link, notify, deadline=None):
        """A bare notification over `link`; returns a Transfer."""
        cdef Transfer transfer
        self._check()
        if not link.up:
            raise errors.PeerLostError(f"peer {link.peer!r} is gone", peer=link.peer)
        transfer = Transfer.__new__(Transfer)
        transfer.core, transfer.link = self, link
        transfer.batch.verb = HXA_WRITE
        self._launch(transfer, notify, None, deadline, None)
        return transfer

    cdef int _launch(self, Transfer transfer, object notify, object signal, object deadline, object priority) except -1:
        """Hands a pinned transfer to its driver; on any refusal everything is unpinned and nothing was sent."""
        cdef Driver driver = transfer.link.driver
        cdef hxa_link *link = transfer.link.link
        cdef int answer
        try:
            if notify is not None:
                self._attach_note(transfer, driver, notify)
            if signal is not None:
                self._attach_signal(transfer, driver, signal)
            if priority is not None:
                try:
                    transfer.batch.priority = PRIORITIES[priority]
                except (KeyError, TypeError):
                    raise errors.InvalidArgumentError(
                        f"priority must be 'low', 'normal' or 'high', not {priority!r}"
                    ) from None
            if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline < INFINITY):
                raise errors.InvalidArgumentError(f"deadline must be a positive number of seconds, not {deadline!r}")
        except BaseException:
            transfer._unpin()
            raise
        transfer.op.owner = <void *>transfer
        transfer.op.failed = -1
        if transfer.batch.bytes <= GIL_BYTES:
            answer = driver.table.submit(link, &transfer.batch, &transfer.op)
        else:
            with nogil:
                answer = driver.table.submit(link, &transfer.batch, &transfer.op)
        if answer == HXA_DONE:
            transfer.outcome = DONE
            transfer.op.bytes = transfer.batch.bytes
            transfer._unpin()
            self.n_inline += 1
            self.n_bytes += transfer.batch.bytes
        elif answer == HXA_PENDING:
            self.in_flight += 1
            self._track(transfer)
            transfer.link.flights += 1
            transfer.moved = self.loop.time()
            if deadline is not None:
                transfer.timer = self.loop.call_later(deadline, transfer._expire, deadline)
            if self.watchdog is None:
                self.watchdog = self.loop.call_later(self.stall / 8, self._watch)
        else:
            index = transfer.op.failed if transfer.op.failed >= 0 else None
            transfer._unpin()
            raise _error(driver, -answer, transfer.op.native, repr(transfer), transfer.link.peer, index)
        self.n_transfers += 1
        return 0

    cdef int _attach_note(self, Transfer transfer, Driver driver, object notify) except -1:
        if driver.capabilities & HXA_CAP_NOTIFY == 0:
            raise errors.DriverError(f"driver {driver.name!r} cannot carry notifications")
        try:
            topic, payload = notify
            transfer.topic = topic.encode()
            transfer.note = payload if type(payload) is bytes else bytes(memoryview(payload))
        except (TypeError, ValueError, AttributeError, UnicodeError) as error:
            raise errors.InvalidArgumentError(f"notify must be (topic: str, payload: bytes), not {notify!r}") from error
        if not transfer.topic:
            raise errors.InvalidArgumentError("the notification's topic is empty; subscribers need a name")
        cdef uint64_t total = len(<bytes>transfer.topic) + len(<bytes>transfer.note)
        if total > driver.note_limit:
            raise errors.InvalidArgumentError(
                f"the notification has {total} bytes (topic and payload); driver {driver.name!r} takes {driver.note_limit}: "
                "write the payload into a region and notify its place"
            )
        transfer.batch.topic = <const char *><bytes>transfer.topic
        transfer.batch.topic_len = <uint32_t>len(<bytes>transfer.topic)
        transfer.batch.note = <const char *><bytes>transfer.note
        transfer.batch.note_len = <uint32_t>len(<bytes>transfer.note)
        return 0

    cdef int _attach_signal(self, Transfer transfer, Driver driver, object signal) except -1:
        cdef Slice word
        if driver.capabilities & HXA_CAP_SIGNAL == 0:
            raise errors.DriverError(f"driver {driver.name!r} cannot store signals")
        try:
            place, value = signal
            word = place
            transfer.batch.signal_value = value
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                "signal must be (remote range of 8 bytes, value in 0..2**64-1)"
            ) from error
        if word is None or not isinstance(word.memory, RemoteMemory) or word.length != 8 or word.offset % 8:
            raise errors.InvalidArgumentError("the signal's place must be 8 aligned bytes of a remote region")
        if (<RemoteMemory>word.memory).link is not transfer.link:
            raise errors.InvalidArgumentError("the signal's region belongs to another peer than the data's")
        if not word.memory.alive:
            _raise_gone(word.memory)
        _check_access(word.memory, HXA_WRITE)
        transfer.batch.signal = word.memory.mems[driver.index]
        transfer.batch.signal_off = word.offset
        transfer.signal = word.memory
        word.memory.flights += 1
        return 0

    # -- flights

    cdef Transfer _control(self, Link link):
        """The slot of a link or memory call."""
        cdef Transfer call = Transfer.__new__(Transfer)
        call.core, call.link, call.control = self, link, True
        call.op.owner = <void *>call
        call.op.failed = -1
        return call

    cdef Transfer _answer(self, Transfer call, int answer, str what):
        if answer == HXA_DONE:
            call.outcome = DONE
        elif answer == HXA_PENDING:
            self._track(call)
            if call.link is not None:
                call.link.flights += 1
        else:
            raise _error(call.link.driver, -answer, call.op.native, what, call.link.peer)
        return call

    cdef int _track(self, Transfer transfer) except -1:
        Py_INCREF(transfer)  # C1: the flight's own reference
        transfer.flying = True
        transfer.next = self.first
        if self.first != NULL:
            (<Transfer>self.first).prev = <void *>transfer
        self.first = <void *>transfer
        self.pinned += 1
        return 0

    cdef int _settle(self, hxa_op *op) except -1:
        """One op from the mailbox: its completion, its release, or both (C2)."""
        cdef Transfer transfer = <Transfer>op.owner
        cdef uint32_t events = hxa_mailbox_events(op)
        cdef _Drain drain
        if events & HXA_RELEASED:
            transfer.flying = False
            if transfer.prev != NULL:
                (<Transfer>transfer.prev).next = transfer.next
            else:
                self.first = transfer.next
            if transfer.next != NULL:
                (<Transfer>transfer.next).prev = transfer.prev
            transfer.next = transfer.prev = NULL
            self.pinned -= 1
            if transfer.link is not None:
                transfer.link.flights -= 1
            transfer._unpin()
            drains, transfer.drains = transfer.drains, None
            for drain in drains or ():
                drain._one()
            Py_DECREF(transfer)  # C1
        if events & HXA_COMPLETED and transfer.outcome == ACTIVE:
            if op.status == HXA_OK:
                if not transfer.control:
                    op.bytes = transfer.batch.bytes
                    self.n_bytes += op.bytes
                transfer._resolve(DONE, None)
            elif op.status == HXA_E_CANCELLED and not transfer.control:
                transfer._resolve(CANCELLED, None)
            else:
                transfer._resolve(FAILED, _error(
                    transfer.link.driver, op.status, op.native,
                    f"{transfer!r} failed, the contents of its target are undefined" if not transfer.control else "link",
                    transfer.link.peer, op.failed if op.failed >= 0 else None))
        return 0

    def drain(self):
        """Settles what drivers posted.  The loop calls it; it may be called from any code that runs on the loop's thread."""
        cdef hxa_op *op
        cdef int left = DRAIN_OPS
        cdef double limit
        if self.draining or self.finished:
            return
        limit = self.loop.time() + DRAIN_SECONDS
        self.draining = asyncio_current_task(self.loop) is None
        self.drain_scheduled = False
        try:
            hxa_mailbox_disarm(self.box)
            while True:
                self._deliver()
                if self.backlog == NULL:
                    self.backlog = hxa_mailbox_take_ops(self.box)
                    if self.backlog == NULL:
                        if self.graveyard:
                            self._bury_dead()
                        if not hxa_mailbox_arm(self.box):
                            return
                        continue
                while self.backlog != NULL:
                    op = self.backlog
                    self.backlog = op.next
                    self._settle(op)
                    left -= 1
                    if left <= 0 or (left & 7 == 0 and self.loop.time() > limit):
                        return  # C8; the finally clause comes back for the rest
        finally:
            self.draining = False
            if not self.box.armed and not self.drain_scheduled and not self.finished:
                # Capped, or an exception such as KeyboardInterrupt passed through a resumed task: the rest must not wait.
                self.drain_scheduled = True
                self.call_soon(self.drain)

    def _bury_dead(self):
        cdef Memory memory
        dead, self.graveyard = self.graveyard, []
        for memory in dead:
            memory._bury()

    def _deliver(self):
        """Hands events to the engine, oldest first."""
        cdef hxa_letter *letter = hxa_mailbox_take_letters(self.box)
        cdef hxa_letter *following
        while letter != NULL:
            following = letter.next
            topic = PyBytes_FromStringAndSize(<const char *>letter.event.topic, letter.event.topic_len)
            data = PyBytes_FromStringAndSize(<const char *>letter.event.data, letter.event.data_len)
            kind, cookie, status = letter.event.kind, letter.event.link, letter.event.status
            free(letter)
            letter = following
            try:
                self.handler(kind, cookie, status, topic, data)
            except Exception as error:
                self.loop.call_exception_handler({"message": "a driver's event could not be handled", "exception": error})

    def _watch(self):
        """The stall check: fails what made no progress for `stall` seconds."""
        cdef Transfer transfer
        cdef uint64_t landed
        cdef double now = self.loop.time()
        self.watchdog = None
        for transfer in self._flights():
            if transfer.control or transfer.outcome != ACTIVE or transfer.link.link == NULL:
                continue
            landed = transfer.link.driver.table.progress(transfer.link.link, &transfer.op)
            if landed != transfer.landed:
                transfer.landed, transfer.moved = landed, now
            elif now - transfer.moved >= self.stall:
                transfer._time_out(f"made no progress for {self.stall:g} s")
        if self.in_flight > 0 and not self.finished:
            self.watchdog = self.loop.call_later(self.stall / 8, self._watch)

    cdef list _flights(self):
        """Everything that still pins memory; a copy, for callers may settle meanwhile."""
        cdef list flights = []
        cdef void *node = self.first
        while node != NULL:
            flights.append(<Transfer>node)
            node = (<Transfer>node).next
        return flights

    def _drained_transfers(self, list flights):
        cdef _Drain drain = _Drain.__new__(_Drain)
        cdef Transfer transfer
        drain.future = self.loop.create_future()
        drain.missing = len(flights)
        if not flights:
            drain.future.set_result(None)
        for transfer in flights:
            if transfer.drains is None:
                transfer.drains = []
            transfer.drains.append(drain)
        return drain.future

    def _drained(self, Memory memory, uint64_t offset, uint64_t length):
        """Waits for every flight that touches a range of a region."""
        cdef Transfer transfer
        if memory.address != NULL:
            return self._drained_local(<uint64_t>memory.address + offset, length)
        return self._drained_transfers([
            transfer for transfer in self._flights() if _touches_remote(transfer, memory, offset, length)
        ])

    def _drained_local(self, uint64_t start, uint64_t size):
        """Waits for every flight that touches a range of this process's addresses."""
        cdef Transfer transfer
        return self._drained_transfers([
            transfer for transfer in self._flights() if _touches_local(transfer, start, size)
        ])

    def drained(self, buffer):
        """Waits until no flight touches the memory of `buffer`: a region, a range of one, or any buffer given to read or write.

        :return: an awaitable; cancelling it only ends the wait.
        :raises BufferTypeError: if `buffer` has no contiguous memory.
        """
        cdef Py_buffer view
        cdef Slice piece
        cdef uint64_t start, size
        self._check()
        if isinstance(buffer, (Slice, Memory)):
            piece = _whole(buffer, "buffer", Memory)
            return self._drained(piece.memory, piece.offset, piece.length)
        if PyObject_CheckBuffer(buffer):
            try:
                PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
            except (BufferError, ValueError, TypeError) as error:
                raise errors.BufferTypeError(f"{type(buffer).__name__} has no contiguous memory: {error}") from error
            start, size = <uint64_t>view.buf, view.len
            PyBuffer_Release(&view)
        else:
            start, size, _ = self._address_of(buffer, False)
        return self._drained_local(start, size)

    # -- end

    def _refuse_work(self):
        """The first step of close (C7)."""
        self.closed = True

    def _all_drained(self):
        """Waits until every slot is released."""
        return self._drained_transfers(self._flights())

    def _finish(self):
        """The last step of close: what is still pinned is leaked, and its waiters are told.

        :return: the number of flights leaked.
        """
        cdef Transfer transfer
        cdef _Drain drain
        cdef list leaked
        self.closed = True
        if self.finished:
            return 0
        self.drain()
        leaked = self._flights()
        for transfer in leaked:
            exc = errors.ClosedError(f"the engine was closed while a driver still held the memory of {transfer!r}; it is leaked")
            if transfer.outcome == ACTIVE:
                transfer._resolve(FAILED, exc)
            for drain in transfer.drains or ():
                if not drain.future.done():
                    drain.future.set_exception(exc)
            transfer.drains = None
        self.finished = True
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None
        if not self.loop.is_closed():
            self.loop.remove_reader(self.box.fd)
        self._bury_dead()
        self._dispose()
        return len(leaked)

    cdef int _dispose(self) except -1:
        """Frees the mailbox once the engine is finished and no driver is left that could post.

        An engine that was never closed leaks it, for a driver's thread may hold its address.
        """
        cdef Driver driver
        if not self.finished or self.box == NULL:
            return 0
        for driver in self.drivers:
            if driver.instance != NULL:
                return 0
        self.n_signals = self.box.signals
        hxa_mailbox_close(self.box)
        PyMem_RawFree(self.box)
        self.box = NULL
        return 0

    def _after_fork(self):
        """In a child of fork(): closes the child's copies of descriptors; nothing of the parent's is torn down."""
        cdef Driver driver
        for driver in self.drivers:
            driver.after_fork()
        if self.box != NULL:
            hxa_mailbox_close(self.box)

    def _counters(self):
        return (self.n_transfers, self.n_inline, self.n_bytes, self.n_failed, self.box.signals if self.box != NULL else self.n_signals)


cdef object asyncio_current_task = asyncio.current_task


cdef inline bint _overlap(uint64_t start, uint64_t size, uint64_t other, uint64_t length) noexcept:
    return start < other + length and other < start + size


cdef bint _touches_remote(Transfer transfer, Memory memory, uint64_t start, uint64_t size) noexcept:
    cdef size_t i
    cdef const hxa_desc *desc = transfer.batch.desc
    cdef const hxa_mem *handle
    if transfer.control or transfer.link is None:
        return False
    handle = memory.mems[transfer.link.driver.index]
    for i in range(transfer.batch.n):
        if desc[i].rmem == handle and _overlap(start, size, desc[i].roff, desc[i].len):
            return True
    return handle != NULL and transfer.batch.signal == handle and _overlap(start, size, transfer.batch.signal_off, 8)


cdef bint _touches_local(Transfer transfer, uint64_t start, uint64_t size):
    """Descriptors count from a handle's start; its address is that of the memory with this handle."""
    cdef size_t i
    cdef const hxa_desc *desc = transfer.batch.desc
    cdef const hxa_mem *handle = NULL
    cdef uint64_t base = 0
    cdef Memory memory
    if transfer.control:
        return False
    pinned = (<Batch>transfer.local).memories if type(transfer.local) is Batch else (transfer.local,)
    for i in range(transfer.batch.n):
        if desc[i].lmem != handle:
            handle, base = desc[i].lmem, 0
            if handle != NULL:
                for memory in pinned:
                    if memory.mems[transfer.link.driver.index] == handle:
                        base = <uint64_t>memory.address
        if _overlap(start, size, base + desc[i].loff, desc[i].len):
            return True
    return False


def _raise_gone(memory):
    """Why no new work may use `memory`."""
    cdef RemoteMemory remote
    if isinstance(memory, RemoteMemory):
        remote = memory
        if not remote.link.up:
            raise errors.PeerLostError(f"peer {remote.link.peer!r} is gone; connect again", peer=remote.link.peer)
        raise errors.StaleRegionError(
            f"{memory!r} was closed by its owner; await peer.region(name) for a new one", peer=remote.link.peer
        )
    raise errors.ClosedError(f"{memory!r} was closed; no new work may use it")
