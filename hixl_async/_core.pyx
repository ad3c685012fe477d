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
C8   A coroutine that only awaits finished operations still yields: `credit`.  A drain is capped:
     `burst`, DRAIN_NANOSECONDS.
C9   An engine belongs to one loop; a foreign loop raises WrongLoopError.
C10  After fork() the child's calls raise EngineForkedError and tear nothing down for the parent.
C11  Data before signal before notification: the drivers' rule T5; the core hands all three over in one batch.
C12  The GIL is held for copies estimated below ~100 us and released above.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.number cimport PyNumber_Index
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.math cimport INFINITY

from ._batch cimport Batch
from ._link cimport (
    Driver, Hub, Link, MAX_DRIVERS, driver_error, hxa_letter, hxa_mailbox, hxa_mailbox_asleep, hxa_mailbox_signals,
)
from ._memory cimport LocalMemory, Memory, Places, RemoteMemory, Slice, check_access, check_reach, raise_gone, whole
from ._transfer cimport ACTIVE, CANCELLED, COST_NANOSECONDS, CREDIT, DONE, Drain, FAILED, SMALL_BYTES, Transfer
from .driver cimport *

from asyncio import current_task
from collections import deque

from . import errors

cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept, void (*)() noexcept, void (*)() noexcept)

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from "hxa_mailbox.h" nogil:
    int hxa_mailbox_open(hxa_mailbox *box)
    void hxa_mailbox_post(void *ctx, hxa_op *op, uint32_t events)
    void hxa_mailbox_event(void *ctx, const hxa_event *event)
    hxa_op *hxa_mailbox_take_ops(hxa_mailbox *box)
    hxa_letter *hxa_mailbox_take_letters(hxa_mailbox *box)
    uint32_t hxa_mailbox_events(hxa_op *op)
    void hxa_mailbox_awake(hxa_mailbox *box)
    void hxa_mailbox_clear(hxa_mailbox *box)
    int hxa_mailbox_arm(hxa_mailbox *box)
    void hxa_mailbox_close(hxa_mailbox *box)
    void free(void *)

cdef extern from *:
    """
    #include <time.h>
    static inline int64_t hxa_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    """
    int64_t hxa_now() nogil

cdef enum: DRAIN_NANOSECONDS = 1000000
# C12: a cold copy of this much takes about 100 us.
cdef enum: GIL_BYTES = 384 << 10

cdef uint64_t fork_generation = 0


cdef void _forked() noexcept nogil:
    global fork_generation
    fork_generation += 1


pthread_atfork(NULL, NULL, _forked)

cdef dict PRIORITIES = {"low": HXA_PRIORITY_LOW, "normal": HXA_PRIORITY_NORMAL, "high": HXA_PRIORITY_HIGH}


