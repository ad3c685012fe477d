"""Memory that transfers may name, and ranges of it."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release
from cpython.bytearray cimport PyByteArray_CheckExact
from cpython.bytes cimport PyBytes_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from libc.string cimport memset

from .link cimport Driver, Hub, Link, MAX_DRIVERS, refusal, hxa_mailbox, pack_card, unpack_card
from .driver cimport *

from bisect import bisect_right

from .. import errors

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil
    bint PySlice_Check(object)
    uint64_t PyLong_AsUnsignedLongLong(PyObject *) noexcept
    void PyErr_Clear()

cdef extern from "hxa_mailbox.h" nogil:
    void hxa_mailbox_signal(hxa_mailbox *box)

cdef extern from *:
    """
    static inline PyObject *hxa_slice_start(PyObject *s) { return ((PySliceObject *)s)->start; }
    static inline PyObject *hxa_slice_stop(PyObject *s) { return ((PySliceObject *)s)->stop; }
    static inline PyObject *hxa_slice_step(PyObject *s) { return ((PySliceObject *)s)->step; }
    """
    PyObject *hxa_slice_start(object)
    PyObject *hxa_slice_stop(object)
    PyObject *hxa_slice_step(object)


cdef str NO_VIEW = "this region lies on a device; copy it to the host to look at it"

# Memories that a transport did not let go of; never given back (C7).
cdef list _leaked = []


# Nothing here is cleared by the collector before it is freed: memoryviews of dead cycles call back into these objects.
@cython.no_gc_clear
cdef class Memory:
    """Memory that transfers may name: a window of ours, or a peer's after import."""

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        return make_slice(self, 0, self.size, key)

    cdef int _unpin(self) except -1:
        self.flights -= 1
        if not self.alive and self.flights == 0:
            self._let_go()
        return 0

    cdef int _let_go(self) except -1:
        """Retired, and no flight or peer holds it any more."""
        self.retiring = 0
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        return self._bury()

    def retire(self):
        """No new work from now on; the drivers' handles go when the last flight, peer and view are gone."""
        if self.alive:
            self.alive = False
            if self.address != NULL:
                self.core.places.discard(self)
            if self.flights == 0:
                self._let_go()

    def drained(self):
        """Waits until no flight touches this memory any more.

        :return: an awaitable; cancelling it only ends the wait.
        """
        if self.core is None:
            raise_gone(self)
        return self.core._drained(self, 0, self.size)

    def released(self):
        """Waits until the memory is closed, and no flight and no peer holds it; cancelling only ends the wait.

        :return: an awaitable.
        """
        if self.core is None:
            raise_gone(self)
        self.core._must_be_on_thread()
        waiter = self.core.loop.create_future()
        if not self.alive and self.flights == self.retiring:
            waiter.set_result(None)
        elif self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)
        return waiter

    cdef int _bury(self) except -1:
        """Releases the driver's handles now, or on the loop's thread where that is still running (header, T2)."""
        if self.alive or self.flights or self.exports or self.core.forked:
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
        return self.flights - self.retiring


