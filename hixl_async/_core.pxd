# What an engine is made of; every field explained.
from libc.stdint cimport uint32_t, uint64_t

from ._batch cimport Batch
from ._link cimport Driver, Hub, Link, hxa_letter
from ._memory cimport LocalMemory, Memory, RemoteMemory, Slice
from ._transfer cimport Transfer
from .driver cimport hxa_op


cdef class Core(Hub):
    cdef object handler               # handler(driver, kind, cookie, status, topic, data): notifications, signals, lost links
    cdef object is_running            # loop.is_running, bound once
    cdef uint64_t generation          # fork_generation at open (C10)
    cdef readonly bint closed         # no new work
    cdef bint drain_scheduled         # drain() will run again without a signal
    cdef hxa_op *backlog              # taken from the mailbox, not yet settled (a capped drain)
    cdef hxa_letter *letters          # likewise, not yet delivered
    cdef void *first                  # Transfer: head of the list of flights that still pin memory
    cdef object watchdog              # TimerHandle of the stall check, only while something is in flight
    cdef readonly double stall        # seconds without progress after which a transfer fails
    cdef readonly uint64_t bytes_in_flight    # of transfers whose memory is pinned
    cdef readonly uint64_t max_bytes_in_flight        # 0: any
    cdef uint64_t promised            # bytes that waiters were told they may submit in this pass of the loop
    cdef object crowd                 # deque of (bytes, waiter): who waits for room, in order
    cdef uint64_t n_transfers, n_inline, n_bytes
    cdef readonly Py_ssize_t pinned           # slots not released yet

    cdef int _check(self) except -1
    cdef Transfer _single(self, uint32_t verb, object local, object remote, object notify, object signal,
                          object deadline, object priority)
    cdef Transfer _submit(self, Batch batch, object notify, object signal, object deadline, object priority)
    cdef int _pin_slice(self, Transfer transfer, Slice left, uint32_t verb, Link link) except -1
    cdef uint64_t _pin_buffer(self, Transfer transfer, object local, uint32_t verb, Link link) except? <uint64_t>-1
    cdef int _attach_note(self, Transfer transfer, Driver driver, object notify) except -1
    cdef int _attach_signal(self, Transfer transfer, Driver driver, object signal) except -1
    cdef int _find_place(self, Transfer transfer, object local, uint64_t size, Driver driver, bint device) except -1
    cdef list _flights(self)
    cdef int _place(self, LocalMemory memory, Driver driver) except -1
    cdef int _own(self, LocalMemory memory, char *address, uint64_t size, uint32_t rights) except -1
    cdef int _launch(self, Transfer transfer, object notify, object signal, object deadline, object priority) except -1
    cdef int _track(self, Transfer transfer) except -1
    cdef int _fly(self, Transfer transfer, object deadline) except -1
    cdef int _fly_on_device(self, Transfer transfer, object deadline) except -1
    cdef int _settle(self, hxa_op *op) except -1
    cdef bint _fits(self, uint64_t nbytes) noexcept
    cdef int _admit(self) except -1
    cdef int _settle_all(self) except -1
    cdef int _deliver(self) except -1