@cython.no_gc_clear
cdef class Core(Hub):
    """What an `Engine` is made of: one loop, one mailbox, drivers, and the flights between them."""

    def __cinit__(self, *args, **kwargs):
        self.closed = True
        self.finished = True

    def _open(self, loop, handler, double stall, int burst, uint64_t max_bytes_in_flight):
        """Binds the core to `loop`; `handler(driver, kind, cookie, status, topic, data)` hears what drivers report.

        `burst` is the most that one pass of the loop takes of completions and of each link's notifications.
        """
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
        self.loop, self.handler, self.stall = loop, handler, stall
        self.call_soon, self.is_running = loop.call_soon, loop.is_running
        self.thread = PyThread_get_thread_ident()
        self.generation = fork_generation
        self.drivers, self.graveyard, self.places = (), [], Places()
        self.credit, self.burst = CREDIT, burst
        self.crowd, self.max_bytes_in_flight = deque(), max_bytes_in_flight
        self.closed = self.finished = False
        loop.add_reader(self.box.fd, self._signalled)

    cdef int _check(self) except -1:
        # C9: while our loop runs on this thread no other can.  To ask asyncio which one runs costs a getpid() before
        # Python 3.12, a third of a small write.
        if (self.closed or self.generation != fork_generation or PyThread_get_thread_ident() != self.thread
                or not self.is_running()):
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
            "an engine belongs to the event loop in which it was opened: call it there, from another thread by "
            "loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe; only push of KV streams may be called elsewhere"
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
            raise driver_error(driver, -answer, 0, f"allocation of {size} bytes", None)
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
            raise driver_error(driver, -answer, 0, f"registration of {memory.size} bytes", None)
        self._place(memory, driver)
        return True

    cdef int _place(self, LocalMemory memory, Driver driver) except -1:
        """`driver` knows `memory` from now on."""
        driver.memories += 1
        if driver.capabilities & HXA_CAP_LOCAL_ANY == 0:
            (<Places>self.places).add(memory)
        return 0

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
        self._launch(transfer, notify, signal, deadline, priority)
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

    def submit(self, batch, *, notify=None, signal=None, deadline=None, priority=None):
        """Starts a prepared batch; parameters and errors as for `write`.

        :return: a `Transfer`, already started; its result is the sum of the lengths.
        """
        self._check()
        if type(batch) is not Batch:
            raise errors.InvalidArgumentError(f"batch must be a hixl_async.Batch, not {type(batch).__name__}")
        return self._submit(batch, notify, signal, deadline, priority)

    cdef Transfer _submit(self, Batch batch, object notify, object signal, object deadline, object priority):
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
            if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline < INFINITY):
                raise errors.InvalidArgumentError(f"deadline must be a positive number of seconds, not {deadline!r}")
        except BaseException:
            transfer._unpin()
            raise
        transfer.op.owner = <void *>transfer
        transfer.op.failed = -1
        transfer.cost = 1
        if transfer.device is not None:
            self._fly_on_device(transfer, deadline)
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
            transfer.op.bytes = transfer.batch.bytes
            transfer._unpin()
            self.n_inline += 1
            self.n_bytes += transfer.batch.bytes
        elif answer == HXA_PENDING:
            self._fly(transfer, deadline)
        else:
            index = _failed_row(transfer)
            transfer._unpin()
            raise driver_error(driver, -answer, transfer.op.native, repr(transfer), transfer.link.peer, index)
        self.n_transfers += 1
        return 0

    cdef int _fly(self, Transfer transfer, object deadline) except -1:
        """Accepted, and not over yet."""
        self.in_flight += 1
        self.bytes_in_flight += transfer.batch.bytes
        self._track(transfer)
        transfer.link.flights += 1
        transfer.moved = self.loop.time()
        if deadline is not None:
            transfer.timer = self.loop.call_later(deadline, transfer._expire, deadline)
        if self.watchdog is None:
            self.watchdog = self.loop.call_later(self.stall / 8, self._watch)
        return 0

    cdef int _fly_on_device(self, Transfer transfer, object deadline) except -1:
        """A device's own engine copies; see `DeviceCopies`."""
        try:
            self._begin_on_device(transfer)
        except BaseException:
            transfer.device = None
            transfer._unpin()
            raise
        return self._fly(transfer, deadline)

    def _begin_on_device(self, Transfer transfer):
        raise errors.BufferTypeError("memory of a device cannot be used here")

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
            transfer.batch.signal_value = PyNumber_Index(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                "signal must be (remote range of 8 bytes, value in 0..2**64-1)"
            ) from error
        if word is None or not isinstance(word.memory, RemoteMemory) or word.length != 8 or word.offset % 8:
            raise errors.InvalidArgumentError("the signal's place must be 8 aligned bytes of a remote region")
        if (<RemoteMemory>word.memory).link is not transfer.link:
            raise errors.InvalidArgumentError("the signal's region belongs to another peer than the data's")
        if not word.memory.alive:
            raise_gone(word.memory)
        check_access(word.memory, HXA_WRITE)
        transfer.batch.signal = word.memory.mems[driver.index]
        transfer.batch.signal_off = word.offset
        transfer.signal = word.memory
        word.memory.flights += 1
        return 0

    # -- events

    def _waiter(self):
        """What a task awaits until an event ends the wait by `_wake`; within `drain` the task then runs at once (C4)."""
        cdef Transfer waiter = Transfer.__new__(Transfer)
        waiter.core, waiter.control = self, True
        return waiter

    # -- back-pressure

    cdef bint _fits(self, uint64_t nbytes) noexcept:
        cdef uint64_t taken = self.bytes_in_flight + self.promised
        return self.max_bytes_in_flight == 0 or taken == 0 or taken + nbytes <= self.max_bytes_in_flight

    def _room(self, uint64_t nbytes):
        """What to await before `nbytes` more may be submitted, or None."""
        if not self.crowd and self._fits(nbytes):
            return None
        waiter = self._waiter()
        self.crowd.append((nbytes, waiter))
        return waiter

    cdef int _admit(self) except -1:
        """Wakes those for whom there is room, in order.  What they may submit is theirs for this pass of the loop."""
        while self.crowd:
            nbytes, waiter = self.crowd[0]
            if not waiter.done():
                if not self.closed and not self._fits(nbytes):
                    return 0
                self.promised += <uint64_t>nbytes
                # Before the wake-up: what a resumed task raises passes through it.
                self.call_soon(self.call_soon, self._unpromise, nbytes)
            self.crowd.popleft()
            waiter._wake()
        return 0

    def _unpromise(self, uint64_t nbytes):
        self.promised -= nbytes
        self._admit()

    # -- flights

    cdef hxa_op *_control(self, Link link) except NULL:
        cdef Transfer call = Transfer.__new__(Transfer)
        call.core, call.link, call.control = self, link, True
        call.op.owner = <void *>call
        call.op.failed = -1
        Py_INCREF(call)  # until _answer
        return &call.op

    cdef object _answer(self, hxa_op *op, int answer, str what, object memory=None):
        cdef Transfer call = <Transfer>op.owner
        Py_DECREF(call)
        if answer == HXA_DONE:
            call.outcome = DONE
        elif answer == HXA_PENDING:
            self._track(call)
            call.link.flights += 1
            if memory is not None:
                call.remote = memory
                call.remote.flights += 1
        else:
            raise driver_error(call.link.driver, -answer, op.native, what, call.link.peer)
        return call

    cdef int _status(self, object call) except -1:
        return (<Transfer>call).op.status

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
        cdef Drain drain
        row = None if op.failed < 0 else _failed_row(transfer)
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
            if not transfer.control:
                self.bytes_in_flight -= transfer.batch.bytes
                if self.crowd:
                    self._admit()
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
                failed = f"{transfer!r} failed, the contents of its target are undefined"
                transfer._resolve(FAILED, driver_error(
                    transfer.link.driver, op.status, op.native, failed if not transfer.control else transfer.link.what,
                    transfer.link.peer, row))
        return 0

    def drain(self):
        """Settles what drivers posted.  The loop calls it; it may be called from any code that runs on the loop's thread."""
        self._drain(current_task(self.loop) is None)

    def _signalled(self):
        """The loop found the mailbox's descriptor readable."""
        if not self.finished:
            hxa_mailbox_clear(self.box)
            self._drain(True)

    cdef int _drain(self, bint direct) except -1:
        cdef hxa_op *op
        cdef int left = self.burst
        cdef int64_t limit = 0
        if self.draining or self.finished:
            return 0
        self.draining = direct
        self.drain_scheduled = False
        try:
            hxa_mailbox_awake(self.box)
            while True:
                if self.letters == NULL and self.backlog == NULL:
                    self.letters = hxa_mailbox_take_letters(self.box)
                    self.backlog = hxa_mailbox_take_ops(self.box)
                if self.letters != NULL:
                    self._deliver()
                elif self.backlog != NULL:
                    op = self.backlog
                    self.backlog = op.next
                    self._settle(op)
                else:
                    if self.graveyard:
                        self._bury_dead()
                    if not hxa_mailbox_arm(self.box):
                        return 0
                    continue
                left -= 1
                if left & 7 == 0 or left <= 0:
                    # C8; the finally clause comes back for the rest.  The first few pay for no clock.
                    if left <= 0 or (limit and hxa_now() > limit):
                        return 0
                    if limit == 0:
                        limit = hxa_now() + DRAIN_NANOSECONDS
        finally:
            self.draining = False
            if not hxa_mailbox_asleep(self.box) and not self.drain_scheduled and not self.finished:
                # Capped, or an exception such as KeyboardInterrupt passed through a resumed task: the rest must not wait.
                self.drain_scheduled = True
                self.call_soon(self.drain)

    def _bury_dead(self):
        cdef Memory memory
        dead, self.graveyard = self.graveyard, []
        for memory in dead:
            memory._bury()

    cdef int _deliver(self) except -1:
        """Hands the oldest event to the engine."""
        cdef hxa_letter *letter = self.letters
        # Taken off before the handler runs: what a resumed task raises (KeyboardInterrupt) must not lose the others.
        self.letters = letter.next
        topic = PyBytes_FromStringAndSize(<const char *>letter.event.topic, letter.event.topic_len)
        data = PyBytes_FromStringAndSize(<const char *>letter.event.data, letter.event.data_len)
        kind, status = letter.event.kind, letter.event.status
        index, cookie = letter.event.link % MAX_DRIVERS, letter.event.link // MAX_DRIVERS
        free(letter)
        try:
            self.handler(self.drivers[index], kind, cookie, status, topic, data)
        except Exception as error:
            self.loop.call_exception_handler({"message": "a driver's event could not be handled", "exception": error})
        return 0

    cdef int _settle_all(self) except -1:
        """At the end nothing that arrived is left to a later pass."""
        cdef hxa_op *op
        self._deliver_all()
        while True:
            if self.backlog == NULL:
                self.backlog = hxa_mailbox_take_ops(self.box)
                if self.backlog == NULL:
                    return 0
            op = self.backlog
            self.backlog = op.next
            self._settle(op)

    cdef int _deliver_all(self) except -1:
        while True:
            if self.letters == NULL:
                self.letters = hxa_mailbox_take_letters(self.box)
                if self.letters == NULL:
                    return 0
            self._deliver()

    def _watch(self):
        """The stall check: fails what made no progress for `stall` seconds."""
        cdef Transfer transfer
        cdef uint64_t landed
        cdef double now = self.loop.time()
        cdef bint waiting = self.in_flight > 0
        self.watchdog = None
        for transfer in self._flights():
            if transfer.control or transfer.link.link == NULL:
                continue
            if transfer.outcome != ACTIVE and not transfer._abandonable():
                continue
            waiting = True
            landed = transfer._moved()
            if landed != transfer.landed:
                transfer.landed, transfer.moved = landed, now
            elif now - transfer.moved >= self.stall:
                transfer._time_out(f"made no progress for {self.stall:g} s")
        if waiting and not self.finished:
            self.watchdog = self.loop.call_later(self.stall / 8, self._watch)

    cdef list _flights(self):
        """Everything that still pins memory; a copy, for callers may settle meanwhile."""
        cdef list flights = []
        cdef void *node = self.first
        while node != NULL:
            flights.append(<Transfer>node)
            node = (<Transfer>node).next
        return flights

    def _drained_transfers(self, list transfers):
        """Waits for the release of those that still fly."""
        cdef Drain drain = Drain.__new__(Drain)
        cdef Transfer transfer
        cdef list flights = [transfer for transfer in transfers if transfer.flying]
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

    def _drained_link(self, Link link):
        """Waits for every flight over a link."""
        cdef Transfer transfer
        return self._drained_transfers([transfer for transfer in self._flights() if transfer.link is link])

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

    # -- end

    def _refuse_work(self):
        """The first step of close (C7)."""
        self.closed = True
        if self.crowd:
            self._admit()

    def _all_drained(self):
        """Waits until every slot is released."""
        return self._drained_transfers(self._flights())

    def _finish(self):
        """The last step of close: what is still pinned is leaked, and its waiters are told.

        :return: the number of flights leaked.
        """
        cdef Transfer transfer
        cdef Drain drain
        cdef list leaked
        self.closed = True
        if self.finished:
            return 0
        self._settle_all()
        leaked = self._flights()
        for transfer in leaked:
            exc = errors.ClosedError(
                f"the engine was closed while a driver still held the memory of {transfer!r}; it is leaked"
            )
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
        self.handler = None
        self._bury_dead()
        self._dispose()
        return len(leaked)

    cdef int _dispose(self) except -1:
        """Frees the mailbox once the engine is finished and no driver is left that could post.

        An engine that was never closed leaks it, for a driver's thread may hold its address.
        """
        cdef Driver driver
        cdef hxa_letter *letter
        if not self.finished or self.box == NULL:
            return 0
        for driver in self.drivers:
            if driver.instance != NULL:
                return 0
        self.n_signals = hxa_mailbox_signals(self.box)
        while self.letters != NULL:
            letter = self.letters
            self.letters = letter.next
            free(letter)
        hxa_mailbox_close(self.box)
        PyMem_RawFree(self.box)
        self.box = NULL
        self.drivers = ()  # ends the circle through Driver.core, which the collector may not
        return 0

    def _after_fork(self):
        """In a child of fork(): closes the child's copies of descriptors; nothing of the parent's is torn down."""
        cdef Driver driver
        for driver in self.drivers:
            driver.after_fork()
        if self.box != NULL:
            hxa_mailbox_close(self.box)

    def _counters(self):
        signals = hxa_mailbox_signals(self.box) if self.box != NULL else self.n_signals
        return (self.n_transfers, self.n_inline, self.n_bytes, self.n_failed, signals)


cdef object _failed_row(Transfer transfer):
    """The number of the copy that failed, as the program listed it, or None."""
    cdef int64_t index = transfer.op.failed
    if type(transfer.local) is Batch:
        index = (<Batch>transfer.local)._row(index)
    return index if index >= 0 else None


cdef inline bint _overlap(uint64_t start, uint64_t size, uint64_t other, uint64_t length) noexcept:
    return size != 0 and start < other + length and other < start + size


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
