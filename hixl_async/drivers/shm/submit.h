/* Transfers, from the loop's side: small batches are copied inside submit; larger ones go to the copy threads. */
#ifndef SHM_SUBMIT_H
#define SHM_SUBMIT_H

#include "link.h"

enum { SHM_DESCRIPTORS = 1 << 16 };    /* most in one batch: checking them takes the loop 0.1 ms */

SHM_INTERNAL int shm_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op);
SHM_INTERNAL int shm_cancel(hxa_link *link, hxa_op *op);
SHM_INTERNAL uint64_t shm_progress(hxa_link *link, const hxa_op *op);

#endif /* SHM_SUBMIT_H */
