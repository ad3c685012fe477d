# The fields of transfers.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint64_t

from .link cimport CoreBase, Link
from .memory cimport Memory
from .driver cimport hxa_batch, hxa_desc, hxa_op

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


cdef enum: ACTIVE, DONE, FAILED, CANCELLED
# C8: the work that may finish inside calls before an await must yield.  A small operation costs 1, a larger copy its
# duration in units of COST_NANOSECONDS: 128 is roughly a tenth of a millisecond, against 3 to 6 us for the yield.
cdef enum: BUDGET = 128
cdef enum: COST_NANOSECONDS = 800
cdef enum: SMALL_BYTES = 16 << 10  # for smaller copies reading the clock would cost too much


cdef class Drain:
    cdef object future
    cdef Py_ssize_t missing           # operations that are not released yet

    cdef int _one(self) except -1


cdef class Transfer:
    cdef hxa_op op                    # the driver's part of the slot; op.owner is this object
    cdef hxa_batch batch
    cdef hxa_desc desc                # storage of a batch of one
    cdef CoreBase core
    cdef Link link                    # None: a waiter
    cdef object local                 # pins: LocalMemory, Batch, or an object whose address is used
    cdef Memory remote                # pins the remote side of a batch of one
    cdef Memory signal                # pins the memory of the signal word
    cdef Py_buffer view               # pins a plain local buffer; view.obj is NULL otherwise
    cdef object device                # event of a copy that a device makes by itself; None: the driver copies
    cdef hxa_batch *tail              # of such a transfer: the signal and notification that follow the data, or NULL
    cdef object topic, note           # bytes that the batch points to
    cdef int outcome                  # ACTIVE, DONE, FAILED, CANCELLED
    cdef int cost                     # of awaiting it, once it is done (C8)
    cdef bint control                 # a link or memory call, or a waiter, not a transfer; not counted, no timeout
    cdef bint held                    # accepted, and not yet released: linked in InFlightTable.first
    cdef bint abandoned               # the driver was told that its outcome no longer matters
    cdef public bint _asyncio_future_blocking
    cdef public object _cancel_message        # the argument of `cancel`
    cdef object exc                   # the failure
    cdef object unretrieved           # reports a failure that is never retrieved
    cdef object callback, context     # the usual single waiter
    cdef list callbacks               # further (callback, context)
    cdef list drains                  # Drain objects that wait for the release
    cdef double timeout               # seconds within which it must finish; 0: no limit
    cdef object timer                 # TimerHandle of the timeout
    cdef double moved                 # loop time of the last progress seen
    cdef uint64_t landed              # bytes at that time
    cdef void *next                   # Transfer: list of operations in flight
    cdef void *prev

    cdef int _raise(self) except -1
    cdef int _time_out(self, str why) except -1
    cdef int _resolve(self, int outcome, object exc) except -1
    cdef int _unpin(self) except -1
    cdef uint64_t _moved(self)
    cdef bint _stop(self) except -1
    cdef bint _waits(self) noexcept
    cdef bint _abandonable(self) noexcept
    cdef object _failure(self)
    cdef str _describe(self)
    cdef str _aftermath(self)
    cdef object _failed_row(self)


cdef Transfer new_transfer(CoreBase core)
