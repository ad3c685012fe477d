/* Moving bytes: memcpy, streaming stores, process_vm_*. */
#ifndef SHM_COPY_H
#define SHM_COPY_H

#include "link.h"

typedef struct shm_outcome { int32_t status, native; uint32_t scope; int64_t failed; uint64_t bytes; } shm_outcome;

/* Copy `bytes` bytes of the batch, from byte `offset` of descriptor `index` on. */
SHM_INTERNAL void shm_copy(hxa_link *link, const hxa_batch *batch, uint32_t index, uint64_t offset, uint64_t bytes,
                           shm_outcome *out);

/* Store the signal of a batch.  T5: a full barrier, then the value, then the news of it.  Return 0, or a failure's status.
 * The kernel copies the word into memory that was registered where it lies, perhaps byte by byte: a program that looks at it
 * before the news may see a part of it. */
SHM_INTERNAL int32_t shm_signal_store(hxa_link *link, const hxa_batch *batch, shm_outcome *out);

#endif /* SHM_COPY_H */
