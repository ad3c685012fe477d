"""Memory that transfers may use, ranges of it, and the functions by which the engine package lends and closes it."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release
from cpython.bytearray cimport PyByteArray_CheckExact
from cpython.bytes cimport PyBytes_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from libc.string cimport memset

from .link cimport CoreBase, Driver, Link, MAX_DRIVERS, refusal, hxa_mailbox, pack_metadata, unpack_metadata
from .driver cimport *
from .seal cimport PyTypeObject, hxa_seal

from bisect import bisect_right
from functools import partial

from .. import errors
from ..display import shown
from .guard import guarded, report
from .unpicklable import unpicklable

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


cdef str NO_ASSIGNMENT = (
    "a region does not support item assignment; write to a view: memoryview(region)[0:4] = b\"data\", "
    "or region.numpy()[0:4] = ..."
)
cdef str NO_REMOTE_ASSIGNMENT = (
    "a peer's region does not support item assignment; write to it by await engine.write(b\"data\", remote[0:4])"
)
cdef str NO_DELETION = "a region does not support item deletion; its size is fixed until it is closed"
cdef str NO_VIEW = "this region is on a device; copy it to the host to view it"

cdef object _of_region = unpicklable("let the other process get the region by its name, with await peer.region(name)")

# Memories that a transport did not release; never freed (C7).
cdef list _leaked = []


# The collector does not clear these before they are freed, because memoryviews of dead cycles call back into them.
@cython.no_gc_clear
cdef class Memory:
    """Memory that transfers may use: a region of ours, or a peer's after its import."""

    __reduce__ = _of_region

    def __len__(self):
        """Return the size in bytes."""
        return self.nbytes

    @property
    def size(self):
        """The size in bytes."""
        return self.nbytes

    @property
    def alive(self):
        """True while new work may use the memory."""
        return self.usable

    @property
    def pins(self):
        """The number of operations in flight, and of peers that were given access, that hold this memory."""
        return self.holds - self.retiring

    cdef int _unpin(self) except -1:
        self.holds -= 1
        if not self.usable and self.holds == 0:
            self._end_use()
        return 0

    cdef int _end_use(self) except -1:
        """Wake the waiters, because no operation and no peer holds this closed memory, and release it."""
        self.retiring = 0
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        return self._release_when_unused()

    def drained(self):
        """Wait until no operation of this engine touches the memory, including those whose `Transfer` was dropped.

        :return: a future; cancelling it only ends the wait.
        :raises InvalidArgumentError: if the region belongs to no engine.
        :raises WrongLoopError: on another thread than the loop's.
        """
        if self.core is None:
            raise_gone(self)
        return self.core._drained_range(self, 0, self.nbytes)

    def released(self):
        """Wait until the region is closed, and no operation and no peer holds its memory.

        :return: a future; cancelling it only ends the wait.
        :raises InvalidArgumentError: if the region belongs to no engine.
        :raises WrongLoopError: on another thread than the loop's.
        """
        if self.core is None:
            raise_gone(self)
        self.core._must_be_on_thread()
        waiter = self.core.event_loop.create_future()
        if not self.usable and self.holds == self.retiring:
            waiter.set_result(None)
        elif self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)
        return waiter

    cdef int _release_when_unused(self) except -1:
        """Release the drivers' handles, here or on the loop's thread while that is running (hxa_driver.h, T2)."""
        if self.usable or self.holds or self.exports or self.core._forked():
            return 0
        if not self.core.finished and PyThread_get_thread_ident() != self.core.thread:
            self.core.deferred.append(self)
            hxa_mailbox_signal(self.core.box)
            return 0
        return self._release()

    cdef int _release(self) except -1:
        raise NotImplementedError


