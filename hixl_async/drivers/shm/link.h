/* A link: two halves, each a segment made by one side and written by the other, and a doorbell in each direction.
 *
 * This header has what all parts need: the count of writes to the peer's memory, and its lifetime.  It is made in connect.c, read
 * in receive.c, and ended in fence.c and stop.c.
 */
#ifndef SHM_LINK_H
#define SHM_LINK_H

#include "half.h"
#include "instance.h"
#include "process.h"

enum { SHM_NEW = 0, SHM_UP = 1, SHM_DOWN = 2, SHM_STOPPED = 3 };

struct hxa_link {
    /* What submit reads. */
    uint32_t state;                    /* atomic; only grows */
    uint32_t in_flight;                /* atomic: chunks and signals being written into the peer's memory by threads */
    shm_half *peer;                    /* the half that we write to */
    hxa_instance *self;
    uint64_t note_bytes;               /* most of a notification that both sides allow */
    int bell;                          /* write end of our pipe */
    int peer_bell;                     /* read end of the peer's */

    shm_half *own;                     /* the half that the peer writes to */
    uint64_t cookie;
    hxa_link *next, *prev;             /* all links of the instance, for after_fork */
    uint32_t refs;                     /* atomic: 1 until stopped, and one per accepted op */
    uint32_t capacity, peer_capacity;  /* of the rings, private copies */
    int bell_read;                     /* our own copy of the passed read end: no SIGPIPE while it is open */
    shm_process process;               /* the peer's */
    uint64_t pace;                     /* atomic: most bytes per second, 0: any */
    uint64_t free_at;                  /* when its next chunk may begin, in ns; under the threads' mutex */

    /* Receiving; the loop's. */
    uint64_t tail;                     /* private: what the half says is for the producer */
    uint64_t signals_seen;
    uint8_t more;                      /* the last poll left work behind */
    int8_t bell_end;                   /* SHM_BELL_CLOSED or SHM_BELL_FAULTY: the peer's bell rings no more */
    uint32_t down;                     /* atomic: LINK_DOWN was reported */

    /* Sending; see notes.c. */
    uint32_t busy;                     /* atomic: 0 free; else a thread appends, and others asked meanwhile */
    uint32_t waiting_n;                /* atomic: accepted ops with a notification that is not sent yet */
    uint32_t starved;                  /* atomic: a notification waits for room */
    uint32_t scrub;                    /* atomic: one that waits was cancelled */
    hxa_op *incoming;                  /* atomic stack */
    shm_queue waiting;                 /* of the thread that made busy non-zero */
    uint64_t head;                     /* likewise */
    uint64_t tail_seen;                /* likewise, and peeked at by the loop */

    hxa_op *stops;                     /* atomic stack of link_stop ops; see shm_link_unref for its end */
    hxa_op *fence;                     /* link_fence; the loop's */
    uint32_t fenced;                   /* atomic: 1 the peer fenced us, 2 and we told it that it can rely on that */
    uint32_t dead;                     /* the caller's word; the loop's */
};

/* Return 1 if something of ours may still be written into the peer's memory. */
static inline int shm_link_open(const hxa_link *link) {
    return shm_load_acq(&link->state) == SHM_UP && shm_load_acq(&link->peer->fence) == 0;
}

/* Count ourselves among those that write into the peer's memory, on any thread but the loop's; return 0 if that is forbidden. */
SHM_INTERNAL int shm_link_enter(hxa_link *link);
SHM_INTERNAL void shm_link_leave(hxa_link *link);

/* Tell the peer that it is fenced, once it asked and nothing is being written into its memory any more. */
SHM_INTERNAL void shm_link_say_fenced(hxa_link *link);

/* The link broke by itself: say so once, and let the ops that it cannot serve any more fail. */
SHM_INTERNAL void shm_link_break(hxa_link *link, int32_t status, const char *why);

/* Drop a reference; the last one ends the stop. */
SHM_INTERNAL void shm_link_unref(hxa_link *link);

/* Let an op of link_stop finish with the last reference.  Return 0 if that is gone already. */
SHM_INTERNAL int shm_link_wait_for_stop(hxa_link *link, hxa_op *op);

/* Begin an op of the link's own life, which is neither cancelled nor counted. */
SHM_INTERNAL void shm_link_adopt(hxa_link *link, hxa_op *op);

/* The most bytes per second that ops of the link may move from now on. */
SHM_INTERNAL int shm_link_pace(hxa_link *link, uint64_t bytes_per_second);

#endif /* SHM_LINK_H */
