"""The operations in flight of one engine, from accepted submit to release: mailbox, drain, timeouts, back-pressure, close.

C1 to C10 are the invariants of _core.pyx.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.ref cimport Py_DECREF, Py_INCREF

from .batch cimport Batch
from .link cimport (
    Driver, CoreBase, Link, MAX_DRIVERS, failure, refusal, hxa_event_node, hxa_mailbox, hxa_mailbox_asleep, hxa_mailbox_awake,
    hxa_mailbox_signals,
)
from .memory cimport Memory, Places
from .transfer cimport ACTIVE, BUDGET, CANCELLED, DONE, Drain, FAILED, Transfer, hxa_now, new_transfer
from .driver cimport *

from asyncio import BaseEventLoop, CancelledError, _get_running_loop, current_task, wait
from collections import deque

from .. import errors
from .guard import report
from .transfer import wake

cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept, void (*)() noexcept, void (*)() noexcept)

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from "hxa_mailbox.h" nogil:
    int hxa_mailbox_open(hxa_mailbox *box)
    void hxa_mailbox_post(void *ctx, hxa_op *op, uint32_t events)
    void hxa_mailbox_event(void *ctx, const hxa_event *event)
    hxa_op *hxa_mailbox_take_ops(hxa_mailbox *box)
    hxa_event_node *hxa_mailbox_take_event_nodes(hxa_mailbox *box)
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
cdef class InFlightTable(CoreBase):
    """The loop, the mailbox, and every slot that a driver has not released."""

    def __cinit__(self, *args, **kwargs):
        self.is_closed = True
        self.finished = True

    @property
    def closed(self):
        """True before the engine is opened, and once `aclose` has begun."""
        return self.is_closed

    @property
    def forked(self):
        """True in a process that was forked after this engine was opened."""
        return self._forked()

    @property
    def bytes_in_flight(self):
        """The number of bytes of transfers whose memory is pinned."""
        return self.n_bytes_in_flight

    cdef bint _forked(self) noexcept:
        return self.event_loop is not None and self.generation != fork_generation

    cdef int _check(self) except -1:
        # C9: while our loop runs on this thread no other can.  asyncio.get_running_loop() costs a getpid() before Python
        # 3.12, a third of a small write.
        if (self.is_closed or self.generation != fork_generation or PyThread_get_thread_ident() != self.thread
                or not (self.event_loop._thread_id is not None if self.plain else self.is_running())):
            self._refuse()
        return 0

    cdef int _refuse(self) except -1:
        """Raise the reason why a call cannot be served."""
        if self._forked():
            raise errors.EngineForkedError(
                "this engine was opened before fork(); open one in each process, for example in the worker's start-up hook"
            )
        on_thread = PyThread_get_thread_ident() == self.thread
        if self.is_closed and (on_thread or self.finished):
            raise errors.ClosedError("the engine is closed" if self.event_loop is not None else
                                     "the engine is not open; use 'async with Engine(...)' or await engine.open()")
        if on_thread and _get_running_loop() is None:
            raise errors.WrongLoopError(
                "an engine belongs to the event loop in which it was opened, and that loop is not running: make the call "
                "inside a coroutine that it runs, for example by runner.run(...) or loop.run_until_complete(...)"
            )
        raise errors.WrongLoopError(
            "an engine belongs to the event loop in which it was opened: call it there, from another thread by "
            "loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe; only push of KV streams may be called elsewhere"
        )

    cdef int _must_be_on_thread(self) except -1:
        """Raise on another thread than the loop's, and in a child of fork(); the loop need not run."""
        if PyThread_get_thread_ident() != self.thread or self.generation != fork_generation:
            self._refuse()
        return 0

    # -- waiting

    cdef object _new_waiter(self):
        cdef Transfer waiter
        self._must_be_on_thread()
        waiter = new_transfer(self)
        waiter.control = True
        return waiter

    cdef int _spend(self, int cost) except -1:
        """Charge the budget for work that finished without a wait; once it is spent the next await yields (C8)."""
        if self.budget > -BUDGET:
            self.budget -= cost
        return 0

    # -- back-pressure

    cdef bint _fits(self, uint64_t nbytes) noexcept:
        cdef uint64_t taken = self.n_bytes_in_flight + self.promised
        return self.max_bytes_in_flight == 0 or taken == 0 or taken + nbytes <= self.max_bytes_in_flight

    cdef int _admit(self) except -1:
        """Wake the waiters that fit, in order.  Their bytes are reserved for this pass of the loop."""
        while self.room_waiters:
            nbytes, waiter = self.room_waiters[0]
            if not waiter.done():
                if not self.is_closed and not self._fits(nbytes):
                    return 0
                self.promised += <uint64_t>nbytes
                # Before the wake-up, which passes on exceptions of a resumed task.
                self.call_soon(self.call_soon, _unpromise, self, nbytes)
            self.room_waiters.popleft()
            wake(waiter)
        return 0

    # -- from submit to release

    cdef hxa_op *_begin_call(self, Link link) except NULL:
        cdef Transfer call = new_transfer(self)
        call.link, call.control = link, True
        call.op.owner = <void *>call
        call.op.failed = -1
        Py_INCREF(call)  # until _end_call
        return &call.op

    cdef object _end_call(self, hxa_op *op, int answer, str what, object memory=None):
        cdef Transfer call = <Transfer>op.owner
        Py_DECREF(call)
        if answer == HXA_DONE:
            call.outcome = DONE
        elif answer == HXA_PENDING:
            self._track(call)
            if memory is not None:
                call.remote = memory
                call.remote.holds += 1
        else:
            raise refusal(call.link.driver, -answer, op.native, what, call.link)
        return call

    cdef int _call_status(self, object call) except -1:
        return (<Transfer>call).op.status

    cdef int _accept(self, Transfer transfer) except -1:
        """Add a transfer that the driver has accepted and not finished."""
        self.n_in_flight += 1
        self.n_bytes_in_flight += transfer.batch.bytes
        self._track(transfer)
        transfer.moved = self.event_loop.time()
        if transfer.timeout:
            transfer.timer = self.event_loop.call_later(transfer.timeout, _expire, transfer)
        if self.watchdog is None:
            self.watchdog = self.event_loop.call_later(self.stall / 8, _check_progress, self)
        return 0

    cdef int _track(self, Transfer transfer) except -1:
        Py_INCREF(transfer)  # C1: the reference of the operation in flight
        transfer.held = True
        transfer.next = self.first
        if self.first != NULL:
            (<Transfer>self.first).prev = <void *>transfer
        self.first = <void *>transfer
        self.pinned += 1
        return 0

    cdef int _settle(self, hxa_op *op) except -1:
        """Settle one op from the mailbox: its completion, its release, or both (C2)."""
        cdef Transfer transfer = <Transfer>op.owner
        cdef uint32_t events = hxa_mailbox_events(op)
        if op.status == HXA_E_LINK and self._withholds(transfer, events):
            return 0
        return self._settle_events(transfer, events)

    cdef bint _withholds(self, Transfer transfer, uint32_t events) except *:
        """Keep back the failure of a transfer whose link broke while the cause is awaited; see `Link.explain_by`."""
        cdef Link link = transfer.link
        if transfer.control or transfer.outcome != ACTIVE or link.cause_awaited is None:
            return False
        if not link.withheld and not link.cause_awaited():
            return False
        link.withheld.append((transfer, events))
        return True

    cdef int _settle_withheld(self, Link link) except -1:
        cdef Transfer transfer
        withheld, link.withheld = link.withheld, []
        self.direct = False  # the caller is in the middle of its work, so that no task may run now
        for transfer, events in withheld:
            self._settle_events(transfer, events)
        return 0

    cdef int _settle_events(self, Transfer transfer, uint32_t events) except -1:
        cdef hxa_op *op = &transfer.op
        cdef Drain drain
        row = None if op.failed < 0 else transfer._failed_row()
        if events & HXA_RELEASED:
            transfer.held = False
            if transfer.prev != NULL:
                (<Transfer>transfer.prev).next = transfer.next
            else:
                self.first = transfer.next
            if transfer.next != NULL:
                (<Transfer>transfer.next).prev = transfer.prev
            transfer.next = transfer.prev = NULL
            self.pinned -= 1
            transfer._unpin()
            if not transfer.control:
                self.n_bytes_in_flight -= transfer.batch.bytes
                if self.room_waiters:
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
                if self.event_nodes == NULL and self.ops == NULL:
                    self.event_nodes = hxa_mailbox_take_event_nodes(self.box)
                    self.ops = hxa_mailbox_take_ops(self.box)
                if self.event_nodes != NULL:
                    self._deliver()
                elif self.ops != NULL:
                    op = self.ops
                    self.ops = op.next
                    self._settle(op)
                else:
                    if self.deferred:
                        self._release_deferred()
                    if not hxa_mailbox_arm(self.box):
                        return 0
                    continue
                left -= 1
                if left & 7 == 0 or left <= 0:
                    # C8; the finally clause schedules the rest.  The first few read no clock.
                    if left <= 0 or (limit and hxa_now() > limit):
                        return 0
                    if limit == 0:
                        limit = hxa_now() + DRAIN_NANOSECONDS
        finally:
            self.draining = self.direct = False
            if not hxa_mailbox_asleep(self.box) and not self.drain_scheduled and not self.finished:
                # Capped, or a resumed task raised, for example KeyboardInterrupt: the rest must not wait for a signal.
                self.drain_scheduled = True
                self.call_soon(_drain_again, self)

    cdef int _release_deferred(self) except -1:
        cdef Memory memory
        dropped, self.deferred = self.deferred, []
        for memory in dropped:
            memory._release_when_unused()
        return 0

    cdef int _deliver(self) except -1:
        """Deliver the oldest event to the engine."""
        cdef hxa_event_node *node = self.event_nodes
        # Removed before the handler runs, because an exception of a resumed task (KeyboardInterrupt) must not lose the others.
        self.event_nodes = node.next
        topic = PyBytes_FromStringAndSize(<const char *>node.event.topic, node.event.topic_len)
        data = PyBytes_FromStringAndSize(<const char *>node.event.data, node.event.data_len)
        kind, status = node.event.kind, node.event.status
        index, cookie = node.event.link % MAX_DRIVERS, node.event.link // MAX_DRIVERS
        free(node)
        try:
            self.handler(self.drivers[index], kind, cookie, status, topic, data)
        except (KeyboardInterrupt, SystemExit):  # of a task that the event has resumed
            raise
        except BaseException as error:
            report(self.event_loop, "a driver's event could not be handled", error)
        return 0

    cdef object _failure(self, Transfer transfer, object row):
        """Return the error of an accepted operation that failed."""
        cdef Link link = transfer.link
        if transfer.control:
            return refusal(link.driver, transfer.op.status, transfer.op.native, link.what, link)
        what = f"{transfer._describe()} failed, and {transfer._aftermath()}"
        return failure(link, transfer.op.status, transfer.op.native, what, row)

    cdef int _settle_all(self) except -1:
        """Settle everything that has arrived without a cap, because close has no later pass."""
        cdef hxa_op *op
        self._deliver_all()
        while True:
            if self.ops == NULL:
                self.ops = hxa_mailbox_take_ops(self.box)
                if self.ops == NULL:
                    return 0
            op = self.ops
            self.ops = op.next
            self._settle(op)

    cdef int _deliver_all(self) except -1:
        while True:
            if self.event_nodes == NULL:
                self.event_nodes = hxa_mailbox_take_event_nodes(self.box)
                if self.event_nodes == NULL:
                    return 0
            self._deliver()

    cdef int _check_progress(self) except -1:
        """Fail the transfers that made no progress for `stall` seconds."""
        cdef Transfer transfer
        cdef uint64_t landed
        cdef double now = self.event_loop.time()
        cdef bint waiting = self.n_in_flight > 0
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
            self.watchdog = self.event_loop.call_later(self.stall / 8, _check_progress, self)
        return 0

    cdef list _all(self):
        """List every operation that still pins memory; a copy, because callers may settle some meanwhile."""
        cdef list found = []
        cdef void *node = self.first
        while node != NULL:
            found.append(<Transfer>node)
            node = (<Transfer>node).next
        return found

    cdef object _drained_transfers(self, list transfers):
        cdef Drain drain = Drain.__new__(Drain)
        cdef Transfer transfer
        cdef list held = [transfer for transfer in transfers if (<Transfer?>transfer).held]
        self._must_be_on_thread()
        drain.future = self.event_loop.create_future()
        drain.missing = len(held)
        if not held:
            self._spend(1)
            if self.budget > 0:
                drain.future.set_result(None)
            else:
                self.budget = BUDGET
                self.call_soon(_set_none, drain.future)
        for transfer in held:
            if transfer.drains is None:
                transfer.drains = []
            transfer.drains.append(drain)
        return drain.future

    cdef bint _all_released(self, list transfers) except -1:
        cdef Transfer transfer
        for transfer in transfers:
            if transfer.held:
                return False
        return True

    cdef object _drained_range(self, object memory, uint64_t offset, uint64_t length):
        cdef Memory region = memory
        cdef Transfer transfer
        if region.address != NULL:
            return self._drained_local(<uint64_t>region.address + offset, length)
        return self._drained_transfers([
            transfer for transfer in self._all() if _touches_remote(transfer, region, offset, length)
        ])

    cdef object _drained_local(self, uint64_t start, uint64_t size):
        """Return an awaitable for the release of every operation that touches a range of this process's addresses."""
        cdef Transfer transfer
        return self._drained_transfers([
            transfer for transfer in self._all() if _touches_local(transfer, start, size)
        ])

    cdef object _drained_link(self, Link link):
        cdef Transfer transfer
        return self._drained_transfers([transfer for transfer in self._all() if transfer.link is link])

    # -- end

    cdef int _finish(self) except -1:
        """End the core (C7): leak what is still pinned, wake its waiters, and return the number of operations leaked."""
        cdef Transfer transfer
        cdef Drain drain
        cdef Driver driver
        cdef list leaked
        self.is_closed = True
        if self.finished:
            return 0
        for driver in self.drivers or ():
            driver._end_watch()
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
        if not self.event_loop.is_closed():
            self.event_loop.remove_reader(self.box.fd)
        self.handler = None
        self._release_deferred()
        self._dispose()
        return len(leaked)

    cdef int _dispose(self) except -1:
        """Free the mailbox once the core is finished and all drivers that could post are closed.

        An engine that was never closed leaks it, because a driver's thread may hold its address.
        """
        cdef Driver driver
        cdef hxa_event_node *node
        if not self.finished or self.box == NULL:
            return 0
        for driver in self.drivers:
            if driver.instance != NULL:
                return 0
        self.n_signals = hxa_mailbox_signals(self.box)
        while self.event_nodes != NULL:
            node = self.event_nodes
            self.event_nodes = node.next
            free(node)
        hxa_mailbox_close(self.box)
        PyMem_RawFree(self.box)
        self.box = NULL
        self.drivers = ()  # breaks the cycle through Driver.core, which the collector may not break
        return 0


