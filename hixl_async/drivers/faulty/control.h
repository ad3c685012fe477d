/* The control block: Python owns it and fills it; hixl_async/testing/plan.py mirrors its layout. */
#ifndef HXA_FAULTY_CONTROL_H
#define HXA_FAULTY_CONTROL_H

#include <stddef.h>
#include <stdint.h>

enum { FAULTY_BLOCK = 1, FAULTY_RULES = 64 };                     /* version of the layout; most rules in a plan */

enum {                                                            /* faulty_rule.kind */
    FAULTY_DELAY = 1,         /* low..high ns; `part` says what is delayed */
    FAULTY_BANDWIDTH = 2,     /* low: bytes per second of the link's one virtual wire */
    FAULTY_HOLD = 3,          /* until released */
    FAULTY_LATE = 4,          /* as HOLD, and cancel and stop end only the wait: the bytes land after release */
    FAULTY_FAIL = 5,          /* status, native, index, scope; descriptors before index land */
    FAULTY_REORDER = 6,       /* low: operations that are collected and shuffled; high: ns after which fewer are enough */
    FAULTY_DROP = 7,          /* the operation breaks its link */
    FAULTY_BUSY = 8,          /* submit is refused */
    FAULTY_PENDING = 9,       /* never inline: the outcome comes from the timer thread */
    FAULTY_STALL = 10,        /* low: parts per million of the bytes that land before the operation is held */
    FAULTY_STUCK = 11         /* as HOLD, but cancel is too late; abandon ends it */
};

enum { FAULTY_OPERATION = 0, FAULTY_OUTCOME = 1, FAULTY_NOTE = 2 };   /* part: all of it, its report, its signal and notification */
enum {                                                            /* verbs; BARE: a signal or notification without data */
    FAULTY_READS = 1u, FAULTY_WRITES = 2u, FAULTY_BARE = 4u,
    FAULTY_START = 8u, FAULTY_SHUTDOWN = 16u, FAULTY_READY = 32u, FAULTY_RETIRE = 64u,
    FAULTY_CONNECT = 128u
};
enum { FAULTY_RELEASE = 1, FAULTY_BREAK = 2, FAULTY_SEND = 3 };   /* commands; SEND: its argument is a faulty_message * */

typedef struct faulty_message { const void *data; uint32_t len; } faulty_message;

typedef struct faulty_rule {
    uint32_t kind;
    uint32_t part;
    uint32_t verbs;           /* the operations that it counts */
    uint32_t chance;          /* parts per million of them */
    uint64_t first;           /* the first operation that it applies to, counted from 1 */
    uint64_t every;           /* then every n-th; 1: each */
    uint64_t count;           /* how many at most; 0: no end */
    uint64_t low, high;
    int64_t index;
    int32_t status, native;
    uint32_t scope;
    uint32_t reserved;
    uint64_t seen;            /* atomic: operations that it counted */
} faulty_rule;

typedef struct faulty_block {
    uint32_t version;
    uint32_t rules;           /* atomic: the number of entries of `rule` in use */
    uint64_t seed;
    uint64_t command;         /* a faulty_command *; 0 before the first open */
    /* Counters, atomic: what was injected. */
    uint64_t ops, delayed, paced, held, stalled, released, late, landed_late, failed, reordered, broken, busy, pending;
    uint64_t holding;         /* gauge: operations that wait for a release */
    faulty_rule rule[FAULTY_RULES];
} faulty_block;

typedef void faulty_command(faulty_block *block, uint32_t what, uint64_t argument);

#define faulty_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define faulty_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define faulty_count(p) ((void)__atomic_fetch_add((p), 1, __ATOMIC_RELAXED))

/* Functions that the files of this driver share, hidden from other modules. */
#define FAULTY_INTERNAL __attribute__((visibility("hidden")))

#endif /* HXA_FAULTY_CONTROL_H */
