# What other Cython modules may cimport: the types of _core.pyx with their fields explained.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

from .driver cimport hxa_batch, hxa_desc, hxa_driver, hxa_event, hxa_instance, hxa_link, hxa_mem, hxa_op, hxa_sink


cdef extern from "hxa_mailbox.h" nogil:
    ctypedef struct hxa_letter:
        hxa_letter *next
        hxa_event event
    ctypedef struct hxa_mailbox:
        int fd
        uint32_t armed
        uint64_t signals
        uint64_t lost


cdef class Core:
    cdef hxa_mailbox *box             # where drivers post; see hxa_mailbox.h.  NULL before open and after the end
    cdef hxa_sink sink                # what drivers get of it
    cdef readonly object loop         # the one event loop this engine belongs to (C9)
    cdef object handler               # handler(kind, cookie, status, topic, data): notifications, signals, lost links
    cdef object call_soon             # loop.call_soon, bound once
    cdef unsigned long thread         # ident of the loop's thread
    cdef uint64_t generation          # fork_generation at open (C10)
    cdef readonly bint closed         # no new work
    cdef bint finished                # the mailbox is gone; memory is released by whoever drops it last
    cdef bint draining                # inside drain(), so a nested call does nothing
    cdef bint drain_scheduled         # drain() will run again without a signal
    cdef list drivers                 # Driver, in order of preference; the index is Driver.index
    cdef hxa_op *backlog              # taken from the mailbox, not yet settled (a capped drain)
    cdef void *first                  # Transfer: head of the list of flights that still pin memory
    cdef list graveyard               # memories whose last view was dropped in another thread
    cdef object watchdog              # TimerHandle of the stall check, only while something is in flight
    cdef readonly double stall        # seconds without progress after which a transfer fails
    cdef int credit                   # finished operations that may still be awaited without a trip through the loop (C8)
    cdef uint64_t n_transfers, n_inline, n_bytes, n_failed, n_signals
    cdef readonly Py_ssize_t in_flight        # transfers without an outcome
    cdef readonly Py_ssize_t pinned           # slots not released yet
    cdef readonly Py_ssize_t local_memories
    cdef readonly Py_ssize_t remote_memories

    cdef int _check(self) except -1
    cdef Transfer _single(self, uint32_t verb, object local, object remote, object notify, object signal,
                          object deadline, object priority)
    cdef int _pin_slice(self, Transfer transfer, Slice left, uint32_t verb, Link link) except -1
    cdef uint64_t _pin_buffer(self, Transfer transfer, object local, uint32_t verb, Link link) except? <uint64_t>-1
    cdef int _attach_note(self, Transfer transfer, Driver driver, object notify) except -1
    cdef int _attach_signal(self, Transfer transfer, Driver driver, object signal) except -1
    cdef list _flights(self)
    cdef int _own(self, LocalMemory memory, char *address, uint64_t size, uint32_t rights) except -1
    cdef int _launch(self, Transfer transfer, object notify, object signal, object deadline, object priority) except -1
    cdef int _track(self, Transfer transfer) except -1
    cdef int _settle(self, hxa_op *op) except -1
    cdef int _dispose(self) except -1
    cdef Transfer _control(self, Link link)
    cdef Transfer _answer(self, Transfer transfer, int answer, str what)


cdef class Driver:
    cdef const hxa_driver *table      # the driver's functions
    cdef hxa_instance *instance       # NULL once closed
    cdef object capsule               # keeps the module, and so the table, alive
    cdef object options               # keeps what they refer to alive
    cdef Core core
    cdef readonly int index           # position in Core.drivers
    cdef readonly str name
    cdef readonly uint64_t capabilities
    cdef readonly uint64_t note_limit         # bytes of topic and payload together
    cdef readonly uint64_t descriptor_limit   # descriptors in one batch
    cdef readonly uint64_t inline_limit       # bytes that may be copied inside submit
    cdef uint64_t alignment
    cdef Py_ssize_t memories          # hxa_mem objects alive
    cdef bint closing                 # close as soon as memories is 0

    cdef int _forget(self) except -1