@cython.no_gc_clear
cdef class LocalMemory(Memory):
    """Memory of this process, known to the drivers."""

    def __dealloc__(self):
        PyBuffer_Release(&self.source)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.alive:
            raise errors.ClosedError("this region was closed; take its views before")
        if self.device:
            raise BufferError(NO_VIEW)
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
        cdef int i
        # The allocator comes last: its pages are what the others know.
        for i in range(MAX_DRIVERS):
            if i + 1 != self.allocator:
                self._give_back(i)
        if self.flights == 0 and self.allocator and not self._held():
            self._give_back(self.allocator - 1)
        if self.flights or self._held():
            return 0  # a transport takes its time, and its release leads here again; or it never lets go
        if self.address != NULL:
            self.address = NULL
            self.core.local_memories -= 1
        PyBuffer_Release(&self.source)
        self.owner = None
        return 0

    cdef int _give_back(self, int index) except -1:
        """Gives one driver's handle back; a driver that lets go of it later pins what is left of the memory until then."""
        cdef hxa_mem *mem = self.mems[index]
        cdef Driver driver
        cdef hxa_op *op
        if mem == NULL:
            return 0
        self.mems[index] = NULL
        driver = self.core.drivers[index]
        # After the end of the engine, and so of its transports, nothing is left to wait for.
        if driver.table.mem_retire == NULL or self.core.finished:
            driver.table.mem_release(mem)
        else:
            op = self.core._control(driver._without_peer("retirement of a region"))
            try:
                call = self.core._answer(op, driver.table.mem_retire(mem, op), "retirement of a region", self)
            except errors.HixlError as error:
                self.flights += 1  # for ever
                return self._leak(error)
            if not call.done():
                self.retiring += 1
                self.retirements = [call, *(self.retirements or ())]
                call.add_done_callback(self._retired)
        driver._forget()
        return 0

    def _held(self):
        return any(self.core._status(call) != HXA_OK for call in self.retirements or ())

    def _retired(self, call):
        if call.exception() is not None:
            self._leak(call.exception())

    cdef int _leak(self, object error) except -1:
        _leaked.append(self)
        self.core.loop.call_exception_handler(
            {"message": f"{self!r} is leaked: its transport did not let go of it", "exception": error}
        )
        return 0

    def registration(self, Driver driver):
        """Waits until peers may be told of this memory by `driver`, which knows it; to be asked once for each.

        :return: an awaitable.
        """
        cdef hxa_mem *mem = self.mems[driver.index]
        if mem == NULL:
            raise errors.ClosedError(f"{self!r} was closed, or driver {driver.name!r} does not know it")
        what = "registration of a region"
        cdef hxa_op *op = self.core._control(driver._without_peer(what))
        return self.core._answer(
            op, driver.table.mem_ready(mem, op) if driver.table.mem_ready != NULL else HXA_DONE, what, self)

    def export(self, Driver driver, uint32_t rights):
        """The card that lets a peer of `driver` import this memory: ``(bytes, descriptors)``, the latter the caller's."""
        cdef hxa_card card
        if self.mems[driver.index] == NULL:
            raise errors.DriverError(f"driver {driver.name!r} does not know this memory")
        memset(&card, 0, sizeof(card))
        cdef int answer = driver.table.mem_export(self.mems[driver.index], rights, &card)
        if answer:
            raise refusal(driver, -answer, 0, "export of a region")
        return unpack_card(&card)

    def known_to(self, Driver driver):
        """True if `driver` can export this memory."""
        return self.mems[driver.index] != NULL


@cython.no_gc_clear
cdef class RemoteMemory(Memory):
    """A peer's memory, imported over one link."""

    def map(self, Link link, bytes data, list fds, uint64_t size, uint32_t rights):
        """Imports what a peer exported as a card; the driver owns `fds` from here on.

        :return: an awaitable; the memory is usable once it is done, and must be retired in any case.
        """
        cdef hxa_card card
        cdef Hub core = link.driver.core
        cdef hxa_op *op
        cdef int index = link.driver.index
        pack_card(&card, data, fds)
        link._must_exist(fds)
        op = core._control(link)
        self.core, self.link, self.size, self.rights = core, link, size, rights
        cdef int answer = link.driver.table.mem_import(link.link, &card, size, rights, &self.mems[index], op)
        if answer < 0:
            self.mems[index] = NULL
        else:
            self.alive = True
            link.driver.memories += 1
            core.remote_memories += 1
        return core._answer(op, answer, "import of a region", self)

    cdef int _release(self) except -1:
        cdef Driver driver = self.link.driver
        if self.mems[driver.index] != NULL:
            if self.farewell is not None:
                self.farewell()
            driver.table.mem_release(self.mems[driver.index])
            self.mems[driver.index] = NULL
            self.core.remote_memories -= 1
            driver._forget()
        return 0


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class Slice:
    """A range of bytes of a region; made by ``region[a:b]``."""

    def __init__(self):
        raise TypeError("a range is made by slicing a region: region[0:4096]")

    def __getitem__(self, key):
        return make_slice(self.memory, self.offset, self.length, key)

    def __len__(self):
        return self.length

    def __repr__(self):
        return f"{self.memory!r}[{self.offset}:{self.offset + self.length}]"

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef Memory memory = self.memory
        if isinstance(memory, RemoteMemory):
            raise BufferError("a remote range has no memory here; read it into a local one")
        if not memory.alive:
            raise errors.ClosedError("this region was closed; take its views before")
        if (<LocalMemory>memory).device:
            raise BufferError(NO_VIEW)
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
    cdef uint64_t bound
    if value == <PyObject *>None:
        return default
    # Outside of a try block, which costs more than the conversion.
    if PyLong_CheckExact(<object>value):
        bound = PyLong_AsUnsignedLongLong(value)
        if bound != <uint64_t>-1:
            return bound
        PyErr_Clear()
    return _odd_bound(<object>value, name)


