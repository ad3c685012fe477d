/* What the parts of the fault-injecting driver share.
 *
 *   ../_faulty.c   the table, options, memory, control calls, statistics, texts
 *   plan.c         the control block: which op meets which fault; commands from Python
 *   flight.c       one accepted op: the inner submits that it is made of, and its outcome
 *   link.c         link_*: wrapping, breaking and stopping links
 *   call.c         start, shutdown, mem_ready, mem_retire: calls that take their time, if the plan says so
 *   timer.c        the thread that wakes what is due
 *
 * Threads: the loop (T2) makes every call into the inner driver.  The timer thread and the inner driver's threads only move
 * flights between states under `lock` and post to the outer sink; what must be submitted later is marked ripe and the
 * link's bell is rung, so that the loop comes to poll.  Nobody calls out (sink or inner driver) with the lock held.
 */
#ifndef HXA_FAULTY_H
#define HXA_FAULTY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "hxa_driver.h"

#define FAULTY_INTERNAL __attribute__((visibility("hidden")))

/* ---- the control block: owned by Python, which mirrors it in hixl_async/testing/plan.py ------------------------------ */

enum { FAULTY_BLOCK = 1, FAULTY_RULES = 64 };                     /* version of the layout; most rules in a plan */

enum {                                                            /* faulty_rule.kind */
    FAULTY_DELAY = 1,         /* low..high ns; `part` says what waits */
    FAULTY_BANDWIDTH = 2,     /* low: bytes per second of the link's one virtual wire */
    FAULTY_HOLD = 3,          /* until released */
    FAULTY_LATE = 4,          /* as HOLD, and cancel and stop end only the wait: the bytes land after release */
    FAULTY_FAIL = 5,          /* status, native, index, scope; descriptors before index land */
    FAULTY_REORDER = 6,       /* low: ops that are collected and shuffled; high: ns after which fewer must do */
    FAULTY_DROP = 7,          /* the op breaks its link */
    FAULTY_BUSY = 8,          /* submit is refused */
    FAULTY_PENDING = 9,       /* never inline: the outcome comes from the timer thread */
    FAULTY_STALL = 10,        /* low: parts per million of the bytes that land before it holds */
    FAULTY_STUCK = 11         /* as HOLD, but cancel is too late; abandon ends it */
};

enum { FAULTY_OPERATION = 0, FAULTY_OUTCOME = 1, FAULTY_NOTE = 2 };   /* part: all of it, its report, its signal and notification */
enum {                                                            /* verbs; BARE: a signal or notification without data */
    FAULTY_READS = 1u, FAULTY_WRITES = 2u, FAULTY_BARE = 4u,
    FAULTY_START = 8u, FAULTY_SHUTDOWN = 16u, FAULTY_READY = 32u, FAULTY_RETIRE = 64u,
    FAULTY_CONNECT = 128u
};
enum { FAULTY_RELEASE = 1, FAULTY_BREAK = 2, FAULTY_SAY = 3 };    /* commands; SAY: its argument is a faulty_saying * */

typedef struct faulty_saying { const void *data; uint32_t len; } faulty_saying;

typedef struct faulty_rule {
    uint32_t kind;
    uint32_t part;
    uint32_t verbs;           /* which ops it looks at */
    uint32_t chance;          /* parts per million of them */
    uint64_t first;           /* the first that it meets, counted from 1 among those it looks at */
    uint64_t every;           /* then every n-th; 1: each */
    uint64_t count;           /* how many at most; 0: no end */
    uint64_t low, high;
    int64_t index;
    int32_t status, native;
    uint32_t scope;
    uint32_t reserved;
    uint64_t seen;            /* atomic: ops that it looked at */
} faulty_rule;

typedef struct faulty_block {
    uint32_t version;
    uint32_t rules;           /* atomic: how many of `rule` count */
    uint64_t seed;
    uint64_t command;         /* void (*)(faulty_block *, uint32_t what, uint64_t argument); 0 before the first open */
    /* Counters, atomic: what was injected. */
    uint64_t ops, delayed, paced, held, stalled, released, late, landed_late, failed, reordered, broken, busy, pending;
    uint64_t holding;         /* gauge: ops that wait for a release */
    faulty_rule rule[FAULTY_RULES];
} faulty_block;