cdef class Link:
    cdef hxa_link *link               # NULL once freed
    cdef readonly Driver driver
    cdef readonly uint64_t cookie     # what events of this link carry
    cdef readonly str peer            # the peer's name, for errors
    cdef readonly bint up             # submits are accepted
    cdef int fd                       # the driver's descriptor that is watched, or -1
    cdef bint poll_scheduled
    cdef Transfer stopping            # the first stop, for everybody who stops again
    cdef readonly Py_ssize_t flights  # slots of this link not released yet


cdef enum: MAX_DRIVERS = 4


cdef class Transfer


cdef class Memory:
    cdef hxa_mem *mems[MAX_DRIVERS]   # one handle per driver (remote memory has exactly one)
    cdef char *address                # local memory: where it lies; NULL for remote memory
    cdef readonly uint64_t size       # bytes
    cdef readonly uint32_t rights     # HXA_RIGHT_*: what a peer may do with it
    cdef readonly bint alive          # may be used in new work
    cdef Py_ssize_t flights           # slots that pin it
    cdef Py_ssize_t exports           # buffer views of it
    cdef Core core
    cdef list waiters                 # futures of released()
    cdef object __weakref__

    cdef int _unpin(self) except -1
    cdef int _let_go(self) except -1
    cdef int _bury(self) except -1
    cdef int _release(self) except -1


cdef class LocalMemory(Memory):
    cdef Py_buffer source             # of registered memory: the view that keeps it alive
    cdef object owner                 # of registered memory without the buffer protocol: the object itself
    cdef readonly bint readonly       # registered from a read-only buffer


cdef class RemoteMemory(Memory):
    cdef readonly Link link


cdef class Slice:
    cdef readonly Memory memory
    cdef readonly uint64_t offset     # bytes into memory
    cdef readonly uint64_t length     # bytes


cdef class Batch:
    cdef hxa_desc *desc
    cdef readonly size_t count        # descriptors
    cdef readonly uint64_t nbytes
    cdef uint32_t verb
    cdef readonly Link link
    cdef list memories                # every Memory that the descriptors name, each once

    cdef int _adopt(self, LocalMemory local, RemoteMemory remote) except -1
    cdef int _add_slices(self, Slice left, Slice right) except -1
    cdef int _add_rows(self, Slice left, Slice right, const uint64_t[:, ::1] table) except -1


cdef class Transfer:
    cdef hxa_op op                    # the driver's part of the slot; op.owner is this object
    cdef hxa_batch batch
    cdef hxa_desc desc                # storage of a batch of one
    cdef Core core
    cdef readonly Link link
    cdef object local                 # pins: LocalMemory, Batch, or an object whose address is used
    cdef Memory remote                # pins the remote side of a batch of one
    cdef Memory signal                # pins the memory of the signal word
    cdef Py_buffer view               # pins a plain local buffer; view.obj is NULL otherwise
    cdef object topic, note           # bytes that the batch points to
    cdef int outcome                  # ACTIVE, DONE, FAILED, CANCELLED
    cdef bint control                 # not a transfer: a link or memory call; not counted, no deadline
    cdef bint flying                  # accepted, not yet released: linked in Core.first
    cdef public bint _asyncio_future_blocking
    cdef object exc                   # the failure
    cdef object unretrieved           # reports a failure that nobody looked at
    cdef object callback, context     # the usual single waiter
    cdef list callbacks               # further (callback, context)
    cdef list drains                  # _Drain objects that wait for the release
    cdef object timer                 # TimerHandle of an explicit deadline
    cdef double moved                 # loop time of the last progress seen
    cdef uint64_t landed              # bytes at that time
    cdef void *next                   # Transfer: list of flights
    cdef void *prev

    cdef int _resolve(self, int outcome, object exc) except -1
    cdef int _unpin(self) except -1
    cdef int _stop(self) except -1
    cdef object _failure(self)