@cython.no_gc_clear
cdef class LocalMemory(Memory):
    """Memory of this process, known to the drivers."""

    def __dealloc__(self):
        PyBuffer_Release(&self.source)

    def __getitem__(self, key):
        return _local_slice(self, 0, self.nbytes, key)

    def __setitem__(self, key, value):
        raise TypeError(NO_ASSIGNMENT)

    def __delitem__(self, key):
        raise TypeError(NO_DELETION)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.usable:
            raise errors.ClosedError("this region was closed; take its views before")
        if self.on_device:
            raise BufferError(NO_VIEW)
        PyBuffer_FillInfo(view, self, self.address, self.nbytes, self.is_readonly, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1
        if self.exports == 0 and not self.usable:
            self._release_when_unused()

    @property
    def readonly(self):
        """True if the memory was registered from a read-only buffer, so that reads into it are refused."""
        return self.is_readonly

    @property
    def device(self):
        """True if the memory is on a device, where the CPU cannot reach its address."""
        return self.on_device

    @property
    def address(self):
        """The address of the first byte in this process, or on its device; 0 once the memory is released."""
        return <size_t>self.address

    cdef int _release(self) except -1:
        cdef int i
        # The allocator comes last, because the other drivers know its pages.
        for i in range(MAX_DRIVERS):
            if i + 1 != self.allocator:
                self._give_back(i)
        if self.holds == 0 and self.allocator and not self._awaits_drivers():
            self._give_back(self.allocator - 1)
        if self.holds or self._awaits_drivers():
            return 0  # a transport releases later, which calls this again, or never
        if self.address != NULL:
            self.address = NULL
            self.core.local_memories -= 1
        PyBuffer_Release(&self.source)
        self.owner = None
        return 0

    cdef int _give_back(self, int index) except -1:
        """Release one driver's handle; a driver that releases it later pins the rest of the memory until then."""
        cdef hxa_mem *mem = self.mems[index]
        cdef Driver driver
        cdef hxa_op *op
        if mem == NULL:
            return 0
        self.mems[index] = NULL
        driver = self.core.drivers[index]
        # After the end of the engine, and so of its transports, there is nothing to wait for.
        if driver.table.mem_retire == NULL or self.core.finished:
            driver.table.mem_release(mem)
        else:
            op = self.core._begin_call(driver._without_peer("retirement of a region"))
            try:
                call = self.core._end_call(op, driver.table.mem_retire(mem, op), "retirement of a region", self)
            except errors.HixlError as error:
                self.holds += 1  # for ever
                return self._leak(error)
            if not call.done():
                self.retiring += 1
                self.retirements = [call, *(self.retirements or ())]
                call.add_done_callback(partial(_on_retired, self))
        driver._forget()
        return 0

    cdef bint _awaits_drivers(self) except -1:
        return any([self.core._call_status(call) != HXA_OK for call in self.retirements or ()])

    cdef int _leak(self, object error) except -1:
        _leaked.append(self)
        report(self.core.event_loop, f"{self!r} is leaked: its transport did not release it", error)
        return 0


def _on_retired(LocalMemory memory not None, call):
    if call.exception() is not None:
        memory._leak(call.exception())


@cython.no_gc_clear
cdef class RemoteMemory(Memory):
    """A peer's memory, imported over one link."""

    def __getitem__(self, key):
        return _remote_slice(self, 0, self.nbytes, key)

    def __setitem__(self, key, value):
        raise TypeError(NO_REMOTE_ASSIGNMENT)

    def __delitem__(self, key):
        raise TypeError(NO_DELETION)

    cdef int _release(self) except -1:
        cdef Driver driver = self.link.driver
        if self.mems[driver.index] != NULL:
            if self.on_unmap is not None:
                guarded(self.core.event_loop, f"the device did not let go of {self!r}", self.on_unmap)
            driver.table.mem_release(self.mems[driver.index])
            self.mems[driver.index] = NULL
            self.core.remote_memories -= 1
            driver._forget()
        return 0


# -- the port for the engine package; functions, so that users do not find them at a region

def pin(Memory memory not None):
    """Pin the memory beyond `retire`, because a peer has it mapped; `unpin` undoes it."""
    if memory.core is None:
        raise_gone(memory)
    memory.holds += 1


def unpin(Memory memory not None):
    """Undo one `pin`."""
    if memory.holds <= 0:
        raise RuntimeError(f"{memory!r} is not pinned")
    memory._unpin()


def retire(Memory memory not None):
    """Refuse new work; the drivers' handles are released with the last operation, peer and view.  Idempotent."""
    if memory.usable:
        memory.usable = False
        if memory.address != NULL:
            (<Places>memory.core.places).discard(memory)
        if memory.holds == 0:
            memory._end_use()


def registration(LocalMemory memory not None, Driver driver not None):
    """Wait until `driver`, which knows this memory, can export it; to be called once for each driver.

    :return: an awaitable.
    :raises ClosedError: if the memory was closed, or `driver` does not know it.
    """
    cdef hxa_mem *mem = memory.mems[driver.index]
    if mem == NULL:
        raise errors.ClosedError(f"{memory!r} was closed, or driver {driver.name!r} does not know it")
    what = "registration of a region"
    cdef hxa_op *op = memory.core._begin_call(driver._without_peer(what))
    return memory.core._end_call(
        op, driver.table.mem_ready(mem, op) if driver.table.mem_ready != NULL else HXA_DONE, what, memory)


def export(LocalMemory memory not None, Driver driver not None, uint32_t rights):
    """Make the metadata with which a peer of `driver` imports this memory.

    :param rights: the most that the peer may do with it, HXA_RIGHT_*.
    :return: ``(bytes, descriptors)``; the caller closes the descriptors.
    """
    cdef hxa_metadata metadata
    if memory.mems[driver.index] == NULL:
        raise errors.DriverError(f"driver {driver.name!r} does not know this memory")
    memset(&metadata, 0, sizeof(metadata))
    cdef int answer = driver.table.mem_export(memory.mems[driver.index], rights, &metadata)
    if answer:
        raise refusal(driver, -answer, 0, "export of a region")
    return unpack_metadata(&metadata)


def known_to(LocalMemory memory not None, Driver driver not None):
    """Return True if `driver` can export this memory."""
    return memory.mems[driver.index] != NULL


def import_remote(RemoteMemory memory not None, Link link not None, bytes data not None, list fds not None, uint64_t size,
                  uint32_t rights):
    """Import memory that a peer exported.

    :param memory: a new memory, which represents the peer's from here on.
    :param data: the metadata of the export.
    :param fds: its descriptors, which the driver owns from here on.
    :param size: bytes.
    :param rights: the access that the peer grants, HXA_RIGHT_*.
    :return: an awaitable; the memory is usable once it is done, and must be retired in any case.
    """
    cdef hxa_metadata metadata
    cdef CoreBase core = link.driver.core
    cdef hxa_op *op
    cdef int index = link.driver.index
    if memory.core is not None:
        raise RuntimeError(f"{memory!r} was imported before")
    pack_metadata(&metadata, data, fds)
    link._must_exist(fds)
    op = core._begin_call(link)
    memory.core, memory.link, memory.nbytes, memory.rights = core, link, size, rights
    cdef int answer = link.driver.table.mem_import(link.link, &metadata, size, rights, &memory.mems[index], op)
    if answer < 0:
        memory.mems[index] = NULL
    else:
        memory.usable = True
        link.driver.memories += 1
        core.remote_memories += 1
    return core._end_call(op, answer, "import of a region", memory)


def link_of(RemoteMemory memory not None):
    """Return the link over which a memory was imported, or None if it was not."""
    return memory.link


# -- ranges

# Two types without a common base, which would cost each slicing a second constructor and destructor.
@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class LocalSlice:
    """A range of bytes of a region of this engine, made by ``region[a:b]``.

    It offers the buffer protocol: ``memoryview(region[a:b])``.
    """

    __reduce__ = _of_region

    def __getitem__(self, key):
        return _local_slice(self.memory, self.start, self.nbytes, key)

    def __setitem__(self, key, value):
        raise TypeError(NO_ASSIGNMENT)

    def __delitem__(self, key):
        raise TypeError(NO_DELETION)

    def __len__(self):
        """Return the length in bytes."""
        return self.nbytes

    def __repr__(self):
        return f"{self.memory!r}[{self.start}:{self.start + self.nbytes}]"

    @property
    def region(self):
        """The `Region` that this is a range of."""
        return self.memory

    @property
    def offset(self):
        """The first byte, counted from the start of the region."""
        return self.start

    @property
    def length(self):
        """The length in bytes."""
        return self.nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef LocalMemory memory = self.memory
        if not memory.usable:
            raise errors.ClosedError("this region was closed; take its views before")
        if memory.on_device:
            raise BufferError(NO_VIEW)
        PyBuffer_FillInfo(view, self, memory.address + self.start, self.nbytes, memory.is_readonly, flags)
        memory.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        cdef LocalMemory memory = self.memory
        memory.exports -= 1
        if memory.exports == 0 and not memory.usable:
            memory._release_when_unused()

    def drained(self):
        """Wait until no operation of this engine touches the range, those included whose `Transfer` was dropped.

        :return: a future; cancelling it only ends the wait.
        :raises InvalidArgumentError: if the region belongs to no engine.
        :raises WrongLoopError: on another thread than the loop's.
        """
        return _drained_slice(self.memory, self.start, self.nbytes)


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class RemoteSlice:
    """A range of bytes of a peer's region, made by ``remote[a:b]``; read it into a local range to view its bytes."""

    __reduce__ = _of_region

    def __getitem__(self, key):
        return _remote_slice(self.memory, self.start, self.nbytes, key)

    def __setitem__(self, key, value):
        raise TypeError(NO_REMOTE_ASSIGNMENT)

    def __delitem__(self, key):
        raise TypeError(NO_DELETION)

    def __len__(self):
        """Return the length in bytes."""
        return self.nbytes

    def __repr__(self):
        return f"{self.memory!r}[{self.start}:{self.start + self.nbytes}]"

    @property
    def region(self):
        """The `RemoteRegion` that this is a range of."""
        return self.memory

    @property
    def offset(self):
        """The first byte, counted from the start of the region."""
        return self.start

    @property
    def length(self):
        """The length in bytes."""
        return self.nbytes

    def drained(self):
        """Wait until no operation of this engine touches the range, those included whose `Transfer` was dropped.

        :return: a future; cancelling it only ends the wait.
        :raises InvalidArgumentError: if the region belongs to no engine.
        :raises WrongLoopError: on another thread than the loop's.
        """
        return _drained_slice(self.memory, self.start, self.nbytes)


cdef object _refuse_slice(PyTypeObject *kind, PyObject *args, PyObject *kwargs):
    raise TypeError("a range is made by slicing a region: region[0:4096]")


hxa_seal(LocalSlice, _refuse_slice)
hxa_seal(RemoteSlice, _refuse_slice)


cdef object _drained_slice(Memory memory, uint64_t offset, uint64_t length):
    if memory.core is None:
        raise_gone(memory)
    return memory.core._drained_range(memory, offset, length)


cdef inline uint64_t _bound(PyObject *value, uint64_t default, str name) except? <uint64_t>-1:
    cdef uint64_t bound
    if value == <PyObject *>None:
        return default
    # Not in a try block, which would cost more than the conversion.
    if PyLong_CheckExact(<object>value):
        bound = PyLong_AsUnsignedLongLong(value)
        if bound != <uint64_t>-1:
            return bound
        PyErr_Clear()
    return _odd_bound(<object>value, name)


cdef uint64_t _odd_bound(object value, str name) except? <uint64_t>-1:
    """Convert a bound that is not an int of 64 bits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return value if PyLong_CheckExact(value) else PyNumber_Index(value)
    except (OverflowError, TypeError):
        raise errors.RangeError(
            f"slice {name} is {shown(value)}; slices count bytes from 0, and never reach outside"
        ) from None


cdef struct Range:
    uint64_t start, length


cdef inline int _find_range(Range *found, uint64_t size, object key) except -1:
    """Fill in the range of bytes that a subscript names."""
    if not PySlice_Check(key):
        raise errors.InvalidArgumentError(f"index with a slice of bytes such as region[0:4096], not with {shown(key)}")
    cdef PyObject *step = hxa_slice_step(key)
    if step != <PyObject *>None and (<object>step != 1 or isinstance(<object>step, bool)):
        raise errors.RangeError(f"slice step is {shown(<object>step)}; only contiguous ranges (step 1) can be moved")
    cdef uint64_t start = _bound(hxa_slice_start(key), 0, "start")
    cdef uint64_t stop = _bound(hxa_slice_stop(key), size, "stop")
    if start > stop or stop > size:
        if start <= size and stop <= size:
            raise errors.RangeError(f"range [{start}:{stop}] ends before it begins")
        raise errors.RangeError(f"range [{start}:{stop}] lies outside of {size} bytes; slices are never clamped")
    found.start, found.length = start, stop - start
    return 0


cdef LocalSlice _local_slice(LocalMemory memory, uint64_t base, uint64_t size, object key):
    cdef Range found
    _find_range(&found, size, key)
    cdef LocalSlice piece = LocalSlice.__new__(LocalSlice)
    piece.memory, piece.start, piece.nbytes = memory, base + found.start, found.length
    return piece


cdef RemoteSlice _remote_slice(RemoteMemory memory, uint64_t base, uint64_t size, object key):
    cdef Range found
    _find_range(&found, size, key)
    cdef RemoteSlice piece = RemoteSlice.__new__(RemoteSlice)
    piece.memory, piece.start, piece.nbytes = memory, base + found.start, found.length
    return piece


cdef LocalSlice whole_local(object side, str name):
    """Return a region of this engine, or a range of one, as a range."""
    cdef LocalSlice piece
    if type(side) is LocalSlice:
        return side
    if not isinstance(side, LocalMemory):
        raise _wrong_side(side, name, "local: a region of this engine")
    piece = LocalSlice.__new__(LocalSlice)
    piece.memory = side
    piece.nbytes = piece.memory.nbytes
    return piece


cdef RemoteSlice whole_remote(object side, str name):
    """Return a peer's region, or a range of one, as a range."""
    cdef RemoteSlice piece
    if type(side) is RemoteSlice:
        return side
    if not isinstance(side, RemoteMemory):
        raise _wrong_side(side, name, "a region of a peer")
    piece = RemoteSlice.__new__(RemoteSlice)
    piece.memory = side
    piece.nbytes = piece.memory.nbytes
    return piece


cdef object _wrong_side(object side, str name, str wanted):
    if isinstance(side, (LocalSlice, RemoteSlice)):
        side = side.region
    if isinstance(side, Memory):
        return errors.InvalidArgumentError(f"{name} must be {wanted}, not {side!r}")
    return errors.InvalidArgumentError(f"{name} must be a region or a range of one, not {type(side).__name__}")


cdef int check_access(Memory remote, uint32_t verb) except -1:
    cdef uint32_t needed = HXA_RIGHT_READ if verb == HXA_READ else HXA_RIGHT_WRITE
    if remote.rights & needed == 0:
        word = "read" if verb == HXA_READ else "write"
        raise errors.AccessError(
            f"{remote!r} does not grant {word!r}; its owner chooses the access by access= of allocate or register"
        )
    return 0


cdef int check_reach(LocalMemory local, Driver driver) except -1:
    """Raise if `driver`, which does not know `local`, cannot move it."""
    if local.on_device or driver.capabilities & HXA_CAP_LOCAL_ANY == 0:
        raise errors.BufferTypeError(
            f"{local!r} is not known to driver {driver.name!r}, which cannot register it; use memory that it can register"
        )
    return 0


cdef int check_contents(object buffer, Py_buffer *view) except -1:
    """Release `view` and raise if `buffer` holds references to Python objects, which a copy would make dangle."""
    if PyByteArray_CheckExact(buffer) or PyBytes_CheckExact(buffer):
        return 0
    try:
        if not _holds_objects(buffer):
            return 0
        raise errors.BufferTypeError(
            f"{type(buffer).__name__} holds references to Python objects, which are invalid in another process: "
            "transfer their values in an array of a plain dtype, or pickle them"
        )
    except BaseException:
        PyBuffer_Release(view)
        raise


cdef bint _holds_objects(object buffer) except -1:
    """Return True if a buffer's items refer to Python objects; the dtype is checked first, because some have no format."""
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
            name = not name  # a field's name is between two colons
        elif at[0] == b"O" and not name:
            return True
        at += 1
    return False


cdef class Places:
    """The local memories by address, to find a buffer's region for drivers that move only registered memory."""

    def __cinit__(self):
        self.bases, self.memories, self.ends = [], [], []

    cdef int add(self, LocalMemory memory) except -1:
        """Add a memory.  Idempotent."""
        if any([known is memory for known in self.memories]):
            return 0
        cdef Py_ssize_t at = bisect_right(self.bases, <size_t>memory.address)
        self.bases.insert(at, <size_t>memory.address)
        self.memories.insert(at, memory)
        return self._measure()

    cdef int discard(self, LocalMemory memory) except -1:
        """Remove a memory, if it is there."""
        for at, known in enumerate(self.memories):
            if known is memory:
                del self.bases[at], self.memories[at]
                return self._measure()
        return 0

    cdef int _measure(self) except -1:
        cdef LocalMemory memory
        cdef uint64_t end = 0
        self.ends = []
        for memory in self.memories:
            end = max(end, <uint64_t>memory.address + memory.nbytes)
            self.ends.append(end)
        return 0

    cdef LocalMemory find(self, uint64_t address, uint64_t size, int index):
        """Return a memory that the driver with this index knows and that has all these bytes, or None."""
        cdef LocalMemory memory
        cdef Py_ssize_t at = bisect_right(self.bases, address) - 1
        while at >= 0 and <uint64_t>self.ends[at] >= address + size:
            memory = self.memories[at]
            if <uint64_t>memory.address + memory.nbytes >= address + size and memory.mems[index] != NULL:
                return memory
            at -= 1
        return None


cdef int raise_gone(object memory) except -1:
    """Raise the reason why no new work may use `memory`."""
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
