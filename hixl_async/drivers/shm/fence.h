/* Fences: an owner asks the peer to stop touching its memory, and learns when it can rely on that. */
#ifndef SHM_FENCE_H
#define SHM_FENCE_H

#include "link.h"

/* Ask the peer; the op finishes when it has answered. */
SHM_INTERNAL int shm_link_fence(hxa_link *link, hxa_op *op);

/* The loop: answer the peer that asked, and take its answer.  Inline copies are not running now, because this is their thread. */
SHM_INTERNAL void shm_fence_poll(hxa_link *link);

/* Return 1 if a poll would find anything to do; called after arming. */
SHM_INTERNAL int shm_fence_waits(const hxa_link *link);

/* Nothing can be written any more: finish the op of our own fence, if there is one. */
SHM_INTERNAL void shm_fence_end(hxa_link *link);

#endif /* SHM_FENCE_H */
