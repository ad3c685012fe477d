"""A transfer is the slot of an operation in flight, and also the future that a program awaits."""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from cpython.mem cimport PyMem_Free
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF

from .batch cimport Batch
from .link cimport CoreBase
from .memory cimport LocalMemory, Memory
from .driver cimport *
from .seal cimport PyTypeObject, hxa_seal

import asyncio
from asyncio import CancelledError, InvalidStateError
from functools import partial

from .. import errors
from ..display import shown
from .guard import report
from .unpicklable import unpicklable
from ..types import TransferState

cdef extern from "Python.h":
    int PyContext_Enter(object) except -1
    int PyContext_Exit(object) except -1
    object PyContext_CopyCurrent()
    void PyErr_SetObject(object, object)

cdef extern from *:
    """
    /* An awaitable with am_send costs a sixth of one that raises StopIteration; Cython has no syntax for the slot. */
    static void hxa_set_am_send(PyObject *type, sendfunc send) {
        PyTypeObject *t = (PyTypeObject *)type;
        t->tp_as_async->am_send = send;
        PyType_Modified(t);
    }
    """
    ctypedef int PySendResult
    PySendResult PYGEN_RETURN, PYGEN_NEXT, PYGEN_ERROR
    ctypedef PySendResult (*sendfunc)(PyObject *, PyObject *, PyObject **) noexcept
    void hxa_set_am_send(object, sendfunc)

# Seconds between two polls of a transfer's progress.
cdef double SHORTEST_POLL = 0.0005
cdef double LONGEST_POLL = 0.05

cdef object Task = asyncio.Task
cdef tuple OUTCOMES = (TransferState.ACTIVE, TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED)


class _Unretrieved:
    """A report to the loop's exception handler, which is made if the failure of a transfer is never retrieved."""

    __slots__ = ("exception", "loop", "text")

    def __init__(self, loop, text, exception):
        self.loop, self.text, self.exception = loop, text, exception

    def __del__(self):
        if self.exception is not None and not self.loop.is_closed():
            report(self.loop, f"{self.text} failed and its exception was never retrieved", self.exception)


cdef class Drain:
    """A future for the release of several operations."""

    cdef int _one(self) except -1:
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(None)
        return 0