# -- callbacks of the loop

def _signalled(InFlightTable core not None):
    """Drain the mailbox, whose descriptor is readable."""
    if not core.finished:
        core.budget = BUDGET  # a new pass of the loop
        hxa_mailbox_clear(core.box)
        core._drain(True)


def _drain_again(InFlightTable core not None):
    drain(core)


def _unpromise(InFlightTable core not None, uint64_t nbytes):
    core.promised -= nbytes
    core._admit()


def _check_progress(InFlightTable core not None):
    core._check_progress()


def _expire(Transfer transfer not None):
    """Fail a transfer whose timeout has passed."""
    transfer.timer = None
    transfer._time_out(f"did not finish within its timeout of {transfer.timeout:g} s")


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
    """Return True if a transfer touches local addresses; a descriptor counts from the start of the memory with its handle."""
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


# -- the port for the engine package; functions, so that users do not find them at an engine

def start(InFlightTable core not None, loop not None, handler not None, double stall, int burst, uint64_t max_bytes_in_flight):
    """Bind a core to its event loop, for good.

    :param handler: ``handler(driver, kind, cookie, status, topic, data)`` receives the drivers' events.
    :param stall: seconds without progress after which a transfer fails.
    :param burst: the most completions, and notifications of each link, that one pass of the loop takes.
    :param max_bytes_in_flight: the most bytes of transfers in flight together; 0: no limit.
    """
    if core.event_loop is not None:
        raise errors.ClosedError("this engine was opened before; make a new one")
    core.box = <hxa_mailbox *>PyMem_RawMalloc(sizeof(hxa_mailbox))
    if core.box == NULL:
        raise MemoryError()
    cdef int error = hxa_mailbox_open(core.box)
    if error:
        PyMem_RawFree(core.box)
        core.box = NULL
        raise OSError(-error, "eventfd")
    core.sink.ctx = core.box
    core.sink.post = <void (*)(void *, hxa_op *, uint32_t) noexcept nogil>hxa_mailbox_post
    core.sink.event = <void (*)(void *, const hxa_event *) noexcept nogil>hxa_mailbox_event
    core.event_loop, core.handler, core.stall = loop, handler, stall
    core.call_soon, core.is_running = loop.call_soon, loop.is_running
    core.plain = hasattr(loop, "_thread_id") and getattr(type(loop), "is_running", None) is BaseEventLoop.is_running
    core.thread = PyThread_get_thread_ident()
    core.generation = fork_generation
    core.drivers, core.deferred, core.places = (), [], Places()
    core.budget, core.burst = BUDGET, burst
    core.room_waiters, core.max_bytes_in_flight = deque(), max_bytes_in_flight
    core.is_closed = core.finished = False
    loop.add_reader(core.box.fd, _signalled, core)


