# The loop's side of drivers and links; every field explained.
from libc.stdint cimport uint32_t, uint64_t

from .driver cimport hxa_card, hxa_driver, hxa_event, hxa_instance, hxa_link, hxa_op, hxa_sink


cdef extern from "hxa_mailbox.h" nogil:
    ctypedef struct hxa_letter:
        hxa_letter *next
        hxa_event event
    ctypedef struct hxa_mailbox:
        int fd
    void hxa_mailbox_awake(hxa_mailbox *box)
    int hxa_mailbox_asleep(const hxa_mailbox *box)
    uint64_t hxa_mailbox_signals(const hxa_mailbox *box)


cdef enum: MAX_DRIVERS = 4


cdef class Hub:
    cdef hxa_mailbox *box             # where drivers post; see hxa_mailbox.h.  NULL before open and after the end
    cdef hxa_sink sink                # what drivers get of it
    cdef readonly object loop         # the one event loop this engine belongs to (C9)
    cdef object call_soon             # loop.call_soon, bound once
    cdef unsigned long thread         # ident of the loop's thread
    cdef bint finished                # the end: memory is released by whoever drops it last
    cdef bint draining                # inside drain()
    cdef bint direct                  # no task is current there: one that waits may be resumed directly (C4)
    cdef int burst                    # the most that one pass of the loop takes: completions; notifications of a link
    cdef int credit                   # finished work for which nobody has to go around the loop yet (C8)
    cdef tuple drivers                # Driver, in order of preference; a tuple, for the collector empties lists
    cdef object places                # Places: memories by address, for drivers that move nothing else
    cdef list graveyard               # memories whose last view was dropped in another thread
    cdef readonly Py_ssize_t in_flight        # transfers without an outcome
    cdef readonly Py_ssize_t local_memories
    cdef readonly Py_ssize_t remote_memories
    cdef uint64_t n_failed, n_signals

    cdef int _drain(self, bint direct) except -1
    cdef int _deliver_all(self) except -1
    cdef hxa_op *_control(self, Link link) except NULL
    cdef object _answer(self, hxa_op *op, int answer, str what, object memory=*)
    cdef int _status(self, object call) except -1
    cdef int _dispose(self) except -1


cdef class Driver:
    cdef const hxa_driver *table      # the driver's functions: `own`
    cdef hxa_driver own               # a copy of its table; what it does not have is NULL
    cdef hxa_instance *instance       # NULL once closed
    cdef object capsule               # keeps the module, and so the table, alive
    cdef object options               # keeps what they refer to alive
    cdef Hub core
    cdef readonly int index           # position in Hub.drivers
    cdef readonly str name
    cdef readonly uint64_t capabilities
    cdef readonly uint64_t note_limit         # bytes of topic and payload together
    cdef readonly uint64_t descriptor_limit   # descriptors in one batch
    cdef readonly uint64_t inline_limit       # bytes that may be copied inside submit
    cdef uint64_t alignment
    cdef Py_ssize_t memories          # hxa_mem objects alive
    cdef bint closing                 # close as soon as memories is 0

    cdef int _forget(self) except -1
    cdef Link _without_peer(self, str what)


cdef class Link:
    cdef hxa_link *link               # NULL once freed
    cdef readonly Driver driver
    cdef readonly uint64_t cookie     # what events of this link carry
    cdef readonly str peer            # the peer's name, for errors; None: a call that concerns no peer
    cdef str what                     # a call of this link that failed, in a word
    cdef readonly bint up             # submits are accepted
    cdef int fd                       # the driver's descriptor that is watched, or -1
    cdef bint poll_scheduled
    cdef list stops                   # Transfer: the first stop, and the one that told that the peer is dead
    cdef bint dead                    # a stop has told so
    cdef object explain               # see `explain_by`; None: the cause is never known
    cdef readonly Py_ssize_t flights  # slots of this link not released yet

    cdef int _must_exist(self, list fds) except -1
    cdef int _poll(self, bint direct) except -1
    cdef object _down(self)
    cdef tuple _why_down(self)


cdef object refusal(Driver driver, int status, int native, str what, Link link=*, object index=*)
cdef object failure(Link link, int status, int native, str what, object index=*)
cdef tuple unpack_card(hxa_card *card)
cdef int pack_card(hxa_card *card, bytes data, list fds) except -1