@cython.final
@cython.freelist(128)
cdef class Transfer:
    """An accepted read, write or batch; a future: await it, or pass it to gather, wait, wait_for, timeout or shield.

    Its result is the number of bytes moved.  It has started when the call returns; awaiting only waits.  After a failure or
    a cancellation the contents of the target range are undefined, and the local memory stays pinned until `drained`.
    """

    __reduce__ = unpicklable("await it here, and send its result")

    def __dealloc__(self):
        PyMem_Free(self.tail)

    def __repr__(self):
        held = " pinned" if self.held else ""
        return f"<Transfer {self._describe()}, {OUTCOMES[self.outcome].value}{held}>"

    cdef str _describe(self):
        """Return a text for the operation, without its state."""
        if not self.control and self.batch.n == 0:
            what = "notification" if self.batch.topic != NULL else "signal"
            return what + (f" to {self.link.peer!r}" if self.link is not None else "")
        what = "control" if self.control else "write" if self.batch.verb == HXA_WRITE else "read"
        peer = f" {'to' if self.batch.verb == HXA_WRITE else 'from'} {self.link.peer!r}" if self.link is not None else ""
        return f"{what}{peer} of {self.batch.bytes} bytes"

    cdef str _aftermath(self):
        """Return a text for what is not known after its failure."""
        if self.batch.n or self.batch.signal != NULL:
            return "the contents of its target are undefined"
        return "it may not have arrived"

    # -- future protocol: https://docs.python.org/3/library/asyncio-extending.html and Lib/asyncio/futures.py

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        cdef PyObject *value
        cdef PySendResult sent
        if self.outcome == FAILED or self.outcome == CANCELLED:
            self._raise()
        sent = _transfer_send(<PyObject *>self, NULL, &value)
        result = <object>value
        Py_DECREF(result)
        if sent == PYGEN_RETURN:
            raise StopIteration(result)
        return result

    def get_loop(self):
        """Return the event loop of the engine."""
        return self.core.event_loop

    @property
    def _loop(self):
        return self.core.event_loop

    def done(self):
        """Return True once the outcome is known; the memory may still be in use, see `drained`."""
        return self.outcome != ACTIVE

    def cancelled(self):
        """Return True if the transfer was cancelled."""
        return self.outcome == CANCELLED

    def result(self):
        """Return the number of bytes moved.

        :raises InvalidStateError: if the transfer is not done.
        :raises TransferError: if the transfer failed: with `PeerLostError` if the peer went down, with `TransferTimeoutError`
            if it made no progress or its timeout passed.
        :raises CancelledError: if the transfer was cancelled.
        """
        if self.outcome == DONE:
            return self.op.bytes
        self._raise()

    def exception(self):
        """Return the exception of a failed transfer, or None.

        :raises InvalidStateError: if the transfer is not done.
        :raises CancelledError: if the transfer was cancelled.
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

    cdef int _raise(self) except -1:
        if self.outcome == FAILED:
            raise self._failure()
        if self.outcome == CANCELLED:
            raise self._make_cancelled_error()
        raise InvalidStateError("the transfer is not done")

    def _make_cancelled_error(self):
        """Return the error that asyncio.gather raises for a cancelled member; the protocol has no public name for it."""
        return CancelledError() if self._cancel_message is None else CancelledError(self._cancel_message)

    def add_done_callback(self, fn, *, context=None):
        """Call ``fn(transfer)`` on the loop once the outcome is known.

        :param fn: the callback; it gets this transfer.
        :param context: the context to run `fn` in; default: a copy of the current one.
        :raises TypeError: if `fn` is not callable.
        :raises WrongLoopError: on another thread than the loop's.
        """
        if not callable(fn):
            raise TypeError(f"a callback must be callable, not {fn!r}")
        self.core._must_be_on_thread()
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
        """Remove every registration of `fn`.

        :param fn: the callback that was registered.
        :return: the number of registrations removed.
        :raises WrongLoopError: on another thread than the loop's.
        """
        cdef int removed = 0
        self.core._must_be_on_thread()
        if self.callback is not None and self.callback == fn:
            self.callback = self.context = None
            removed = 1
        if self.callbacks is not None:
            kept = [pair for pair in self.callbacks if pair[0] != fn]
            removed += len(self.callbacks) - len(kept)
            self.callbacks = kept
        return removed

    def cancel(self, msg=None):
        """End the wait and ask the driver to stop.

        Bytes in flight may still land, and the memory stays pinned until `drained`.

        :param msg: the message of the CancelledError.
        :return: True if this call cancelled the transfer; False if the outcome was known already.
        :raises WrongLoopError: on another thread than the loop's.
        """
        if self.outcome != ACTIVE:
            return False
        self.core._must_be_on_thread()
        self._cancel_message = msg
        self._resolve(CANCELLED, None)
        self._stop()
        return True

    # -- beyond futures

    @property
    def state(self):
        """The outcome so far: a `TransferState`."""
        return OUTCOMES[self.outcome]

    @property
    def nbytes(self):
        """The number of bytes to move."""
        return self.batch.bytes

    def progress(self):
        """Return the number of bytes that have landed so far, as far as the driver can tell."""
        if self.outcome == ACTIVE and self.held and self.link is not None and self.link.link != NULL:
            return self._moved()
        return self.op.bytes

    cdef uint64_t _moved(self):
        if self.device is not None:
            return 0
        if self.tail != NULL:
            return self.batch.bytes
        return self.link.driver.table.progress(self.link.link, &self.op)

    async def at_least(self, nbytes):
        """Wait until at least `nbytes` bytes have landed, as far as the driver can tell; which bytes is not defined.

        The driver is polled: soon at first, then when that many bytes are due at the rate so far.

        :param nbytes: the number of bytes, at most the transfer's own `nbytes`.
        :return: the number of bytes that have landed.
        :raises InvalidArgumentError: if `nbytes` is not a number of bytes in that range.
        :raises TransferError: if the transfer fails first.
        :raises CancelledError: if the transfer is cancelled first.
        :raises WrongLoopError: on another thread than the loop's.
        """
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes <= self.batch.bytes:
            raise errors.InvalidArgumentError(
                f"nbytes must be in 0..{self.batch.bytes}, the size of the transfer, not {shown(nbytes)}")
        cdef double pause = SHORTEST_POLL
        cdef int64_t since = hxa_now()  # a loop's own time may be constant within a pass
        cdef uint64_t landed, first
        self.core._must_be_on_thread()
        first = self.progress()
        while self.outcome == ACTIVE:
            landed = self.progress()
            if landed >= nbytes:
                return landed
            if landed > first:
                pause = (nbytes - landed) * ((hxa_now() - since) * 1e-9) / (landed - first)
            else:
                pause *= 2
            pause = min(max(pause, SHORTEST_POLL), LONGEST_POLL)
            waiter = self.core._new_waiter()
            end = partial(_end_wait, waiter)
            self.add_done_callback(end)
            timer = self.core.event_loop.call_later(pause, end)
            try:
                await waiter
            finally:
                timer.cancel()
                self.remove_done_callback(end)
        return await self

    def drained(self):
        """Wait until the driver has released the local memory, whatever the outcome was.

        :return: a future; cancelling it only ends the wait.
        :raises WrongLoopError: on another thread than the loop's.
        """
        return self.core._drained_transfers([self])

    # -- life of the slot

    cdef int _resolve(self, int outcome, object exc) except -1:
        """Set the outcome; the only function that does (C4)."""
        cdef object callback = self.callback, context = self.context, pair
        cdef CoreBase core = self.core
        self.outcome = outcome
        core.n_in_flight -= 0 if self.control else 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if outcome != DONE and not self.control:
            core.n_failed += 1
        if outcome == FAILED:
            self.exc = exc
            if not self.control:
                self.unretrieved = _Unretrieved(core.event_loop, repr(self), exc)
        self.callback = self.context = None
        callbacks, self.callbacks = self.callbacks, None
        # Only a task's own wake-up may run at once, because other callbacks may rely on the order of call_soon.
        cdef bint direct = core.direct and isinstance(getattr(callback, "__self__", None), Task)
        if callback is not None and not direct:
            core.call_soon(callback, self, context=context)
        for pair in callbacks or ():
            core.call_soon(pair[0], self, context=pair[1])
        # Last, because exceptions of the task (KeyboardInterrupt, SystemExit) pass through here.
        if direct:
            core.direct = False  # now a task is current; tasks that it cancels or wakes must wait for the loop
            try:
                direct = _resume(callback, context, self)
            finally:
                core.direct = core.draining
            if not direct:
                core.call_soon(callback, self, context=context)
        return 0

    cdef bint _stop(self) except -1:
        """Ask the driver to give up, and return True if it will; the release says when the memory is free."""
        cdef const hxa_driver *table
        if self.held and self.device is None and self.link is not None and self.link.link != NULL:
            table = self.link.driver.table
            if table.cancel != NULL:
                return table.cancel(self.link.link, &self.op)
        return False

    cdef bint _waits(self) noexcept:
        """Return True while the driver keeps it waiting behind others or a limit, so that it is not stalled."""
        cdef const hxa_driver *table = self.link.driver.table
        return (self.held and self.device is None and self.link.link != NULL and table.waits != NULL
                and table.waits(self.link.link, &self.op))

    cdef bint _abandonable(self) noexcept:
        """Return True if the driver can be told to release the memory in bounded time, and was not told yet."""
        return (self.held and not self.abandoned and self.device is None and self.link.link != NULL
                and self.link.driver.table.abandon != NULL)

    cdef int _time_out(self, str why) except -1:
        cdef bint stopped = False
        if self.outcome == ACTIVE:
            exc = errors.TransferTimeoutError(
                f"{self._describe()} {why}; {self._aftermath()}"
                + (": await transfer.drained() before reusing memory" if self.batch.n else ""),
                peer=self.link.peer if self.link is not None else None,
            )
            self._resolve(FAILED, exc)
            stopped = self._stop()
        # A caller that cancels only ends its wait; a transfer that times out may cost the link.
        if not stopped and self._abandonable():
            self.abandoned = True
            self.link.driver.table.abandon(self.link.link, &self.op)

    cdef object _failed_row(self):
        """Return the number of the copy that failed, as the program listed it, or None."""
        cdef int64_t index = self.op.failed
        if type(self.local) is Batch:
            index = (<Batch>self.local)._row(index)
        return index if index >= 0 else None

    cdef int _unpin(self) except -1:
        """Unpin the memory; called once, at the release or when the submit was refused or finished inside the call."""
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
    """Run a task's wake-up now, in its context; return False if that context is entered already."""
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
        self.cost = 0  # other tasks run meanwhile
        out = self
    elif self.outcome == DONE:
        if self.cost and self.core.budget <= 0:
            # C8: a bare yield sends the task once around the loop; the next send brings the result.
            self.core.budget = BUDGET
            self.cost = 0
            out = None
        else:
            out = self.op.bytes
            Py_INCREF(out)
            result[0] = <PyObject *>out
            return PYGEN_RETURN
    else:
        result[0] = NULL
        if self.outcome == CANCELLED:
            PyErr_SetObject(CancelledError, self._make_cancelled_error())
        else:
            out = self._failure()
            PyErr_SetObject(type(out), out)
        return PYGEN_ERROR
    Py_INCREF(out)
    result[0] = <PyObject *>out
    return PYGEN_NEXT


hxa_set_am_send(Transfer, _transfer_send)


cdef Transfer new_transfer(CoreBase core):
    """Return an empty slot."""
    cdef Transfer transfer = Transfer.__new__(Transfer)
    transfer.core = core
    return transfer


cdef object _refuse_transfer(PyTypeObject *kind, PyObject *args, PyObject *kwargs):
    raise TypeError("a transfer is made by engine.read, engine.write or engine.submit")


hxa_seal(Transfer, _refuse_transfer)


# -- for the core and the packages above it

def all_drained(Transfer first not None, *others):
    """Wait like `Transfer.drained`, for several transfers of one engine at once.

    :return: a future; cancelling it only ends the wait.
    :raises WrongLoopError: on another thread than the loop's.
    """
    return first.core._drained_transfers([first, *others])


def wake(Transfer waiter not None):
    """End a wait that `in_flight.new_waiter` began.  Idempotent."""
    if waiter.link is not None:
        raise TypeError(f"{waiter!r} is not a waiter; only its driver can end it")
    if waiter.outcome == ACTIVE:
        waiter._resolve(DONE, None)


def _end_wait(waiter, _=None):
    """Wake a waiter; a callback of futures and timers."""
    wake(waiter)
