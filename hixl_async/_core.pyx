# cython: freethreading_compatible=False
"""The hot path: what a call checks, pins and hands to a driver.

Invariants; the core's modules cite them where they rely on them, and tests/core has a test for each.

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
C8   A coroutine that only awaits what is finished (transfers, drains, groups, room, notifications) still yields: `credit`,
     which work spends that finishes inside of a call.  A drain is capped: `burst`, DRAIN_NANOSECONDS.
C9   An engine belongs to one loop; a foreign loop raises WrongLoopError.
C10  After fork() the child's calls raise EngineForkedError and tear nothing down for the parent.
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
from libc.math cimport INFINITY

from .core.batch cimport Batch
from .core.in_flight cimport Flights
from .core.link cimport Driver, Link, refusal
from .core.memory cimport (
    LocalMemory, Memory, Places, RemoteMemory, Slice, check_access, check_contents, check_reach, raise_gone, whole,
)
from .core.transfer cimport COST_NANOSECONDS, CREDIT, DONE, SMALL_BYTES, Transfer, hxa_now
from .core.driver cimport *

from . import errors

# C12: a cold copy of this much takes about 100 us.
cdef enum: GIL_BYTES = 384 << 10

cdef dict PRIORITIES = {"low": HXA_PRIORITY_LOW, "normal": HXA_PRIORITY_NORMAL, "high": HXA_PRIORITY_HIGH}


@cython.no_gc_clear
cdef class Core(Flights):
    """What an `Engine` is made of: its memory, and what begins flights."""

    # -- memory

    def _adopt(self, LocalMemory memory, Driver driver, uint64_t size, uint32_t rights):
        """Lets `driver` allocate `size` bytes for `memory`."""
        cdef void *address = NULL
        cdef int answer = driver.table.mem_alloc(driver.instance, size, rights, &memory.mems[driver.index], &address)
        if answer:
            memory.mems[driver.index] = NULL
            raise refusal(driver, -answer, 0, f"allocation of {size} bytes")
        memory.allocator = driver.index + 1
        self._own(memory, <char *>address, size, rights)
        self._place(memory, driver)

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
        check_contents(buffer, &memory.source)
        memory.readonly = memory.source.readonly
        if memory.readonly and rights & HXA_RIGHT_WRITE:
            PyBuffer_Release(&memory.source)
            raise errors.BufferTypeError("a read-only buffer cannot be registered with write access")
        if memory.source.len == 0:
            PyBuffer_Release(&memory.source)
            raise errors.RangeError("the buffer is empty; there is nothing to register")
        self._own(memory, <char *>memory.source.buf, memory.source.len, rights)

    def _borrow_address(self, LocalMemory memory, owner, size_t address, uint64_t size, uint32_t rights, bint device):
        """Takes memory by address, of the host or a device; `owner` is kept alive."""
        memory.owner, memory.device = owner, device
        self._own(memory, <char *>address, size, rights)

    cdef int _own(self, LocalMemory memory, char *address, uint64_t size, uint32_t rights) except -1:
        memory.core, memory.address, memory.size, memory.rights, memory.alive = self, address, size, rights, True
        self.local_memories += 1
        return 0

    def _register(self, LocalMemory memory, Driver driver):
        """Makes `memory` known to a further driver; False if that cannot use memory of this kind."""
        cdef uint32_t kind = HXA_KIND_DEVICE if memory.device else HXA_KIND_HOST
        cdef int answer = driver.table.mem_register(
            driver.instance, memory.address, memory.size, kind, memory.rights, &memory.mems[driver.index])
        if answer:
            memory.mems[driver.index] = NULL
            if answer == -HXA_E_UNSUPPORTED:
                return False
            raise refusal(driver, -answer, 0, f"registration of {memory.size} bytes")
        self._place(memory, driver)
        return True

    cdef int _place(self, LocalMemory memory, Driver driver) except -1:
        """`driver` knows `memory` from now on."""
        driver.memories += 1
        if driver.capabilities & HXA_CAP_LOCAL_ANY == 0:
            (<Places>self.places).add(memory)
        return 0

    # -- work

    def write(self, local, remote, *, notify=None, signal=None, timeout=None, priority=None):
        """Copies `local` into the peer's memory; done means that the bytes are there.

        :param local: a range of a local region, or any contiguous buffer (bytes, numpy, memoryview, CPU tensor).
        :param remote: a range of a remote region, of the same length.
        :param notify: ``(topic, payload)``: one notification to the peer after the data; str and bytes.
        :param signal: ``(remote range of 8 bytes, value)``: one 64-bit word stored after the data.
        :param timeout: seconds from now within which it must finish, progress or not; default: no limit but the stall check.
        :param priority: ``"low"``, ``"normal"`` or ``"high"``.
        :return: a `Transfer`, already started.
        :raises RangeError: if a range is empty, outside of its region, or the lengths differ.
        :raises AccessError: if the region does not grant writing.
        :raises BufferTypeError: if `local` has no contiguous memory, or holds references to Python objects.
        :raises PeerDownError: if the peer is down.
        :raises StaleRegionError: if the remote region was closed.
        :raises BusyError: if a bounded queue of the driver is full.
        """
        return self._single(HXA_WRITE, local, remote, notify, signal, timeout, priority)

    def read(self, local, remote, *, notify=None, signal=None, timeout=None, priority=None):
        """Copies from the peer's memory into `local`; done means that the bytes are here.

        Parameters and errors as for `write`; `local` must be writable.
        """
        return self._single(HXA_READ, local, remote, notify, signal, timeout, priority)

    cdef Transfer _single(self, uint32_t verb, object local, object remote, object notify, object signal,
                          object timeout, object priority):
        cdef Transfer transfer
        cdef Slice left, right
        cdef RemoteMemory target
        cdef Link link
        cdef uint64_t length
        self._check()
        # C6: everything is checked before anything is pinned or posted.
        if type(remote) is not Slice or not isinstance((<Slice>remote).memory, RemoteMemory):
            right = whole(remote, "remote", RemoteMemory)
        else:
            right = <Slice>remote
        target = <RemoteMemory>right.memory
        if not target.alive:
            raise_gone(target)
        link = target.link
        if link.driver.core is not self:
            raise errors.InvalidArgumentError(f"{target!r} belongs to another engine")
        if not link.up:
            raise_gone(target)
        check_access(target, verb)
        transfer = Transfer.__new__(Transfer)
        transfer.core = self
        transfer.link = link
        transfer.batch.verb = verb
        if type(local) is Slice:
            left = <Slice>local
            length = left.length
            self._pin_slice(transfer, left, verb, link)
        elif isinstance(local, Memory):
            left = whole(local, "local", LocalMemory)
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
        self._launch(transfer, notify, signal, timeout, priority)
        return transfer

    cdef int _pin_slice(self, Transfer transfer, Slice left, uint32_t verb, Link link) except -1:
        cdef Memory memory = left.memory
        if memory.address == NULL or memory.core is not self:
            whole(left, "local", LocalMemory)
            if memory.core is not None and memory.core is not self:
                raise errors.InvalidArgumentError(f"{memory!r} belongs to another engine")
            raise errors.ClosedError(f"{memory!r} is closed, or belongs to no engine")
        if not memory.alive:
            raise errors.ClosedError(f"{memory!r} was closed; no new work may use it")
        if verb == HXA_READ and (<LocalMemory>memory).readonly:
            raise errors.BufferTypeError("the local region was registered from a read-only buffer; it cannot be read into")
        transfer.desc.lmem = memory.mems[link.driver.index]
        transfer.desc.loff = left.offset
        if transfer.desc.lmem == NULL:
            check_reach(<LocalMemory>memory, link.driver)
            transfer.desc.loff += <uint64_t>memory.address
        transfer.local = memory
        memory.flights += 1
        return 0

    cdef uint64_t _pin_buffer(self, Transfer transfer, object local, uint32_t verb, Link link) except? <uint64_t>-1:
        cdef uint64_t size
        cdef bint anywhere = link.driver.capabilities & HXA_CAP_LOCAL_ANY
        if not PyObject_CheckBuffer(local):
            transfer.desc.loff, size, owner, device = self._address_of(local, verb == HXA_READ)
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
                f"local {type(local).__name__} cannot be used: {error}; it must be contiguous"
                + (" and writable to be read into" if verb == HXA_READ else "")
            ) from error
        check_contents(local, &transfer.view)
        transfer.desc.loff = <uint64_t>transfer.view.buf
        size = transfer.view.len
        if not anywhere:
            PyBuffer_Release(&transfer.view)  # the region that it lies in keeps it alive
            self._find_place(transfer, local, size, link.driver, False)
        return size

    cdef int _find_place(self, Transfer transfer, object local, uint64_t size, Driver driver, bint device) except -1:
        """Names an address of ours by the region that it lies in, for a driver that moves nothing else."""
        cdef LocalMemory memory = (<Places>self.places).find(transfer.desc.loff, size, driver.index)
        if memory is None:
            raise errors.BufferTypeError(
                f"driver {driver.name!r} moves {'device ' if device else ''}memory only where it is registered, and this "
                f"{type(local).__name__} lies in no region that it knows; engine.register(name, buffer) the memory first, "
                "once, and use any part of it"
            )
        transfer.desc.lmem = memory.mems[driver.index]
        transfer.desc.loff -= <uint64_t>memory.address
        transfer.local = memory
        memory.flights += 1
        return 0

    def _address_of(self, local, writable):
        """``(address, bytes, owner, on a device)`` of an object without the buffer protocol; `Engine` knows more kinds."""
        raise errors.BufferTypeError(f"local must be a region's range or a contiguous buffer, not {type(local).__name__}")

    def submit(self, batch, *, notify=None, signal=None, timeout=None, priority=None):
        """Starts a prepared batch; parameters and errors as for `write`.

        :return: a `Transfer`, already started; its result is the sum of the lengths.
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
            if not memory.alive:
                raise_gone(memory)
        if not batch.link.up:
            raise_gone(batch.memories[1])
        transfer = Transfer.__new__(Transfer)
        transfer.core, transfer.link, transfer.local = self, batch.link, batch
        for memory in batch.memories:
            memory.flights += 1
        transfer.batch.verb = batch.verb
        transfer.batch.n = batch.count
        transfer.batch.desc = batch.desc
        transfer.batch.bytes = batch.nbytes
        self._launch(transfer, notify, signal, timeout, priority)
        return transfer

    def _post_note(self, Link link, notify, timeout=None):
        """A bare notification over `link`; returns a Transfer."""
        cdef Transfer transfer
        self._check()
        if not link.up:
            raise link._down()
        transfer = Transfer.__new__(Transfer)
        transfer.core, transfer.link = self, link
        transfer.batch.verb = HXA_WRITE
        self._launch(transfer, notify, None, timeout, None)
        return transfer

    cdef int _launch(self, Transfer transfer, object notify, object signal, object timeout, object priority) except -1:
        """Hands a pinned transfer to its driver; on any refusal everything is unpinned and nothing was sent."""
        cdef Driver driver = transfer.link.driver
        cdef hxa_link *link = transfer.link.link
        cdef int64_t began
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
            if self.max_bytes_in_flight and self.bytes_in_flight and (
                    self.bytes_in_flight + transfer.batch.bytes > self.max_bytes_in_flight):
                raise errors.BusyError(
                    f"{self.bytes_in_flight} of at most {self.max_bytes_in_flight} bytes are in flight, {transfer.batch.bytes} "
                    "more do not fit; await engine.room(nbytes) before"
                )
            if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < INFINITY):
                raise errors.InvalidArgumentError(f"timeout must be a positive number of seconds, not {timeout!r}")
        except BaseException:
            transfer._unpin()
            raise
        transfer.op.owner = <void *>transfer
        transfer.op.failed = -1
        transfer.cost = 1
        if transfer.device is not None:
            self._fly_on_device(transfer, timeout)
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
                transfer.cost += <int>min((hxa_now() - began) / COST_NANOSECONDS, CREDIT)
        if answer == HXA_DONE:
            transfer.outcome = DONE
            self._spend(transfer.cost)
            transfer.op.bytes = transfer.batch.bytes
            transfer._unpin()
            self.n_inline += 1
            self.n_bytes += transfer.batch.bytes
        elif answer == HXA_PENDING:
            self._fly(transfer, timeout)
        else:
            index = transfer._failed_row()
            transfer._unpin()
            raise refusal(driver, -answer, transfer.op.native, f"{transfer._describe()} was refused",
                          transfer.link, index)
        self.n_transfers += 1
        return 0

    cdef int _fly_on_device(self, Transfer transfer, object timeout) except -1:
        """A device's own engine copies; see `DeviceCopies`."""
        try:
            self._begin_on_device(transfer)
        except BaseException:
            transfer.device = None
            transfer._unpin()
            raise
        return self._fly(transfer, timeout)

    def _begin_on_device(self, Transfer transfer):
        raise errors.BufferTypeError("memory of a device cannot be used here")

    cdef int _attach_note(self, Transfer transfer, Driver driver, object notify) except -1:
        if driver.capabilities & HXA_CAP_NOTIFY == 0:
            raise errors.DriverError(f"driver {driver.name!r} cannot carry notifications")
        try:
            topic, payload = notify
            transfer.topic = topic.encode()
            transfer.note = payload if type(payload) is bytes else _bytes_of(payload)
        except (BufferError, TypeError, ValueError, AttributeError, UnicodeError) as error:
            if isinstance(error, errors.HixlError):
                raise
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
            transfer.batch.signal_value = PyNumber_Index(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                "signal must be (remote range of 8 bytes, value in 0..2**64-1)"
            ) from error
        if word is None or not isinstance(word.memory, RemoteMemory) or word.length != 8 or word.offset % 8:
            raise errors.InvalidArgumentError("the signal's place must be 8 aligned bytes of a remote region")
        other = (<RemoteMemory>word.memory).link
        if other is not transfer.link:
            if other is not None and other.cookie == transfer.link.cookie and other.driver.core is self:
                raise errors.DriverError(
                    f"{word.memory!r} is reached by driver {other.driver.name!r}, and the data's region by {driver.name!r}; a "
                    "signal needs the same way: allocate or register both in the same manner, and look why one of them is not "
                    "known to both drivers (await region.ready() tells its owner)"
                )
            raise errors.InvalidArgumentError("the signal's region belongs to another peer than the data's")
        if not word.memory.alive:
            raise_gone(word.memory)
        check_access(word.memory, HXA_WRITE)
        transfer.batch.signal = word.memory.mems[driver.index]
        transfer.batch.signal_off = word.offset
        transfer.signal = word.memory
        word.memory.flights += 1
        return 0

    def drained(self, buffer):
        """Waits until no flight of ours touches the memory of `buffer`: a region, a range of one, or any buffer given to read
        or write.  What peers do to a region of ours is another matter: revoke it, and await its `released()`.

        :return: an awaitable; cancelling it only ends the wait.
        :raises BufferTypeError: if `buffer` has no contiguous memory.
        """
        cdef Py_buffer view
        cdef Slice piece
        cdef uint64_t start, size
        self._check()
        if isinstance(buffer, (Slice, Memory)):
            piece = whole(buffer, "buffer", Memory)
            return self._drained(piece.memory, piece.offset, piece.length)
        if PyObject_CheckBuffer(buffer):
            try:
                PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
            except (BufferError, ValueError, TypeError) as error:
                raise errors.BufferTypeError(f"{type(buffer).__name__} has no contiguous memory: {error}") from error
            start, size = <uint64_t>view.buf, view.len
            PyBuffer_Release(&view)
        else:
            start, size, _, _ = self._address_of(buffer, False)
        return self._drained_local(start, size)


cdef bytes _bytes_of(object payload):
    """A copy of what a buffer of any shape holds."""
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
