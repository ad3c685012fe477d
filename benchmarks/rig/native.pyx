# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=False
"""The C levels of the ladder: the bare copies of prepared batches, and the driver's `submit` without the core around it.

Both run the descriptors that the core would post, over the same mapped pages, in a C loop without the GIL.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from hixl_async.core.batch cimport Batch
from hixl_async.core.link cimport CoreBase, hxa_mailbox
from hixl_async.core.driver cimport *

cdef extern from *:
    """
    #include <poll.h>
    #include <time.h>
    #include "hxa_mailbox.h"

    static inline int64_t ladder_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    static inline void ladder_copy(const hxa_batch *batch, char *local, char *remote) {
        for (size_t i = 0; i < batch->n; i++) {
            const hxa_desc *desc = &batch->desc[i];
            char *here = local + desc->loff, *there = remote + desc->roff;
            if (batch->verb == HXA_READ) memcpy(here, there, desc->len);
            else memcpy(there, here, desc->len);
        }
        __asm__ volatile("" ::: "memory");             /* no copy may be left out because the next one repeats it */
    }

    /* Sleeps until the op is released, as the loop does, on the mailbox's descriptor.  The loop's thread is busy here, so
     * nothing else drains, and the op must be the only one in flight. */
    static inline int ladder_wait(hxa_mailbox *box, hxa_op *op) {
        uint32_t seen = 0;
        for (;;) {
            for (hxa_op *at = hxa_mailbox_take_ops(box), *next; at != NULL; at = next) {
                next = at->next;
                if (at == op) seen |= hxa_mailbox_events(at);
            }
            if (seen & HXA_RELEASED) return op->status == HXA_OK ? HXA_DONE : -op->status;
            __atomic_store_n(&box->armed, 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&box->ops, __ATOMIC_SEQ_CST) == NULL) {
                struct pollfd bell = {.fd = box->fd, .events = POLLIN};
                poll(&bell, 1, -1);
            }
            uint64_t count;
            __atomic_store_n(&box->armed, 0, __ATOMIC_SEQ_CST);
            if (read(box->fd, &count, sizeof count) < 0 && errno != EAGAIN) return -HXA_E_SYSTEM;
        }
    }

    /* Hands the mailbox back to the loop; an event that came meanwhile must wake it. */
    static inline void ladder_leave(hxa_mailbox *box) {
        __atomic_store_n(&box->armed, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&box->event_nodes, __ATOMIC_SEQ_CST) != NULL) hxa_mailbox_signal(box);
    }
    """
    int64_t ladder_now() nogil
    void ladder_copy(const hxa_batch *batch, char *local, char *remote) nogil
    int ladder_wait(hxa_mailbox *box, hxa_op *op) nogil
    void ladder_leave(hxa_mailbox *box) nogil


cdef class Program:
    """Batches of one link and direction, run in turn.

    :param batches: prepared batches between the same two regions.
    :param local: address of the local region.
    :param remote: address where this process has the peer's region mapped.
    """

    cdef list batches                 # keeps the descriptors alive
    cdef hxa_batch *items
    cdef size_t count
    cdef size_t turn
    cdef char *local
    cdef char *remote
    cdef CoreBase core
    cdef const hxa_driver *table
    cdef hxa_link *link

    def __cinit__(self, list batches not None, size_t local, size_t remote):
        cdef Batch batch = batches[0]
        cdef size_t i
        self.batches, self.count = batches, len(batches)
        self.local, self.remote = <char *>local, <char *>remote
        self.core, self.table, self.link = batch.link.driver.core, batch.link.driver.table, batch.link.link
        self.items = <hxa_batch *>malloc(self.count * sizeof(hxa_batch))
        if self.items == NULL:
            raise MemoryError()
        memset(self.items, 0, self.count * sizeof(hxa_batch))
        for i in range(self.count):
            batch = batches[i]
            self.items[i].verb, self.items[i].n, self.items[i].desc = batch.verb, batch.n_descriptors, batch.desc
            self.items[i].bytes = batch.total_bytes

    def __dealloc__(self):
        free(self.items)

    def copy(self, size_t times):
        """Copy `times` batches with memcpy; nanoseconds."""
        cdef size_t i, turn = self.turn
        cdef int64_t start
        with nogil:
            start = ladder_now()
            for i in range(times):
                ladder_copy(&self.items[turn], self.local, self.remote)
                turn = turn + 1 if turn + 1 < self.count else 0
            start = ladder_now() - start
        self.turn = turn
        return start

    def submit(self, size_t times):
        """Submit `times` batches to the driver, each awaited before the next; nanoseconds."""
        cdef hxa_op op
        cdef size_t i, turn = self.turn
        cdef int64_t start
        cdef int answer = HXA_DONE
        cdef bint waited = False
        if self.core.n_in_flight:
            raise RuntimeError("the C loop needs the link for itself, but a transfer is in flight")
        memset(&op, 0, sizeof(op))
        with nogil:
            start = ladder_now()
            for i in range(times):
                answer = self.table.submit(self.link, &self.items[turn], &op)
                if answer == HXA_PENDING:
                    waited = True
                    answer = ladder_wait(self.core.box, &op)
                if answer != HXA_DONE:
                    break
                turn = turn + 1 if turn + 1 < self.count else 0
            start = ladder_now() - start
            if waited:
                ladder_leave(self.core.box)
        self.turn = turn
        if answer != HXA_DONE:
            raise RuntimeError(f"the driver refused or failed a copy: status {-answer}")
        return start
