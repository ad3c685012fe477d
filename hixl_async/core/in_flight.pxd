# The fields of the table of slots between submit and release.
from libc.stdint cimport uint32_t, uint64_t

from .link cimport CoreBase, hxa_event_node
from .transfer cimport Transfer
from .driver cimport hxa_op

cdef class InFlightTable(CoreBase):
    cdef object handler               # handler(driver, kind, cookie, status, topic, data): notifications, signals, lost links
    cdef object is_running            # loop.is_running, bound once
    cdef bint plain                   # is_running is BaseEventLoop's, a Python function that looks at loop._thread_id
    cdef uint64_t generation          # fork_generation at the start (C10)
    cdef bint is_closed               # no new work
    cdef bint drain_scheduled         # a drain is scheduled without a signal
    cdef hxa_op *ops                  # taken from the mailbox, not yet settled (a capped drain)
    cdef hxa_event_node *event_nodes  # taken from the mailbox, not yet delivered
    cdef void *first                  # Transfer: head of the list of operations that still pin memory
    cdef object watchdog              # TimerHandle of the stall check, only while operations are in flight
    cdef double stall                 # seconds without progress after which a transfer fails
    cdef uint64_t n_bytes_in_flight   # of transfers whose memory is pinned
    cdef uint64_t max_bytes_in_flight         # 0: no limit
    cdef uint64_t promised            # bytes that woken waiters may submit in this pass of the loop
    cdef object room_waiters          # deque of (bytes, waiter), first come, first served
    cdef uint64_t n_transfers, n_inline, n_bytes
    cdef Py_ssize_t pinned            # slots not released yet

    cdef int _check(self) except -1
    cdef int _refuse(self) except -1
    cdef int _spend(self, int cost) except -1
    cdef bint _fits(self, uint64_t nbytes) noexcept
    cdef int _admit(self) except -1
    cdef int _accept(self, Transfer transfer) except -1
    cdef int _track(self, Transfer transfer) except -1
    cdef int _settle(self, hxa_op *op) except -1
    cdef int _settle_events(self, Transfer transfer, uint32_t events) except -1
    cdef bint _withholds(self, Transfer transfer, uint32_t events) except *
    cdef object _failure(self, Transfer transfer, object row)
    cdef int _settle_all(self) except -1
    cdef int _deliver(self) except -1
    cdef int _release_deferred(self) except -1
    cdef int _check_progress(self) except -1
    cdef list _all(self)
    cdef object _drained_local(self, uint64_t start, uint64_t size)
    cdef int _finish(self) except -1