#define faulty_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define faulty_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define faulty_count(p) ((void)__atomic_fetch_add((p), 1, __ATOMIC_RELAXED))

/* ---- what one op meets ------------------------------------------------------------------------------------------------ */

typedef struct faulty_fate {
    uint32_t any;             /* something below is set */
    uint32_t busy, drop, hold, late, stuck, pending, fail;
    uint64_t delay, outcome_delay, note_delay;                    /* ns */
    uint64_t bandwidth;
    uint64_t window, within;                                      /* of a reorder */
    uint64_t stall;           /* ppm of the bytes, + 1; 0: none */
    int64_t index;
    int32_t status, native;
    uint32_t scope;
} faulty_fate;

/* ---- objects ---------------------------------------------------------------------------------------------------------- */

struct hxa_mem {
    hxa_instance *self;
    hxa_mem *inner;
};

typedef struct faulty_node { struct faulty_node *next, *prev; } faulty_node;      /* of a ring with a head */

enum { FAULTY_OPEN = 0, FAULTY_UNTIL = 1, FAULTY_HELD = 2 };                      /* gates: none, a time, a release */

typedef struct faulty_leg {   /* one inner submit */
    size_t first, n;          /* descriptors */
    uint64_t bytes;
    uint32_t tail;            /* with the signal and the notification */
    uint32_t gate;            /* before it */
    uint64_t delay;           /* of FAULTY_UNTIL */
} faulty_leg;

enum { FAULTY_LEGS = 3 };
enum { FAULTY_WORK = 0, FAULTY_CALL = 1, FAULTY_STOP = 2 };                       /* what a flight is */
enum {                                                                           /* flight.stage */
    FAULTY_WAITING = 0,       /* for time, release or the loop: the inner driver does not have it */
    FAULTY_SUBMITTED = 1,     /* the inner driver has it */
    FAULTY_REPORTING = 2,     /* all done, the report waits */
    FAULTY_OVER = 3           /* released; freed by the loop when it comes by */
};

typedef struct faulty_flight {
    faulty_node all;          /* in link->flights or link->stops; first, see faulty_flight_of */
    faulty_node ripe;         /* in link->ripe, or alone */
    struct faulty_flight *chain;                                  /* in a private list */
    hxa_op op;                /* ours; the inner driver's while SUBMITTED */
    hxa_op *outer;
    hxa_instance *self;
    hxa_link *link;           /* NULL for a call without one */
    hxa_mem *mem;             /* of a retirement: freed by the loop with the flight */
    uint32_t kind, stage;
    uint32_t seen;            /* events of the inner driver for this leg */
    uint32_t accepted;        /* submit answered PENDING: the outer op is ours until released */
    uint32_t reported;        /* COMPLETED was posted */
    uint32_t held;            /* waits for a release */
    uint32_t landing;         /* a late op that was given up: nobody waits for its outcome */
    uint32_t events;          /* to post, in a private list */
    uint32_t pool;            /* number of the reorder pool, 0: none */
    size_t slot;              /* in the timer's heap, + 1; 0: not there */
    uint64_t due, order, number;                                  /* the heap's key */
    uint64_t begun, end;      /* on the wire, for progress */
    uint64_t moved;           /* bytes of legs that are over */
    faulty_fate fate;
    const hxa_batch *batch;   /* the core's */
    hxa_batch part;           /* of the current leg */
    hxa_desc *desc;           /* translated */
    size_t split;             /* index of the second half of a divided descriptor, 0: none */
    faulty_leg legs[FAULTY_LEGS];
    uint32_t leg, leg_count;
} faulty_flight;

#define faulty_flight_of(node) ((faulty_flight *)(void *)(node))
#define faulty_ripe_of(node) ((faulty_flight *)(void *)((char *)(node) - offsetof(faulty_flight, ripe)))