def must_be_open(InFlightTable core not None):
    """Raise an error if the engine is closed, forked, or belongs to another loop."""
    core._check()


def must_be_on_thread(InFlightTable core not None):
    """Raise an error on another thread than the loop's, in another running loop, and in a child of fork().

    The loop need not run.  An engine that has ended, or was never opened, holds nothing that such a call could harm.
    """
    if core.finished:
        return
    core._must_be_on_thread()
    running = _get_running_loop()
    if running is not None and running is not core.event_loop:
        core._refuse()


def refuse(InFlightTable core not None):
    """Raise the reason why a call cannot be served: forked, closed, or another loop."""
    core._refuse()


def drain(InFlightTable core not None):
    """Settle what drivers posted, from any code that runs on the loop's thread.

    :raises WrongLoopError: on another thread.
    """
    if core.finished:
        return
    core._must_be_on_thread()
    core._drain(current_task(core.event_loop) is None)


def new_waiter(InFlightTable core not None):
    """Return an awaitable that `transfer.wake` ends; within a drain the waiting task then runs at once (C4)."""
    return core._new_waiter()


def checkpoint(InFlightTable core not None):
    """Return an awaitable with which a task that need not wait yields to others (C8), or None if it need not yield."""
    cdef Transfer pause
    core._must_be_on_thread()
    core._spend(1)
    if core.budget > 0:
        return None
    pause = core._new_waiter()
    pause.outcome, pause.cost = DONE, 1
    return pause