cdef uint64_t _odd_bound(object value, str name) except? <uint64_t>-1:
    """A bound that is no int of 64 bits."""
    try:
        return value if PyLong_CheckExact(value) else PyNumber_Index(value)
    except (OverflowError, TypeError):
        raise errors.RangeError(
            f"slice {name} is {value!r}; slices count bytes from 0, and never reach outside"
        ) from None


cdef Slice make_slice(Memory memory, uint64_t base, uint64_t size, object key):
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


cdef Slice whole(object side, str name, type kind):
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


cdef int check_access(Memory remote, uint32_t verb) except -1:
    cdef uint32_t needed = HXA_RIGHT_READ if verb == HXA_READ else HXA_RIGHT_WRITE
    if remote.rights & needed == 0:
        word = "read" if verb == HXA_READ else "write"
        raise errors.AccessError(
            f"{remote!r} does not grant {word!r}; its owner decides that by access= at allocate or register"
        )
    return 0


cdef int check_reach(LocalMemory local, Driver driver) except -1:
    """Whether `driver`, which does not know `local`, can move it all the same."""
    if local.device or driver.capabilities & HXA_CAP_LOCAL_ANY == 0:
        raise errors.BufferTypeError(
            f"{local!r} is not known to driver {driver.name!r}, which cannot register it; use memory that it can"
        )
    return 0


cdef int check_contents(object buffer, Py_buffer *view) except -1:
    """Releases `view` and raises if `buffer` holds references to Python objects: after a copy they would lead to anywhere."""
    if PyByteArray_CheckExact(buffer) or PyBytes_CheckExact(buffer):
        return 0
    try:
        if not _holds_objects(buffer):
            return 0
        raise errors.BufferTypeError(
            f"{type(buffer).__name__} holds references to Python objects, which mean nothing in another process: "
            "transfer what they stand for, in an array of a plain dtype or pickled"
        )
    except BaseException:
        PyBuffer_Release(view)
        raise


cdef bint _holds_objects(object buffer) except -1:
    """Arrays are asked for their dtype before the format of their buffer: some dtypes have none."""
    cdef const char *at
    cdef bint name = False
    kind = getattr(buffer, "dtype", None)
    if kind is not None:
        return getattr(kind, "hasobject", False)
    if not PyMemoryView_Check(buffer):
        buffer = memoryview(buffer)
    at = PyMemoryView_GET_BUFFER(buffer).format
    while at != NULL and at[0] != 0:
        if at[0] == b":":
            name = not name  # a field's name stands between two
        elif at[0] == b"O" and not name:
            return True
        at += 1
    return False


cdef class Places:
    """Local memories by address, for drivers that move registered memory only: a buffer is looked up among them."""

    def __cinit__(self):
        self.bases, self.memories, self.ends = [], [], []

    def add(self, LocalMemory memory):
        """Enters a memory; once is enough."""
        if any(known is memory for known in self.memories):
            return
        cdef Py_ssize_t at = bisect_right(self.bases, <size_t>memory.address)
        self.bases.insert(at, <size_t>memory.address)
        self.memories.insert(at, memory)
        self._measure()

    def discard(self, LocalMemory memory):
        """Takes a memory out, if it is there."""
        for at, known in enumerate(self.memories):
            if known is memory:
                del self.bases[at], self.memories[at]
                return self._measure()

    def _measure(self):
        cdef LocalMemory memory
        cdef uint64_t end = 0
        self.ends = []
        for memory in self.memories:
            end = max(end, <uint64_t>memory.address + memory.size)
            self.ends.append(end)

    cdef LocalMemory find(self, uint64_t address, uint64_t size, int index):
        """A memory that the driver of that index knows, and that has all these bytes; None if there is none."""
        cdef LocalMemory memory
        cdef Py_ssize_t at = bisect_right(self.bases, address) - 1
        while at >= 0 and <uint64_t>self.ends[at] >= address + size:
            memory = self.memories[at]
            if <uint64_t>memory.address + memory.size >= address + size and memory.mems[index] != NULL:
                return memory
            at -= 1
        return None


cdef int raise_gone(object memory) except -1:
    """Why no new work may use `memory`."""
    cdef RemoteMemory remote
    if (<Memory?>memory).core is None:
        raise errors.InvalidArgumentError(
            f"{memory!r} belongs to no engine; use engine.allocate, engine.register or peer.region"
        )
    if isinstance(memory, RemoteMemory):
        remote = memory
        if not remote.link.up:
            raise remote.link._down()
        raise errors.StaleRegionError(
            f"{memory!r} was closed by its owner; await peer.region(name) for a new one", peer=remote.link.peer
        )
    raise errors.ClosedError(f"{memory!r} was closed; no new work may use it")
