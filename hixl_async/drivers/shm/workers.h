/* Copy threads: they take turns on all queued ops, one chunk at a time, several on one op if it is large.
 *
 * The loop pushes ops on a stack and wakes (pool.h); all else is between the threads, under their mutex.  The thread that holds
 * it walks at most 4,096 descriptors; copies, posts and wake-ups happen outside of it.
 */
#ifndef SHM_WORKERS_H
#define SHM_WORKERS_H

#include "link.h"

/* Before work of that size is accepted: start enough threads, or at least one.  Return 0 or a refusal. */
SHM_INTERNAL int shm_workers_ready(hxa_instance *self, uint64_t bytes, uint64_t descriptors);

/* Return 1 if the op is queued and no part of it is being copied. */
SHM_INTERNAL int shm_waits(hxa_link *link, const hxa_op *op);

#endif /* SHM_WORKERS_H */