struct hxa_link {
    hxa_link *next;           /* links of the instance; changed by the loop under the registry's lock */
    hxa_instance *self;
    hxa_link *inner;
    uint64_t cookie;
    int bell, set;            /* eventfd; epoll of it and of the inner link's descriptor */
    uint32_t down;            /* atomic: broken by the plan */
    uint32_t breaking;        /* atomic: the loop is to break it at the next poll */
    /* Under the lock. */
    uint32_t stopping;
    uint32_t pool, pooled;    /* the reorder pool that fills now, and its size */
    uint64_t pool_window, pool_due;
    uint64_t wire;            /* when the virtual wire is free */
    size_t notes;             /* flights with a notification that was sent and whose report waits */
    uint64_t notes_due;       /* when the last of them reports: they do in the order in which they were sent (T5) */
    size_t live;              /* flights whose release is not posted yet */
    faulty_node flights, ripe, stops;
};

struct hxa_instance {
    hxa_instance *next;       /* of all instances; under the registry's lock */
    const hxa_driver *table;  /* `wrapped` */
    hxa_driver wrapped;       /* a copy of the wrapped driver's, which may be shorter: the rest is NULL */
    hxa_instance *inner;
    hxa_sink outer, sink;     /* the core's; ours, which the inner driver gets: it refers to this object */
    faulty_block *block;
    faulty_block own_block;   /* where no control block was given */
    uint64_t seed;
    pthread_t loop;
    hxa_link *links;          /* changed by the loop under the registry's lock */
    faulty_flight *dead;      /* atomic stack, emptied by the loop */
    faulty_node calls;        /* flights of calls without a link whose report waits; under the lock */
    uint64_t call_count;      /* the loop's */

    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t timer;
    uint32_t running;         /* the timer thread lives */
    uint32_t closing;
    faulty_flight **heap;
    size_t heap_size, heap_room;
    size_t work;              /* flights that may need a place in the heap */
    uint32_t pools;           /* reorder pools so far */
};

static inline uint64_t faulty_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void faulty_ring_init(faulty_node *head) { head->next = head->prev = head; }
static inline int faulty_ring_empty(const faulty_node *head) { return head->next == head; }

static inline void faulty_ring_add(faulty_node *head, faulty_node *node) {
    node->prev = head->prev;
    node->next = head;
    head->prev->next = node;
    head->prev = node;
}

static inline void faulty_ring_remove(faulty_node *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    faulty_ring_init(node);
}

/* ---- plan.c ----------------------------------------------------------------------------------------------------------- */

FAULTY_INTERNAL void faulty_fate_of(hxa_instance *self, const hxa_batch *batch, faulty_fate *fate, uint64_t *number);
FAULTY_INTERNAL void faulty_fate_of_call(hxa_instance *self, uint32_t verb, faulty_fate *fate);
FAULTY_INTERNAL uint64_t faulty_random(uint64_t seed, uint64_t a, uint64_t b);
FAULTY_INTERNAL void faulty_registry_add(hxa_instance *self);
FAULTY_INTERNAL void faulty_registry_remove(hxa_instance *self);
FAULTY_INTERNAL void faulty_registry_forked(hxa_instance *self);
FAULTY_INTERNAL void faulty_registry_add_link(hxa_link *link);
FAULTY_INTERNAL void faulty_registry_remove_link(hxa_link *link);

/* ---- flight.c --------------------------------------------------------------------------------------------------------- */