def wait_for_room(InFlightTable core not None, uint64_t nbytes):
    """Return an awaitable that is done when `nbytes` more may be submitted, or None if they may be submitted now."""
    if not core.room_waiters and core._fits(nbytes):
        return None
    waiter = core._new_waiter()
    core.room_waiters.append((nbytes, waiter))
    return waiter


def admit_waiters(InFlightTable core not None):
    """Wake the waiters for room that fit, after one of them has given up, because later ones may need less."""
    core._admit()


def all_drained(InFlightTable core not None):
    """Wait until every slot is released.

    :return: a future; cancelling it only ends the wait.
    """
    return core._drained_transfers(core._all())


async def settled(InFlightTable core not None, list transfers not None):
    """Wait until transfers are drained; a cancellation of the wait cancels them, but does not end it.

    :return: the cancellation, if there was one.
    """
    interruption = None
    drained = core._drained_transfers(transfers)
    while not drained.done():
        try:
            await wait([drained])
        except CancelledError as error:
            interruption = error
            for transfer in transfers:
                transfer.cancel()
    drained.result()
    return interruption


def refuse_work(InFlightTable core not None):
    """Take the first step of close (C7): refuse new work from here on."""
    core.is_closed = True
    if core.room_waiters:
        core._admit()


def finish(InFlightTable core not None):
    """Take the last step of close: leak what is still pinned, and wake its waiters.

    :return: the number of operations leaked.
    """
    return core._finish()


def after_fork(InFlightTable core not None):
    """Close the child's copies of descriptors, in a child of fork(), without effect on the parent."""
    cdef Driver driver
    for driver in core.drivers or ():
        driver.after_fork()
    if core.box != NULL:
        hxa_mailbox_close(core.box)


def counters(InFlightTable core not None):
    """Return the core's counters and gauges, by their names in `EngineStats`."""
    return {
        "transfers": core.n_transfers,
        "inline": core.n_inline,
        "bytes": core.n_bytes,
        "failed": core.n_failed,
        "in_flight": core.n_in_flight,
        "pinned": core.pinned,
        "bytes_in_flight": core.n_bytes_in_flight,
        "regions": core.local_memories,
        "remote_regions": core.remote_memories,
        "wakeups": hxa_mailbox_signals(core.box) if core.box != NULL else core.n_signals,
    }
