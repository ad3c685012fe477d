# The fields of the loop's side of drivers and links.
from libc.stdint cimport uint32_t, uint64_t

from .driver cimport hxa_metadata, hxa_driver, hxa_event, hxa_instance, hxa_link, hxa_op, hxa_sink


cdef extern from "hxa_mailbox.h" nogil:
    ctypedef struct hxa_event_node:
        hxa_event_node *next
        hxa_event event
    ctypedef struct hxa_mailbox:
        int fd
    void hxa_mailbox_awake(hxa_mailbox *box)
    int hxa_mailbox_asleep(const hxa_mailbox *box)
    uint64_t hxa_mailbox_signals(const hxa_mailbox *box)


cdef enum: MAX_DRIVERS = 4


cdef class CoreBase:
    cdef hxa_mailbox *box             # where drivers post; see hxa_mailbox.h.  NULL before the start and after the end
    cdef hxa_sink sink                # the drivers' side of it
    cdef object event_loop            # the one event loop this engine belongs to (C9)
    cdef object call_soon             # loop.call_soon, bound once
    cdef unsigned long thread         # ident of the loop's thread
    cdef bint finished                # closed completely: memory is released by its last holder
    cdef bint draining                # inside drain()
    cdef bint direct                  # no task is current in drain(): a waiting one may be resumed directly (C4)
    cdef int burst                    # the most that one pass of the loop takes: completions; notifications of a link
    cdef int budget                   # work that may still finish inside calls before an await yields (C8)
    cdef tuple drivers                # Driver, in order of preference; a tuple, because the collector empties lists
    cdef object places                # Places: memories by address, for drivers that move registered memory only
    cdef list deferred                # memories whose last view was dropped in another thread, to be released here
    cdef Py_ssize_t n_in_flight       # transfers without an outcome
    cdef Py_ssize_t local_memories
    cdef Py_ssize_t remote_memories
    cdef uint64_t n_failed, n_signals

    cdef int _drain(self, bint direct) except -1
    cdef int _deliver_all(self) except -1
    cdef int _settle_withheld(self, Link link) except -1
    cdef hxa_op *_begin_call(self, Link link) except NULL
    cdef object _end_call(self, hxa_op *op, int answer, str what, object memory=*)
    cdef int _call_status(self, object call) except -1
    cdef object _drained_link(self, Link link)
    cdef object _drained_range(self, object memory, uint64_t offset, uint64_t length)
    cdef object _drained_transfers(self, list transfers)
    cdef bint _all_released(self, list transfers) except -1
    cdef object _new_waiter(self)
    cdef int _must_be_on_thread(self) except -1
    cdef bint _forked(self) noexcept
    cdef int _dispose(self) except -1


cdef class Driver:
    cdef const hxa_driver *table      # the driver's functions: `own`
    cdef hxa_driver own               # a copy of its table; functions that it lacks are NULL
    cdef hxa_instance *instance       # NULL once closed
    cdef object capsule               # keeps the module, and so the table, alive
    cdef object options               # keeps alive what the options refer to
    cdef CoreBase core
    cdef readonly int index           # position in CoreBase.drivers
    cdef readonly str name
    cdef readonly uint64_t capabilities
    cdef readonly uint64_t note_limit         # bytes of topic and payload together
    cdef readonly uint64_t descriptor_limit   # descriptors in one batch
    cdef readonly uint64_t inline_limit       # bytes that may be copied inside submit
    cdef uint64_t alignment
    cdef Py_ssize_t memories          # hxa_mem objects alive
    cdef list links                   # Link: those that are not freed
    cdef bint closing                 # close as soon as there are no memories and links

    cdef int _must_be_open(self) except -1
    cdef int _forget(self) except -1
    cdef int _forget_link(self, Link link) except -1
    cdef int _end_watch(self) except -1
    cdef int _close_if_unused(self) except -1
    cdef Link _without_peer(self, str what)


cdef class Link:
    cdef hxa_link *link               # NULL once freed
    cdef readonly Driver driver
    cdef readonly uint64_t cookie     # the number in the events of this link
    cdef readonly str peer            # the peer's name, for errors; None: a call that concerns no peer
    cdef str what                     # the call that a control operation stands for, in a word, for errors
    cdef readonly bint up             # submits are accepted
    cdef int fd                       # the driver's descriptor that is watched, or -1
    cdef bint poll_scheduled
    cdef list stops                   # Transfer: the first stop, and the one that said that the peer is dead
    cdef bint dead                    # a stop has said that the peer is dead
    cdef object explain               # explain(): why the link is down, or None; see `explain_by`
    cdef object cause_awaited         # cause_awaited(): True while that is about to be known
    cdef list withheld                # (Transfer, events): what failed meanwhile

    cdef int _must_exist(self, list fds) except -1
    cdef int _poll(self, bint direct) except -1
    cdef object _down(self)
    cdef tuple _why_down(self)
    cdef int _begin_to_stop(self, bint dead) except -1
    cdef int _end_watch(self) except -1
    cdef bint _has_stopped(self) except -1


cdef object refusal(Driver driver, int status, int native, str what, Link link=*, object index=*)
cdef object failure(Link link, int status, int native, str what, object index=*)
cdef tuple unpack_metadata(hxa_metadata *metadata)
cdef int pack_metadata(hxa_metadata *metadata, bytes data, list fds) except -1