FAULTY_INTERNAL int faulty_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op);
FAULTY_INTERNAL int faulty_cancel(hxa_link *link, hxa_op *op);
FAULTY_INTERNAL int faulty_abandon(hxa_link *link, hxa_op *op);
FAULTY_INTERNAL int faulty_waits(hxa_link *link, const hxa_op *op);
FAULTY_INTERNAL uint64_t faulty_progress(hxa_link *link, const hxa_op *op);
FAULTY_INTERNAL int faulty_pump(hxa_link *link, uint32_t budget);
FAULTY_INTERNAL void faulty_post(void *ctx, hxa_op *op, uint32_t events);
FAULTY_INTERNAL faulty_flight *faulty_flight_new(hxa_instance *self, hxa_link *link, hxa_op *outer, uint32_t kind);
FAULTY_INTERNAL void faulty_bury(hxa_instance *self, faulty_flight *flight);
FAULTY_INTERNAL void faulty_reap(hxa_instance *self);
FAULTY_INTERNAL void faulty_give_up(hxa_link *link, int stop);
FAULTY_INTERNAL size_t faulty_stuck(hxa_link *link);
/* With the lock held: */
FAULTY_INTERNAL void faulty_ripen(faulty_flight *flight);
FAULTY_INTERNAL void faulty_ungate(faulty_flight *flight);
FAULTY_INTERNAL void faulty_hold(faulty_flight *flight);
FAULTY_INTERNAL uint32_t faulty_end(faulty_flight *flight);
/* Without it: */
FAULTY_INTERNAL void faulty_deliver(faulty_flight *flight, uint32_t events);

/* ---- link.c ----------------------------------------------------------------------------------------------------------- */

FAULTY_INTERNAL int faulty_link_new(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_card *card);
FAULTY_INTERNAL int faulty_link_pace(hxa_link *link, uint64_t bytes_per_second);
FAULTY_INTERNAL int faulty_link_connect(hxa_link *link, const hxa_card *card, hxa_op *op);
FAULTY_INTERNAL int faulty_link_fd(hxa_link *link);
FAULTY_INTERNAL int faulty_link_stop(hxa_link *link, int dead, hxa_op *op);
FAULTY_INTERNAL int faulty_link_fence(hxa_link *link, hxa_op *op);
FAULTY_INTERNAL void faulty_link_free(hxa_link *link);
FAULTY_INTERNAL int faulty_poll(hxa_link *link, uint32_t budget);
FAULTY_INTERNAL void faulty_event(void *ctx, const hxa_event *event);
FAULTY_INTERNAL void faulty_link_ring(hxa_link *link);
FAULTY_INTERNAL void faulty_link_break(hxa_link *link);
FAULTY_INTERNAL void faulty_stops_issue(hxa_link *link);
FAULTY_INTERNAL faulty_flight *faulty_stops_take(hxa_link *link);       /* with the lock held */
FAULTY_INTERNAL void faulty_stops_finish(hxa_instance *self, faulty_flight *stops);

/* ---- call.c ----------------------------------------------------------------------------------------------------------- */

FAULTY_INTERNAL int faulty_start(hxa_instance *self, hxa_op *op);
FAULTY_INTERNAL int faulty_shutdown(hxa_instance *self, hxa_op *op);
FAULTY_INTERNAL int faulty_mem_ready(hxa_mem *mem, hxa_op *op);
FAULTY_INTERNAL int faulty_mem_retire(hxa_mem *mem, hxa_op *op);
FAULTY_INTERNAL int faulty_message(hxa_link *link, const void *data, size_t len);
FAULTY_INTERNAL void faulty_say(hxa_link *link, const faulty_saying *saying);
FAULTY_INTERNAL void faulty_call_wait(faulty_flight *flight);           /* with the lock held */
FAULTY_INTERNAL void faulty_call_close(faulty_flight *flight);          /* with the lock held */
FAULTY_INTERNAL void faulty_call_report(faulty_flight *flight);         /* without it; after close */

/* ---- timer.c; with the lock held -------------------------------------------------------------------------------------- */

FAULTY_INTERNAL int faulty_timer_start(hxa_instance *self);             /* without the lock */
FAULTY_INTERNAL void faulty_timer_stop(hxa_instance *self);             /* without the lock */
FAULTY_INTERNAL int faulty_timer_reserve(hxa_instance *self);
FAULTY_INTERNAL void faulty_timer_add(faulty_flight *flight, uint64_t due);
FAULTY_INTERNAL void faulty_timer_remove(faulty_flight *flight);
FAULTY_INTERNAL void faulty_pool_close(hxa_link *link);

#endif /* HXA_FAULTY_H */
