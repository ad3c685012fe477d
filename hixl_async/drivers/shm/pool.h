/* The state that the loop and the copy threads share: work that is handed over, and the threads' sleep.
 *
 * The loop never waits for a copy thread: it pushes ops on a lock-free stack, sets flags, and wakes.  Copy threads share one
 * mutex, which the loop takes only to ask whether an op waits for its turn.
 */
#ifndef SHM_POOL_H
#define SHM_POOL_H

#include "job.h"

#include <pthread.h>

enum { SHM_THREADS_MAX = 64 };

typedef struct shm_pool {
    hxa_op *incoming;                  /* atomic stack, pushed by the loop */
    uint32_t epoch;                    /* atomic: what sleepers wait on */
    uint32_t sleepers;                 /* atomic */
    uint32_t ready;                    /* atomic: ops are queued that may begin */
    uint32_t looking;                  /* atomic: an idle thread looks for work without sleeping */
    uint32_t may_look;                 /* there is more than one CPU */
    uint32_t purge;                    /* atomic: some op was cancelled, or some link stopped */
    uint32_t stopping;                 /* atomic */
    uint32_t started;                  /* threads; the loop's */
    uint32_t limit;                    /* most threads */
    pthread_t threads[SHM_THREADS_MAX];
    pthread_mutex_t lock;
    shm_queue queues[3];               /* high, normal, low; under lock */
    uint32_t turn;                     /* picks so far; under lock */
    uint64_t due;                      /* when the next op of a link with a limit may begin, in ns, 0: none; under lock */
} shm_pool;

SHM_INTERNAL int shm_pool_open(shm_pool *pool, uint32_t limit);

/* Stop all threads and wait for them. */
SHM_INTERNAL void shm_pool_close(shm_pool *pool);

/* Hand an op over. */
SHM_INTERNAL void shm_pool_push(shm_pool *pool, hxa_op *op);

/* Some op must stop: let a thread look for it. */
SHM_INTERNAL void shm_pool_purge(shm_pool *pool);

/* A limit changed: let the threads look again at what waited by the old one. */
SHM_INTERNAL void shm_pool_look_again(shm_pool *pool);

/* A thread has nothing to do until time `due`, in ns, 0: until there is work.  `waited` remembers its last wait. */
SHM_INTERNAL void shm_pool_idle(shm_pool *pool, uint64_t due, uint64_t *waited);

/* A thread leaves work for others. */
SHM_INTERNAL void shm_pool_call(shm_pool *pool);

/* The clock that `due` is on. */
SHM_INTERNAL uint64_t shm_now_ns(void);

#endif /* SHM_POOL_H */
