# cython: freethreading_compatible=False
"""The hot path: a call is checked, its memory is pinned, and it is submitted to a driver.

Invariants.  The core's modules cite them where they rely on them, and tests/core has a test for each.

C1   The operation in flight owns its slot (a `Transfer`) from accepted submit to release: one INCREF in `_track`, one DECREF
     in `_settle_events`, nowhere else.
C2   An accepted submit gets exactly one completion, then one release; a refused one gets neither.  Failure and
     safe-to-unpin are two events: a timeout causes the first, only the driver causes the second.
C3   Driver threads hold no GIL and touch no Python object; they only post to the mailbox.
C4   Awaitables are resolved only on the loop's thread.  A waiting task is resumed directly only from `drain`, where no
     task is current; everything else goes through call_soon.
C5   Cancelling ends the wait.  It never unpins memory.
C6   Every descriptor is validated (alive, in bounds, right access, no overflow) before any is posted: all or nothing.
C7   Close refuses new work, drains within a time limit, and leaks memory that a device might still write, and reports it.
C8   A coroutine that only awaits finished work (transfers, drains, groups, room, notifications) still yields, because work that
     finishes inside a call spends `budget`.  A drain is capped: `burst`, DRAIN_NANOSECONDS.
C9   An engine belongs to one loop; calls from another one raise WrongLoopError.
C10  After fork() the child's calls raise EngineForkedError, and never affect the parent.
C11  Data before signal before notification: the drivers' rule T5; the core hands all three over in one batch.
C12  The GIL is held for copies estimated below ~100 us and released above.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyBuffer_ToContiguous, PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.number cimport PyNumber_Index
from cpython.unicode cimport PyUnicode_AsUTF8String
from libc.math cimport INFINITY

from .core.batch cimport Batch
from .core.in_flight cimport InFlightTable
from .core.link cimport Driver, Link, refusal
from .core.memory cimport (
    LocalMemory, LocalSlice, Memory, Places, RemoteMemory, RemoteSlice, check_access, check_contents, check_reach, raise_gone,
    whole_local, whole_remote,
)
from .core.transfer cimport BUDGET, COST_NANOSECONDS, DONE, SMALL_BYTES, Transfer, hxa_now, new_transfer
from .core.driver cimport *

from . import errors
from .display import shown

# C12: a cold copy of this much takes about 100 us.
cdef enum: GIL_BYTES = 384 << 10

cdef dict PRIORITIES = {"low": HXA_PRIORITY_LOW, "normal": HXA_PRIORITY_NORMAL, "high": HXA_PRIORITY_HIGH}


@cython.no_gc_clear
cdef class Core(InFlightTable):
    """The core of an `Engine`, which inherits `read`, `write`, `submit` and `drained` without a wrapper."""

    # -- memory

    cdef int _must_be_new(self, LocalMemory memory) except -1:
        if memory.core is not None:
            raise RuntimeError(f"{memory!r} has memory already")
        return 0

    cdef int _own(self, LocalMemory memory, char *address, uint64_t size, uint32_t rights) except -1:
        memory.core, memory.address, memory.nbytes, memory.rights, memory.usable = self, address, size, rights, True
        self.local_memories += 1
        return 0

    cdef int _place(self, LocalMemory memory, Driver driver) except -1:
        """Record that `driver` knows `memory` from now on."""
        driver.memories += 1
        if driver.capabilities & HXA_CAP_LOCAL_ANY == 0:
            (<Places>self.places).add(memory)
        return 0

    # -- work

    def write(self, local, remote, *, notify=None, signal=None, timeout=None, priority=None):
        """Copy `local` into the peer's memory; the transfer is done when the bytes are there.

        :param local: a region of this engine, a range of one, or any contiguous buffer (bytes, numpy, memoryview, CPU tensor).
        :param remote: a region of a peer or a range of one, of the same length in bytes.
        :param notify: ``(topic, payload)``, str and bytes: a notification to the peer after the data.
        :param signal: ``(remote range of 8 aligned bytes, value)``: a 64-bit word that is stored after the data.
        :param timeout: seconds from now within which it must finish, whatever its progress; default: only the engine's `stall`.
        :param priority: ``"low"``, ``"normal"`` (the default) or ``"high"``.
        :return: a `Transfer`, already started; its result is the number of bytes.
        :raises RangeError: if a range is empty, outside of its region, or the lengths differ.
        :raises AccessError: if the region does not grant writing.
        :raises BufferTypeError: if `local` has no contiguous memory, or holds references to Python objects.
        :raises InvalidArgumentError: if an option is malformed, or a side belongs to another engine.
        :raises DriverError: if the driver cannot send notifications or store signals.
        :raises PeerDownError: if the peer is down.
        :raises StaleRegionError: if the remote region was closed.
        :raises BusyError: if a bounded queue of the driver, or ``max_bytes_in_flight``, is full.
        :raises ClosedError: if the engine or the local region is closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        return self._single(HXA_WRITE, local, remote, notify, signal, timeout, priority)

    def read(self, local, remote, *, notify=None, signal=None, timeout=None, priority=None):
        """Copy from the peer's memory into `local`; the transfer is done when the bytes are here.

        :param local: a region of this engine, a range of one, or any contiguous buffer that is writable.
        :param remote: a region of a peer or a range of one, of the same length in bytes.
        :param notify: ``(topic, payload)``, str and bytes: a notification to the peer after the data.
        :param signal: ``(remote range of 8 aligned bytes, value)``: a 64-bit word that is stored after the data.
        :param timeout: seconds from now within which it must finish, whatever its progress; default: only the engine's `stall`.
        :param priority: ``"low"``, ``"normal"`` (the default) or ``"high"``.
        :return: a `Transfer`, already started; its result is the number of bytes.
        :raises RangeError: if a range is empty, outside of its region, or the lengths differ.
        :raises AccessError: if the region does not grant reading.
        :raises BufferTypeError: if `local` has no contiguous memory, is read-only, or holds references to Python objects.
        :raises InvalidArgumentError: if an option is malformed, or a side belongs to another engine.
        :raises DriverError: if the driver cannot send notifications or store signals.
        :raises PeerDownError: if the peer is down.
        :raises StaleRegionError: if the remote region was closed.
        :raises BusyError: if a bounded queue of the driver, or ``max_bytes_in_flight``, is full.
        :raises ClosedError: if the engine or the local region is closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        return self._single(HXA_READ, local, remote, notify, signal, timeout, priority)

    cdef Transfer _single(self, uint32_t verb, object local, object remote, object notify, object signal,
                          object timeout, object priority):
        cdef Transfer transfer
        cdef LocalSlice left
        cdef RemoteSlice right
        cdef RemoteMemory target
        cdef Link link
        cdef uint64_t length
        self._check()
        # C6: everything is checked before anything is pinned or posted.
        if type(remote) is RemoteSlice:
            right = <RemoteSlice>remote
        else:
            right = whole_remote(remote, "remote")
        target = right.memory
        if not target.usable:
            raise_gone(target)
        link = target.link
        if link.driver.core is not self:
            raise errors.InvalidArgumentError(f"{target!r} belongs to another engine")
        if not link.up:
            raise_gone(target)
        check_access(target, verb)
        transfer = new_transfer(self)
        transfer.link = link
        transfer.batch.verb = verb
        if type(local) is LocalSlice:
            left = <LocalSlice>local
            length = left.nbytes
            self._pin_slice(transfer, left, verb, link)
        else:
            if isinstance(local, Memory) or type(local) is RemoteSlice:
                left = whole_local(local, "local")
                length = left.nbytes
                self._pin_slice(transfer, left, verb, link)
            else:
                length = self._pin_buffer(transfer, local, verb, link)
            # The object's own code, such as its __buffer__, may have closed any of these.
            if self.is_closed or not target.usable or not link.up:
                transfer._unpin()
                self._check()
                raise_gone(target)
        if length != right.nbytes or length == 0:
            transfer._unpin()
            raise errors.RangeError(
                f"{length} local and {right.nbytes} remote bytes; the lengths must be equal and not 0"
            )
        transfer.desc.rmem = target.mems[link.driver.index]
        transfer.desc.roff = right.start
        transfer.desc.len = length
        transfer.remote = target
        target.holds += 1
        transfer.batch.n = 1
        transfer.batch.desc = &transfer.desc
        transfer.batch.bytes = length
        self._launch(transfer, notify, signal, timeout, priority)
        return transfer

    cdef int _pin_slice(self, Transfer transfer, LocalSlice left, uint32_t verb, Link link) except -1:
        cdef LocalMemory memory = left.memory
        if memory.address == NULL or memory.core is not self:
            if memory.core is not None and memory.core is not self:
                raise errors.InvalidArgumentError(f"{memory!r} belongs to another engine")
            raise errors.ClosedError(f"{memory!r} is closed, or belongs to no engine")
        if not memory.usable:
            raise errors.ClosedError(f"{memory!r} was closed; no new work may use it")
        if verb == HXA_READ and memory.is_readonly:
            raise errors.BufferTypeError("the local region was registered from a read-only buffer; it cannot be read into")
        transfer.desc.lmem = memory.mems[link.driver.index]
        transfer.desc.loff = left.start
        if transfer.desc.lmem == NULL:
            check_reach(memory, link.driver)
            transfer.desc.loff += <uint64_t>memory.address
        transfer.local = memory
        memory.holds += 1
        return 0

    cdef uint64_t _pin_buffer(self, Transfer transfer, object local, uint32_t verb, Link link) except? <uint64_t>-1:
        cdef uint64_t size
        cdef bint anywhere = link.driver.capabilities & HXA_CAP_LOCAL_ANY
        if not PyObject_CheckBuffer(local):
            if self.address_of is None:
                raise errors.BufferTypeError(
                    f"local must be a region's range or a contiguous buffer, not {type(local).__name__}")
            transfer.desc.loff, size, owner, device = self.address_of(local, verb == HXA_READ)
            if anywhere and device and link.driver.table.mem_borrow != NULL:
                transfer.local, transfer.device = owner, owner
            elif anywhere and not device:
                transfer.local = owner
            else:
                self._find_place(transfer, local, size, link.driver, device)
            return size
        try:
            PyObject_GetBuffer(local, &transfer.view, PyBUF_WRITABLE if verb == HXA_READ else PyBUF_SIMPLE)
        except (BufferError, ValueError, TypeError) as error:
            raise errors.BufferTypeError(
                f"local {type(local).__name__} cannot be used: {str(error).rstrip('.')}; it must be contiguous"
                + (" and writable to be read into" if verb == HXA_READ else "")
            ) from error
        check_contents(local, &transfer.view)
        transfer.desc.loff = <uint64_t>transfer.view.buf
        size = transfer.view.len
        if not anywhere:
            PyBuffer_Release(&transfer.view)  # its region keeps it alive
            self._find_place(transfer, local, size, link.driver, False)
        return size

    cdef int _find_place(self, Transfer transfer, object local, uint64_t size, Driver driver, bint device) except -1:
        """Find the region of an address of ours, for a driver that moves only registered memory."""
        cdef LocalMemory memory = (<Places>self.places).find(transfer.desc.loff, size, driver.index)
        if memory is None:
            raise errors.BufferTypeError(
                f"driver {driver.name!r} moves {'device ' if device else ''}memory only where it is registered, and this "
                f"{type(local).__name__} lies in no region that it knows; call engine.register(name, buffer) once before, and "
                "use any part of the region, or pass cache.local(buffer) of an engine.registration_cache()"
            )
        transfer.desc.lmem = memory.mems[driver.index]
        transfer.desc.loff -= <uint64_t>memory.address
        transfer.local = memory
        memory.holds += 1
        return 0

    def submit(self, batch, *, notify=None, signal=None, timeout=None, priority=None):
        """Start a prepared batch.

        :param batch: a `Batch` of this engine.
        :param notify: ``(topic, payload)``, str and bytes: a notification to the peer after the data.
        :param signal: ``(remote range of 8 aligned bytes, value)``: a 64-bit word that is stored after the data.
        :param timeout: seconds from now within which it must finish, whatever its progress; default: only the engine's `stall`.
        :param priority: ``"low"``, ``"normal"`` (the default) or ``"high"``.
        :return: a `Transfer`, already started; its result is the sum of the lengths in bytes.
        :raises InvalidArgumentError: if `batch` is not a `Batch` of this engine, or an option is malformed.
        :raises DriverError: if the driver cannot send notifications or store signals.
        :raises PeerDownError: if the peer is down.
        :raises StaleRegionError: if a remote region was closed.
        :raises BusyError: if a bounded queue of the driver, or ``max_bytes_in_flight``, is full.
        :raises ClosedError: if the engine or a local region is closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._check()
        if type(batch) is not Batch:
            raise errors.InvalidArgumentError(f"batch must be a hixl_async.Batch, not {type(batch).__name__}")
        return self._submit(batch, notify, signal, timeout, priority)

    cdef Transfer _submit(self, Batch batch, object notify, object signal, object timeout, object priority):
        cdef Transfer transfer
        cdef Memory memory
        if batch.link.driver.core is not self:
            raise errors.InvalidArgumentError("the batch belongs to another engine")
        for memory in batch.memories:
            if not memory.usable:
                raise_gone(memory)
        if not batch.link.up:
            raise_gone(batch.memories[1])
        transfer = new_transfer(self)
        transfer.link, transfer.local = batch.link, batch
        for memory in batch.memories:
            memory.holds += 1
        transfer.batch.verb = batch.verb
        transfer.batch.n = batch.n_descriptors
        transfer.batch.desc = batch.desc
        transfer.batch.bytes = batch.total_bytes
        self._launch(transfer, notify, signal, timeout, priority)
        return transfer

    cdef int _launch(self, Transfer transfer, object notify, object signal, object timeout, object priority) except -1:
        """Submit a pinned transfer to its driver; if it is refused everything is unpinned and nothing was sent."""
        cdef Driver driver = transfer.link.driver
        cdef hxa_link *link
        cdef int64_t began
        cdef int answer
        try:
            if notify is not None or signal is not None or timeout is not None or priority is not None:
                self._attach_options(transfer, notify, signal, timeout, priority)
                # An option's own code, such as the __buffer__ of a payload, may have closed anything.
                self._recheck(transfer)
            if self.max_bytes_in_flight and self.n_bytes_in_flight and (
                    self.n_bytes_in_flight + transfer.batch.bytes > self.max_bytes_in_flight):
                raise errors.BusyError(
                    f"{self.n_bytes_in_flight} of at most {self.max_bytes_in_flight} bytes are in flight, "
                    f"{transfer.batch.bytes} more do not fit; await engine.room(nbytes) first"
                )
        except BaseException:
            transfer._unpin()
            raise
        link = transfer.link.link
        transfer.op.owner = <void *>transfer
        transfer.op.failed = -1
        transfer.cost = 1
        if transfer.device is not None:
            self._accept_on_device(transfer)
            self.n_transfers += 1
            return 0
        if transfer.batch.bytes <= SMALL_BYTES:
            answer = driver.table.submit(link, &transfer.batch, &transfer.op)
        else:
            began = hxa_now()
            if transfer.batch.bytes <= GIL_BYTES:
                answer = driver.table.submit(link, &transfer.batch, &transfer.op)
            else:
                with nogil:
                    answer = driver.table.submit(link, &transfer.batch, &transfer.op)
            if answer == HXA_DONE:
                transfer.cost += <int>min((hxa_now() - began) / COST_NANOSECONDS, BUDGET)
        if answer == HXA_DONE:
            transfer.outcome = DONE
            self._spend(transfer.cost)
            transfer.op.bytes = transfer.batch.bytes
            transfer._unpin()
            self.n_inline += 1
            self.n_bytes += transfer.batch.bytes
        elif answer == HXA_PENDING:
            self._accept(transfer)
        else:
            index = transfer._failed_row()
            transfer._unpin()
            raise refusal(driver, -answer, transfer.op.native, f"{transfer._describe()} was refused",
                          transfer.link, index)
        self.n_transfers += 1
        return 0

    cdef int _accept_on_device(self, Transfer transfer) except -1:
        """Start a copy that a device makes by itself; see `DeviceCopies`."""
        try:
            if self.begin_on_device is None:
                raise errors.BufferTypeError("memory of a device cannot be used here")
            self.begin_on_device(transfer)
        except BaseException:
            transfer.device = None
            transfer._unpin()
            raise
        return self._accept(transfer)

    cdef int _attach_options(
            self, Transfer transfer, object notify, object signal, object timeout, object priority) except -1:
        cdef Driver driver = transfer.link.driver
        if notify is not None:
            self._attach_note(transfer, driver, notify)
        if signal is not None:
            self._attach_signal(transfer, driver, signal)
        if priority is not None:
            try:
                transfer.batch.priority = PRIORITIES[priority]
            except (KeyError, TypeError):
                raise errors.InvalidArgumentError(
                    f"priority must be 'low', 'normal' or 'high', not {shown(priority)}"
                ) from None
        if timeout is not None:
            try:
                transfer.timeout = timeout if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) else 0
            except OverflowError:  # an int beyond any float
                transfer.timeout = INFINITY
            if not 0 < transfer.timeout < INFINITY:
                raise errors.InvalidArgumentError(f"timeout must be a positive number of seconds, not {shown(timeout)}")
        return 0

    cdef int _recheck(self, Transfer transfer) except -1:
        """Raise if anything that the transfer needs was closed since it was checked."""
        cdef Memory memory
        self._check()
        if type(transfer.local) is Batch:
            for memory in (<Batch>transfer.local).memories:
                _must_be_usable(memory)
        elif isinstance(transfer.local, Memory):
            _must_be_usable(<Memory>transfer.local)
        _must_be_usable(transfer.remote)
        _must_be_usable(transfer.signal)
        return _must_be_up(transfer.link)

    cdef int _attach_note(self, Transfer transfer, Driver driver, object notify) except -1:
        if driver.capabilities & HXA_CAP_NOTIFY == 0:
            raise errors.DriverError(f"driver {driver.name!r} cannot send notifications")
        try:
            topic, payload = notify
            transfer.topic = PyUnicode_AsUTF8String(topic)
            transfer.note = payload if type(payload) is bytes else _bytes_of(payload)
        except (BufferError, TypeError, ValueError, AttributeError, UnicodeError) as error:
            if isinstance(error, errors.HixlError):
                raise
            if isinstance(error, UnicodeEncodeError) and transfer.topic is None:
                raise errors.InvalidArgumentError(
                    f"the topic {shown(topic)} holds half a surrogate pair, which UTF-8 cannot carry") from error
            if transfer.batch.n == 0:  # no option of a transfer, but the call `notify`
                raise errors.InvalidArgumentError(
                    f"topic must be a string and payload bytes, not {shown(notify[0])} and {shown(notify[1])}") from error
            raise errors.InvalidArgumentError(f"notify must be (topic: str, payload: bytes), not {shown(notify)}") from error
        if not transfer.topic:
            raise errors.InvalidArgumentError("the notification's topic is empty; subscribers need a name")
        cdef uint64_t total = len(<bytes>transfer.topic) + len(<bytes>transfer.note)
        if total > driver.note_limit:
            raise errors.InvalidArgumentError(
                f"the notification has {total} bytes (topic and payload); driver {driver.name!r} takes {driver.note_limit}: "
                "write the payload into a region and send its offset"
            )
        transfer.batch.topic = <const char *><bytes>transfer.topic
        transfer.batch.topic_len = <uint32_t>len(<bytes>transfer.topic)
        transfer.batch.note = <const char *><bytes>transfer.note
        transfer.batch.note_len = <uint32_t>len(<bytes>transfer.note)
        return 0

    cdef int _attach_signal(self, Transfer transfer, Driver driver, object signal) except -1:
        cdef RemoteSlice word
        if driver.capabilities & HXA_CAP_SIGNAL == 0:
            raise errors.DriverError(f"driver {driver.name!r} cannot store signals")
        try:
            place, value = signal
            if isinstance(value, bool):
                raise TypeError
            transfer.batch.signal_value = PyNumber_Index(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                f"signal must be (remote range of 8 bytes, value in 0..2**64-1), not {shown(signal)}"
            ) from error
        word = <RemoteSlice>place if type(place) is RemoteSlice else None
        if word is None or word.nbytes != 8 or word.start % 8:
            raise errors.InvalidArgumentError(
                f"the signal's range must be 8 aligned bytes of a remote region, not {shown(place)}"
            )
        other = word.memory.link
        if other is not transfer.link:
            if other is not None and other.cookie == transfer.link.cookie and other.driver.core is self:
                raise errors.DriverError(
                    f"{word.memory!r} is reached by driver {other.driver.name!r}, and the data's region by {driver.name!r}; a "
                    "signal needs the same driver: allocate or register both in the same way; the owner's region.ready() says "
                    "why one of them is not known to both drivers"
                )
            raise errors.InvalidArgumentError("the signal's region belongs to another peer than the data's")
        if not word.memory.usable:
            raise_gone(word.memory)
        check_access(word.memory, HXA_WRITE)
        transfer.batch.signal = word.memory.mems[driver.index]
        transfer.batch.signal_off = word.start
        transfer.signal = word.memory
        word.memory.holds += 1
        return 0

    def drained(self, buffer):
        """Wait until no operation of this engine touches the memory of `buffer`.

        It does not wait for accesses of peers: for these, revoke the region, and await its `released()`.

        :param buffer: a region, a range of one, or any buffer that was given to `read` or `write`.
        :return: a future; cancelling it only ends the wait.
        :raises BufferTypeError: if `buffer` has no contiguous memory.
        :raises ClosedError: if the engine is closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._check()
        if isinstance(buffer, (LocalSlice, RemoteSlice, Memory)):
            return buffer.drained()
        start, size, _, _ = extent(self, buffer)
        return self._drained_local(start, size)


cdef inline int _must_be_usable(Memory memory) except -1:
    if memory is not None and not memory.usable:
        raise_gone(memory)
    return 0


cdef int _must_be_up(Link link) except -1:
    if not link.up:
        raise link._down()
    return 0


cdef bytes _bytes_of(object payload):
    """Copy the contents of a buffer of any shape."""
    cdef Py_buffer view
    try:
        PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
    except (BufferError, ValueError):  # not contiguous
        PyObject_GetBuffer(payload, &view, PyBUF_FULL_RO)
    check_contents(payload, &view)
    try:
        copy = PyBytes_FromStringAndSize(NULL, view.len)
        PyBuffer_ToContiguous(PyBytes_AS_STRING(copy), &view, view.len, b"C")
        return copy
    finally:
        PyBuffer_Release(&view)


# -- the port for the engine package; functions, so that users do not find them at an engine

def set_object_support(Core core not None, address_of not None, begin_on_device not None):
    """Extend a core to objects without the buffer protocol.

    :param address_of: ``address_of(object, writable)`` returns ``(address, bytes, owner, on a device)``, or raises
        BufferTypeError.
    :param begin_on_device: ``begin_on_device(transfer)`` starts a copy that a device makes by itself; see `DeviceCopies`.
    """
    core.address_of, core.begin_on_device = address_of, begin_on_device


def extent(Core core not None, buffer):
    """Return where the memory of a buffer of any kind is.

    :return: its address, its bytes, True if it is on a device, and True if it is known to be read-only.
    :raises BufferTypeError: if it has no contiguous memory.
    """
    cdef Py_buffer view
    if not PyObject_CheckBuffer(buffer):
        address, size, _, device = core.address_of(buffer, False)
        return address, size, device, False
    try:
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    except (BufferError, ValueError, TypeError) as error:
        raise errors.BufferTypeError(f"{type(buffer).__name__} has no contiguous memory: {error}") from error
    found = <uint64_t>view.buf, <uint64_t>view.len, False, bool(view.readonly)
    PyBuffer_Release(&view)
    return found


def allocate(Core core not None, LocalMemory memory not None, Driver driver not None, uint64_t size, uint32_t rights):
    """Have `driver` allocate the bytes of a new `memory`.

    :param size: bytes.
    :param rights: the most that any peer may do with it, HXA_RIGHT_*.
    """
    cdef void *address = NULL
    core._must_be_new(memory)
    driver._must_be_open()
    cdef int answer = driver.table.mem_alloc(driver.instance, size, rights, &memory.mems[driver.index], &address)
    if answer:
        memory.mems[driver.index] = NULL
        raise refusal(driver, -answer, 0, f"allocation of {size} bytes")
    memory.allocator = driver.index + 1
    core._own(memory, <char *>address, size, rights)
    core._place(memory, driver)


def borrow(Core core not None, LocalMemory memory not None, buffer, uint32_t rights):
    """Give a new `memory` the bytes of a buffer object, which stays pinned and cannot be resized meanwhile."""
    core._must_be_new(memory)
    try:
        PyObject_GetBuffer(buffer, &memory.source, PyBUF_WRITABLE)
    except (BufferError, ValueError, TypeError):  # read-only, or not contiguous; the second attempt distinguishes them
        try:
            PyObject_GetBuffer(buffer, &memory.source, PyBUF_SIMPLE)
        except (BufferError, ValueError, TypeError) as error:
            raise errors.BufferTypeError(
                f"{type(buffer).__name__} has no contiguous memory to register: {error}"
            ) from error
    check_contents(buffer, &memory.source)
    memory.is_readonly = memory.source.readonly
    if memory.is_readonly and rights & HXA_RIGHT_WRITE:
        PyBuffer_Release(&memory.source)
        raise errors.BufferTypeError("a read-only buffer cannot be registered with write access")
    if memory.source.len == 0:
        PyBuffer_Release(&memory.source)
        raise errors.RangeError("the buffer is empty; there is nothing to register")
    core._own(memory, <char *>memory.source.buf, memory.source.len, rights)


def borrow_address(
        Core core not None, LocalMemory memory not None, owner, size_t address, uint64_t size, uint32_t rights, bint device):
    """Give a new `memory` the bytes at an address, of the host or a device; `owner` is kept alive."""
    core._must_be_new(memory)
    memory.owner, memory.on_device = owner, device
    core._own(memory, <char *>address, size, rights)


def register(Core core not None, LocalMemory memory not None, Driver driver not None):
    """Register `memory` with a further driver.

    :return: False if the driver cannot use memory of this kind.
    """
    cdef uint32_t kind = HXA_KIND_DEVICE if memory.on_device else HXA_KIND_HOST
    if memory.core is not core:
        raise_gone(memory)
    driver._must_be_open()
    cdef int answer = driver.table.mem_register(
        driver.instance, memory.address, memory.nbytes, kind, memory.rights, &memory.mems[driver.index])
    if answer:
        memory.mems[driver.index] = NULL
        if answer == -HXA_E_UNSUPPORTED:
            return False
        raise refusal(driver, -answer, 0, f"registration of {memory.nbytes} bytes")
    core._place(memory, driver)
    return True


def notify(Core core not None, Link link not None, notification, timeout=None):
    """Send a notification that belongs to no data.

    :param notification: ``(topic, payload)``, str and bytes.
    :param timeout: seconds from now within which it must be delivered.
    :return: a `Transfer`.
    """
    cdef Transfer transfer
    core._check()
    if link.driver.core is not core:
        raise errors.InvalidArgumentError("the link belongs to another engine")
    _must_be_up(link)
    transfer = new_transfer(core)
    transfer.link = link
    transfer.batch.verb = HXA_WRITE
    core._launch(transfer, notification, None, timeout, None)
    return transfer
