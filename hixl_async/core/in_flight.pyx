"""What is under way in one engine, from an accepted submit to its release: mailbox, drain, deadlines, back-pressure, the end.

Invariants C1-C10 are those of _core.pyx.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.ref cimport Py_DECREF, Py_INCREF

from .batch cimport Batch
from .link cimport (
    Driver, Hub, Link, MAX_DRIVERS, failure, hxa_letter, hxa_mailbox, hxa_mailbox_asleep, hxa_mailbox_awake,
    hxa_mailbox_signals, refusal,
)
from .memory cimport Memory, Places
from .transfer cimport ACTIVE, CANCELLED, CREDIT, DONE, Drain, FAILED, Transfer, hxa_now
from .driver cimport *

from asyncio import BaseEventLoop, CancelledError, current_task, wait
from collections import deque

from .. import errors

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
    void hxa_mailbox_clear(hxa_mailbox *box)
    int hxa_mailbox_arm(hxa_mailbox *box)
    void hxa_mailbox_close(hxa_mailbox *box)
    void free(void *)

cdef enum: DRAIN_NANOSECONDS = 1000000

cdef uint64_t fork_generation = 0


cdef void _forked() noexcept nogil:
    global fork_generation
    fork_generation += 1


pthread_atfork(NULL, NULL, _forked)


@cython.no_gc_clear
cdef class Flights(Hub):
    """One loop, one mailbox, and every slot that a driver has not given back."""

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
        self.plain = hasattr(loop, "_thread_id") and getattr(type(loop), "is_running", None) is BaseEventLoop.is_running
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
                or not (self.loop._thread_id is not None if self.plain else self.is_running())):
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

    def _must_be_on_thread(self):
        """Raises what any call raises in another thread or a child of fork(); a loop that stands still will do."""
        if PyThread_get_thread_ident() != self.thread or self.generation != fork_generation:
            self._refuse()

    @property
    def forked(self):
        """True in a process that was forked after this engine was opened."""
        return self.loop is not None and self.generation != fork_generation

    # -- waiting

    def _waiter(self):
        """What a task awaits until an event ends the wait by `_wake`; within `drain` the task then runs at once (C4)."""
        cdef Transfer waiter = Transfer.__new__(Transfer)
        self._must_be_on_thread()
        waiter.core, waiter.control = self, True
        return waiter

    cdef int _spend(self, int cost) except -1:
        """C8: work that needed no wait; whoever awaits next yields when the credit is gone."""
        if self.credit > -CREDIT:
            self.credit -= cost
        return 0

    def _breathe(self):
        """What to await where there is nothing to wait for, so that others run now and then (C8), or None."""
        cdef Transfer pause
        self._spend(1)
        if self.credit > 0:
            return None
        pause = self._waiter()
        pause.outcome, pause.cost = DONE, 1
        return pause

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

    def _next_in_crowd(self):
        """Whoever waited for room has given up; who comes after may need less."""
        self._admit()

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
            raise refusal(call.link.driver, -answer, op.native, what, call.link)
        return call

    cdef int _status(self, object call) except -1:
        return (<Transfer>call).op.status

    cdef int _fly(self, Transfer transfer, object timeout) except -1:
        """Accepted, and not over yet."""
        self.in_flight += 1
        self.bytes_in_flight += transfer.batch.bytes
        self._track(transfer)
        transfer.link.flights += 1
        transfer.moved = self.loop.time()
        if timeout is not None:
            transfer.timer = self.loop.call_later(timeout, transfer._expire, timeout)
        if self.watchdog is None:
            self.watchdog = self.loop.call_later(self.stall / 8, self._watch)
        return 0

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
        row = None if op.failed < 0 else transfer._failed_row()
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
                transfer._resolve(FAILED, self._failure(transfer, row))
        return 0

    cdef object _failure(self, Transfer transfer, object row):
        cdef Link link = transfer.link
        if transfer.control:
            return refusal(link.driver, transfer.op.status, transfer.op.native, link.what, link)
        what = f"{transfer._describe()} failed, the contents of its target are undefined"
        return failure(link, transfer.op.status, transfer.op.native, what, row)

    def drain(self):
        """Settles what drivers posted.  The loop calls it; it may be called from any code that runs on the loop's thread.

        :raises WrongLoopError: on another thread.
        """
        if self.finished:
            return
        self._must_be_on_thread()
        self._drain(current_task(self.loop) is None)

    def _signalled(self):
        """The loop found the mailbox's descriptor readable."""
        if not self.finished:
            self.credit = CREDIT  # a new pass of the loop
            hxa_mailbox_clear(self.box)
            self._drain(True)

    cdef int _drain(self, bint direct) except -1:
        cdef hxa_op *op
        cdef int left = self.burst
        cdef int64_t limit = 0
        if self.draining or self.finished:
            return 0
        self.draining, self.direct = True, direct
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
            self.draining = self.direct = False
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
        for transfer in self._all():
            if transfer.control or transfer.link.link == NULL:
                continue
            if transfer.outcome != ACTIVE and not transfer._abandonable():
                continue
            waiting = True
            landed = transfer._moved()
            if landed != transfer.landed:
                transfer.landed, transfer.moved = landed, now
            elif now - transfer.moved >= self.stall:
                if transfer._waits():
                    transfer.moved = now
                else:
                    transfer._time_out(f"made no progress for {self.stall:g} s")
        if waiting and not self.finished:
            self.watchdog = self.loop.call_later(self.stall / 8, self._watch)

    cdef list _all(self):
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
        self._must_be_on_thread()
        drain.future = self.loop.create_future()
        drain.missing = len(flights)
        if not flights:
            self._spend(1)
            if self.credit > 0:
                drain.future.set_result(None)
            else:
                self.credit = CREDIT
                self.call_soon(_set_none, drain.future)
        for transfer in flights:
            if transfer.drains is None:
                transfer.drains = []
            transfer.drains.append(drain)
        return drain.future

    async def _all_over(self, list transfers):
        """Waits until they are drained; whoever cancels that cancels them, but nobody leaves before.

        :return: the cancellation, if there was one.
        """
        interruption = None
        drained = self._drained_transfers(transfers)
        while not drained.done():
            try:
                await wait([drained])
            except CancelledError as error:
                interruption = error
                for transfer in transfers:
                    transfer.cancel()
        drained.result()
        return interruption

    def _drained(self, Memory memory, uint64_t offset, uint64_t length):
        """Waits for every flight that touches a range of a region."""
        cdef Transfer transfer
        if memory.address != NULL:
            return self._drained_local(<uint64_t>memory.address + offset, length)
        return self._drained_transfers([
            transfer for transfer in self._all() if _touches_remote(transfer, memory, offset, length)
        ])

    def _drained_local(self, uint64_t start, uint64_t size):
        """Waits for every flight that touches a range of this process's addresses."""
        cdef Transfer transfer
        return self._drained_transfers([
            transfer for transfer in self._all() if _touches_local(transfer, start, size)
        ])

    def _drained_link(self, Link link):
        """Waits for every flight over a link."""
        cdef Transfer transfer
        return self._drained_transfers([transfer for transfer in self._all() if transfer.link is link])

    # -- end

    def _refuse_work(self):
        """The first step of close (C7)."""
        self.closed = True
        if self.crowd:
            self._admit()

    def _all_drained(self):
        """Waits until every slot is released."""
        return self._drained_transfers(self._all())

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
        leaked = self._all()
        for transfer in leaked:
            kind = errors.ClosedError if transfer.control else errors.TransferError
            exc = kind(f"the engine was closed while a driver still held the memory of {transfer!r}; it is leaked")
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


def _set_none(future):
    if not future.done():
        future.set_result(None)


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
