/* The driver's part of an accepted op, in its scratch words; stacks and queues of ops. */
#ifndef SHM_JOB_H
#define SHM_JOB_H

#include "atomic.h"
#include "base.h"

typedef struct shm_job {
    hxa_op *next;                      /* in one list at a time */
    hxa_link *link;
    const void *what;                  /* hxa_batch, or hxa_mem being imported */
    uint64_t offset;                   /* the next byte of descriptor `index`, or of the memory */
    uint32_t index;
    uint32_t state;                    /* atomic: SHM_CANCELLED, SHM_FINAL */
    uint32_t in_flight;                /* chunks being copied; under the threads' mutex */
    uint16_t kind;                     /* SHM_COPY, SHM_IMPORT */
    uint16_t queued;                   /* in a queue of the pool; under the threads' mutex */
} shm_job;

enum { SHM_CANCELLED = 1u, SHM_FINAL = 2u };
enum { SHM_COPY = 1, SHM_IMPORT = 2 };

_Static_assert(sizeof(shm_job) <= sizeof(((hxa_op *)0)->scratch), "a job fits into the scratch words");

static inline shm_job *shm_job_of(hxa_op *op) { return (shm_job *)(void *)op->scratch; }
static inline const shm_job *shm_job_seen(const hxa_op *op) { return (const shm_job *)(const void *)op->scratch; }

static inline int shm_job_has_note(const shm_job *job) {
    return job->kind == SHM_COPY && ((const hxa_batch *)job->what)->topic != NULL;
}

typedef struct shm_queue { hxa_op *first, *last; } shm_queue;

static inline void shm_stack_push(hxa_op **stack, hxa_op *op) {
    hxa_op *top = shm_load(stack);
    do shm_job_of(op)->next = top;
    while (!__atomic_compare_exchange_n(stack, &top, op, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
}

/* Everything on the stack, oldest first. */
static inline hxa_op *shm_stack_take(hxa_op **stack) {
    hxa_op *op = __atomic_exchange_n(stack, NULL, __ATOMIC_SEQ_CST), *first = NULL;
    while (op != NULL) {
        hxa_op *next = shm_job_of(op)->next;
        shm_job_of(op)->next = first;
        first = op;
        op = next;
    }
    return first;
}

static inline void shm_queue_push(shm_queue *queue, hxa_op *op) {
    shm_job_of(op)->next = NULL;
    if (queue->first == NULL) queue->first = op;
    else shm_job_of(queue->last)->next = op;
    queue->last = op;
}

static inline void shm_queue_remove(shm_queue *queue, hxa_op *op) {
    hxa_op *before = NULL;
    for (hxa_op *at = queue->first; at != op; at = shm_job_of(at)->next) before = at;
    if (before == NULL) queue->first = shm_job_of(op)->next;
    else shm_job_of(before)->next = shm_job_of(op)->next;
    if (queue->last == op) queue->last = before;
}

#endif /* SHM_JOB_H */
